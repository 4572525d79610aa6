"""Taps: read the inputs and outputs of named modules while a model runs.

    tapped(model, ["layer3", "encoder.0.attn:in"])     "name" is a module's output, "name:in" its first input

The hooks exist only inside the `with` block. A captured graph, such as the inside of a quantized model, has operators instead of
modules. Each operator records the module that it came from, so the same names work there: a module's output is the last of its
values that another module reads. Where an operator took in others behind it, such as a BatchNorm, its value is their output; what
it computed alone is no value of the graph any more, and a tap there is refused.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, fx, nn

from compresskit.base.errors import ModelError, SettingError
from compresskit.graph.interpreter import run_graph
from compresskit.graph.normalize import GIVES_OUTPUT_OF, READS_INPUT_OF

INPUT = ":in"

#: `(tap, value)`: called with what flows through a tap, each time its module is called.
OnValue = Callable[[str, Any], None]


def find_taps(model: nn.Module, pattern: str) -> list[str]:
    """Return the taps that a name or a glob matches, in the order of the model's modules.

    >>> find_taps(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "*:in")
    ['0:in', '1:in']

    Args:
        model: a module, or a model that wraps a captured graph.
        pattern: the dotted name of a module, with `:in` for its input; `*` and `?` match within one part between dots, in a
            captured graph only what is a value of it.

    Raises: ModelError, which suggests similar names, where nothing matches, or what does is merged with others; SettingError for
        what is no name.
    """
    if not isinstance(pattern, str):
        raise SettingError(f"tap {pattern!r}: wanted the name of a module, a text, got {type(pattern).__name__}")
    path = pattern.removesuffix(INPUT)
    names = list(_operators_by_module(model)) or [name for name, _ in model.named_modules() if name]
    parts = path.split(".")
    found = [n for n in names if len(n.split(".")) == len(parts) and all(map(fnmatchcase, n.split("."), parts))]
    if not found:
        near = difflib.get_close_matches(path, names, n=3, cutoff=0.0)
        raise ModelError(f"tap {pattern!r}: {type(model).__name__} has no such module; the nearest are {near}")
    if operators := _operators_by_module(model):
        found = _with_values(operators, found, entry=pattern.endswith(INPUT))
    return [name + pattern[len(path) :] for name in found]


def _with_values(operators: dict[str, list[fx.Node]], names: list[str], *, entry: bool) -> list[str]:
    """Those of some modules whose input, or output, is a value of a graph; the error of `_node_of` where none is."""
    found, errors = [], []
    for name in names:
        try:
            _node_of(operators[name], name, entry=entry)
            found.append(name)
        except ModelError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    return found


@contextmanager
def tapped(model: nn.Module, taps: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Collect the features of some taps while the block runs; a module that is called twice leaves the value of its last call.

    Features are copies: an in-place operation behind the tap, such as `ReLU(inplace=True)`, would change them otherwise.

    Args:
        model: the model itself, not a wrapper of it such as DistributedDataParallel.
        taps: names as `find_taps` returns them.

    Yields: a dict that the model's calls fill, from the tap to its feature. Where a value is a tuple or a dict, the feature is
        the first tensor in it.
    Raises: ModelError, when the model is called, for a value without a tensor.
    """
    features: dict[str, Tensor] = {}

    def keep(tap: str, value: Any) -> None:
        tensor = _tensor_in(value)
        if tensor is None:
            raise ModelError(f"tap {tap!r}: no tensor there, only {type(value).__name__}")
        features[tap] = tensor.clone()

    with watched(model, taps, keep):
        yield features


def feature(features: Mapping[str, Tensor], tap: str) -> Tensor:
    """Return the feature of a tap; `ModelError` where the forward pass did not call its module."""
    if tap not in features:
        raise ModelError(f"tap {tap!r}: the forward pass does not call that module; tap one that it calls")
    return features[tap]


