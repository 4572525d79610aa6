"""Calibration: activation statistics, equalization, smoothing, rounding, diagnosis."""
