"""Models that take part in a distillation: teachers, taps, students that start from a teacher."""
