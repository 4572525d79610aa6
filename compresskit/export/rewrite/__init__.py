"""Rewrites of exported ONNX graphs, for any runtime (`common`) or for ONNX Runtime."""
