"""Graphs written with other operators, which the exporter, quantization and pruning know, and with names that are free.

`exportable` has the list of all that is replaced before a file is written, and the small replacements; `pools`, `parts`,
`composed`, `fourier`, `complex_values` and `squeezes` have those of one kind, `stored_products` makes linear layers of products
by a weight, `traced_calls` replaces calls of torch while a model is traced.
"""
