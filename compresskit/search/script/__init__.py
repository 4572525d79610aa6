"""The recipe of a search as a script, and the file with a model and a task that it, or the command line, runs."""
