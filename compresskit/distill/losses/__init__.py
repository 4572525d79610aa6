"""Distillation losses: pure functions of plain tensors."""
