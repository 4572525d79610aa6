"""Optimizers and averages beside torch's own: Lion, an exponential moving average of the weights, schedulers that a run steps."""
