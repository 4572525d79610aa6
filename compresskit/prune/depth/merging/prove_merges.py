"""Prove on a copy that merged runs are what a plan says.

The reference is the captured graph of the original model, in which the activations of the runs are taken out and the padding of
their layers is moved to the first. The model with one convolution in the place of each run must give what that graph gives, in
float64, or in float32 for a model that does not run in it; and in train mode it must run where the original does.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from compresskit.base.errors import ModelError, named_first_line
from compresskit.base.task import Inputs, first_rows
from compresskit.graph.differences import NOTHING_FINITE, any_finite, relative_difference
from compresskit.graph.interpreter import run_graph
from compresskit.graph.layers.merging import geometry_of, set_geometry_
from compresskit.graph.layers.stored import bias_of, replace_weights_, stored_value
from compresskit.graph.surgery import copy_model, frozen_copy
from compresskit.prune.depth.merging.find_runs import FoundRuns, find_runs
from compresskit.prune.depth.merging.merge_runs import ConvolutionRun, gather_, merge_, shrunk_weight, sizes_in
from compresskit.prune.depth.prove_blocks import (
    SINGLE_TOLERANCE,
    WIDE_TOLERANCE,
    changed_inputs,
    outputs_of,
    runs_here,
    training_failure,
)
from compresskit.prune.structure.repeatable import repeatable, varied_inputs, vary_constants_


def check_merges(model: nn.Module, runs: Collection[ConvolutionRun], example: Inputs) -> str | None:
    """Compare the merged model with the original's graph without activations, on other inputs and for one sample.

    Args:
        model: the original; it is not changed.
        runs: to merge; no two share a layer.
        example: inputs.

    Returns: None where they agree, else what is wrong.
    """
    example = first_rows(example, 2) if runs_here(model, first_rows(example, 2)) else example
    wide, double, tolerance = copy_model(model).double().eval(), changed_inputs(example, Tensor.double), WIDE_TOLERANCE
    if not runs_here(wide, double):
        wide, double, tolerance = copy_model(model).eval(), example, SINGLE_TOLERANCE
    vary_constants_(wide)
    found = find_runs(wide, double, longest=max(len(run.layers) for run in runs), shrink=any(run.shrunk for run in runs))
    if missing := [run.name for run in runs if run.name not in found.runs]:
        return f"{missing[0]} is no run for inputs of another kind"
    reference = _without_activations(found, runs)
    merged = merge_(gather_(copy_model(wide), runs))
    tried = [
        inputs for inputs in (varied_inputs(double), changed_inputs(first_rows(double, 1), Tensor.neg)) if runs_here(wide, inputs)
    ]
    for inputs in tried or [double]:  # a model with a fixed batch takes no other
        try:
            got = outputs_of(merged, inputs)
        except Exception as error:
            return f"the model does not run without it: {named_first_line(error)}"
        wanted = _outputs_of_graph(reference, inputs)
        if wanted and not any_finite(wanted):
            return NOTHING_FINITE
        if [v.shape for v in got] != [v.shape for v in wanted]:
            return "the outputs have other shapes with one convolution"
        worst = max((relative_difference(a, b) for a, b in zip(wanted, got, strict=True)), default=0.0)
        if not worst <= tolerance:
            return f"one convolution gives something else than its layers without the activations, by {worst:.2g}"
    return training_failure(model, merge_(gather_(copy_model(model), runs)), example)


def _without_activations(found: FoundRuns, runs: Collection[ConvolutionRun]) -> fx.GraphModule:
    """The graph of the original with the activations of runs taken out and their padding moved, by the nodes alone."""
    module = found.captured.module
    for run in runs:
        for node in found.activations[run.name]:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
        nodes = [found.convolutions[path] for path in run.layers]
        sizes_of = sizes_in(run, [geometry_of(module, node) for node in nodes])
        for path, node, sizes in zip(run.layers, nodes, sizes_of, strict=True):
            if path in run.shrunk:
                weight, bias = (stored_value(module, n) for n in (node.args[1], bias_of(node)))
                assert weight is not None
                replace_weights_(module, node, shrunk_weight(weight), bias)
            set_geometry_(node, sizes)
    module.recompile()
    return module


def _outputs_of_graph(module: fx.GraphModule, inputs: Inputs) -> list[Tensor]:
    with torch.inference_mode(), torch.random.fork_rng(), repeatable(module):
        outputs = run_graph(module, pytree.tree_leaves(inputs))
    return [v for v in pytree.tree_leaves(outputs) if isinstance(v, Tensor) and v.is_floating_point()]


def runs_that_cannot_go(model: nn.Module, found: FoundRuns, example: Inputs) -> dict[str, str]:
    """Runs without which the model does not run, each with the error: code that reads an attribute of one of their layers."""
    failures = {}
    inputs = first_rows(example, 2) if runs_here(model, first_rows(example, 2)) else example
    for name, run in found.runs.items():
        try:
            outputs_of(gather_(frozen_copy(model), [run]), inputs)
        except Exception as error:
            failures[name] = f"the model does not run without it: {named_first_line(error)}"
    return failures


def merge_checked_(model: nn.Module, example: Inputs) -> nn.Module:
    """Make every gathered run of a model one convolution, in place, as `merge_` does, and compare the outputs before and after.

    Raises ModelError where they differ by more than rounding; the model is then as it was.
    """
    wide, tolerance, inputs = copy_model(model).double(), WIDE_TOLERANCE, changed_inputs(example, Tensor.double)
    if runs_here(wide, inputs):
        before, after = outputs_of(wide, inputs), outputs_of(merge_(wide), inputs)
    else:
        before, after, tolerance = outputs_of(model, example), outputs_of(merge_(copy_model(model)), example), SINGLE_TOLERANCE
    worst = max((relative_difference(a, b) for a, b in zip(before, after, strict=True)), default=0.0)
    if not worst <= tolerance:
        raise ModelError(
            f"{type(model).__name__}: with one convolution in the place of each run its outputs differ by {worst:.2g} of their"
            " largest value; wanted the same; look for values that are not finite, or leave the runs unmerged"
        )
    return merge_(model)
