"""How the labels of an operator's inputs reach its output: one rule for each kind of operator, in files by family."""

from compresskit.prune.rules.arithmetic import ARITHMETIC
from compresskit.prune.rules.base import Raw, Rule
from compresskit.prune.rules.contract import CONTRACTIONS
from compresskit.prune.rules.layers import LAYERS
from compresskit.prune.rules.moves import MOVES
from compresskit.prune.rules.norms import NORMS
from compresskit.prune.rules.recurrent import RECURRENT

RULES: dict[object, Rule] = {**ARITHMETIC, **CONTRACTIONS, **LAYERS, **MOVES, **NORMS, **RECURRENT}

__all__ = ["RULES", "Raw", "Rule"]
