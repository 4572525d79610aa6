"""Modules that take the place of a user's own: a `Bypass` of a removed block, `Factored` layers of low rank, layers of signs,
`Merged` convolutions.

A record is plain data, `{path: {"kind": "bypass", ...}}`; nothing in it is executed. `replace_recorded_` makes the modules again
in a new model of the same class.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeGuard, get_args

import torch
from torch import Tensor, fx, nn

from compresskit.base.errors import CheckpointError, ModelError
from compresskit.graph.rewrites.layer_numbers import renumber_behind_

MOST_OUTPUTS = 64  # of the tuple that a block returns
CP_LAYERS = 4  # of a factored convolution
MOST_ROWS = 2**16  # in a dimension of an output
MOST_MERGED = 2**28  # weights of a merged convolution

_WHERE = torch.ops.aten.where.Scalar

SignGradient = Literal["clip", "polynomial", "tanh"]


class Bypass(nn.Module):
    """Stands where a block was removed: returns one of the arguments that the block was called with.

    Args:
        argument: position of the argument, or its name where it is given by name.
        outputs: length of the tuple that the block returned; 0 where it returned a tensor.
        index: place of the argument in that tuple; the other entries become None.
        copies: whether the argument is copied, since code behind it writes into what it gets.
        renumbers: whether the layers behind it took the number of the one before each: `layer_numbers`.
    """

    def __init__(
        self, argument: int | str = 0, outputs: int = 0, index: int = 0, copies: bool = False, renumbers: bool = True
    ) -> None:
        super().__init__()
        self.argument, self.outputs, self.index, self.copies, self.renumbers = argument, outputs, index, copies, renumbers

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the argument, alone or in a tuple as the block did."""
        value = args[self.argument] if isinstance(self.argument, int) else kwargs[self.argument]
        value = value.clone() if self.copies else value
        return tuple(value if i == self.index else None for i in range(self.outputs)) if self.outputs else value

    def extra_repr(self) -> str:
        """The argument, for `print(model)`."""
        tuples = f", outputs={self.outputs}, index={self.index}" if self.outputs else ""
        flags = f"{', copies=True' if self.copies else ''}{'' if self.renumbers else ', renumbers=False'}"
        return f"argument={self.argument!r}{tuples}{flags}"

    def record(self) -> dict[str, Any]:
        """The settings as plain data."""
        record = {"kind": "bypass", "argument": self.argument, "outputs": self.outputs, "index": self.index}
        return record | ({"copies": True} if self.copies else {}) | ({} if self.renumbers else {"renumbers": False})


class Place(TypedDict):
    """Where the tensors of a new layer are, and of which dtype."""

    device: torch.device
    dtype: torch.dtype


