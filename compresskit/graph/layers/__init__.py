"""Convolutions and linear layers of a captured graph: folding into them, merging them, and one in the form of another."""
