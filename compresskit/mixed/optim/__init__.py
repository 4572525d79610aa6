"""Optimizers and schedules that mixed precision brings along: Lion, an exponential moving average of the weights, warm-up."""
