"""Quantize a model as fast as an accuracy target allows, matrix by matrix."""
