"""Values that a model computes of its weights alone, stored as numbers where ONNX has no operator for the computation.

An orthogonal parametrization takes a matrix exponential of its weight, a state-space layer powers of complex numbers, an
invertible 1x1 convolution the inverse of a matrix. None of it depends on the input, so a file needs the result alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx
from torch.export import ExportedProgram

from compresskit.base.task import Inputs
from compresskit.graph.capture import Dynamic, trace
from compresskit.graph.layers.stored import LAYOUT_OPERATORS, evaluate_constant, stored_sources
from compresskit.graph.normalize import Node, aten

_SEEDED = torch.Tag.nondeterministic_seeded
_STORED = "stored_result_{}"


def with_stored_results(program: ExportedProgram, example: Inputs, dynamic: Dynamic) -> ExportedProgram | None:
    """Return the program with the results of what it computes of weights alone; None where it computes nothing of them.

    Args:
        program: what `trace` made of a model; it is not changed.
        example, dynamic: that it was traced with.

    Raises ModelError where the program with stored results cannot be traced.
    """
    module = program.module()
    module = fx.GraphModule(module, module.graph)
    results = list(_results_of_weights(module))
    for i, node in enumerate(results):
        _store_(module, node, _STORED.format(i))
    if not results:
        return None
    module.graph.eliminate_dead_code()
    module.recompile()
    return trace(module.eval(), example, dynamic)[0]


def _results_of_weights(module: fx.GraphModule) -> Iterator[Node]:
    """Nodes that are computed of weights alone and read by what depends on inputs; of several layouts of one, the first."""
    computed = {node for node in module.graph.nodes if stored_sources(node) and _may_be_stored(node)}
    found: dict[Node, None] = {}
    for node in module.graph.nodes:
        if node in computed and not computed.issuperset(node.users):
            while node.target in LAYOUT_OPERATORS and node.args[0].op == "call_function":  # an expanded one would be stored whole
                node = node.args[0]
            if node.target not in LAYOUT_OPERATORS and isinstance(node.meta.get("val"), torch.Tensor):
                found[node] = None
    yield from found


def _may_be_stored(node: Node) -> bool:
    """Whether a node is computed by operators of torch alone that draw no random numbers: rounded weights stay rounded."""
    pending, visited = [node], {node}
    while pending:
        read = pending.pop()
        target = read.target
        if isinstance(target, torch._ops.OpOverload) and (target.namespace != "aten" or _SEEDED in target.tags):
            return False
        pending += [n for n in read.all_input_nodes if n not in visited]
        visited.update(read.all_input_nodes)
    return True


def _store_(module: fx.GraphModule, node: Node, name: str) -> None:
    """Put a stored tensor in the place of a node."""
    value = evaluate_constant(module, node).contiguous()
    module.register_buffer(name, torch.view_as_real(value) if value.is_complex() else value)
    with module.graph.inserting_before(node):
        stored = module.graph.get_attr(name)
        if value.is_complex():  # files hold no complex numbers
            stored = module.graph.call_function(aten.view_as_complex.default, (stored,))
    node.replace_all_uses_with(stored)
