"""One graph of a model: ATen operators in a plain `fx.GraphModule` whose parameters keep their dotted names.

Pruning reads this graph, quantization rewrites it, ONNX is written from it.

    capture(model, example) -> Captured      torch.export, eval mode, dynamic batch
    Captured.module                          the GraphModule: trains, deep-copies, changes mode like any module
    Captured.shapes                          (node name) -> concrete shape for the example
"""

from __future__ import annotations

import inspect
import logging
import re
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from compresskit.errors import ModelError
from compresskit.normalize import Node, is_inplace, normalize_
from compresskit.surgery import mode
from compresskit.task import Inputs, call, first_rows, shapes_of


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A model as a graph.

    module: GraphModule of functional ATen operators; called like the model (same arguments, same output structure).
    prefix: dotted path of the captured submodule in the user's model, "" for the whole of it.
    example: the inputs it was captured with, two rows of each.
    inputs: one name for each tensor input, in the order of the placeholders.
    shapes: concrete shape of every tensor-valued node for `example`.
    dynamic: whether the first dimension of the inputs may vary.
    """

    module: fx.GraphModule
    prefix: str
    example: Inputs
    inputs: tuple[str, ...]
    dynamic: bool
    shapes: dict[str, tuple[int, ...]] = field(repr=False)


def capture(model: nn.Module, example: Inputs, *, inside: str | None = None, dynamic_batch: bool = True) -> Captured:
    """Capture a model, or its submodule `inside`, as a graph with a dynamic batch.

    Args:
        model: any module; it is captured in eval mode and left as it was.
        example: its inputs, a tuple of positional or a dict of keyword arguments. The first dimension of every tensor
            is taken for the batch; an example of one row is doubled, since a batch of 1 is specialised away.
        inside: dotted name of the submodule to capture with the inputs that it receives from the model.
        dynamic_batch: False fixes the batch to the example's.

    Raises ModelError where `torch.export` cannot follow the code; the message names the line.
    """
    prefix = inside or ""
    with torch.no_grad(), mode(model, training=False):
        check_runs(model, example)
        if inside is not None:
            model, example = inputs_of(model, example, inside)
        example = first_rows(_at_least_two(example), 2)
        program = _export(model, example, dynamic_batch)
        module = program.module()
        if _mutates_a_view(module.graph):
            # In-place writes into views (x[:, :4] = ...) need torch's own functionalization, which costs seconds.
            module = program.run_decompositions({}).module()
        module = fx.GraphModule(module, module.graph, type(model).__name__)
        normalize_(module)
        shapes = _shapes(module, example)
    names = tuple(n.name for n in module.graph.nodes if n.op == "placeholder" and n.name in shapes)
    return Captured(module=module, prefix=prefix, example=example, inputs=names, dynamic=dynamic_batch, shapes=shapes)


def check_runs(model: nn.Module, example: Inputs) -> None:
    """Raise `ModelError` unless the model runs on the example, in eval mode; it is left as it was."""
    try:
        with torch.no_grad(), mode(model, training=False):
            call(model, example)
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} does not run on the example (inputs of shape {shapes_of(example)}{_kinds(example)}):"
            f" {_first_line(error)}"
        ) from error


def _kinds(example: Inputs) -> str:
    """Tell of inputs that are not float32, which are what most often does not fit."""
    other = {str(v.dtype) for v in pytree.tree_leaves(example) if isinstance(v, Tensor) and v.dtype != torch.float32}
    return f" and {', '.join(sorted(other))} values; use .float() where the model wants numbers, not indices" if other else ""


def _export(model: nn.Module, example: Inputs, dynamic_batch: bool) -> torch.export.ExportedProgram:
    args, kwargs = ((), example) if isinstance(example, dict) else (example, {})
    dim = torch.export.Dim.DYNAMIC if dynamic_batch else torch.export.Dim.STATIC
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.export warns of its own internals
            dims = batch_dims(example, dim)
            if any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(model.forward).parameters.values()):
                dims = (dims,)  # forward(*args) has one parameter, a tuple
            logging.getLogger("torch.fx.experimental.symbolic_shapes").setLevel(logging.CRITICAL)
            program = torch.export.export(model, args, kwargs, dynamic_shapes=dims)
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} cannot be captured as a graph: {_first_line(error)}{_blame(error)}\n"
            "  Code whose path depends on values of tensors cannot be captured. Capture the part that can be with"
            " inside='backbone' (the dotted name of a submodule), or rewrite that line."
        ) from error
    return program


def batch_dims(example: Inputs, dim: Any) -> Any:
    """`dim` for the first dimension of every tensor, in the form that torch.export takes."""
    return pytree.tree_map(lambda v: {0: dim} if isinstance(v, Tensor) and v.ndim else None, example)


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip() if lines else 'no message'}"


def _blame(error: BaseException) -> str:
    r"""`\n  at file.py:12 in forward: if x.sum() > 0:` for the innermost line of code that is not torch's."""
    where = ""
    trace = error.__traceback__
    torch_home = torch.__file__.rsplit("/", 1)[0]
    while trace is not None:
        code = trace.tb_frame.f_code
        if not code.co_filename.startswith((torch_home, __file__, "<")) and "torch/" not in code.co_filename:
            import linecache

            line = linecache.getline(code.co_filename, trace.tb_lineno).strip()
            where = f"\n  at {code.co_filename}:{trace.tb_lineno} in {code.co_name}: {line}"
        trace = trace.tb_next
    if found := re.search(r'File "([^"]+)", line (\d+), in (\w+)', str(error)):
        where = where if "in forward" in where else "\n  at {}:{} in {}".format(*found.groups())
    return where


