"""What must hold for any network: each of `CHECKS` raises AssertionError where it does not.

Each returns "worked", or the message of the one CompressError with which the library refused the network.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import oracles
import pytest
import torch
from pruned import assert_untouched, state
from random_blocks import RMS
from random_networks import Network, Spec, build, dynamic_dimensions, inputs_of
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import compresskit as ck
from compresskit.graph.capture import capture

WORKED = "worked"
UNREAD = "which the model does not read on the example (give an example for which it does"  # an optional input's own layers
TRAINING_TOLERANCE = 1e-7  # of the largest output: BatchNorm divides by the deviations of a few values


def assert_same(got, wanted, tolerance: float) -> None:
    """Outputs of one structure whose values differ by at most `tolerance` of the largest; 0 for the same bits."""
    (a, a_spec), (b, b_spec) = pytree.tree_flatten(got), pytree.tree_flatten(wanted)
    assert a_spec == b_spec
    for x, y in zip(a, b, strict=True):
        assert x.shape == y.shape
        x, y = x.detach(), y.detach()
        assert (x - y).abs().max() <= tolerance * max(1.0, float(y.abs().max()))


def runs_in_train_mode(model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """One forward and backward pass of a copy."""
    outputs = pytree.tree_leaves(copy.deepcopy(model).train()(*inputs))
    sum(v.square().mean() for v in outputs).backward()


def capture_again(spec: Spec) -> str:
    """A captured graph computes what the network does, on another batch size too."""
    model = build(spec)
    before = state(model)
    try:
        captured = capture(model, inputs_of(spec, 4))
    except ck.CompressError as error:
        return str(error)
    assert_untouched(model, before)
    for rows in (4, 7):
        with torch.no_grad():
            assert_same(captured.module(*inputs_of(spec, rows, 1)), model(*inputs_of(spec, rows, 1)), 1e-4)
    return WORKED


def other_inputs(spec: Spec) -> list[tuple[Tensor, ...]]:
    """Batches of other sizes than the example's, and of another length where a network takes one."""
    length = {"length": 9} if len(dynamic_dimensions(spec)) > 1 else {}
    return [inputs_of(spec, 64, 3), inputs_of(spec, 7, 2, **length)]


def export(spec: Spec, folder: Path) -> str:
    """The file of the float network agrees with it on other sizes than it was written for, and is the same when written again."""
    model = build(spec)
    before = state(model)
    settings = {"example": inputs_of(spec, 4), "dynamic": dynamic_dimensions(spec)}
    try:
        path = ck.export_onnx(model, folder / "model.onnx", **settings)
    except ck.CompressError as error:
        assert_untouched(model, before)
        return str(error)
    assert_untouched(model, before)
    found = ck.verify_onnx(path, model, other_inputs(spec))
    assert found.passed, str(found)
    assert ck.export_onnx(model, folder / "again.onnx", **settings).read_bytes() == path.read_bytes()
    return WORKED


class MaskedRMS(nn.Module):
    """An `RMS` whose mean leaves out the channels in `gone`."""

    def __init__(self, norm: RMS, gone: list[int]):
        super().__init__()
        self.norm, self.gone = norm, gone

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.ones(x.shape[-1], dtype=x.dtype)
        kept[self.gone] = 0
        mean = (x.square() * kept).sum(-1, keepdim=True) / kept.sum()
        return x * torch.rsqrt(mean + self.norm.eps) * self.norm.weight


def zeroed(model: Network, inputs: tuple[Tensor, ...], plan: ck.prune.Plan, *, training: bool = False):
    """Outputs in float64 of the network with the removed values set to zero, from `oracles`."""
    model = copy.deepcopy(model)
    for path, module in list(model.named_modules()):
        gone = plan.remove.get(f"{path}.weight", {}).get(0, ())
        if isinstance(module, RMS) and gone:
            model.get_submodule(path.rpartition(".")[0]).register_module(path.rpartition(".")[2], MaskedRMS(module, list(gone)))
    renamed = {_renamed(model, name): dims for name, dims in plan.remove.items()}
    return oracles.zeroed_forward(model, inputs, renamed, training=training)


def _renamed(model: nn.Module, name: str) -> str:
    """The name of a tensor of an `RMS` that stands in a `MaskedRMS` now."""
    path, _, leaf = name.rpartition(".")
    return f"{path}.norm.{leaf}" if isinstance(model.get_submodule(path), MaskedRMS) else name


