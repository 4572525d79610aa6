"""Say what of a float model its quantization-aware training leaves out: dropout and all else that is random in train mode alone,
gradients that only train mode has, parameters that are constants of its graph, weights of calls with several BatchNorms, and
statistics that do not follow the batches.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from compresskit.base.task import Inputs
from compresskit.graph.surgery import mode
from compresskit.quant.model import Quantized
from compresskit.quant.passes.unfold_batchnorm import ConvBN
from compresskit.quant.qat.train_mode import train_mode_alone

log = logging.getLogger(__name__)

FIRST_NAMED = 3


def say_what_is_left_out(model: nn.Module, example: Inputs, quantized: Quantized, where: str) -> None:
    """Log a warning, which begins with `where`, for each of these; parameters that lose their gradient are a warning of Python.

    Args:
        model: the float model. example: its inputs, a few of which it runs on in both modes.
        quantized: what it became, ready to be trained.
        where: the function that the user called.
    """
    dropping, alone = list(_with_dropout(model)), train_mode_alone(model, example, quantized)
    places = alone.random_places(dropping)
    left_out = [f"the dropout of {few_names(dropping)}"] if dropping else []
    left_out += [f"what is random in train mode alone, at {_few(places)}"] if places else []
    if left_out:
        log.warning(
            "%s: the training is without %s, since the graph is that of the deployed model", where, " and without ".join(left_out)
        )
    if alone.parameters:
        random = f", without what is random at {_few(places)}" if places else ""
        warnings.warn(
            f"{where}: the gradient of the output reaches {few_names(alone.parameters)} in train mode alone. The graph that is"
            f" trained is that of eval mode{random}: there such a loss trains another model. Quantize without training, with"
            " quantize_static, or train only parts that compute the same in both modes, such as an encoder, with inside=",
            stacklevel=4,
        )
    if alone.constant:
        warnings.warn(
            f"{where}: {few_names(alone.constant)} are not trained: in eval mode the model keeps values that it computed of them"
            " before, which are constants of the graph that is trained. Let forward compute them in eval mode, too, or let"
            " train(True) of the module that keeps them forget them",
            stacklevel=4,
        )
    if names := _torn(model, quantized):
        log.warning(
            "%s: %s runs several times, with another BatchNorm behind each: every call is trained with a weight of its own, all"
            " but the last with BatchNorm folded. To keep one weight, quantize with quantize_static, or build the network without"
            " these BatchNorms",
            where,
            few_names(names),
        )
    if names := _with_frozen_statistics(model, quantized):
        log.warning(
            "%s: the statistics of %s stay as they are from the first step: a layer behind takes them in, the one before is"
            " computed as another (a transposed convolution), or they are read in float; take a rate for a network without"
            " BatchNorm there",
            where,
            few_names(names),
        )


def keep_frozen_(model: nn.Module, quantized: Quantized) -> None:
    """Let BatchNorm whose own `train` leaves it in eval mode, or that of a module around it, keep its statistics in QAT, too."""
    with mode(model, training=True):
        frozen = {name for name, module in model.named_modules() if isinstance(module, _NormBase) and not module.training}
    for name, layer in _layers_by_norm(quantized).items():
        layer.tracking = name not in frozen


def _layers_by_norm(quantized: Quantized) -> dict[str, ConvBN]:
    """The layers with a BatchNorm of a graph that is ready to be trained, by the name that it has in the float model."""
    names = quantized.float_names()
    layers = {path: module for path, module in quantized.body.named_modules() if isinstance(module, ConvBN)}
    return {names[f"body.{path}.running_mean"].rpartition(".")[0]: layer for path, layer in layers.items()}


def _with_frozen_statistics(model: nn.Module, quantized: Quantized) -> list[str]:
    """Norms of the float model with statistics that its outputs depend on, and that follow no batch."""
    read, following = quantized.origin.read, _layers_by_norm(quantized)
    norms = {name for name, module in model.named_modules() if isinstance(module, _NormBase) and module.running_mean is not None}
    return sorted(name for name in norms - following.keys() if f"{name}.running_mean" in read)


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
    return _few([repr(name) for name in names])


def _few(some: Sequence[str]) -> str:
    return ", ".join(some[:FIRST_NAMED]) + (f" and {len(some) - FIRST_NAMED} more" if len(some) > FIRST_NAMED else "")