def inputs_of(model: nn.Module, example: Inputs, inside: str) -> tuple[nn.Module, Inputs]:
    """The submodule `inside`, and what it receives when the model runs on the example; ModelError where it is not called."""
    try:
        part = model.get_submodule(inside)
    except AttributeError:
        names = [name for name, _ in model.named_children()]
        raise ModelError(f"inside={inside!r}: {type(model).__name__} has no such module; its own are {names}") from None
    seen: list[Inputs] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if args and kwargs:
            raise ModelError(f"inside={inside!r}: it is called with positional and keyword arguments mixed")
        seen.append(kwargs if kwargs else args)

    handle = part.register_forward_pre_hook(note, with_kwargs=True)
    try:
        call(model, example)
    finally:
        handle.remove()
    if not seen:
        raise ModelError(f"inside={inside!r}: the model does not call this module for the example")
    return part, seen[0]


def _at_least_two(example: Inputs) -> Inputs:
    def grown(value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim and value.shape[0] == 1:
            return torch.cat([value, value])
        return value

    grown_example: Inputs = pytree.tree_map(grown, example)
    return grown_example


def _mutates_a_view(graph: fx.Graph) -> bool:
    """Whether an in-place operator writes where another, later used, name may look."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if not is_inplace(node):
            continue
        base = node.args[0]
        if not isinstance(base, fx.Node) or base.op in ("placeholder", "get_attr") or _returns_alias(base):
            return True
        if any(order[user] > order[node] or _returns_alias(user) for user in base.users if user is not node):
            return True
    return False


def _returns_alias(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.is_mutable:
        return False
    return any(r.alias_info is not None for r in schema.returns)


class _ShapeRecorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.shapes: dict[str, tuple[int, ...]] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor):
            self.shapes[n.name] = tuple(value.shape)
        return value


def _shapes(module: fx.GraphModule, example: Inputs) -> dict[str, tuple[int, ...]]:
    recorder = _ShapeRecorder(module)
    flat = pytree.tree_leaves(example)
    recorder.run(*flat)
    return recorder.shapes


def parameter_name(node: Any) -> str | None:
    """Dotted name if the node reads a parameter or buffer, else None."""
    return str(node.target) if isinstance(node, fx.Node) and node.op == "get_attr" else None


def module_path(node: Node) -> str:
    """Dotted path of the user's module in whose forward this operator stands."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values() if isinstance(path, str)]
    return paths[-1] if paths else ""
