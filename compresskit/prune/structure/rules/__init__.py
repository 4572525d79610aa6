"""How the labels of an operator's inputs reach its output: one rule for each kind of operator, in files by family."""

from compresskit.prune.structure.rules.arithmetic import ARITHMETIC
from compresskit.prune.structure.rules.base import Raw, Rule
from compresskit.prune.structure.rules.contract import CONTRACTIONS
from compresskit.prune.structure.rules.layers import LAYERS
from compresskit.prune.structure.rules.moves import MOVES
from compresskit.prune.structure.rules.norms import NORMS
from compresskit.prune.structure.rules.recurrent import RECURRENT

RULES: dict[object, Rule] = {**ARITHMETIC, **CONTRACTIONS, **LAYERS, **MOVES, **NORMS, **RECURRENT}

__all__ = ["RULES", "Raw", "Rule"]
