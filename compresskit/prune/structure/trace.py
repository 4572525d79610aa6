"""One eager run of a model, written down as a graph of ATen operators: what the pruning rules walk over.

`torch.export` sees the same operators, yet takes 20 seconds where this takes half of one (Swin), refuses code whose path depends
on values (detection), and hides what only training runs (auxiliary heads). A cut needs no graph that holds for every input,
since every plan is proved on the model itself before it is handed over.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules import module as hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from compresskit.base.task import Inputs, batch_size, call, first_rows
from compresskit.graph.capture import check_runs, inputs_inside
from compresskit.graph.normalize import Node
from compresskit.graph.surgery import mode

aten = torch.ops.aten
_FACTORS = {aten.mul, aten.div}
_LOOK_UPS = {aten.index.Tensor, aten.index_select.default}


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """An eager run as a graph.

    graph: `get_attr` nodes are parameters and buffers by dotted name (relative to `prefix`), `call_function` nodes ATen operators
        in the order in which they ran; `meta["path"]` is the module in whose forward they stand.
    module: the part of the user's model that was recorded. prefix: its dotted path, "" for the whole model.
    example: the inputs. shapes: shape of every node whose value is a tensor. rows: samples in the example.
    extra: a second run, in train mode, where some parameters are read in training only.
    """

    graph: fx.Graph
    module: nn.Module
    prefix: str
    example: Inputs
    shapes: dict[str, tuple[int, ...]] = field(repr=False)
    extra: Recorded | None = None

    @property
    def rows(self) -> int:
        """Samples in the example."""
        return batch_size(self.example)


def record(model: nn.Module, example: Inputs, *, inside: str | None = None) -> Recorded:
    """Run a model, or its submodule `inside`, once and write down every operator; the model is left as it was.

    In eval mode; once more in train mode where parameters are left that eval mode does not read (auxiliary heads).
    Raises ModelError where the model does not run on the example.
    """
    whole, given = model, example
    try:
        with torch.no_grad(), mode(whole, training=False):
            if inside is not None:
                model, example = inputs_inside(model, example, inside)
            example = first_rows(example, 2)
            main = _record(model, example, inside or "")
    except Exception:
        check_runs(whole, given)  # tells what is wrong with the example, where it is the example
        raise
    read = {str(n.target) for n in main.graph.nodes if n.op == "get_attr"}
    if all(name in read for name, _ in model.named_parameters()):
        return main
    with mode(model, training=True), _buffers_kept(model):
        try:
            extra = _record(model, twice(example), inside or "")
        except Exception:
            return main  # training needs more than the example, such as targets: what it reads is proved or locked later
    return Recorded(**{**vars(main), "extra": extra})


def twice(example: Inputs) -> Inputs:
    """Every row two times; BatchNorm in train mode needs more than one value a channel."""

    def doubled(value: Any) -> Any:
        if isinstance(value, list):
            return value + value
        return torch.cat([value, value]) if isinstance(value, Tensor) and value.ndim else value

    return {k: doubled(v) for k, v in example.items()} if isinstance(example, dict) else tuple(doubled(v) for v in example)


def _record(model: nn.Module, example: Inputs, prefix: str) -> Recorded:
    recorder = Recorder(model)
    for value in pytree.tree_leaves(example):
        if isinstance(value, Tensor):
            recorder.enter(value)
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with plain_kernels(), torch.random.fork_rng(devices), torch.inference_mode(), following(model, recorder.paths), recorder:
        output = call(model, example)
    recorder.leave(output)
    return Recorded(graph=recorder.graph, module=model, prefix=prefix, example=example, shapes=recorder.shapes)


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Without the fast path of attention, which is one opaque operator."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, values in before:
                buffer.copy_(values)


@contextmanager
def following(model: nn.Module, paths: list[str]) -> Iterator[None]:
    """Keep in `paths` the dotted names of the modules whose forward is running, outermost first.

    After an exception they are still there: that is where it happened.
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


class Recorder(TorchDispatchMode):
    """Writes down every operator that runs. Under inference mode composite operators (linear, attention) arrive whole."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self.paths = fx.Graph(), [""]
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.nodes: Any = WeakIdKeyDictionary()
        tensors = [*model.named_parameters(), *model.named_buffers()]
        self.named: Any = WeakIdKeyDictionary()
        for name, tensor in reversed(tensors):
            self.named[tensor] = name

    def enter(self, tensor: Tensor) -> None:
        """An input of the model."""
        self._note(tensor, self.graph.placeholder(f"input_{len(self.shapes)}"))

    def leave(self, output: Any) -> None:
        """The outputs of the model."""
        self.graph.output([self._of(v) for v in pytree.tree_leaves(output) if isinstance(v, Tensor)])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = pytree.tree_map_only(Tensor, self._of, (list(args), kwargs))
        target = args[0] if args and isinstance(args[0], Tensor) else None
        aliased = func._schema.is_mutable and target is not None and self._has_alias(target)
        result = func(*args, **kwargs)
        node = self.graph.call_function(func, tuple(given[0]), given[1])
        node.meta["path"] = self.paths[-1]
        node.meta["aliased"] = aliased
        if func in _LOOK_UPS:
            # Where to look is part of the code: a table read at fixed places is followed place by place.
            node.meta["indices"] = pytree.tree_map_only(Tensor, torch.clone, list(args[1:]))
        if len(args) > 1 and isinstance(args[1], Tensor) and args[1].ndim == 0 and func.overloadpacket in _FACTORS:
            node.meta["number"] = float(args[1])
        if isinstance(result, Tensor):
            self._note(result, node)
        elif isinstance(result, list | tuple):
            node.meta["parts"] = [tuple(v.shape) for v in result if isinstance(v, Tensor)]
            for i, value in enumerate(result):
                if isinstance(value, Tensor):
                    self._note(value, self.graph.call_function(operator.getitem, (node, i)))
        return result

    def _note(self, tensor: Tensor, node: Node) -> None:
        self.nodes[tensor] = node
        self.shapes[node.name] = tuple(tensor.shape)

    def _of(self, tensor: Tensor) -> Node:
        node = self.nodes.get(tensor)
        if node is None:
            name = self.named.get(tensor)
            if name is None:  # made outside of the run: a constant
                node = self.graph.call_function(aten.empty.memory_format, (list(tensor.shape),))
                node.meta |= {"path": self.paths[-1], "constant": True}
            else:
                node = self.graph.create_node("get_attr", name)
            self._note(tensor, node)
        return node

    def _has_alias(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()._cdata
        return any(t is not tensor and t.untyped_storage()._cdata == storage for t in list(self.nodes.keys()))
