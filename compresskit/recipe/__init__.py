"""Recipes: stages in order, each kept on disk, verified and resumed."""
