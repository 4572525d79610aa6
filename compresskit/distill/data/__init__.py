"""Data of a distillation: cached predictions, datasets that number their samples."""
