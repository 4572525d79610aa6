"""Dimensions that should vary: where code takes one for a constant, and for which sizes a graph is right."""
