"""Learned rounding, layer by layer or block by block."""
