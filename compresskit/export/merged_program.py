"""Merge the layers of a float model's exported program, so that its file has fewer operators; see `graph.layers.merge_layers`.

The merged graph is exported again, which takes as long as the first time. So a look at the first program says whether anything
of it could be merged: networks whose layers have something else between them cost nothing.
"""

from __future__ import annotations

import itertools
import logging
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from compresskit.base.errors import CompressError
from compresskit.base.task import Inputs
from compresskit.export.rewrite.dtypes import least_precise_dtype
from compresskit.graph.capture import Dynamic, graph_of, parameter_name, trace
from compresskit.graph.layers.channel_affine import ARITHMETIC
from compresskit.graph.layers.fold_batchnorm import fold_batchnorm_
from compresskit.graph.layers.merge_layers import merge_layers_
from compresskit.graph.layers.stored import CONVS, LAYOUT_OPERATORS, TRANSPOSED_CONVS
from compresskit.graph.layers.value_ranges import idle_activations
from compresskit.graph.masks import transfer_masks_
from compresskit.graph.normalize import IDENTITIES, Node, aten, functional_form, is_inplace
from compresskit.graph.quantized import quantized_parts
from compresskit.graph.rewrites.reserved_names import rename_first, reserved_names

log = logging.getLogger(__name__)

_LAYERS = CONVS | TRANSPOSED_CONVS | {aten.linear.default, aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding}
_PLUS_AND_MINUS = frozenset({aten.add.Tensor, aten.sub.Tensor})
_MOVES = LAYOUT_OPERATORS | IDENTITIES | {aten.view.default}


def merged_program(program: ExportedProgram, model: nn.Module, example: Inputs, dynamic: Dynamic) -> ExportedProgram:
    """Return the program of a float model with merged layers and without idle activations, or the program itself where none is.

    Args:
        program: what `trace` made of the model; it is not changed, nor is the model.
        model: the float model. Models in half precision, and with quantized parts, stay as they are.
        example, dynamic: that it was traced with.
    """
    if quantized_parts(model) or least_precise_dtype(model) not in (torch.float32, torch.float64):
        return program
    idle = bool(idle_activations(program.graph))
    if not idle and not _may_merge(program):
        return program
    renamed = {there: here for here, there in reserved_names(model).items()}
    module = graph_of(program, type(model).__name__)
    names = {name for node in module.graph.nodes if (name := parameter_name(node)) is not None}
    transfer_masks_(model, module, {rename_first(name, renamed): name for name in sorted(names)})
    fold_batchnorm_(module)
    if not merge_layers_(module) and not idle:
        return program
    try:
        merged = trace(module.eval(), example, dynamic)[0]
    except CompressError as error:
        log.warning(
            "%s: its layers are not merged in the file, whose graph cannot be traced again: %s", type(model).__name__, error
        )
        return program
    return merged if merged.graph_signature.user_inputs == program.graph_signature.user_inputs else program


def _may_merge(program: ExportedProgram) -> bool:
    """Whether operators stand beside one another that could be merged; sizes, cost and names are not looked at."""
    inputs = set(program.graph_signature.user_inputs)
    stored = {node for node in program.graph.nodes if node.op == "placeholder" and node.name not in inputs}
    for node in program.graph.nodes:
        if node.op == "call_function" and node.all_input_nodes and stored.issuperset(node.all_input_nodes):
            stored.add(node)
    return any(_may_be_merged(node, stored) for node in program.graph.nodes if node.op == "call_function")


def _may_be_merged(node: Node, stored: set[Node]) -> bool:
    target = _operator(node)
    if target in _LAYERS:
        value = _source(node.args[0])
        is_affine = _operator(value) is aten.batch_norm.default or _value_scaled(value, stored) is not None
        return _is_lone_layer(value) or (is_affine and len(value.users) == 1)
    if (scaled := _value_scaled(node, stored)) is not None:
        value = _source(scaled)
        return _is_lone_layer(value) or (len(value.users) == 1 and _value_scaled(value, stored) is not None)
    if target in _PLUS_AND_MINUS and not node.kwargs:
        return _has_parallel_branches(node, stored)
    return False


def _operator(value: Any) -> Any:
    if not isinstance(value, fx.Node) or value.op != "call_function":
        return None
    return functional_form(value.target) if is_inplace(value) else value.target


def _source(value: Any) -> Any:
    """What a value is, moved to other places."""
    while _operator(value) in _MOVES and len(value.users) == 1:
        value = value.args[0]
    return value


def _is_lone_layer(value: Any) -> bool:
    """Whether a value is the result of a layer, or of its BatchNorm, which one operator reads."""
    if _operator(value) is aten.batch_norm.default and len(value.users) == 1:
        value = value.args[0]
    return _operator(value) in _LAYERS and len(value.users) == 1


def _value_scaled(node: Any, stored: set[Node]) -> Node | None:
    """The value that an operator scales or shifts by constants; None for other operators."""
    if _operator(node) not in ARITHMETIC:
        return None
    values = [arg for arg in node.args[:2] if isinstance(arg, fx.Node) and arg not in stored]
    return values[0] if len(values) == 1 else None


def _has_parallel_branches(node: Node, stored: set[Node]) -> bool:
    """Whether two summands read the same value, one of them through a layer."""
    read: list[tuple[Any, bool]] = []
    pending = [*node.args[:2]]
    while pending:
        value = _source(pending.pop())
        if _operator(value) in _PLUS_AND_MINUS and len(value.users) == 1 and _value_scaled(value, stored) is None:
            pending += value.args[:2]
            continue
        if _operator(value) is aten.batch_norm.default and not _is_lone_layer(value):
            read.append((_source(value.args[0]), False))
        elif _is_lone_layer(value):
            layer = value.args[0] if _operator(value) is aten.batch_norm.default else value
            read.append((_source(layer.args[0]), True))
        else:
            scaled = _value_scaled(value, stored)
            read.append((value if scaled is None else _source(scaled), False))
    return any(a is b and (one or other) for (a, one), (b, other) in itertools.combinations(read, 2))
