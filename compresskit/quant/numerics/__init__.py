"""Number formats, observers, quantizers, operator kinds and targets: what quantization computes with."""
