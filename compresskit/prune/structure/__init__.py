"""Find the channels of a model that can be removed, and prove what a plan removes.

Removing a channel of one layer means removing the matching slices of every layer that reads it, every normalisation over it, and
every layer whose output is added to it. This package finds those slices for any model that runs, without hints:

    model, example
      -> trace         one eager run as a graph of ATen operators                                     trace.py
      -> propagate     every channel gets a label; the rule of an operator joins labels               propagate.py, rules/
      -> channel sets  union-find: labels that were joined can only be removed together               channel_sets.py
      -> constraints   what no rule decides alone (heads, hard-coded sizes) is recorded and resolved  constraints.py, resolve.py
      -> groups        channel sets that touch the same tensors, and what their layers cost           groups.py
      -> plan          which indices of which tensors are removed; prints, serializes, applies        assemble.py, plan.py
      -> trial         constraints that no graph shows: prune a copy, run it, undo what breaks it     trial.py
      -> prove         removed equals zeroed, on a copy of the model, in float64                      prove.py

Which channels of a group go is decided elsewhere (`prune/channels`). An operator without a rule locks the channels that reach it,
and `Plan.locked` says why: unknown operators cost sparsity, never correctness. To support one, add a rule in `rules/`.
"""
