"""The trainings of a search: what they minimise, how long they are, and which candidates get one."""