def prune(spec: Spec, folder: Path, macs: float = 0.8) -> str:
    """A plan changes nothing; applied, it equals the network with the removed values at zero, trains, and is stored and read with
    the same bits. Planned again, it is the same plan; applied again, it is refused.

    They are equal in eval mode and in train mode, where BatchNorm takes the statistics of the batch and there may be an auxiliary
    output: in float64, on the example and on another batch of another size. Dropout is off in both, since it draws other values
    for other widths. Gradients are not compared: one backward pass is run.
    """
    model, example = build(spec), inputs_of(spec, 4)
    before = state(model)
    try:
        try:
            plan = ck.prune.plan_channels(model, example, ck.keep(macs=macs), round_to=1)
        except ck.CompressError as error:
            if spec.inputs != "optional" or UNREAD not in str(error):
                raise
            example = inputs_of(spec, 4, optional=True)  # what the error says to do
            plan = ck.prune.plan_channels(model, example, ck.keep(macs=macs), round_to=1)
    except ck.CompressError as error:
        assert_untouched(model, before)
        return str(error)
    assert_untouched(model, before)
    assert plan.macs <= macs * plan.macs_before
    smaller = ck.prune.apply_(copy.deepcopy(model), plan)
    assert ck.count_parameters(smaller) < ck.count_parameters(model)
    exact = ck.prune.apply_(copy.deepcopy(model).double(), plan)
    given = [example, inputs_of(spec, 7, 1)] + [inputs_of(spec, 7, 1, optional=True)] * (spec.inputs == "optional")
    for inputs in given:
        doubles = tuple(v.double() if v.is_floating_point() else v for v in inputs)
        for training, tolerance in ((False, 1e-9), (True, TRAINING_TOLERANCE)):
            with torch.no_grad():
                got = oracles.without_dropout(exact).train(training)(*doubles)
            assert_same(got, zeroed(model, inputs, plan, training=training), tolerance)
    runs_in_train_mode(smaller, example)
    ck.save(smaller, folder)
    again = ck.load(build(replace(spec, seed=spec.seed + 1)), folder)
    with torch.no_grad():
        assert_same(again(*example), smaller(*example), 0)
    with pytest.raises(ck.CompressError):
        ck.prune.apply_(again, plan)
    assert ck.prune.plan_channels(model, example, ck.keep(macs=macs), round_to=1).remove == plan.remove
    return WORKED


HOW: dict[str, Callable[..., nn.Module]] = {
    "static": ck.quant.quantize_static,
    "dynamic": ck.quant.quantize_dynamic,
    "weights": ck.quant.quantize_weights,
}


def quantize(spec: Spec, folder: Path, how: str) -> str:
    """A quantized copy leaves the network as it was, is the same when made again, is stored and read with the same bits, and its
    file agrees with it on other sizes than the calibration data's.
    """
    model, batches, dynamic = build(spec), [inputs_of(spec, 16, seed) for seed in (0, 1)], dynamic_dimensions(spec)
    before = state(model)
    try:
        quantized = HOW[how](model, batches, dynamic=dynamic)
    except ck.CompressError as error:
        assert_untouched(model, before)
        return str(error)
    fresh = inputs_of(spec, 7, 2)
    with torch.no_grad():
        wanted = quantized(*fresh)
        assert_same(HOW[how](model, batches, dynamic=dynamic)(*fresh), wanted, 0)
    assert_untouched(model, before)
    ck.save(quantized, folder / "saved")
    with torch.no_grad():
        assert_same(ck.load(build(replace(spec, seed=spec.seed + 1)), folder / "saved")(*fresh), wanted, 0)
    try:
        path = ck.export_onnx(quantized, folder / "model.onnx", inputs_of(spec, 4))
    except ck.CompressError as error:
        return str(error)
    found = ck.verify_onnx(path, quantized, other_inputs(spec))
    assert found.passed, str(found)
    with torch.no_grad():
        assert_same(quantized(*fresh), wanted, 0)  # neither writing the file nor checking it changes the model
    return WORKED


def _in_folder(check: Callable[[Spec, Path], str]) -> Callable[[Spec], str]:
    def run(spec: Spec) -> str:
        with tempfile.TemporaryDirectory() as folder:
            return check(spec, Path(folder))

    return run


CHECKS: dict[str, Callable[[Spec], str]] = {
    "captured": capture_again,
    "pruned": _in_folder(prune),
    "exported": _in_folder(export),
    **{how: _in_folder(functools.partial(quantize, how=how)) for how in HOW},
}
