"""How the channels of an operator's inputs reach its result: one rule for each kind of operator, in files by family."""

from compresskit.prune.structure.rules import arithmetic, contract, fourier, layers, moves, norms, recurrent, scatter
from compresskit.prune.structure.rules.base import PROPAGATION_RULES

__all__ = ["PROPAGATION_RULES", "arithmetic", "contract", "fourier", "layers", "moves", "norms", "recurrent", "scatter"]