class Factored(nn.Sequential):
    """Two to four layers in the place of a linear layer or a convolution: a product of low rank.

    Of a linear layer, and of a convolution of size 1x1: inputs to rank, rank to outputs. Of another convolution, Tucker-2: 1x1 to
    the first rank, the convolution from the first rank to the second, 1x1 to the outputs; or, over two dimensions, CP, with one
    rank: 1x1 to the rank, a column of the window and a row of it for each channel alone, 1x1 to the outputs. The last one has the
    bias.
    """

    of: dict[str, Any] | None = None  # the record of the merged convolution in whose place it stands

    @staticmethod
    def like(layer: nn.Linear | nn.Conv1d | nn.Conv2d, ranks: tuple[int, ...]) -> Factored:
        """Factors of these ranks for a layer; their weights are still to be set.

        Args:
            layer: linear, or a convolution of one group.
            ranks: (rank,), or (inputs, outputs) for a convolution larger than 1x1, for which (rank,) is CP where it is over two
                dimensions.
        """
        made = Factored._like(layer, ranks)
        made.of = layer.record() if isinstance(layer, Merged) else None
        return made

    @staticmethod
    def _like(layer: nn.Linear | nn.Conv1d | nn.Conv2d, ranks: tuple[int, ...]) -> Factored:
        bias, place = layer.bias is not None, Place(device=layer.weight.device, dtype=layer.weight.dtype)
        outputs, inputs = layer.weight.shape[:2]
        if isinstance(layer, nn.Linear):
            return Factored(nn.Linear(inputs, ranks[0], False, **place), nn.Linear(ranks[0], outputs, bias, **place))
        conv: Any = layer  # torch's stubs take pairs, where the attributes are tuples of any length
        moves = (conv.kernel_size, conv.stride, conv.padding, conv.dilation, 1, False, conv.padding_mode)
        kind: Any = nn.Conv1d if isinstance(layer, nn.Conv1d) else nn.Conv2d
        last = kind(ranks[-1], outputs, 1, bias=bias, **place)
        if math.prod(layer.kernel_size) == 1:
            return Factored(kind(inputs, ranks[0], *moves, **place), last)
        first = kind(inputs, ranks[0], 1, bias=False, **place)
        if len(ranks) == 1:
            return Factored(first, *(_along_axis(conv, ranks[0], axis, place) for axis in (0, 1)), last)
        return Factored(first, kind(ranks[0], ranks[1], *moves, **place), last)

    def record(self) -> dict[str, Any]:
        """The present ranks as plain data."""
        ranks = [int(layer.get_parameter("weight").shape[0]) for layer in [*self][:-1]]
        ranks = ranks[:1] if len(self) == CP_LAYERS else ranks
        return {"kind": "factored", "ranks": ranks} | ({} if self.of is None else {"of": self.of})


def _along_axis(conv: Any, rank: int, axis: int, place: Place) -> nn.Conv2d:
    """What a convolution does along one axis of its window (0 columns, 1 rows), for each of `rank` channels alone."""
    size, stride, dilation = (
        tuple(value[i] if i == axis else 1 for i in (0, 1)) for value in (conv.kernel_size, conv.stride, conv.dilation)
    )
    padding = conv.padding
    if not isinstance(padding, str):
        padding = tuple(padding[i] if i == axis else 0 for i in (0, 1))
    moves: Any = (size, stride, padding, dilation, rank, False, conv.padding_mode)
    return nn.Conv2d(rank, rank, *moves, **place)


def most_cp_rank(shape: Sequence[int]) -> int:
    """The rank of CP at which any weight (out, in, y, x) of a shape can be written; 0 where a side of its window is 1."""
    return math.prod(shape) // max(shape) if len(shape) == 4 and min(shape[2:]) > 1 else 0


class Merged(nn.modules.conv._ConvNd):
    """A convolution that took the place of several: `Merged1d`, `Merged2d` or `Merged3d`."""

    def record(self) -> dict[str, Any]:
        """The present sizes as plain data."""
        sizes = {"outputs": self.out_channels, "inputs": self.in_channels, "groups": self.groups, "bias": self.bias is not None}
        shape = {name: list(vars(self)[name]) for name in ("kernel_size", "stride", "padding", "dilation")}
        return {"kind": "merged"} | sizes | shape


class Merged1d(Merged, nn.Conv1d):
    """A `Merged` convolution over (N, C, L)."""


class Merged2d(Merged, nn.Conv2d):
    """A `Merged` convolution over (N, C, H, W)."""


class Merged3d(Merged, nn.Conv3d):
    """A `Merged` convolution over (N, C, D, H, W)."""


_MERGED: dict[int, type[Any]] = {1: Merged1d, 2: Merged2d, 3: Merged3d}


def merged_convolution(record: Mapping[str, Any], like: Tensor) -> Merged:
    """A convolution of the sizes that `Merged.record` gives, with the dtype and on the device of a weight; its own is not set."""
    settings = {name: tuple(record[name]) for name in ("stride", "padding", "dilation")}
    kernel, place = tuple(record["kernel_size"]), Place(device=like.device, dtype=like.dtype)
    made: Merged = _MERGED[len(kernel)](
        record["inputs"], record["outputs"], kernel, groups=record["groups"], bias=record["bias"], **settings, **place
    )
    return made.requires_grad_(like.requires_grad)


