"""Which layers a training with one or two bits replaces, and what it reads of them first."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from compresskit.base.errors import ModelError, SettingError
from compresskit.base.progress import progress_bar
from compresskit.base.settings import stands_in
from compresskit.base.task import Inputs, call
from compresskit.graph.replacements import Signed
from compresskit.graph.surgery import mode

log = logging.getLogger(__name__)

Layer = nn.Linear | nn.modules.conv._ConvNd


def check_skip(model: nn.Module, skip: tuple[str, ...], where: str) -> None:
    """Raise SettingError, which begins with `where`, for names that the model does not have."""
    if unknown := sorted(set(skip) - {name for name, _ in model.named_modules()}):
        raise SettingError(f"{where}(skip={unknown}): {type(model).__name__} has no module of that name")


def layers_to_replace(model: nn.Module, layers: Sequence[str], skip: tuple[str, ...], *, ends: bool) -> list[str]:
    """Names of the layers that are replaced, or are layers of signs already; ModelError where none is left.

    layers: in the order in which they ran. skip: names of modules that stay, with all inside. ends: take the first and the last.
    """
    modules = dict(model.named_modules())
    order = [name.removesuffix(".layer") if isinstance(modules[name.rpartition(".")[0]], Signed) else name for name in layers]
    stays = skip if ends else (*skip, *order[:1], *order[-1:])
    chosen = [name for name in order if not stands_in(name, stays)]
    if not chosen:
        raise ModelError(
            f"{type(model).__name__}: no linear layer or convolution is left to replace; {order} run on these batches, of which"
            " the first and the last stay unless ends=True, and what skip= names"
        )
    log.info("%d layers are replaced; %s stay", len(chosen), [name for name in order if name not in chosen])
    return chosen


def check_plain_weight(layer: nn.Module, name: str) -> Layer:
    """The layer; ModelError where its weight is computed from other parameters, as by `torch.nn.utils.parametrizations`."""
    if not isinstance(layer, Layer) or parametrize.is_parametrized(layer, "weight"):
        raise ModelError(f"{name}: its weight is computed from other parameters already; leave it out with skip=")
    return layer


def channel_axis(layer: Layer) -> int:
    """The dimension of a layer's channels, counted from the end."""
    return -1 if isinstance(layer, nn.Linear) else 1 - layer.weight.ndim


def run_watched(
    model: nn.Module, data: Sequence[Inputs], watcher: Callable[[str], Callable[[Layer, Tensor, Tensor], None] | None]
) -> None:
    """Run the model in eval mode; the watcher of a layer's name, where there is one, gets each of its inputs and outputs."""

    def watch(name: str) -> Callable[[Any, Any, Any, Any], None]:
        def hook(layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor) -> None:
            if (seen := watcher(name)) is not None:
                seen(layer, args[0] if args else kwargs["input"], y)

        return hook

    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, Layer)]
    handles = [module.register_forward_hook(watch(name), with_kwargs=True) for name, module in layers]
    try:
        with torch.no_grad(), mode(model, training=False):
            for inputs in progress_bar(data, desc="read layers"):
                call(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
