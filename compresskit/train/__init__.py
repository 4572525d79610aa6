"""Training: the stage `Train`, the one loop `fit_`, progress that survives a kill, weight snapshots."""
