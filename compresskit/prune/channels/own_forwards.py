"""Layers whose class has a forward of its own: what their weights are multiplied with, seen while a model runs.

A layer of torch multiplies its weights with its input. A class that inherits from one may pad the input (TensorFlow's "same"),
put coordinates beside it (CoordConv), or multiply other weights, which it computes from those that it stores (weight
standardization, an equalized learning rate).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_LAYER_OF: dict[Any, Any] = {F.linear: nn.Linear, F.conv1d: nn.Conv1d, F.conv2d: nn.Conv2d, F.conv3d: nn.Conv3d}


class _ProductCall(NamedTuple):
    """What F.linear or a convolution is called with; a linear layer has the first three."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None = None
    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    groups: int = 1

    def layer(self, kind: Any) -> Any:
        """Torch's layer of these settings, without values."""
        outputs, inputs, *kernel = self.weight.shape
        if not kernel:
            return kind(inputs, outputs, device="meta")
        return kind(inputs, outputs, tuple(kernel), self.stride, self.padding, self.dilation, device="meta")


def has_own_forward(layer: nn.Module) -> bool:
    """Whether a linear layer or convolution computes its output in code that is not torch's."""
    kind = next((kind for kind in _LAYER_OF.values() if isinstance(layer, kind)), None)
    methods = () if kind is None else ("forward",) if kind is nn.Linear else ("forward", "_conv_forward")
    return any(getattr(layer, name) != MethodType(getattr(kind, name), layer) for name in methods)


class OwnForwards(TorchFunctionMode):
    """Calls `visit(path, layer, x, out)` for each product of some layers' weights, of one group, while the block runs.

    There, layer is torch's layer that computes the product, without its values, x what it reads and out what it gives.
    computed: those that multiply, or read in any other way, something that they compute from their weights or their bias.
    """

    def __init__(self, layers: Mapping[str, Any], visit: Callable[[str, Any, Tensor, Tensor], None]) -> None:
        super().__init__()
        self.layers, self.visit, self.computed = layers, visit, set[str]()
        self.weights: dict[int, tuple[str, Tensor]] = {}  # and what is computed from them; held, so that no id is given twice

    def __enter__(self) -> OwnForwards:
        self.weights = {id(layer.weight): (path, layer.weight) for path, layer in self.layers.items()}
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        product = _ProductCall(*args, **(kwargs or {})) if func in _LAYER_OF else None
        read = [v for v in pytree.tree_leaves((args, kwargs)) if id(v) in self.weights]
        for value in read:
            path, layer = self.weights[id(value)][0], self.layers[self.weights[id(value)][0]]
            if product is None:
                made = [v for v in pytree.tree_leaves(out) if isinstance(v, Tensor) and v is not value]
                self.weights.update((id(v), (path, v)) for v in made)
                self.computed.update([path] if made else [])
                continue
            if product.weight is not layer.weight or product.bias is not layer.bias:
                self.computed.add(path)
            if value is product.weight and value.shape == layer.weight.shape and product.groups == 1:
                self.visit(path, product.layer(_LAYER_OF[func]), product.input, out)
        return out
