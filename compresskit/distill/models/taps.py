"""Taps: what flows through named modules of a model, read by hooks that exist only inside a `with` block.

    tapped(model, ["layer3", "encoder.0.attn:in"])     "name" is a module's output, "name:in" its first input

A captured graph, such as the inside of a quantized model, has operators instead of modules. Each operator remembers the module
that it came from, so the same names are found there: a module's output is the last value that it hands to others.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, fx, nn

from compresskit.base.errors import ModelError
from compresskit.graph.interpreter import run_graph

INPUT = ":in"


def find_taps(model: nn.Module, pattern: str) -> list[str]:
    """Taps that a name or a glob means, in the model's order; a `*` stands for one part between dots.

    >>> find_taps(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "*:in")
    ['0:in', '1:in']

    Raises ModelError, with the nearest names, where there is none.
    """
    path = pattern.removesuffix(INPUT)
    names = list(_origins(model)) or [name for name, _ in model.named_modules() if name]
    parts = path.split(".")
    found = [n for n in names if len(n.split(".")) == len(parts) and all(map(fnmatchcase, n.split("."), parts))]
    if not found:
        near = difflib.get_close_matches(path, names, n=3, cutoff=0.0)
        raise ModelError(f"tap {pattern!r}: {type(model).__name__} has no such module; the nearest are {near}")
    return [name + pattern[len(path) :] for name in found]


def _graph_in(model: nn.Module) -> fx.GraphModule | None:
    """The captured graph that a model wraps, if its operators know the modules that they came from."""
    graphs = (m for m in model.modules() if isinstance(m, fx.GraphModule))
    return next((m for m in graphs if any("nn_module_stack" in n.meta for n in m.graph.nodes)), None)


def _origins(model: nn.Module) -> dict[str, list[fx.Node]]:
    """The operators of each module by its dotted name, both in the order of the graph; empty where there is no graph."""
    graph = _graph_in(model)
    origins: dict[str, list[fx.Node]] = {}
    for node in () if graph is None else graph.graph.nodes:
        for path, _ in (node.meta.get("nn_module_stack") or {}).values():
            if name := re.sub(r"@\d+$", "", path):  # "@1" marks a module's second call
                origins.setdefault(name, []).append(node)
    return origins


def _place(nodes: list[fx.Node], *, entry: bool) -> fx.Node:
    """The operator whose value is a module's input, or its output."""
    if not entry:
        return next((n for n in reversed(nodes) if any(user not in nodes for user in n.users)), nodes[-1])
    first = nodes[0].args[0]
    return first[0] if isinstance(first, list | tuple) else first  # type: ignore[return-value]


@contextmanager
def _read_graph(graph: fx.GraphModule, wanted: dict[fx.Node, list[str]], keep: Callable[[str, Any], None]) -> Iterator[None]:
    """While the block runs the graph is interpreted, an operator at a time, in the place of its compiled code."""
    signature = inspect.signature(graph.forward)

    def visit(node: fx.Node, value: Any) -> None:
        for tap in wanted.get(node, ()):
            keep(tap, value)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return run_graph(graph, signature.bind(*args, **kwargs).args, visit)

    graph.forward = forward
    try:
        yield
    finally:
        del graph.forward


def _first(value: Any) -> Tensor | None:
    """The tensor itself, or the first one in a tuple, list or dict."""
    if isinstance(value, Tensor):
        return value
    entries = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return next((found for entry in entries if (found := _first(entry)) is not None), None)


@contextmanager
def tapped(model: nn.Module, taps: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Collect features by tap while the block runs; a module that is called more than once leaves its last call's.

    Features are copies: an in-place operation behind the tap, such as `ReLU(inplace=True)`, would change them otherwise. Tap
    the model itself, not a wrapper of it such as DistributedDataParallel.
    """
    features: dict[str, Tensor] = {}
    handles = []

    def keep(tap: str, value: Any) -> None:
        found = _first(value)
        if found is None:
            raise ModelError(f"tap {tap!r}: no tensor there, only {type(value).__name__}")
        features[tap] = found.clone()

    def reader(tap: str) -> Callable[..., None]:
        if tap.endswith(INPUT):
            return lambda module, args, kwargs: keep(tap, (*args, *kwargs.values()))
        return lambda module, args, output: keep(tap, output)

    if taps and (origins := _origins(model)):
        graph = _graph_in(model)
        assert graph is not None
        wanted: dict[fx.Node, list[str]] = {}
        for tap in dict.fromkeys(taps):
            node = _place(origins[tap.removesuffix(INPUT)], entry=tap.endswith(INPUT))
            wanted.setdefault(node, []).append(tap)
        with _read_graph(graph, wanted, keep):
            yield features
        return
    try:
        for tap in dict.fromkeys(taps):
            module = model.get_submodule(tap.removesuffix(INPUT))
            if tap.endswith(INPUT):
                handles.append(module.register_forward_pre_hook(reader(tap), with_kwargs=True))
            else:
                handles.append(module.register_forward_hook(reader(tap)))
        yield features
    finally:
        for handle in handles:
            handle.remove()


def feature(features: dict[str, Tensor], tap: str) -> Tensor:
    """The feature of a tap; ModelError where the forward pass did not come by."""
    if tap not in features:
        raise ModelError(f"tap {tap!r}: the forward pass does not call that module; tap one that it calls")
    return features[tap]
