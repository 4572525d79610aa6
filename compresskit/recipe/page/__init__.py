"""The page of a run: `records` reads what is in the folder of a run, `charts` draws, `render` writes HTML and CSV."""