class Unmerged(nn.Sequential):
    """Layers that are to become one convolution, in the place of the last one of them, as they are trained before.

    Args:
        sources: dotted names that the layers had.
        layers: the layers, in order. In the place of a BatchNorm that computes an activation, too, stands one that does not.
    """

    def __init__(self, sources: tuple[str, ...], *layers: nn.Module) -> None:
        super().__init__(*map(_without_activation, layers))
        self.sources = sources

    def record(self) -> dict[str, Any]:
        """The names of the layers as plain data."""
        return {"kind": "unmerged", "sources": list(self.sources)}


def _without_activation(layer: nn.Module) -> nn.Module:
    """A BatchNorm with a forward of somebody's own as one of torch's, with the same tensors; other layers as they are."""
    if not isinstance(layer, nn.modules.batchnorm._BatchNorm) or type(layer).__module__.startswith("torch."):
        return layer
    kind: Any = next(base for base in type(layer).__mro__ if base.__module__.startswith("torch."))
    if type(layer).forward is kind.forward or kind is nn.modules.batchnorm._BatchNorm:
        return layer
    plain = kind(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
    plain._parameters.update({name: layer._parameters[name] for name in plain._parameters})
    plain._buffers.update({name: layer._buffers[name] for name in plain._buffers})
    return plain.train(layer.training)


class Signed(nn.Module):
    """A linear layer or convolution of the signs of its inputs and weights, times learned factors (XNOR-Net++, 1909.13863).

    y = layer(sign(x - threshold)) * channels * rows * columns + bias, with sign(0) = 1. Thresholds are learned for each input
    channel (Liu et al., 2003.03488), since behind a ReLU the plain sign is constant. Zeros of the padding stay 0.

    Args:
        layer: linear, or a convolution; its weight stays a parameter of floats, of which the sign is used.
        sizes: of the output's dimensions behind the channels, each of which gets factors; () for factors of channels alone.
        weights, activations: whether the signs of the weights, and of the inputs, take their place.
        gradient: that of a sign at u, the distance from the threshold in units of `window`: 1 ("clip", Hubara et al., 1602.02830)
            or 2 - 2 |u| ("polynomial", Liu et al., 1808.00278) where |u| < 1, and 0 beyond; 1 - tanh(u)^2 everywhere ("tanh").

    `window` is a buffer, one value.
    """

    window: Tensor

    def __init__(
        self,
        layer: nn.Linear | nn.modules.conv._ConvNd,
        sizes: tuple[int, ...] = (),
        *,
        weights: bool = True,
        activations: bool = True,
        gradient: SignGradient = "polynomial",
    ) -> None:
        super().__init__()
        place = Place(device=layer.weight.device, dtype=layer.weight.dtype)
        self.axis = -1 if isinstance(layer, nn.Linear) else -layer.weight.ndim + 1
        inputs, outputs = (
            (layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else (layer.in_channels, layer.out_channels)
        )
        self.weights, self.activations, self.gradient, self.sizes = weights, activations, gradient, tuple(sizes)
        self.bias = layer.bias
        layer.bias = None
        self.layer = layer
        self.threshold = nn.Parameter(torch.zeros(inputs, **place))
        self.factors = nn.ParameterList([nn.Parameter(torch.ones(n, **place)) for n in (outputs, *sizes)])
        self.register_buffer("window", torch.ones((), **place))

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, of the shape that the layer itself gives."""
        if self.activations:
            x = sign_of(x, _along(self.threshold, self.axis), self.window, self.gradient)
        weight = self.layer.weight
        if self.weights:
            weight = sign_of(weight, torch.zeros((), dtype=weight.dtype, device=weight.device), 1.0, "clip")
        y: Tensor = torch.func.functional_call(self.layer, {"weight": weight}, (x,))
        if self.sizes and tuple(y.shape[self.axis + 1 :]) != self.sizes:
            raise ModelError(
                f"a layer of signs has factors for outputs of {self.sizes}, got {tuple(y.shape[self.axis + 1 :])}; give inputs of"
                ' the size that it was made for, or make it with factors="channels"'
            )
        factors = [_along(factor, dim) for dim, factor in enumerate(self.factors, self.axis)]
        if torch.is_grad_enabled() and not torch.compiler.is_exporting():
            factors = [
                math.prod(factors[1:], start=factors[0])
            ]  # one pass; in a file the product would be as large as the output
        for factor in factors:
            y = y * factor
        return y if self.bias is None else y + _along(self.bias, self.axis)

    def extra_repr(self) -> str:
        """What is replaced by signs, for `print(model)`."""
        return f"weights={self.weights}, activations={self.activations}, gradient={self.gradient!r}, sizes={self.sizes}"

    def record(self) -> dict[str, Any]:
        """The settings as plain data."""
        flags = {"weights": self.weights, "activations": self.activations, "gradient": self.gradient}
        of = {"of": self.layer.record() | {"bias": self.bias is not None}} if isinstance(self.layer, Merged) else {}
        return {"kind": "signed", "sizes": list(self.sizes)} | flags | of


def sign_of(x: Tensor, threshold: Tensor, window: Tensor | float, gradient: SignGradient) -> Tensor:
    """1 where x >= threshold, else -1, in the shape and dtype of x, with one of the gradients of `Signed`."""
    if torch.is_grad_enabled() and not torch.compiler.is_exporting():
        return _Sign.apply(x - threshold, window, gradient)  # type: ignore[no-any-return, no-untyped-call]
    return _plus_or_minus(x >= threshold, x.dtype)


def takes_signs(model: nn.Module) -> bool:
    """Whether a model, or the captured graph of one, takes signs of values that depend on its inputs."""
    graphs = [module.graph for module in model.modules() if isinstance(module, fx.GraphModule)]
    captured = any(node.target is _WHERE and node.args[1:] == (1.0, -1.0) for graph in graphs for node in graph.nodes)
    return captured or any(isinstance(module, Signed) and module.activations for module in model.modules())


def _plus_or_minus(mask: Tensor, dtype: torch.dtype) -> Tensor:
    signs = torch.where(mask, 1.0, -1.0)
    return signs if signs.dtype == dtype else signs.to(dtype)


class _Sign(torch.autograd.Function):
    """The sign of a distance, and a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, distance: Tensor, window: Tensor | float, gradient: SignGradient) -> Tensor:
        ctx.gradient, ctx.window = gradient, float(window)
        ctx.save_for_backward(distance)
        return torch.ge(distance, 0, out=torch.empty_like(distance)).mul_(2).sub_(1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (distance,) = ctx.saved_tensors
        window = ctx.window
        if ctx.gradient == "clip":
            return grad * (distance.abs() < window) / window, None, None
        if ctx.gradient == "polynomial":
            slope = distance.abs().mul_(-2 / window**2).add_(2 / window).clamp_(min=0)
        else:
            slope = (distance / window).tanh_().square_().neg_().add_(1).div_(window)
        return slope.mul_(grad), None, None


def _along(values: Tensor, dim: int) -> Tensor:
    """A vector as a tensor that broadcasts along a dimension counted from the end."""
    return values.view(-1, *(1,) * (-dim - 1))


_KINDS = (Bypass, Factored, Signed, Merged, Unmerged)


def replacements(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The record of every module that took the place of a user's own, by its dotted name."""
    return {path: module.record() for path, module in model.named_modules() if isinstance(module, _KINDS)}


def replace_module_(model: nn.Module, path: str, made: nn.Module) -> None:
    """Put a module where another one is, under all of that one's names; it takes over whether it trains.

    The fused kernels of torch's transformer layers read the weights of their linear layers, which the new module may not have: a
    layer around it takes the plain path from here on, and so does its encoder.

    Raises ModelError for the path "": the whole model cannot be replaced inside itself.
    """
    if not path:
        raise ModelError(
            f"{type(model).__name__} is the whole model, which cannot be replaced inside itself; put it into a model, such as"
            " nn.Sequential(layer)"
        )
    here = model.get_submodule(path)
    made.train(here.training)
    for name in [name for name, module in model.named_modules(remove_duplicate=False) if module is here]:
        model.set_submodule(name, made)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and any(part is made for part in module.modules()):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder) and any(part is made for part in module.modules()):
            module.use_nested_tensor = False


def bypass_(model: nn.Module, path: str, bypass: Bypass) -> None:
    """Put a bypass in the place of a block, in place, under this one of its names; layers behind it are numbered as it says."""
    if bypass.renumbers:
        renumber_behind_(model, path)
    model.set_submodule(path, bypass.train(model.get_submodule(path).training))


def replace_recorded_(model: nn.Module, record: Mapping[str, Any]) -> None:
    """Put the modules of a record into a model of the same class, which may have some of them already.

    Raises CheckpointError where the record is damaged, or of another model.
    """
    kinds = {path: saved.get("kind") if isinstance(saved, dict) else None for path, saved in record.items()}
    for path in sorted(record, key=lambda path: kinds[path] != "unmerged"):  # first, as the others replace layers that it takes
        here, saved = _module_at(model, path), record[path]
        match kinds[path]:
            case "unmerged":
                _unmerge_(model, path, here, saved)
            case "merged":
                _merge_(model, path, here, saved)
            case "factored":
                _factor_(model, path, _merged_below_(model, path, here, saved), saved.get("ranks"))
            case "signed":
                _sign_(model, path, _merged_below_(model, path, here, saved), saved)
            case "bypass":
                _bypass_(model, path, here, saved)
            case _:
                raise CheckpointError(f"{path}: not the record of a replaced module, got {saved!r}; delete the folder")


def _merged_below_(model: nn.Module, path: str, here: nn.Module, saved: Mapping[str, Any]) -> nn.Module:
    """The layer that a record of another kind replaces: made first where it is itself a merged convolution."""
    if not isinstance(saved.get("of"), dict) or isinstance(here, Factored | Signed):
        return here
    _merge_(model, path, here, saved["of"])
    return _module_at(model, path)


def _factor_(model: nn.Module, path: str, here: nn.Module, ranks: Any) -> None:
    """Put factors of these ranks into the place of a layer that is not factored yet; of others the shapes are set later."""
    if isinstance(here, Factored):
        return
    if not isinstance(here, nn.Linear | nn.Conv1d | nn.Conv2d):
        raise CheckpointError(
            f"{path}: the record says a layer of low rank, the model has {type(here).__name__}; it is of another model"
        )
    outputs, inputs = here.weight.shape[:2]
    tucker = not isinstance(here, nn.Linear) and math.prod(here.kernel_size) > 1
    most = (inputs, outputs) if tucker else (min(inputs, outputs),)
    if isinstance(here, nn.Conv2d) and tucker and isinstance(ranks, list) and len(ranks) == 1:
        most = (most_cp_rank(here.weight.shape),)
    fits = isinstance(ranks, list) and len(ranks) == len(most)
    if not fits or not all(_is_count(r) and 1 <= r <= m for r, m in zip(ranks, most, strict=True)):
        raise CheckpointError(f"{path}: wanted a rank up to each of {most}, got {ranks!r}; delete the folder")
    made = Factored.like(here, tuple(ranks)).requires_grad_(here.weight.requires_grad)
    replace_module_(model, path, made)


def _sign_(model: nn.Module, path: str, here: nn.Module, saved: Mapping[str, Any]) -> None:
    """Put a layer of signs into the place of a layer that is none yet; of one that is, set what is signed."""
    sizes, weights, activations = saved.get("sizes"), saved.get("weights"), saved.get("activations")
    fits = isinstance(sizes, list) and all(_is_count(n) and 0 < n <= MOST_ROWS for n in sizes)
    if not fits or not {type(weights), type(activations)} <= {bool} or saved.get("gradient") not in get_args(SignGradient):
        raise CheckpointError(f"{path}: not the record of a layer of signs, got {saved!r}; delete the folder")
    if isinstance(here, Signed) and list(here.sizes) == sizes:
        here.weights, here.activations, here.gradient = saved["weights"], saved["activations"], saved["gradient"]
        return
    if not isinstance(here, nn.Linear | nn.modules.conv._ConvNd):
        raise CheckpointError(
            f"{path}: the record says a layer of signs of sizes {sizes}, the model has {type(here).__name__}; it is of another"
            " model"
        )
    made = Signed(
        here, tuple(saved["sizes"]), weights=saved["weights"], activations=saved["activations"], gradient=saved["gradient"]
    )
    replace_module_(model, path, made.requires_grad_(here.weight.requires_grad))


def _unmerge_(model: nn.Module, path: str, here: nn.Module, saved: Mapping[str, Any]) -> None:
    """Gather layers in the place of the last one, unless they are there."""
    sources = saved.get("sources")
    if not isinstance(sources, list) or not sources or sources[-1] != path or not all(isinstance(s, str) for s in sources):
        raise CheckpointError(f"{path}: not the record of layers to merge, got {saved!r}; delete the folder")
    if isinstance(here, Unmerged):
        if list(here.sources) != sources:
            raise CheckpointError(f"{path}: the record says {sources}, the model has {here.sources}; it is of another model")
        return
    replace_module_(model, path, Unmerged(tuple(sources), *(_module_at(model, source) for source in sources)))


def _merge_(model: nn.Module, path: str, here: nn.Module, saved: Mapping[str, Any]) -> None:
    """Put a merged convolution into the place of a layer, unless one of that record is there."""
    if isinstance(here, Merged) and here.record() == saved:
        return
    like = here[-1] if isinstance(here, Unmerged) else here
    if not isinstance(like, nn.modules.conv._ConvNd):
        raise CheckpointError(
            f"{path}: the record says a merged convolution, the model has {type(here).__name__}; it is of another model"
        )
    rank = like.weight.ndim - 2
    shapes = [saved.get(name) for name in ("kernel_size", "stride", "padding", "dilation")]
    counts = [saved.get(name) for name in ("outputs", "inputs", "groups")]
    fits = all(isinstance(shape, list) and len(shape) == rank and all(map(_is_count, shape)) for shape in shapes)
    if (
        not fits
        or not all(_is_count(n) and 0 < n <= MOST_ROWS for n in (*counts, *shapes[0], *shapes[1], *shapes[3]))  # type: ignore[misc]
        or any(n % counts[2] for n in counts)  # type: ignore[operator]
        or math.prod((*counts[:2], *shapes[0])) // counts[2] > MOST_MERGED  # type: ignore[arg-type, misc, operator]
        or type(saved.get("bias")) is not bool
    ):
        raise CheckpointError(f"{path}: not the record of a merged convolution, got {saved!r}; delete the folder")
    replace_module_(model, path, merged_convolution(saved, like.weight))


def _module_at(model: nn.Module, path: Any) -> nn.Module:
    try:
        return model.get_submodule(str(path or "no name"))
    except AttributeError:
        raise CheckpointError(
            f"the record was made of another model: {type(model).__name__} has no module {path!r}; build the model that the run"
            " started from"
        ) from None


def _bypass_(model: nn.Module, path: str, here: nn.Module, saved: Mapping[str, Any]) -> None:
    """Put a bypass in the place of a block, unless one of that record is there."""
    argument, outputs, index = saved.get("argument"), saved.get("outputs"), saved.get("index")
    copies, renumbers = saved.get("copies", False), saved.get("renumbers", True)
    if (
        not (isinstance(argument, str) or _is_count(argument))
        or not (_is_count(outputs) and outputs <= MOST_OUTPUTS)
        or not (_is_count(index) and index < max(1, outputs))
        or not {type(copies), type(renumbers)} <= {bool}
    ):
        raise CheckpointError(f"{path}: not the record of a replaced module, got {saved!r}; delete the folder")
    made = Bypass(argument, outputs, index, copies, renumbers)
    if not isinstance(here, Bypass):
        bypass_(model, path, made)
    elif here.record() != made.record():
        raise CheckpointError(f"{path}: the record says {made}, the model has {here}; it is of another model")


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and value >= 0
