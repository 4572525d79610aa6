"""Dynamic quantization: activations are quantized when the file runs."""
