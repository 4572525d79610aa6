"""Recipes: run stages in order, keep each result on disk, verify its ONNX file, and resume where a run stopped."""

from compresskit.recipe.recipe import Recipe, Result
from compresskit.recipe.store import load, save

__all__ = ["Recipe", "Result", "load", "save"]
