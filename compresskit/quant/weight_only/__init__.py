"""Weight-only quantization, and quantization with an accuracy target."""
