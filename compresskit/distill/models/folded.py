"""A frozen model with BatchNorm folded into the layers before it: the same predictions with fewer passes over memory.

On modules, not on a captured graph: a teacher may be any model, and its batches have any size. That nothing but a BatchNorm reads
what its layer gives is seen in one run, and the folded model has to give the same there.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from compresskit.base.task import Inputs, call, first_rows

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
ROWS = 2  # of the inputs of the one run
TOLERANCE = 1e-3  # of the largest output: what folding in fp32 changes in a deep network is a hundredth of it


def fold_copy(model: nn.Module, inputs: Inputs) -> nn.Module:
    """Return a copy of a frozen fp32 model, with which it shares all other tensors, that has as few BatchNorms as possible.

    Args:
        model: in eval mode; it is not changed.
        inputs: that it takes.

    Returns the model itself where nothing can be folded, or where the copy would give something else.
    """
    rows = first_rows(inputs, ROWS)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            wanted = call(model, rows)
            folded = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
            pairs = _pairs(folded, rows)
            for layer, norm in pairs:
                _fold_(folded, layer, norm)
            return folded if pairs and _same(wanted, call(folded, rows)) else model
    except Exception:  # a model that cannot be copied, or reads what is no longer there: it runs as it is
        return model


class _Uses(TorchFunctionMode):
    """Counts how often tensors are read outside of `ignored` calls."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[int, Tensor] = {}  # kept, so that no identity is used twice
        self.reads: Counter[int] = Counter()
        self.ignoring = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self.ignoring:
            self.reads.update(id(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if id(leaf) in self.tensors)
        return func(*args, **(kwargs or {}))


def _pairs(model: nn.Module, inputs: Inputs) -> list[tuple[nn.Module, nn.Module]]:
    """Layers and the BatchNorms that alone read what they give, each called once."""
    uses, calls, made, read = _Uses(), Counter[nn.Module](), dict[nn.Module, Tensor](), dict[nn.Module, Tensor]()

    def after_layer(layer: nn.Module, _: Any, output: Tensor) -> None:
        calls[layer] += 1
        made[layer] = uses.tensors[id(output)] = output

    def before_norm(norm: nn.Module, given: tuple[Tensor, ...]) -> None:
        calls[norm] += 1
        read[norm] = given[0]
        uses.ignoring += 1

    def after_norm(*_: Any) -> None:
        uses.ignoring -= 1

    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    handles = []
    for module in model.modules():
        if module._forward_hooks or module._forward_pre_hooks:
            continue
        if type(module) in LAYERS and all(owners[id(p)] == 1 for p in module.parameters()):
            handles.append(module.register_forward_hook(after_layer))
        elif type(module) in NORMS and module.running_mean is not None:
            handles += [module.register_forward_pre_hook(before_norm), module.register_forward_hook(after_norm)]
    try:
        with uses:
            call(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    found = []
    for norm, value in read.items():
        layer = next((layer for layer, output in made.items() if output is value), None)
        if layer is None or calls[layer] > 1 or calls[norm] > 1 or uses.reads[id(value)]:
            continue
        readers = sum(other is value for other in read.values())
        if readers == 1 and (value.ndim == 2 or not isinstance(layer, nn.Linear)):  # the channels of BatchNorm are dimension 1
            found.append((layer, norm))
    return found


def _fold_(model: nn.Module, layer: Any, norm: Any) -> None:
    """Give the layer the weights of both, and put an identity where the BatchNorm was."""
    given = (norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias)
    weight, bias = fuse_conv_bn_weights(layer.weight, layer.bias, *given)
    layer.weight, layer.bias = (nn.Parameter(value.detach(), requires_grad=False) for value in (weight, bias))
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if child is norm:
                setattr(parent, name, nn.Identity())


def _same(wanted: Any, got: Any) -> bool:
    """Whether two outputs have the same form, and the same values but for rounding."""
    (one, form), (other, other_form) = pytree.tree_flatten(wanted), pytree.tree_flatten(got)
    if form != other_form:
        return False
    for a, b in zip(one, other, strict=True):
        if not isinstance(a, Tensor):
            continue
        if not isinstance(b, Tensor) or a.shape != b.shape or a.dtype != b.dtype:
            return False
        if a.is_floating_point() and not float((a - b).abs().max()) <= TOLERANCE * float(a.abs().max()):
            return False
        if not a.is_floating_point() and not torch.equal(a, b):
            return False
    return True