@contextmanager
def watched(model: nn.Module, taps: Sequence[str], on_value: OnValue) -> Iterator[None]:
    """Call `on_value(tap, value)` for every value that flows through a tap while the block runs.

    An input is a module's arguments as a tuple, positional ones first; an output is what the module returns. In a captured graph
    both are the value of one operator.
    """
    taps = list(dict.fromkeys(taps))
    if taps and (operators := _operators_by_module(model)):
        graph = _graph_in(model)
        assert graph is not None
        nodes: dict[fx.Node, list[str]] = {}
        for tap in taps:
            name = tap.removesuffix(INPUT)
            node = _node_of(operators[name], name, entry=tap.endswith(INPUT))
            nodes.setdefault(node, []).append(tap)
        with _interpreted(graph, nodes, on_value):
            yield
        return

    def hook(tap: str) -> Callable[..., None]:
        if tap.endswith(INPUT):
            return lambda module, args, kwargs: on_value(tap, (*args, *kwargs.values()))
        return lambda module, args, output: on_value(tap, output)

    with ExitStack() as handles:
        for tap in taps:
            module = model.get_submodule(tap.removesuffix(INPUT))
            if tap.endswith(INPUT):
                handle = module.register_forward_pre_hook(hook(tap), with_kwargs=True)
            else:
                handle = module.register_forward_hook(hook(tap))
            handles.callback(handle.remove)
        yield


def _tensor_in(value: Any) -> Tensor | None:
    """The tensor itself, or the first one in a tuple, list or dict."""
    if isinstance(value, Tensor):
        return value
    entries = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return next((tensor for entry in entries if (tensor := _tensor_in(entry)) is not None), None)


def _graph_in(model: nn.Module) -> fx.GraphModule | None:
    """The captured graph that a model wraps, if its operators record the modules that they came from."""
    graphs = (m for m in model.modules() if isinstance(m, fx.GraphModule))
    return next((m for m in graphs if any("nn_module_stack" in n.meta for n in m.graph.nodes)), None)


def _operators_by_module(model: nn.Module) -> dict[str, list[fx.Node]]:
    """The operators of each module by its dotted name, both in the order of the graph; empty where there is no graph."""
    graph = _graph_in(model)
    operators: dict[str, list[fx.Node]] = {}
    for node in () if graph is None else graph.graph.nodes:
        for name in _modules_around(node) | _modules_around(node, GIVES_OUTPUT_OF):
            operators.setdefault(name, []).append(node)
    return operators


def _modules_around(node: fx.Node, key: str = "nn_module_stack") -> dict[str, None]:
    """Dotted names of the modules that an operator stands in, in order; by `GIVES_OUTPUT_OF` of those whose output it gives."""
    paths = (path for path, _ in (node.meta.get(key) or {}).values())
    return dict.fromkeys(name for path in paths if (name := re.sub(r"@\d+$", "", path)))  # "@1" marks a module's second call


def _node_of(nodes: list[fx.Node], name: str, *, entry: bool) -> fx.Node:
    """The operator whose value is the input of a module with these operators, or its output.

    Raises ModelError where the operator computes something else than the module: it took in what comes behind, or was taken in.
    """
    if not entry:
        last = next((n for n in reversed(nodes) if any(user not in nodes for user in n.users)), nodes[-1])
        if GIVES_OUTPUT_OF in last.meta and name not in (given := _modules_around(last, GIVES_OUTPUT_OF)):
            where = repr([*given][-1]) if given else "code"
            remedy = f"tap {where}, which the float model has, too" if given else "tap another module"
            raise ModelError(
                f"tap {name!r}: what it computes is merged with {where} behind it here, and is no value of its own; {remedy}"
            )
        return last
    before = _modules_around(nodes[0], READS_INPUT_OF) if READS_INPUT_OF in nodes[0].meta else _modules_around(nodes[0])
    if name not in before:
        where = repr([*before][-1]) if before else "code"
        raise ModelError(
            f"tap {name + INPUT!r}: it is merged with {where} before it here, so that its input is no value; tap its output,"
            f" {name!r}"
        )
    first = nodes[0].args[0]
    return first[0] if isinstance(first, list | tuple) else first  # type: ignore[return-value]


@contextmanager
def _interpreted(graph: fx.GraphModule, taps: dict[fx.Node, list[str]], on_value: OnValue) -> Iterator[None]:
    """Run the graph an operator at a time instead of its compiled code while the block runs."""
    signature = inspect.signature(graph.forward)

    def visit(node: fx.Node, value: Any) -> None:
        for tap in taps.get(node, ()):
            on_value(tap, value)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return run_graph(graph, signature.bind(*args, **kwargs).args, visit)

    graph.forward = forward
    try:
        yield
    finally:
        del graph.forward
