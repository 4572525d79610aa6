"""Run a graph one operator at a time: to look at values inside it, to compute some of them in another way, or to stop early.

    run_graph(module, inputs)                       the output, as calling the module gives it
    run_graph(module, inputs, visit)                visit(node, value) sees every value
    run_graph(module, inputs, until=node)           the value of one node; only what it depends on is run
    run_graph(module, inputs, compute=compute)      compute(node, value_of) computes in the place of `execute`
    read_count(node)                                at how many places of the graph a value is read

Values are freed after the last operator that reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from compresskit.graph.normalize import Node
from compresskit.graph.surgery import owner

ValueOf = Callable[[Node], Any]
Visit = Callable[[Node, Any], object]
Compute = Callable[[Node, ValueOf], Any]


def run_graph(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    visit: Visit | None = None,
    *,
    compute: Compute | None = None,
    until: Node | None = None,
) -> Any:
    """Run a graph on positional inputs, and return its output.

    Args:
        module: a captured graph, with or without quantizers.
        inputs: as the module itself takes them, or their leaves; those that `until` does not depend on may be missing.
        visit: called with each node and its value, in the order of execution.
        compute: what gives the value of each node but placeholders; `execute` of the module if None.
        until: a node whose value is returned instead of the output; nothing that it does not depend on is run.
    """
    nodes = list(module.graph.nodes) if until is None else _ancestors(module.graph, until)
    chosen = set(nodes)
    pending = {node: sum(user in chosen for user in node.users) for node in nodes}
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    arguments = dict(zip(placeholders, module.graph.process_inputs(*inputs), strict=False))
    values: dict[Node, Any] = {}
    value: Any = None
    for node in nodes:
        if node.op == "placeholder":
            value = arguments[node] if node in arguments else node.args[0]  # its default
        else:
            value = execute(module, node, values.__getitem__) if compute is None else compute(node, values.__getitem__)
        values[node] = value
        if visit is not None:
            visit(node, value)
        for source in node.all_input_nodes:
            pending[source] -= 1
            if not pending[source]:
                del values[source]
        if not pending[node]:
            del values[node]
    return value


def read_count(node: Node) -> int:
    """At how many places a graph reads a value. `node.users` holds each operator once: that of `x * x` reads x twice."""
    reads: list[Node] = []
    for user in node.users:
        fx.map_arg((user.args, user.kwargs), reads.append)
    return sum(read is node for read in reads)


def execute(module: fx.GraphModule, node: Node, value_of: ValueOf) -> Any:
    """The value of a node that is no placeholder, from those of the nodes that it reads."""
    if node.op == "get_attr":
        holder, leaf = owner(module, node.target)
        return getattr(holder, leaf)
    args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
    if node.op == "output":
        return module.graph.process_outputs(args[0])
    operator = module.get_submodule(node.target) if node.op == "call_module" else node.target
    return operator(*args, **kwargs)


def _ancestors(graph: fx.Graph, node: Node) -> list[Node]:
    """A node and all that it depends on, in the order of execution."""
    needed, pending = {node}, [node]
    while pending:
        for source in pending.pop().all_input_nodes:
            if source not in needed:
                needed.add(source)
                pending.append(source)
    return [n for n in graph.nodes if n in needed]
