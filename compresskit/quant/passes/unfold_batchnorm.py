"""Conv-BN QAT: unfold BatchNorm and scales from the layers of a quantized graph for training, and fold them again at the end.

The runtime computes conv(x; W k, b) with k = gamma / sqrt(var + eps), and rounds W k. While BatchNorm tracks the statistics of
batches, a layer computes (Krishnamoorthi, arXiv 1806.08342, section 3.2.2; Jacob et al., arXiv 1712.05877, section 3.2)

    batch_norm(conv(x; round(W k)) / k)

so that the folded weight is rounded, and BatchNorm still normalizes the layer. With frozen statistics it computes what the
runtime computes. The gradient of its weight is then that of a batch that is normalized still (as in batch renormalization,
Ioffe, arXiv 1702.03275), and a part of what this lacks, that along mean and scale of the output: with all of it a network
diverges within a few steps at learning rates that BatchNorm allows, and with none of it mean and scale drift away. Parameters
keep the names that they have in the float model.

Scales and shifts by constants that were merged into a layer, as those of x / 255 before it, are unfolded, too: the gradient of
the merged weight is 255 times that of the weight of the model, and a step of the optimizer 255^2 times as large for its size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from compresskit.base.distributed import joins_rows, sync_batch_norm
from compresskit.graph.capture import parameter_name
from compresskit.graph.layers.fold_batchnorm import NORM_LEAVES, FoldedBatchNorm, FoldedScales, norms_by_name, of_norm
from compresskit.graph.layers.stored import Scales, bias_of, scaled_inputs, sum_over_inputs
from compresskit.graph.normalize import Node, aten
from compresskit.graph.surgery import free_name, get_tensor, owner
from compresskit.quant.numerics.batch_norm_gradients import ScaledBatchNorm, ShiftedOnly, keeps_statistics
from compresskit.quant.numerics.quantizers import BiasQuantizer, WeightQuantizer
from compresskit.quant.passes.quantizer_names import QuantizerHolder

LEAST_ROWS = 32  # values of a channel in a batch, in fewer of which a gradient through their statistics leaves too little


class UnfoldedLayer(nn.Module):
    """A convolution or linear layer with the scales and shifts around it, for training: called with its input, weight and bias.

    A layer that runs several times is called with the number of the call, too: biases are rounded by the scale of the input.
    Where a parameter scales the result, it is the last argument.

    roundings: of each call, the quantizers of weight and bias; None where it is not rounded.
    inward, entering, outward, leaving: see `Scales`; None where there is none.
    """

    keeps_fp32 = True
    inward: Tensor | None
    entering: Tensor | None
    outward: Tensor | None
    leaving: Tensor | None

    def __init__(self, call: tuple[Any, tuple[Any, ...]], roundings: list[tuple[Any, Any]], scales: Scales) -> None:
        super().__init__()
        self.operator, self.rest = call
        self.roundings = roundings  # in a list, so that they are not registered as submodules
        self.groups, self.axis = scales.groups, scales.axis
        for name in ("inward", "entering", "outward", "leaving"):
            values = getattr(scales, name)
            self.register_buffer(name, None if values is None else values.float())

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, call: int = 0, gain: Tensor | None = None) -> Tensor:
        round_weight, round_bias = self.roundings[call]
        folded, shift = self.folded(weight, bias, gain)
        shift = shift if shift is None or round_bias is None else round_bias(shift, folded)
        folded = folded if round_weight is None else round_weight(folded)
        return self.operator(x, folded, None if shift is None else shift.to(folded.dtype), *self.rest)  # type: ignore[no-any-return]

    def rounding_of(self, call: Node) -> tuple[Any, Any]:
        """The quantizers of weight and bias of a call, a node of the graph."""
        return self.roundings[call.args[3] if len(call.args) > 3 else 0]

    def factor(self, gain: Tensor | None = None) -> Tensor | None:
        """What the layer's result is multiplied by, (channels,) or one number; None where it is not."""
        gain = None if gain is None else gain.flatten()
        return gain if self.outward is None else self.outward if gain is None else self.outward * gain

    def folded(self, weight: Tensor, bias: Tensor | None, gain: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Weight and bias with everything folded in."""
        weight, bias = self._entered(weight, bias)
        if (factor := self.factor(gain)) is not None:
            weight, bias = self._scaled(weight, factor), None if bias is None else bias * factor
        if self.leaving is not None:
            bias = self.leaving if bias is None else bias + self.leaving
        return weight, bias

    def folded_at(self, body: fx.GraphModule, call: Node) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of a call, a node of the graph, with everything folded in; detached."""
        weight, bias, gain = (self._read(body, call, place) for place in (1, 2, 4))
        assert weight is not None
        folded, shift = self.folded(weight, bias, gain)
        return folded.detach(), None if shift is None else shift.detach()

    def scaling_at(self, body: fx.GraphModule, call: Node) -> Tensor:
        """What the weight of a call is multiplied by before it is rounded, of its number of dimensions; detached."""
        weight, gain = self._read(body, call, 1), self._read(body, call, 4)
        assert weight is not None
        factor = self.factor(gain)
        factor = weight.new_ones(1) if factor is None else factor.detach()
        scaling = factor.view([-1 if d == self.axis else 1 for d in range(weight.ndim)])
        if self.inward is None:
            return scaling
        return scaled_inputs(torch.ones_like(weight, dtype=torch.float32), self.inward, self.groups) * scaling

    def unscaled_at(self, body: fx.GraphModule, call: Node) -> Tensor:
        """The weight of a call in the units of the float model, with nothing but BatchNorm folded in; detached."""
        weight = self._read(body, call, 1)
        assert weight is not None
        return weight

    def _read(self, body: fx.GraphModule, call: Node, place: int) -> Tensor | None:
        node = call.args[place] if len(call.args) > place else None
        return None if node is None else get_tensor(body, str(parameter_name(node))).detach()

    def _entered(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Weight and bias with what comes before the layer."""
        if self.entering is not None:
            moved = sum_over_inputs(weight.float(), self.entering, self.groups)
            bias = moved if bias is None else bias + moved
        if self.inward is not None:
            weight = scaled_inputs(weight.float(), self.inward, self.groups).to(weight.dtype)
        return weight, bias

    def _scaled(self, weight: Tensor, factor: Tensor) -> Tensor:
        shape = [1] * weight.ndim
        shape[self.axis] = -1
        return (weight.float() * factor.view(shape)).to(weight.dtype)


class ConvBN(UnfoldedLayer):
    """A layer with its BatchNorm: the scales before it are those of its input, those behind it of BatchNorm's result.

    weight, bias, running_mean, running_var: of the BatchNorm.
    tracking: whether, in train mode, batches are normalized by their own statistics, and the running ones follow.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, folded: FoldedBatchNorm, call: tuple[Any, tuple[Any, ...]], roundings: list[tuple[Any, Any]]) -> None:
        super().__init__(call, roundings, folded.scales or Scales())
        self.momentum, self.eps = folded.momentum, folded.eps
        self.tracking = True
        self.axis = next((rounding.axis for rounding, _ in roundings if rounding is not None), 0)
        for name, key in (("weight", "gamma"), ("bias", "beta")):
            values = folded.tensors[key]
            trains = key not in folded.frozen
            self.register_parameter(name, None if values is None else nn.Parameter(values.clone(), requires_grad=trains))
        for name, key in (("running_mean", "mean"), ("running_var", "var")):
            values = folded.tensors[key]
            assert values is not None
            self.register_buffer(name, values.clone())

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, call: int = 0, gain: Tensor | None = None) -> Tensor:
        round_weight, round_bias = self.roundings[call]
        weight, bias = self._entered(weight, bias)
        if self.training and self.tracking:
            factor = self.factor(gain).detach()
            factor = torch.where(factor.abs() > 1e-8, factor, torch.ones_like(factor))
            scaled = self._scaled(weight, factor)
            y = self.operator(x, scaled if round_weight is None else round_weight(scaled), None, *self.rest)
            return self._normalized(y, factor, bias, gain)
        folded, shift = self._with_norm(weight, bias, gain)
        shift = shift if round_bias is None else round_bias(shift, folded)
        if self.training and self._trains() and torch.is_grad_enabled():
            factor = self.factor(gain).detach()
            scaled = self._scaled(weight, factor)
            y = self.operator(x, scaled if round_weight is None else round_weight(scaled), None, *self.rest)
            if y.numel() >= LEAST_ROWS * y.shape[1] and keeps_statistics(y, self.running_mean):
                return ShiftedOnly.apply(y, self.eps * factor.square(), self._gamma(gain), shift)  # type: ignore[no-any-return, no-untyped-call]
        folded = folded if round_weight is None else round_weight(folded)
        return self.operator(x, folded, shift.to(folded.dtype), *self.rest)  # type: ignore[no-any-return]

    def _trains(self) -> bool:
        """Whether weight and bias of the BatchNorm are trained, and can follow where the layer's weight cannot."""
        return all(value is not None and value.requires_grad for value in (self.weight, self.bias))

    def _gamma(self, gain: Tensor | None) -> Tensor | None:
        """The weight of BatchNorm, times the scales behind it."""
        factor = super().factor(gain)
        return self.weight if factor is None else factor if self.weight is None else self.weight * factor

    def _beta(self, gain: Tensor | None) -> Tensor | None:
        """The bias of BatchNorm, with the scales and shifts behind it."""
        factor, bias = super().factor(gain), self.bias
        scaled = bias if bias is None or factor is None else bias * factor
        return scaled if self.leaving is None else self.leaving if scaled is None else scaled + self.leaving

    def _normalized(self, y: Tensor, factor: Tensor, bias: Tensor | None, gain: Tensor | None) -> Tensor:
        """BatchNorm of y / factor + bias with the statistics of the batch, which the running ones follow."""
        gamma, shift = self._gamma(gain), self._beta(gain)
        if joins_rows() or not keeps_statistics(y, self.running_mean) or y.numel() <= y.shape[1]:
            shape = [1, -1, *[1] * (y.ndim - 2)]
            y = y * factor.reciprocal().to(y.dtype).view(shape)
            y = y if bias is None else y + bias.view(shape)
            return sync_batch_norm(y, self.running_mean, self.running_var, gamma, shift, self.momentum, self.eps)
        weight = None if gamma is None else gamma * factor.sign()
        if bias is not None:  # it cancels; optimizers still see it, with a gradient of zeros
            shift = 0 * bias if shift is None else shift + 0 * bias
        usual = self.running_var * factor.square()
        x, mean, variance = ScaledBatchNorm.apply(y, self.eps * factor.square(), usual, weight, shift)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            rows = y.numel() / y.shape[1]
            self.running_mean.lerp_(mean / factor + (0 if bias is None else bias), self.momentum)
            self.running_var.lerp_(variance / factor.square() * (rows / (rows - 1)), self.momentum)
        return x  # type: ignore[no-any-return]

    def following(self) -> list[Tensor]:
        """The statistics, while they follow the batches."""
        return [self.running_mean, self.running_var] if self.training and self.tracking else []

    def factor(self, gain: Tensor | None = None) -> Tensor:
        """The factor k = gamma / sqrt(var + eps), (channels,), with what comes behind BatchNorm."""
        k, gamma = torch.rsqrt(self.running_var + self.eps), self._gamma(gain)
        return k if gamma is None else gamma * k

    def folded(self, weight: Tensor, bias: Tensor | None, gain: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weight and bias with everything folded in."""
        return self._with_norm(*self._entered(weight, bias), gain)

    def unscaled_at(self, body: fx.GraphModule, call: Node) -> Tensor:
        k = torch.rsqrt(self.running_var + self.eps)
        return self._scaled(super().unscaled_at(body, call), k if self.weight is None else k * self.weight.detach())

    def _with_norm(self, weight: Tensor, bias: Tensor | None, gain: Tensor | None) -> tuple[Tensor, Tensor]:
        k, beta = self.factor(gain), self._beta(gain)
        shift = -self.running_mean if bias is None else bias - self.running_mean
        return self._scaled(weight, k), shift * k + (0 if beta is None else beta)


class FloatNorm(ConvBN):
    """A BatchNorm that is computed in float, by itself: that of a layer which multiplies each channel by 1.

    given: the last arguments of torch's operator, from whether it trains on.
    """

    ones: Tensor

    def __init__(self, folded: FoldedBatchNorm, given: tuple[Any, ...]) -> None:
        super().__init__(folded, (_scaled_channels, ()), [(None, None)])
        self.given = given
        self.register_buffer("ones", torch.ones_like(self.running_var), persistent=False)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # the layer has no weight that anybody gives
        return super().forward(x, self.ones, None)


def _scaled_channels(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply each channel of x (N, C, ...) by its weight, and add its bias."""
    shape = [1, -1, *[1] * (x.ndim - 2)]
    y = x * weight.view(shape)
    return (y if bias is None else y + bias.view(shape)).to(x.dtype)


def _unfold_float_norms_(body: fx.GraphModule) -> None:
    """Replace BatchNorms that are left in a graph, with running statistics, by `FloatNorm` modules of their names, in place."""
    for path, calls in norms_by_name(body).items():
        norm = FloatNorm(FoldedBatchNorm(layer=calls[0], **of_norm(body, calls[0])), tuple(calls[0].args[5:]))
        body.set_submodule(path, norm.train(body.training))
        for node in calls:
            node.op, node.target, node.args = "call_module", path, (node.args[0],)


def _fold_float_norms_(body: fx.GraphModule) -> None:
    """Put torch's operator back in the places of `FloatNorm` modules, with their parameters under the same names, in place."""
    norms = {path: norm for path, norm in body.named_modules() if isinstance(norm, FloatNorm)}
    for node in list(body.graph.nodes):
        if node.op == "call_module" and node.target in norms:
            norm, path = norms[node.target], node.target
            with body.graph.inserting_before(node):
                reads = [None if getattr(norm, leaf) is None else body.graph.get_attr(f"{path}.{leaf}") for leaf in NORM_LEAVES]
            node.op, node.target, node.args = "call_function", aten.batch_norm.default, (node.args[0], *reads, *norm.given)
    for path, norm in norms.items():
        holder = nn.Module()
        for leaf in ("weight", "bias"):
            holder.register_parameter(leaf, getattr(norm, leaf))
        for leaf in ("running_mean", "running_var"):
            holder.register_buffer(leaf, getattr(norm, leaf))
        body.set_submodule(path, holder.train(norm.training))


def unfold_batchnorm_(body: fx.GraphModule, folds: list[FoldedScales]) -> None:
    """Replace layers by `ConvBN` or `UnfoldedLayer` modules that hold what was folded into them, in place.

    BatchNorms that were folded into nothing become `FloatNorm` modules.
    """
    _unfold_float_norms_(body)
    for fold in folds:
        layer, calls = fold.layer, (fold.layer, *(fold.others if isinstance(fold, FoldedBatchNorm) else ()))
        weights = [_parameter_and_quantizer(body, node.args[1], WeightQuantizer) for node in calls]
        biases = [_parameter_and_quantizer(body, bias_of(node), BiasQuantizer) for node in calls]
        roundings = [(weight[1], bias[1]) for weight, bias in zip(weights, biases, strict=True)]
        call = layer.target, tuple(layer.args[3:])
        if isinstance(fold, FoldedBatchNorm):
            unfolded: UnfoldedLayer = ConvBN(fold, call, roundings)
            name = fold.norm or free_name(body, "norm")  # of one that is called by a model itself, "" names all of it
            taken = isinstance(getattr(body, name.partition(".")[0], None), QuantizerHolder)  # it was free once it was folded
            if taken or _holds_tensors(body, name):
                name = free_name(body, name.replace(".", "_"))
        else:
            unfolded, name = UnfoldedLayer(call, roundings, fold.scales or Scales()), free_name(body, f"scales_of_{layer.name}")
        body.add_submodule(name, unfolded)
        old = get_tensor(body, str(parameter_name(weights[0][0])))
        for leaf, (read, _) in (("weight", weights[0]), ("bias", biases[0])):
            if read is not None:
                _put_back_(body, str(parameter_name(read)), fold, leaf, old)
        gain = _put_gain_back_(body, fold, old)
        unfolded.to(old.device).train(body.training)
        for number, (node, (weight, _), (bias, _)) in enumerate(zip(calls, weights, biases, strict=True)):
            node.op, node.target = "call_module", name
            rest: list[Any] = [number] if number or gain is not None else []
            if gain is not None:
                with body.graph.inserting_before(node):
                    rest.append(body.graph.get_attr(gain))
            node.args = (node.args[0], weight, None if fold.tensors["bias"] is None else bias, *rest)
            node.meta["bias"] = None if bias is None else str(parameter_name(bias))
    _drop_unread_nodes_(body)


def _holds_tensors(body: fx.GraphModule, path: str) -> bool:
    """Whether a module of the graph still holds something, as a norm does that computes its activation by a layer."""
    module = dict(body.named_modules()).get(path)
    return module is not None and bool([*module.parameters(), *module.buffers()])


def _put_back_(body: fx.GraphModule, name: str, fold: FoldedScales, leaf: str, like: Tensor) -> None:
    """Give a weight or bias the values that it has in the float model, or delete one that the float model has not."""
    module, own = owner(body, name)
    if fold.tensors[leaf] is None:
        delattr(module, own)
    else:
        setattr(module, own, nn.Parameter(_unfolded(fold, leaf).to(like), requires_grad=leaf not in fold.frozen))


def _put_gain_back_(body: fx.GraphModule, fold: FoldedScales, like: Tensor) -> str | None:
    """The name of the parameter that scales the result of a layer, which the graph has again; None where there is none."""
    if fold.scales is None or fold.scales.gain is None:
        return None
    name, values = fold.scales.gain
    path, _, leaf = name.rpartition(".")
    if path not in dict(body.named_modules()):
        body.add_submodule(path, nn.Module())
    module = body.get_submodule(path)
    if leaf not in module._parameters:
        module.register_parameter(leaf, nn.Parameter(values.clone().to(like)))
    return name


def _unfolded(fold: FoldedScales, name: str) -> Tensor:
    values = fold.tensors[name]
    assert values is not None
    return values.clone()


def _parameter_and_quantizer(body: fx.GraphModule, node: Any, kind: type[nn.Module]) -> tuple[Any, Any]:
    """(the node that reads the parameter, its quantizer or None)."""
    quantizer = body.get_submodule(node.target) if node is not None and node.op == "call_module" else None
    return (node.args[0], quantizer) if isinstance(quantizer, kind) else (node, None)


def fold_conv_bn_(body: fx.GraphModule) -> None:
    """Fold everything again: the graph as before `unfold_batchnorm_`, with the trained weights and biases, in place."""
    _fold_float_norms_(body)
    names = {id(module): name for name, module in body.named_modules()}
    folded: dict[str, Tensor | None] = {}
    gains: set[str] = set()
    for node in list(body.graph.nodes):
        layer = body.get_submodule(node.target) if node.op == "call_module" else None
        if isinstance(layer, UnfoldedLayer):
            path = node.target
            if path not in folded:
                folded[path] = _fold_weights_(body, layer, node)
            gains |= {str(parameter_name(gain)) for gain in node.args[4:]}
            _call_operator_(body, layer, node, names, folded[path])
    for path in folded:
        body.delete_submodule(path)
    _drop_unread_nodes_(body)
    for name in gains - {parameter_name(node) for node in body.graph.nodes}:
        module, leaf = owner(body, name)
        delattr(module, leaf)


def _fold_weights_(body: fx.GraphModule, layer: UnfoldedLayer, node: Node) -> Tensor | None:
    """Give the parameters of a layer the values with everything folded in; returns the bias."""
    name, other = str(parameter_name(node.args[1])), node.meta["bias"]
    values = layer.folded_at(body, node)
    trains = get_tensor(body, name).requires_grad
    own_bias = None if node.args[2] is None else get_tensor(body, str(parameter_name(node.args[2])))
    if isinstance(layer, ConvBN):
        trains, own_bias = layer.weight is None or layer.weight.requires_grad, layer.bias
    bias_trains = trains if own_bias is None else own_bias.requires_grad
    for target, value, requires_grad in zip((name, other), values, (trains, bias_trains), strict=True):
        if value is not None:
            module, leaf = owner(body, target)
            setattr(module, leaf, nn.Parameter(value.detach(), requires_grad=requires_grad))
    return values[1]


def _call_operator_(
    body: fx.GraphModule, layer: UnfoldedLayer, node: Node, names: dict[int, str], folded_bias: Tensor | None
) -> None:
    """Let a node call the layer's operator, with its parameters rounded as `layer` rounds them."""
    x, weight, bias, *_ = node.args
    round_weight, round_bias = layer.rounding_of(node)
    node.op, node.target = "call_function", layer.operator
    with body.graph.inserting_before(node):
        bias = body.graph.get_attr(node.meta["bias"]) if bias is None and folded_bias is not None else bias
        reads = [weight, bias]
        if round_weight is not None:
            reads[0] = body.graph.call_module(names[id(round_weight)], (weight,))
        if round_bias is not None and folded_bias is not None:
            reads[1] = body.graph.call_module(names[id(round_bias)], (bias, weight))
            round_bias.make_room_(folded_bias)
    node.args = (x, *reads, *layer.rest)


def conv_bn_layers(body: fx.GraphModule) -> list[ConvBN]:
    """All layers of a graph with an unfolded BatchNorm."""
    return [module for module in body.modules() if isinstance(module, ConvBN)]


def units_of(body: fx.GraphModule) -> dict[WeightQuantizer, Tensor]:
    """What scales around a layer multiply its weight by before a quantizer rounds it, of the shape of its scales, on average."""
    units: dict[WeightQuantizer, Tensor] = {}
    for node in body.graph.nodes:
        layer = body.get_submodule(node.target) if node.op == "call_module" else None
        if isinstance(layer, UnfoldedLayer) and (rounding := layer.rounding_of(node)[0]) is not None:
            folded, own = (
                values.float().abs().movedim(rounding.axis, 0).flatten(1).mean(1 if rounding.scheme.per_channel else None)
                for values in (layer.folded_at(body, node)[0], layer.unscaled_at(body, node))
            )
            units[rounding] = torch.where((folded > 0) & (own > 0), folded / own, 1.0)
    return units


def _drop_unread_nodes_(body: fx.GraphModule) -> None:
    """Drop nodes without readers; the modules of the quantizers stay."""
    for node in reversed(list(body.graph.nodes)):
        if node.op in ("get_attr", "call_module") and not node.users:
            body.graph.erase_node(node)
    body.graph.lint()
    body.recompile()
