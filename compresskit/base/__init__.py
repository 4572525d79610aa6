"""Errors, tasks, settings, files and random numbers: what every other package may use."""
