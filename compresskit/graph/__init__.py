"""The model as a graph: captured with torch.export, normalized, interpreted; modules and masks found by their dotted names."""
