"""The captured graph of a model, masks, and operations on modules by dotted name."""
