"""Training: the stage `Train`, the one loop `fit_`, learning-rate schedules, snapshots of the weights."""
