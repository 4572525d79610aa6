"""Turn runs of convolutions into one: gather the layers of a run in the place of its last, then compute the one convolution.

    gather_(model, runs)    activations go, the padding of every layer moves to the first one; the layers still train apart
    merge_(model)           every gathered run becomes one convolution, which computes the same

With zeros padded between two convolutions there is no one convolution that computes both: at the border the second would read
zeros where the merged one reads what the first makes of zeros. So the first pads for all, as in LayerMerge (Kim et al.,
2406.12837), which is part of what a merge changes. What `merge_` does then is exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from compresskit.graph.layers.geometry import Geometry, composed, consecutive
from compresskit.graph.layers.stored import sum_over_inputs
from compresskit.graph.replacements import Bypass, Merged, Unmerged, merged_convolution, replace_module_

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


@dataclass(frozen=True, kw_only=True)
class ConvolutionRun:
    """Consecutive convolutions that are one convolution without the activations between them.

    layers: their dotted names, in order. norms: the BatchNorm behind each but the last; "" where there is none.
    activations: the activation behind each but the last, as the dotted name of its module, which goes; "" where there is none.
        Where the BatchNorm computes it, too, as timm's do, its name.
    stays: names of operators such as "relu" that are called in code, or by a module that serves other places too. They stay
        where they are, and from then on read what the run reads, of which they change nothing.
    shrunk: layers that become 1x1, so that the one kernel grows less.
    """

    layers: tuple[str, ...]
    norms: tuple[str, ...]
    activations: tuple[str, ...]
    stays: tuple[str, ...] = ()
    shrunk: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Such as `layer1.0.conv1 + layer1.0.conv2`, with `(1x1)` behind layers that are shrunk."""
        return " + ".join(f"{path} (1x1)" if path in self.shrunk else path for path in self.layers)

    @property
    def path(self) -> str:
        """Dotted name of the last layer, where the one convolution will be."""
        return self.layers[-1]

    @property
    def sources(self) -> tuple[str, ...]:
        """Dotted names of the layers and norms, in order."""
        pairs = zip(self.layers, (*self.norms, ""), strict=True)
        return tuple(name for pair in pairs for name in pair if name)

    @property
    def emptied(self) -> tuple[str, ...]:
        """Dotted names of the modules that do nothing afterwards."""
        return tuple(dict.fromkeys((*self.sources[:-1], *filter(None, self.activations))))


