"""Trace one eager run of a model into a graph of ATen operators, on which the pruning rules work.

`torch.export` gives the same operators, but takes 20 seconds where this takes half a second (Swin), refuses code whose path
depends on values (detection), and does not see what only training runs (auxiliary heads). Pruning needs no graph that holds for
every input, because every plan is proved on the model itself before it is returned.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules import module as hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from compresskit.base.errors import ModelError, named_first_line
from compresskit.base.task import Inputs, batch_size, call
from compresskit.graph.capture import check_runs, inputs_inside
from compresskit.graph.normalize import Node, aten
from compresskit.graph.surgery import mode
from compresskit.prune.structure.repeatable import alike_rows, state_restored

_MULTIPLICATIONS = {aten.mul, aten.div}
_LOOK_UPS = {aten.index.Tensor, aten.index_select.default}
_SCATTERS = {
    aten.gather,
    aten.scatter,
    aten.scatter_,
    aten.scatter_add,
    aten.scatter_add_,
    aten.scatter_reduce,
    aten.scatter_reduce_,
}


@dataclass(frozen=True, kw_only=True)
class Trace:
    """An eager run as a graph.

    graph: `get_attr` nodes are parameters and buffers by dotted name (relative to `prefix`), `call_function` nodes are ATen
        operators in the order in which they ran; `meta["path"]` is the module in whose forward they ran, `meta["parts"]` are the
        shapes of the results of an operator with several.
    module: the traced part of the user's model. prefix: its dotted path, "" for the whole model.
    example: the inputs, two samples where each takes as many MACs, else as they were given.
    shapes: shape of every node whose value is a tensor.
    other_runs: the same in train mode and on other inputs, where one run in eval mode does not read all tensors.
    unread: parameters and buffers that no run has read, and their shapes; on other inputs the model may read them.
    copies: buffers that no run has read -> the buffer that was read and has the same values; they are not in `unread`.
    """

    graph: fx.Graph
    module: nn.Module
    prefix: str
    example: Inputs
    shapes: dict[str, tuple[int, ...]] = field(repr=False)
    other_runs: tuple[Trace, ...] = ()
    unread: dict[str, tuple[int, ...]] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)

    @property
    def name_prefix(self) -> str:
        """`prefix` as it stands before names: with a dot, where there is one."""
        return f"{self.prefix}." if self.prefix else ""

    @property
    def rows(self) -> int:
        """Samples in the example."""
        return batch_size(self.example)

    @cached_property
    def read(self) -> frozenset[str]:
        """Names of the parameters and buffers that the run reads."""
        return frozenset(str(n.target) for n in self.graph.nodes if n.op == "get_attr")

    @cached_property
    def read_with_values(self) -> frozenset[str]:
        """Those of them that meet values; an expert that is called on no rows reads its weights, but shows no channels."""
        made_of: dict[Node, set[str]] = {}  # what is computed from nothing but parameters and constants -> these parameters
        met: set[str] = set()
        for node in self.graph.nodes:
            names = set[str]().union(*(made_of.get(n, ()) for n in node.all_input_nodes))
            if node.op == "get_attr":
                made_of[node] = {str(node.target)}
            elif node.op == "call_function" and made_of.keys() >= {*node.all_input_nodes} and (node.users or not names):
                made_of[node] = names
            elif not self.is_empty(node):
                met |= names
        return frozenset(met)

    def is_empty(self, node: Node) -> bool:
        """Whether an operator gives tensors, and none of them has an entry."""
        one = self.shapes.get(node.name)
        shapes = node.meta.get("parts", ()) if one is None else (one,)
        return bool(shapes) and all(0 in shape for shape in shapes)


def trace_model(model: nn.Module, example: Inputs, *, inside: str | None = None) -> Trace:
    """Run a model, or its submodule `inside`, and record every operator; the model is not changed.

    The run is in eval mode, on two samples where each takes as many MACs (`alike_rows`), else on all of the example. Where that
    leaves parameters or buffers unread (heads, experts, branches, statistics that training writes), or reads them where there are
    no rows, others follow: in train mode, on the whole example, and on the example with its signs changed.

    Raises ModelError where the model does not run on the example, or not in inference mode.
    """
    whole_model, whole_example = model, example
    try:
        with torch.no_grad(), mode(whole_model, training=False), state_restored(whole_model):
            if inside is not None:
                _check_inference_mode(model, example)  # in which a plan is proved on the whole model
                model, example = inputs_inside(model, example, inside)
            trace = _first_trace(model, example, inside or "")
    except Exception:
        check_runs(whole_model, whole_example)  # explains what is wrong with the example, where it is the example
        _check_inference_mode(whole_model, whole_example)
        raise
    others = [(True, repeat_rows(trace.example)), (False, example), (False, _negated(example)), (True, repeat_rows(example))]
    runs: list[Trace] = []
    while others and (_unread(model, (trace, *runs))[0] or names_without_values((trace, *runs))):
        training, inputs = others.pop(0)
        with mode(model, training=training), state_restored(model), suppress(Exception):
            # Training may need more than the example, such as targets: what it reads is proved or locked later.
            runs.append(_trace_run(model, inputs, inside or ""))
    unread, copies = _unread(model, (trace, *runs))
    return replace(trace, other_runs=tuple(runs), unread=unread, copies=copies)


def _first_trace(model: nn.Module, example: Inputs, prefix: str) -> Trace:
    """A run on two samples, or on the whole example where its inputs cannot be cut (graphs) or two rows are another workload.

    What operators cost is read off the shapes of this run.
    """
    try:
        return _trace_run(model, alike_rows(model, example, 2), prefix)
    except Exception:
        return _trace_run(model, example, prefix)


def _check_inference_mode(model: nn.Module, example: Inputs) -> None:
    """Raise ModelError for a model that runs, but not in inference mode, as one that takes gradients in its forward pass."""
    try:
        with torch.random.fork_rng(), torch.inference_mode(), mode(model, training=False), state_restored(model):
            call(model, example)
    except Exception as error:
        check_runs(model, example)
        raise ModelError(
            f"{type(model).__name__} runs on the example, but not in torch.inference_mode, in which channels are found and proved"
            f" ({named_first_line(error)}); wanted a forward pass without gradients of its own (torch.autograd.grad): prune the"
            " part that it differentiates as a model of its own, with that part's inputs as the example"
        ) from error


def _unread(model: nn.Module, runs: Sequence[Trace]) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Parameters and floating point buffers that no run has read: their shapes, and those of them that are copies of others."""
    read = set[str]().union(*(run.read for run in runs))
    buffers = {name: b for name, b in model.named_buffers() if b.is_floating_point() and b.numel() > 1}
    copies = _copies({name: b for name, b in buffers.items() if name not in read}, {n: buffers[n] for n in buffers if n in read})
    tensors = (*model.named_parameters(), *buffers.items())
    return {name: tuple(v.shape) for name, v in tensors if name not in read and name not in copies}, copies


