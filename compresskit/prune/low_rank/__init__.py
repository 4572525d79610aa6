"""Low rank: replace layers by products of smaller ones, with the rank of each chosen by a budget.

plan = low_rank.plan_ranks(model, example, ck.keep(macs=0.6), batches=inputs)   # decides; the model is not changed
plan.apply_(model, inputs)                                                     # factors the layers, in closed form

low_rank.LowRank(budget=ck.keep(macs=0.6), finetune=ck.Train(epochs=4))         # the same as a stage of a recipe
"""

from compresskit.prune.low_rank.factorize import factored, spectrum
from compresskit.prune.low_rank.low_rank_stage import LowRank
from compresskit.prune.low_rank.plan_ranks import RankPlan, plan_ranks

__all__ = ["LowRank", "RankPlan", "factored", "plan_ranks", "spectrum"]
