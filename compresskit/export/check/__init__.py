"""Checks of an ONNX file: verify, bisect, audit, compare optimization levels, benchmark, profile."""
