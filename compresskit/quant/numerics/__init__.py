"""Numbers: schemes, observers, quantizers, operator kinds and targets."""
