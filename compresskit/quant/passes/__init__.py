"""Passes over the captured graph: fold, rewrite, place, insert quantizers, lower to ONNX."""
