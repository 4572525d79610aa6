"""Models that take part in a distillation: teachers, students that start from a teacher."""
