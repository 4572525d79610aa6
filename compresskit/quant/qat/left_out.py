"""Say what of a float model its quantization-aware training leaves out: dropout, and weights of calls with several BatchNorms."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from compresskit.quant.model import Quantized

log = logging.getLogger(__name__)

FIRST_NAMED = 3


def say_what_is_left_out(model: nn.Module, quantized: Quantized, where: str) -> None:
    """Log a warning, which begins with `where`, for each of these.

    Args:
        model: the float model. quantized: what it became, ready to be trained.
        where: the function that the user called.
    """
    if names := list(_with_dropout(model)):
        log.warning(
            "%s: the training is without the dropout of %s, since the graph is that of the deployed model",
            where,
            few_names(names),
        )
    if names := _torn(model, quantized):
        log.warning(
            "%s: %s runs several times, with another BatchNorm behind each: every call is trained with a weight of its own, all"
            " but the last with BatchNorm folded. To keep one weight, quantize with quantize_static, or build the network without"
            " these BatchNorms",
            where,
            few_names(names),
        )


def _with_dropout(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        rate = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0.0)
        if isinstance(rate, float) and rate > 0:
            yield name or type(module).__name__


def _torn(model: nn.Module, quantized: Quantized) -> list[str]:
    """Layers of the float model whose weight became several: the folded one of a second call has the name `weight_2`."""
    own = {name for name, _ in model.named_parameters()}
    numbered = (re.fullmatch(r"(.+)_\d+", name) for name, _ in quantized.body.named_parameters() if name not in own)
    copies = (found[1] for found in numbered if found and found[1] in own)
    return sorted({name.rpartition(".")[0] or name for name in copies})


def few_names(names: Iterable[str]) -> str:
    """The first names of some, and how many more there are."""
    some = [repr(name) for name in names]
    return ", ".join(some[:FIRST_NAMED]) + (f" and {len(some) - FIRST_NAMED} more" if len(some) > FIRST_NAMED else "")