def geometry_of_layer(layer: Convolution) -> Geometry:
    """The sizes of a convolution module. Its padding must be symmetric."""
    pads: Any = layer.padding
    if isinstance(pads, str):
        same = pads == "same"
        pads = tuple(d * (k - 1) // 2 if same else 0 for d, k in zip(layer.dilation, layer.kernel_size, strict=True))
    return Geometry(
        outputs=layer.out_channels,
        inputs=layer.in_channels,
        kernel=tuple(layer.kernel_size),
        stride=tuple(layer.stride),
        padding=tuple(pads),
        dilation=tuple(layer.dilation),
        groups=layer.groups,
    )


def sizes_in(run: ConvolutionRun, parts: Sequence[Geometry]) -> list[Geometry]:
    """The sizes of a run's layers as they will be: shrunk, and with all the padding in front of the first.

    parts: the sizes as they are, in order.
    """
    none = (0,) * len(parts[0].kernel)
    ones = tuple(1 for _ in none)
    shrunk = [
        replace(part, kernel=ones, padding=none, dilation=ones) if path in run.shrunk else part
        for path, part in zip(run.layers, parts, strict=True)
    ]
    return padded_first(shrunk)


def can_shrink(part: Geometry) -> bool:
    """Whether the middle tap of a kernel reads the position that the result is for."""
    taps = zip(part.kernel, part.padding, part.reach, strict=True)
    return max(part.kernel, default=1) > 1 and all(k % 2 and 2 * p == r for k, p, r in taps)


def shrunk_weight(weight: Tensor) -> Tensor:
    """The weight of a 1x1 convolution in the place of a larger one, which gives the same where inputs do not change in space."""
    return weight.detach().double().sum(tuple(range(2, weight.ndim)), keepdim=True).to(weight.dtype)


def padded_first(parts: Sequence[Geometry]) -> list[Geometry]:
    """The sizes of consecutive convolutions of which the first pads for all.

    One row of zeros before a layer is worth as many rows of the input as the strides before that layer skip.
    """
    pads, steps = list(parts[0].padding), [1] * len(parts[0].padding)
    for before, part in itertools.pairwise(parts):
        steps = [s * t for s, t in zip(steps, before.stride, strict=True)]
        pads = [p + s * q for p, s, q in zip(pads, steps, part.padding, strict=True)]
    return [replace(parts[0], padding=tuple(pads)), *(replace(p, padding=(0,) * len(pads)) for p in parts[1:])]


def merged_geometry(parts: Sequence[Geometry]) -> Geometry:
    """The sizes of the one convolution that computes several, of which the first pads for all."""
    whole, *rest = padded_first(parts)
    for part in rest:
        joined = consecutive(whole, part, biased=True)
        assert joined is not None, "only the first of the layers pads"
        whole = joined
    return whole


def gather_(model: nn.Module, runs: Iterable[ConvolutionRun]) -> nn.Module:
    """Put the layers of every run in the place of its last one, without the activations between them, in place.

    Where the layers and activations were, a `Bypass` hands on what it gets. The first layer pads for all of them.
    """
    for run in runs:
        layers: list[Any] = [model.get_submodule(path) for path in run.layers]
        for layer, sizes in zip(layers, sizes_in(run, [geometry_of_layer(layer) for layer in layers]), strict=True):
            if sizes.kernel != tuple(layer.kernel_size):
                layer.weight = nn.Parameter(shrunk_weight(layer.weight), layer.weight.requires_grad)
            layer.kernel_size, layer.padding, layer.dilation = sizes.kernel, sizes.padding, sizes.dilation
        made = Unmerged(run.sources, *(model.get_submodule(path) for path in run.sources))
        made.training = made[-1].training
        for path in run.emptied:
            # Code that stays may write into its argument, which others read.
            copies = bool(run.stays) and path == run.layers[0]
            replace_module_(model, path, Bypass(copies=copies))
        model.set_submodule(run.path, made)
    return model


def merge_(model: nn.Module) -> nn.Module:
    """Put one convolution in the place of every gathered run, in place, and return the model.

    Computed in float64 and rounded once. Its BatchNorm is taken as in eval mode.
    """
    for path in [name for name, module in model.named_modules() if isinstance(module, Unmerged)]:
        replace_module_(model, path, merged_of([*model.get_submodule(path).children()]))
    return model


@torch.no_grad()
def merged_of(layers: Sequence[nn.Module]) -> Merged:
    """The one convolution that computes consecutive convolutions with BatchNorm between them, of which only the first pads.

    Args:
        layers: convolutions, each of them but the last with or without a BatchNorm behind it, which has statistics.
    """
    first: Any = layers[0]
    whole, weight, bias = geometry_of_layer(first), first.weight.double(), _double(first.bias)
    for layer in layers[1:]:
        if isinstance(layer, Convolution):
            sizes, then = geometry_of_layer(layer), layer.weight.double()
            own, weight = _double(layer.bias), composed(weight, then, whole, sizes)
            if bias is not None:
                own = sum_over_inputs(then, bias, sizes.groups) + (0 if own is None else own)
            bias, whole = own, merged_geometry([whole, sizes])
        else:
            weight, bias = _normalized(layer, weight, bias)
    sizes_of = {"outputs": whole.outputs, "inputs": whole.inputs, "groups": whole.groups, "bias": bias is not None}
    record = sizes_of | {
        "kernel_size": whole.kernel,
        "stride": whole.stride,
        "padding": whole.padding,
        "dilation": whole.dilation,
    }
    last: Any = layers[-1]
    made = merged_convolution(record, last.weight)
    made.weight.copy_(weight)
    if made.bias is not None and bias is not None:
        made.bias.copy_(bias)
    made.requires_grad_(any(p.requires_grad for layer in layers for p in layer.parameters()))
    return made


def _double(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.double()


def _normalized(norm: Any, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weight and bias of a convolution with the BatchNorm behind it, in float64."""
    factor = torch.rsqrt(norm.running_var.double() + norm.eps)
    factor = factor if norm.weight is None else factor * norm.weight.double()
    shift = (0 if bias is None else bias) - norm.running_mean.double()
    after = torch.zeros_like(factor) if norm.bias is None else norm.bias.double()
    return weight * factor.view(-1, *(1,) * (weight.ndim - 1)), shift * factor + after
