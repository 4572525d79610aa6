"""Precision chosen layer by layer: for a target of accuracy, or a budget of bits."""