def names_without_values(runs: Sequence[Trace]) -> set[str]:
    """Parameters that runs read, but all of them where there are no rows, as those of an expert that no row was sent to."""
    found = {name for run in runs for name in run.read}.difference(*(run.read_with_values for run in runs))
    return {name for name, value in runs[0].module.named_parameters() if name in found and value.numel()}


def _copies(unread: Mapping[str, Tensor], read: Mapping[str, Tensor]) -> dict[str, str]:
    """Buffers that were not read -> the one that was, of the same module and with the same values.

    Rotary embeddings of Hugging Face keep a copy of their frequencies. Values that are all alike are no sign of one.
    """
    copies: dict[str, str] = {}
    for name, value in unread.items():
        beside = [other for other in read if other.rpartition(".")[0] == name.rpartition(".")[0]]
        same = [other for other in beside if _have_same_values(read[other], value)]
        if len(same) == 1 and bool((value != value.flatten()[0]).any()):
            copies[name] = same[0]
    return copies


def _have_same_values(one: Tensor, other: Tensor) -> bool:
    kinds = [(b.shape, b.dtype, b.device, b.layout) for b in (one, other)]
    return kinds[0] == kinds[1] and one.layout is torch.strided and torch.equal(one, other)


def _negated(example: Inputs) -> Inputs:
    """The example with other signs: routing and branches that depend on values take other ways."""
    changed: Inputs = pytree.tree_map(lambda v: -v if isinstance(v, Tensor) and v.is_floating_point() else v, example)
    return changed


def repeat_rows(example: Inputs) -> Inputs:
    """Every sample twice; BatchNorm in train mode needs more than one value per channel."""

    def doubled(value: Any) -> Any:
        if isinstance(value, list):
            return value + value
        return torch.cat([value, value]) if isinstance(value, Tensor) and value.ndim else value

    return {k: doubled(v) for k, v in example.items()} if isinstance(example, dict) else tuple(doubled(v) for v in example)


