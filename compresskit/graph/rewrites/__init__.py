"""Graphs written with other operators, which the exporter, quantization and pruning know, and with names that are free.

`exportable` has the list of all that is replaced before a file is written, and the small replacements; `pools`, `parts`,
`composed`, `fourier`, `complex_values` and `squeezes` have those of one kind, `stored_products` makes linear layers of
products by a weight, `hardsigmoids` finds those that are written by hand, `traced_calls` replaces calls of torch while a model
is traced. `layer_numbers` numbers the layers of a model anew where one of them goes, `fp32_parts` adds casts around parts that
compute in fp32, `gradient_hooks` keeps hooks of parameters through copies.
"""
