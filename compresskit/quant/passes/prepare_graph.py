"""Capture a float model as the graph that quantizers are inserted into: parametrizations computed, BatchNorm folded, rewritten.

prepare_graph(model, example, target, skip) -> (captured graph, what it was made from, what was folded into layers)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from compresskit.base.errors import ModelError
from compresskit.base.randomness import generators_kept
from compresskit.base.task import Inputs, call, copied_tensors
from compresskit.graph.capture import Captured, Dynamic, autocasts, capture, module_path, parameter_name
from compresskit.graph.differences import relative_difference
from compresskit.graph.layers.fold_batchnorm import FoldedBatchNorm, FoldedScales, fold_batchnorm_
from compresskit.graph.layers.merge_layers import merge_layers_
from compresskit.graph.layers.merging import MergedLayer, MergeRules, is_stored_layer
from compresskit.graph.masks import check_removed_are_zero, transfer_masks_
from compresskit.graph.normalize import Node, aten, source_line
from compresskit.graph.quantized import quantized_parts
from compresskit.graph.rewrites.gradient_hooks import drop_gradient_hooks_
from compresskit.graph.rewrites.hardsigmoids import write_hardsigmoids_
from compresskit.graph.rewrites.stored_products import rewrite_stored_products_
from compresskit.graph.surgery import copy_model, get_tensor, holds_nan, mode, not_fp32, structure
from compresskit.quant.numerics.bit_widths import TARGET_BITS, BitWidths, bits_record, named_modules
from compresskit.quant.numerics.operators import LAYER_KINDS, OPERATOR_KINDS
from compresskit.quant.numerics.targets import Target
from compresskit.quant.passes.fold_parametrizations import fold_parametrizations_
from compresskit.quant.passes.input_grids import rounds_as_well, takes_identity
from compresskit.quant.passes.rewrite import rewrite_

LEAST_MERGED_DECIBELS = 30.0  # of merged weights in eight bits; normally distributed ones of one convolution have about 40


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """One remedy against rounding errors that was tried, and what it bought.

    name: of the remedy. before, after: mean signal-to-noise ratio of the outputs, in dB, on calibration data that it did not see.
    kept: whether it paid. seconds: that it took.
    drop_before, drop_after: what the model loses, in percent, where that was measured, too; see `repair`.
    milliseconds, float_milliseconds: of its file and of the float model's, where the choice was timed.
    """

    name: str
    before: float
    after: float
    kept: bool
    seconds: float
    drop_before: float | None = None
    drop_after: float | None = None
    milliseconds: float | None = None
    float_milliseconds: float | None = None

    def __str__(self) -> str:
        verdict = "kept" if self.kept else "not kept"
        if self.milliseconds is not None:
            verdict = f"{self.milliseconds:.3f} ms where float takes {self.float_milliseconds:.3f}, {verdict}"
        drops = "" if self.drop_after is None else f", loss {self.drop_before:.3f} -> {self.drop_after:.3f} %"
        quality = f"{self.after - self.before:+.1f} dB ({self.before:.2f} -> {self.after:.2f} dB at the outputs{drops})"
        return f"{self.name}: {quality}, {verdict}, {self.seconds:.1f} s"


@dataclass(frozen=True, kw_only=True)
class MeasuredPlacement:
    """What `choose="measure"`, or "auto" with an effort, measured.

    threads, batch: how the files were run. milliseconds: of the file that was chosen. float_milliseconds: of the float model's,
    timed in turn with it. integer_milliseconds: of the one with everything in integers that the rules allow.
    floating: operators that it took back to float. files: how many were written and timed. seconds: that the search took.
    """

    threads: int
    batch: int
    milliseconds: float
    float_milliseconds: float
    integer_milliseconds: float
    floating: int
    files: int
    seconds: float

    def __str__(self) -> str:
        back = f"{self.floating} operators stay float" if self.floating else "all stays in integers"
        return (
            f"measured placement (batch {self.batch}, threads {self.threads}): {back}, {self.milliseconds:.3f} ms;"
            f" all in integers {self.integer_milliseconds:.3f} ms, float {self.float_milliseconds:.3f} ms"
            f" ({self.files} files in {self.seconds:.0f} s)"
        )


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a quantized model was made from: with the class of the float model, enough to build it again from a file.

    Each way of quantizing subclasses it with its own settings.

    float_class: name of the float model's class. structure: shapes and sizes of the float model, see `graph.surgery.structure`.
    skip: modules that the user left float. floating: nodes of the graph that were left float, each with the reason.
    smoothed: how many values `smooth_` and the balancing of channels changed on the way.
    bits: of weights and activations, where they are other than the target's.
    merges: nodes of the graph that were merged into others, see `graph.layers.merge_layers`.
    remedies: what the effort level of static quantization tried. measured: what `choose=` found.
    read: names of the float model's tensors that its graph computes the outputs from; no file has them, where they are none.
    """

    float_class: str
    structure: Mapping[str, Any] = field(repr=False)
    skip: tuple[str, ...] = ()
    floating: Mapping[str, str] = field(default_factory=dict)
    smoothed: int = 0
    bits: BitWidths = TARGET_BITS
    merges: tuple[MergedLayer, ...] = field(default=(), repr=False)
    remedies: tuple[Remedy, ...] = ()
    measured: MeasuredPlacement | None = None
    read: frozenset[str] = field(default=frozenset(), repr=False, compare=False)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready record."""
        tried: dict[str, Any] = {"remedies": [asdict(remedy) for remedy in self.remedies]} if self.remedies else {}
        if self.measured is not None:
            tried["measured"] = asdict(self.measured)
        if self.bits != TARGET_BITS:
            tried["bits"] = bits_record(self.bits)
        return tried | {
            "class": self.float_class,
            "structure": dict(self.structure),
            "skip": list(self.skip),
            "floating": dict(self.floating),
            "merges": [list(merge) for merge in self.merges],
            "smoothed": self.smoothed,
        }


def prepare_graph(
    model: nn.Module,
    example: Inputs,
    target: Target,
    skip: tuple[str, ...] = (),
    dynamic: Dynamic = (0,),
    *,
    apart: Collection[str] = (),
    trains: bool = False,
    bits: BitWidths = TARGET_BITS,
    merges: Sequence[MergedLayer] | None = None,
) -> tuple[Captured, Origin, list[FoldedScales]]:
    """Capture a copy of a float model and bring its graph into the form that quantizers are inserted into.

    The model itself is not changed. Masks are carried over to the graph.

    Args:
        model, example, target, skip, dynamic: of the quantization.
        apart: names of modules that are rounded in another way than others, and are not merged with them.
        trains: whether the graph is to be trained, so that layers behind it take in no BatchNorm that normalizes other layers.
        bits: of weights and activations; what is merged into the layer of a module that it names takes those of that module.
        merges: `Origin.merges` of a model that is built again; None merges what can be merged.

    Returns the captured graph, what it was made from, and the BatchNorms and scales that were folded into layers which it still
    has.
    Raises ModelError where the model, or a part of it, is quantized already, or its weights are not fp32 or hold nan, or weights
    that its masks remove are not zero.
    """
    if parts := list(quantized_parts(model)):
        where = f"its part {parts[0]!r}" if parts[0] else "this model"
        raise ModelError(f"{where} is quantized already; quantize the float model it came from")
    if other := not_fp32(model):
        raise ModelError(f"{type(model).__name__}: wanted fp32 weights, but {other}; quantize model.float()")
    if merges is None and (bad := holds_nan(model)):  # one that is built again takes its weights from a file
        raise ModelError(f"{type(model).__name__}: {bad} holds nan; mend the model before it is quantized")
    if merges is None:
        check_removed_are_zero(model, type(model).__name__)
    origin = Origin(float_class=type(model).__name__, structure=structure(model), skip=tuple(skip))
    copied = copy_model(model)
    drop_gradient_hooks_(copied)  # they are for the weights as they are now
    captured = _captured(copied, example, dynamic)
    _refuse_autocast(type(model).__name__, captured.module.graph)
    names = {name for node in captured.module.graph.nodes if (name := parameter_name(node)) is not None}
    there = {captured.name_in_model(name): name for name in sorted(names)}
    transfer_masks_(model, captured.module, there)
    rewrite_stored_products_(captured.module, transpose="linear" in target.operators)
    fold_parametrizations_(captured.module)
    if "hardsigmoid" in target.operators:
        write_hardsigmoids_(captured.module)  # before its + 3 is merged into a layer
    folds = _folded_norms(captured.module)
    rules = MergeRules(
        skip=(*skip, *apart, *(_norms_of_layers(captured.module.graph) if trains else ())),
        named=named_modules(bits),
        takes_identity=takes_identity(captured, target, bits, skip),
        least_decibels=LEAST_MERGED_DECIBELS,
        rounds=rounds_as_well(captured),
        recorded=None if merges is None else frozenset(merges),
    )
    origin = replace(origin, merges=tuple(merge_layers_(captured.module, rules, folds)), read=frozenset(there))
    return captured, origin, _with_momenta(model, captured, _rewrite_layers(captured.module, target, folds))


def _captured(model: nn.Module, example: Inputs, dynamic: Dynamic) -> Captured:
    """Capture a model as `capture` does, but let the graph compute what modules keep for eval mode, from their parameters.

    Such modules (position biases of LeViT and TinyViT) override `train`, where they forget the values, since training changes the
    parameters. In the graph of eval mode the values would be constants, and the parameters would not be trained. So they are
    where the other graph cannot be made.
    """
    if paths := _keeping(model, example):
        with suppress(ModelError), _renewed(model, paths):
            return capture(model, example, dynamic=dynamic)
    return capture(model, example, dynamic=dynamic)


def _keeping(model: nn.Module, example: Inputs) -> list[str]:
    """Names of the modules that forget tensors of eval mode when they are told to train, and make the same ones again.

    Those of a model are none where its outputs are others after that (what it forgets was a state, or given to it from outside),
    or its parameters (it merges some for eval mode).
    """
    if not any(map(_overrides_train, model.modules())):
        return []
    copied = copy_model(model)
    with suppress(Exception), generators_kept(), torch.no_grad(), mode(copied, training=False):
        first = call(copied, copied_tensors(example))
        kept = {path: _held_tensors(module) for path, module in copied.named_modules() if _overrides_train(module)}
        before = {name: value.clone() for name, value in copied.named_parameters()}
        copied.train()
        forgotten = [path for path, values in kept.items() if values.keys() - _held_tensors(copied.get_submodule(path)).keys()]
        copied.eval()
        if all(torch.equal(value, before[name]) for name, value in copied.named_parameters()):
            again = [call(copied, copied_tensors(example)) for _ in range(2)] if forgotten else []
            return forgotten if all(_is_same_output(first, output) for output in again) else []
    return []


def _is_same_output(a: Any, b: Any) -> bool:
    pairs = zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)
    return all(relative_difference(x, y) == 0 for x, y in pairs if isinstance(x, Tensor))


def _overrides_train(module: nn.Module) -> bool:
    return type(module).train is not nn.Module.train


def _held_tensors(module: nn.Module) -> dict[int, Tensor]:
    """The tensors that a module and those in it hold beside parameters, by their ids; held, since ids are given again."""
    own = [value for m in module.modules() for name, value in vars(m).items() if name not in ("_parameters", "_modules")]
    return {id(value): value for value in pytree.tree_leaves(own) if isinstance(value, Tensor)}


@contextmanager
def _renewed(model: nn.Module, paths: list[str]) -> Iterator[None]:
    """Let modules compute anew, in each of their calls inside the block, what they keep for eval mode."""

    def renew(module: nn.Module, _: Any) -> None:
        module.train()
        module.eval()

    handles = [model.get_submodule(path).register_forward_pre_hook(renew) for path in paths]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _folded_norms(module: fx.GraphModule) -> list[FoldedScales]:
    """Fold BatchNorm, in place; returns what was folded."""
    folds: list[FoldedBatchNorm] = []
    fold_batchnorm_(module, folds)
    return [*folds]


def _norms_of_layers(graph: fx.Graph) -> Iterator[str]:
    """Names of the BatchNorms left in a graph that normalize what layers compute, and are no branch of a sum."""
    computed: set[Node] = set()  # what depends on a layer
    for node in graph.nodes:
        if OPERATOR_KINDS.get(node.target) in LAYER_KINDS or not computed.isdisjoint(node.all_input_nodes):
            computed.add(node)
        is_branch = all(OPERATOR_KINDS.get(reader.target) == "add" for reader in node.users)
        if node.target is aten.batch_norm.default and node.args[0] in computed and not is_branch and module_path(node):
            yield module_path(node)


def _rewrite_layers(module: fx.GraphModule, target: Target, folds: list[FoldedScales]) -> list[FoldedScales]:
    """Rewrite a graph for a target, in place; returns what was folded into layers that it still has, or has now."""
    weights = [str(parameter_name(fold.layer.args[1])) for fold in folds]
    norms = rewrite_(module, target)
    left = set(module.graph.nodes)
    pairs = zip(folds, weights, strict=True)
    found = [fold if fold.layer in left else _rewritten(module, fold, weight) for fold, weight in pairs]
    return [*(fold for fold in found if fold is not None), *norms]


def _rewritten(module: fx.GraphModule, fold: FoldedScales, weight: str) -> FoldedScales | None:
    """What was folded into a layer, of the layer that took its place; None where that cannot be unfolded for training.

    weight: name of the layer's weight.
    """
    layers = [node for node in module.graph.nodes if is_stored_layer(module, node) and parameter_name(node.args[1]) == weight]
    if isinstance(fold, FoldedBatchNorm) or fold.scales is None or len(layers) != 1:
        return None
    return fold.moved(layers[0], get_tensor(module, weight).detach())


def _with_momenta(model: nn.Module, captured: Captured, folds: list[FoldedScales]) -> list[FoldedScales]:
    """The same with a momentum of 0 where a BatchNorm has it, which in the graph stands for a cumulative average, too."""
    return [
        replace(fold, momentum=0.0) if isinstance(fold, FoldedBatchNorm) and _has_no_momentum(model, captured, fold) else fold
        for fold in folds
    ]


def _has_no_momentum(model: nn.Module, captured: Captured, fold: FoldedBatchNorm) -> bool:
    norm = model.get_submodule(captured.name_in_model(fold.norm))
    return isinstance(norm, nn.modules.batchnorm._BatchNorm) and norm.momentum == 0


def _refuse_autocast(model: str, graph: fx.Graph) -> None:
    """Raise ModelError where a part of a captured graph runs under `torch.autocast`."""
    for node, dtype in autocasts(graph):
        raise ModelError(
            f"{model}: wanted fp32 in forward, but {module_path(node) or 'the model itself'} computes in {dtype} under"
            f" torch.autocast{source_line(node)}; call the model inside autocast where you train it, instead of autocast inside"
            " forward"
        )
