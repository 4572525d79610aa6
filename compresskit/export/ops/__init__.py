"""Custom operators of captured graphs and their translations to ONNX."""
