"""Objectives: what a training minimises, built from teachers and losses."""
