"""Bits chosen layer by layer under a budget."""
