"""Weight-only quantization: matrices stored in 2 to 8 bits."""