def _trace_run(model: nn.Module, example: Inputs, prefix: str) -> Trace:
    recorder = OperatorRecorder(model)
    for value in pytree.tree_leaves(example):
        if isinstance(value, Tensor):
            recorder.add_input(value)
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with (
        torch.random.fork_rng(devices),
        torch.inference_mode(),
        running_modules(model, recorder.paths),
        recorder,
    ):
        output = call(model, example)
    recorder.add_output(output)
    return Trace(graph=recorder.graph, module=model, prefix=prefix, example=example, shapes=recorder.shapes)


@contextmanager
def running_modules(model: nn.Module, paths: list[str]) -> Iterator[None]:
    """Keep in `paths` the dotted names of the modules whose forward is running, outermost first.

    After an exception they are left there: the last one is the module that failed.
    """
    names = {id(module): name for name, module in model.named_modules()}

    def enter(module: nn.Module, _: Any) -> None:
        if id(module) in names:
            paths.append(names[id(module)])

    def leave(module: nn.Module, _: Any, __: Any) -> None:
        if id(module) in names:
            paths.pop()

    handles = hooks.register_module_forward_pre_hook(enter), hooks.register_module_forward_hook(leave)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class OperatorRecorder(TorchDispatchMode):
    """Records every operator that runs. Under inference mode composite operators (linear, attention) arrive whole."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self.paths = fx.Graph(), [""]
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.nodes: Any = WeakIdKeyDictionary()
        self.names: Any = WeakIdKeyDictionary()
        for name, tensor in reversed([*model.named_parameters(), *model.named_buffers()]):
            self.names[tensor] = name

    def add_input(self, tensor: Tensor) -> None:
        """Record an input of the model."""
        self._set_node(tensor, self.graph.placeholder(f"input_{len(self.shapes)}"))

    def add_output(self, output: Any) -> None:
        """Record the outputs of the model."""
        self.graph.output([self.node_of(v) for v in pytree.tree_leaves(output) if isinstance(v, Tensor)])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        node_args, node_kwargs = pytree.tree_map_only(Tensor, self.node_of, (list(args), kwargs))
        target = args[0] if args and isinstance(args[0], Tensor) else None
        aliased = func._schema.is_mutable and target is not None and self._has_alias(target)
        result = func(*args, **kwargs)
        node = self.graph.call_function(func, tuple(node_args), node_kwargs)
        node.meta["path"] = self.paths[-1]
        node.meta["aliased"] = aliased
        if func in _LOOK_UPS:
            # The positions are part of the code: a table that is read at fixed positions is followed entry by entry.
            node.meta["indices"] = pytree.tree_map_only(Tensor, torch.clone, list(args[1:]))
        if func.overloadpacket in _SCATTERS:
            node.meta["index"] = args[2].clone()
        if func.overloadpacket in (aten.index_put, aten.index_put_):
            node.meta["masks"] = [index is not None and index.dtype == torch.bool for index in args[1]]
        if func is aten.as_strided.default:
            node.meta["strides"] = None if args[0].storage_offset() else args[0].stride()
        if len(args) > 1 and isinstance(args[1], Tensor) and args[1].ndim == 0 and func.overloadpacket in _MULTIPLICATIONS:
            node.meta["factor"] = float(args[1])
        if isinstance(result, Tensor):
            self._set_node(result, node)
        elif isinstance(result, list | tuple):
            node.meta["parts"] = [tuple(v.shape) for v in result if isinstance(v, Tensor)]
            for i, value in enumerate(result):
                if isinstance(value, Tensor):
                    self._set_node(value, self.graph.call_function(operator.getitem, (node, i)))
        return result

    def _set_node(self, tensor: Tensor, node: Node) -> None:
        self.nodes[tensor] = node
        self.shapes[node.name] = tuple(tensor.shape)

    def node_of(self, tensor: Tensor) -> Node:
        """The node of a tensor: the operator that made it, a parameter or buffer, or a new node for a constant."""
        node = self.nodes.get(tensor)
        if node is None:
            name = self.names.get(tensor)
            if name is None:  # made outside of the run: a constant
                node = self.graph.call_function(aten.empty.memory_format, (list(tensor.shape),))
                node.meta |= {"path": self.paths[-1], "constant": True}
            else:
                node = self.graph.create_node("get_attr", name)
            self._set_node(tensor, node)
        return node

    def _has_alias(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()._cdata
        return any(t is not tensor and t.untyped_storage()._cdata == storage for t in list(self.nodes.keys()))
