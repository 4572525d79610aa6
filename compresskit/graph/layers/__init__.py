"""Layers of a captured graph: folding into them, merging them, one in the form of another, and what recurrent ones read."""
