"""Graphs written with other operators, which the exporter, quantization and pruning know, and with names that are free."""
