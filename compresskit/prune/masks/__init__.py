"""Masks for single weights and blocks: patterns, allocation, schedules, rewinding, and the stage `Sparsify`."""
