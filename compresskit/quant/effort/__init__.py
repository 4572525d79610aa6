"""Static quantization that measures: remedies against rounding errors, each kept only where it pays on data it has not seen."""
