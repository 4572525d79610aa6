"""The page of a run: `records` reads its folder, `layers` and `statistics` make rows, charts and sentences of it, `render` writes
HTML and CSV. What a chart looks like is in `compresskit.measure.charts`.
"""
