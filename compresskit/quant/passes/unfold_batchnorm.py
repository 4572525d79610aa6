"""Conv-BN QAT: unfold BatchNorm from the layers of a quantized graph for training, and fold it again at the end.

The runtime computes conv(x; W k, b) with k = gamma / sqrt(var + eps), and rounds W k. While BatchNorm tracks the statistics of
batches, a layer computes (Krishnamoorthi, arXiv 1806.08342, section 3.2.2; Jacob et al., arXiv 1712.05877, section 3.2)

    batch_norm(conv(x; round(W k)) / k)

so that the folded weight is rounded, and BatchNorm still normalizes the layer. With frozen statistics it computes what the
runtime computes. The gradient of its weight is then that of a batch that is normalized still (as in batch renormalization,
Ioffe, arXiv 1702.03275), and a part of what this lacks, that along mean and scale of the output: with all of it a network
diverges within a few steps at learning rates that BatchNorm allows, and with none of it mean and scale drift away. Parameters
keep the names that they have in the float model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from compresskit.base.distributed import joins_rows, sync_batch_norm
from compresskit.graph.capture import parameter_name
from compresskit.graph.layers.fold_batchnorm import FoldedBatchNorm
from compresskit.graph.normalize import Node
from compresskit.graph.surgery import free_name, get_tensor, owner
from compresskit.quant.numerics.quantizers import BiasQuantizer, WeightQuantizer
from compresskit.quant.passes.quantizer_names import QuantizerHolder

PULL = 0.3  # part of the gradient along mean and scale of a layer's output that its weight gets with frozen statistics
LEAST_ROWS = 32  # values of a channel in a batch, in fewer of which a gradient through their statistics leaves too little
CONSTANT = 0.01  # fraction of eps below which a variance is that of a channel that is constant


class ConvBN(nn.Module):
    """A convolution or linear layer with its BatchNorm, for training: called with the layer's input, weight and bias.

    A layer that runs several times is called with the number of the call, too: biases are rounded by the scale of the input.

    roundings: of each call, the quantizers of weight and bias; None where it is not rounded.
    weight, bias, running_mean, running_var: of the BatchNorm.
    tracking: whether, in train mode, batches are normalized by their own statistics, and the running ones follow.
    """

    keeps_fp32 = True
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, folded: FoldedBatchNorm, call: tuple[Any, tuple[Any, ...]], roundings: list[tuple[Any, Any]]) -> None:
        super().__init__()
        self.operator, self.rest = call
        self.roundings = roundings  # in a list, so that they are not registered as submodules
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

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, call: int = 0) -> Tensor:
        round_weight, round_bias = self.roundings[call]
        if self.training and self.tracking:
            factor = self.factor().detach()
            factor = torch.where(factor.abs() > 1e-8, factor, torch.ones_like(factor))
            scaled = self._scaled(weight, factor)
            y = self.operator(x, scaled if round_weight is None else round_weight(scaled), None, *self.rest)
            return self._normalized(y, factor, bias)
        folded, shift = self.folded(weight, bias)
        shift = shift if round_bias is None else round_bias(shift, folded)
        if self.training and self._trains() and torch.is_grad_enabled():
            factor = self.factor().detach()
            scaled = self._scaled(weight, factor)
            y = self.operator(x, scaled if round_weight is None else round_weight(scaled), None, *self.rest)
            if y.numel() >= LEAST_ROWS * y.shape[1] and _keeps_statistics(y, self.running_mean):
                return _ShiftedOnly.apply(y, self.eps * factor.square(), self.weight, shift)  # type: ignore[no-any-return, no-untyped-call]
        folded = folded if round_weight is None else round_weight(folded)
        return self.operator(x, folded, shift.to(folded.dtype), *self.rest)  # type: ignore[no-any-return]

    def _trains(self) -> bool:
        """Whether weight and bias of the BatchNorm are trained, and can follow where the layer's weight cannot."""
        return all(value is not None and value.requires_grad for value in (self.weight, self.bias))

    def rounding_of(self, call: Node) -> tuple[Any, Any]:
        """The quantizers of weight and bias of a call, a node of the graph."""
        return self.roundings[call.args[3] if len(call.args) > 3 else 0]

    def _normalized(self, y: Tensor, factor: Tensor, bias: Tensor | None) -> Tensor:
        """BatchNorm of y / factor + bias with the statistics of the batch, which the running ones follow."""
        if joins_rows() or not _keeps_statistics(y, self.running_mean) or y.numel() <= y.shape[1]:
            shape = [1, -1, *[1] * (y.ndim - 2)]
            y = y * factor.reciprocal().to(y.dtype).view(shape)
            y = y if bias is None else y + bias.view(shape)
            return sync_batch_norm(y, self.running_mean, self.running_var, self.weight, self.bias, self.momentum, self.eps)
        weight = None if self.weight is None else self.weight * factor.sign()
        shift: Tensor | None = self.bias
        if bias is not None:  # it cancels; optimizers still see it, with a gradient of zeros
            shift = 0 * bias if shift is None else shift + 0 * bias
        usual = self.running_var * factor.square()
        x, mean, variance = _ScaledBatchNorm.apply(y, self.eps * factor.square(), usual, weight, shift)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            rows = y.numel() / y.shape[1]
            self.running_mean.lerp_(mean / factor + (0 if bias is None else bias), self.momentum)
            self.running_var.lerp_(variance / factor.square() * (rows / (rows - 1)), self.momentum)
        return x  # type: ignore[no-any-return]

    def following(self) -> list[Tensor]:
        """The statistics, while they follow the batches."""
        return [self.running_mean, self.running_var] if self.training and self.tracking else []

    def factor(self) -> Tensor:
        """The factor k = gamma / sqrt(var + eps), (channels,)."""
        k = torch.rsqrt(self.running_var + self.eps)
        return k if self.weight is None else self.weight * k

    def folded(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Weight and bias with BatchNorm folded in."""
        k = self.factor()
        shift = -self.running_mean if bias is None else bias - self.running_mean
        return self._scaled(weight, k), shift * k + (0 if self.bias is None else self.bias)

    def _scaled(self, weight: Tensor, factor: Tensor) -> Tensor:
        shape = [1] * weight.ndim
        shape[self.axis] = -1
        return (weight.float() * factor.view(shape)).to(weight.dtype)


class _ScaledBatchNorm(torch.autograd.Function):
    """BatchNorm of y / k for x = y: weight (y - mean) / sqrt(variance + eps k^2) + bias, without computing y / k.

    A channel whose weights all round to zero is constant: its variance is none, and the gradient of BatchNorm, which divides by
    sqrt(eps), hundreds of times too large. Of such a channel the usual variance takes the place of eps.

    Its values are computed again where the backward pass of a quantizer needs them (see `round_to_grid`).
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, eps: Tensor, usual: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Ten times as fast as var_mean, whose reduction over the outer dimensions is not vectorised on CPUs.
        # Given statistics that are fp32, and none of it: of a half value it would return them in half otherwise.
        like = torch.zeros_like(usual), torch.zeros_like(usual)
        mean, variance = torch.batch_norm_update_stats(y, *like, 0.0)
        spread = variance + torch.where(variance < CONSTANT * eps, torch.maximum(eps, usual), eps)
        ctx.save_for_backward(y, weight, bias, mean, spread)
        ctx.computed_again = _normalized_again
        ctx.unpacked = None
        ctx.mark_non_differentiable(mean, variance)
        return _normalize(y, mean, spread, weight, bias), mean, variance

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        y, weight, bias, mean, spread = ctx.saved_tensors if ctx.unpacked is None else ctx.unpacked
        ctx.unpacked = None
        needed = [True, weight is not None, bias is not None]
        scale = torch.rsqrt(spread)
        found = torch.ops.aten.native_batch_norm_backward(grads[0], y, weight, None, None, mean, scale, True, 0.0, needed)
        return found[0], None, None, *(value if wanted else None for value, wanted in zip(found[1:], needed[1:], strict=True))


class _ShiftedOnly(torch.autograd.Function):
    """y + shift, with a gradient of y that has less of what changes its mean and scale (see the top of this file).

    weight: of the BatchNorm, which y is proportional to, and which gets the gradient of that.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, eps: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
        like = torch.zeros_like(eps), torch.zeros_like(eps)
        mean, variance = torch.batch_norm_update_stats(y, *like, 0.0)
        ctx.save_for_backward(y, weight, shift, mean, (variance + eps).clamp_min(torch.finfo(eps.dtype).tiny))
        ctx.computed_again = _shifted_again
        ctx.unpacked = None
        return _shift(y, shift)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        y, weight, shift, mean, spread = ctx.saved_tensors if ctx.unpacked is None else ctx.unpacked
        ctx.unpacked = None
        deviation, scale = spread.sqrt(), torch.rsqrt(spread)
        needed = [True, True, True]
        # Of normalized values times their deviation, the gradient is in the scale of y.
        of_y, of_normalized, of_sum = torch.ops.aten.native_batch_norm_backward(
            grads[0], y, deviation, None, None, mean, scale, True, 0.0, needed
        )
        nonzero = torch.where(weight.abs() > 1e-8, weight, torch.ones_like(weight))
        of_weight = (deviation * of_normalized + mean * of_sum) / nonzero
        return torch.lerp(of_y, grads[0], PULL), None, of_weight.to(weight.dtype), of_sum.to(shift.dtype)


def _shift(y: Tensor, shift: Tensor) -> Tensor:
    return y + shift.to(y.dtype).view([1, -1, *[1] * (y.ndim - 2)])


def _shifted_again(ctx: Any) -> Tensor:
    """The output of a `_ShiftedOnly` to the bit, see `_normalized_again`."""
    ctx.unpacked = ctx.saved_tensors
    y, _, shift, _, _ = ctx.unpacked
    return _shift(y, shift)


def _keeps_statistics(y: Tensor, mean: Tensor) -> bool:
    """Whether statistics of a value have the dtype of the running ones: those of a half value, under autocast, are fp32."""
    halves = (torch.bfloat16, torch.float16)
    return y.dtype not in halves if mean.dtype == y.dtype else mean.dtype == torch.float32 and y.dtype in halves


def _normalized_again(ctx: Any) -> Tensor:
    """The output of a `_ScaledBatchNorm` to the bit; what was saved is unpacked once, as `torch.utils.checkpoint` wants it."""
    ctx.unpacked = ctx.saved_tensors
    y, weight, bias, mean, spread = ctx.unpacked
    return _normalize(y, mean, spread, weight, bias)


def unfold_batchnorm_(body: fx.GraphModule, folds: list[FoldedBatchNorm]) -> None:
    """Replace layers by `ConvBN` modules that hold the unfolded weight and a BatchNorm of its own, in place."""
    for fold in folds:
        layer, calls = fold.layer, (fold.layer, *fold.others)
        weights = [_parameter_and_quantizer(body, node.args[1], WeightQuantizer) for node in calls]
        biases = [_parameter_and_quantizer(body, node.args[2], BiasQuantizer) for node in calls]
        roundings = [(weight[1], bias[1]) for weight, bias in zip(weights, biases, strict=True)]
        conv_bn = ConvBN(fold, (layer.target, tuple(layer.args[3:])), roundings)
        name = fold.norm or free_name(body, "norm")  # of one that is called by a model itself, "" names all of it
        if isinstance(getattr(body, name.partition(".")[0], None), QuantizerHolder):  # the name was free once it was folded
            name = free_name(body, name.replace(".", "_"))
        body.add_submodule(name, conv_bn)
        module, leaf = owner(body, str(parameter_name(weights[0][0])))
        old = getattr(module, leaf)
        setattr(module, leaf, nn.Parameter(_unfolded(fold, "weight").to(old), requires_grad="weight" not in fold.frozen))
        module, leaf = owner(body, str(parameter_name(biases[0][0])))
        if fold.tensors["bias"] is None:
            delattr(module, leaf)
        else:
            setattr(module, leaf, nn.Parameter(_unfolded(fold, "bias").to(old), requires_grad="bias" not in fold.frozen))
        conv_bn.to(old.device).train(body.training)
        for number, (node, (weight, _), (bias, _)) in enumerate(zip(calls, weights, biases, strict=True)):
            node.op, node.target = "call_module", name
            node.args = (node.args[0], weight, None if fold.tensors["bias"] is None else bias, *([number] if number else []))
            node.meta["bias"] = str(parameter_name(bias))
    _drop_unread_nodes_(body)


def _unfolded(fold: FoldedBatchNorm, name: str) -> Tensor:
    values = fold.tensors[name]
    assert values is not None
    return values.clone()


def _parameter_and_quantizer(body: fx.GraphModule, node: Node, kind: type[nn.Module]) -> tuple[Node, Any]:
    """(the node that reads the parameter, its quantizer or None)."""
    quantizer = body.get_submodule(node.target) if node.op == "call_module" else None
    return (node.args[0], quantizer) if isinstance(quantizer, kind) else (node, None)


def fold_conv_bn_(body: fx.GraphModule) -> None:
    """Fold every BatchNorm again: the graph as before `unfold_batchnorm_`, with the trained weights and biases, in place."""
    names = {id(module): name for name, module in body.named_modules()}
    folded: dict[str, tuple[ConvBN, tuple[Tensor, Tensor]]] = {}
    for node in list(body.graph.nodes):
        conv_bn = body.get_submodule(node.target) if node.op == "call_module" else None
        if isinstance(conv_bn, ConvBN):
            if node.target not in folded:
                folded[node.target] = conv_bn, _fold_weights_(body, conv_bn, node)
            _call_operator_(body, conv_bn, node, names, folded[node.target][1][1])
    for path in folded:
        body.delete_submodule(path)
    _drop_unread_nodes_(body)


def _fold_weights_(body: fx.GraphModule, conv_bn: ConvBN, node: Node) -> tuple[Tensor, Tensor]:
    """Give the parameters of a layer the values with BatchNorm folded in; returns them."""
    name, other, bias = str(parameter_name(node.args[1])), node.meta["bias"], node.args[2]
    with torch.no_grad():
        values = conv_bn.folded(get_tensor(body, name), None if bias is None else get_tensor(body, other))
    for target, value in zip((name, other), values, strict=True):
        module, leaf = owner(body, target)
        trains = conv_bn.weight is None or conv_bn.weight.requires_grad
        setattr(module, leaf, nn.Parameter(value.detach(), requires_grad=trains))
    return values


def _call_operator_(body: fx.GraphModule, conv_bn: ConvBN, node: Node, names: dict[int, str], folded_bias: Tensor) -> None:
    """Let a node call the layer's operator, with its parameters rounded as `conv_bn` rounds them."""
    x, weight, bias, *_ = node.args
    round_weight, round_bias = conv_bn.rounding_of(node)
    node.op, node.target = "call_function", conv_bn.operator
    with body.graph.inserting_before(node):
        bias = body.graph.get_attr(node.meta["bias"]) if bias is None else bias
        reads = [weight, bias]
        if round_weight is not None:
            reads[0] = body.graph.call_module(names[id(round_weight)], (weight,))
        if round_bias is not None:
            reads[1] = body.graph.call_module(names[id(round_bias)], (bias, weight))
            round_bias.make_room_(folded_bias)
    node.args = (x, *reads, *conv_bn.rest)


def conv_bn_layers(body: fx.GraphModule) -> list[ConvBN]:
    """All unfolded layers of a graph."""
    return [module for module in body.modules() if isinstance(module, ConvBN)]


def _drop_unread_nodes_(body: fx.GraphModule) -> None:
    """Drop nodes without readers; the modules of the quantizers stay."""
    for node in reversed(list(body.graph.nodes)):
        if node.op in ("get_attr", "call_module") and not node.users:
            body.graph.erase_node(node)
    body.graph.lint()
    body.recompile()


def _normalize(y: Tensor, mean: Tensor, spread: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Batch norm by given statistics, whose variance holds the eps already: `F.batch_norm` of torch 2.11 refuses an eps of 0."""
    return torch.batch_norm(y, weight, bias, mean, spread, False, 0.0, 0.0, torch.backends.cudnn.enabled)
