"""Placement of integers by what is measured: times on this machine, and the ranges that calibration data show.

Times: `latency_search` times files, `placement_model` predicts them from layers, `beside_float` times a result beside the float
model. Ranges: `shown_ranges` measures them; `by_ranges` asks `uneven_tables`, `joined_values` and `hard_gates` what stays
float, or has another form; `repeated_calls` shares scales. What else the ranges decide is asked in `by_ranges`.
"""
