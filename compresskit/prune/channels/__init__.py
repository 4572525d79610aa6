"""Channel pruning: budgets, rankings, selection, refitting, and the stage `Prune`."""
