"""Dimensions that should vary: where code takes one for a constant, and where a graph holds for some of its sizes alone.

`torch.export` fails where a size becomes a constant. Where code decides by a size (`if length > 10`, `pad = -width % 8`) it
follows the branch that the example takes, and keeps the condition. Whether anything depends on it, a run of the model at a size
that breaks it shows.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import logging
import math
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from compresskit.base.task import Inputs, call, copied_tensors, shapes_of
from compresskit.graph.surgery import state_kept

_ASSERTIONS = frozenset({torch.ops.aten._assert_scalar.default, torch.ops.aten._assert_async.msg})
_LOGGER = "torch.fx.experimental.symbolic_shapes"
_CONSTANT = re.compile(r"You marked (\S+)\.size\(\)\[(\d+)\] as dynamic but your code specialized it to be a constant \((\d+)\)")


class _Messages(logging.Handler):
    """Keeps what torch logs about the sizes of a traced model."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def constant_dimensions(error: BaseException, trace_again: Callable[[], object]) -> str:
    """Describe an error of `torch.export` about a dimension that the code takes for a constant; "" for any other error.

    Args:
        error: that tracing the model raised.
        trace_again: does the same once more, and raises the same; torch then logs the line of the code.
    """
    found = _CONSTANT.search(str(error))
    if found is None:
        return ""
    source, dim, size = found.groups()
    name = (re.findall(r"\['(\w+)'\]", source) or [source])[-1]
    line = _place_of(f"{source}.size()[{dim}]", trace_again)
    return (
        f"dimension {dim} of input {name!r} should vary, but the code takes it for the constant {size}{line}, as a loop over it"
        " does, and len(); use nn.LSTM or nn.GRU, or an operator over the whole input, write x.shape[0] for len(x), or leave the"
        ' dimension out of dynamic=, by name where another input has the same, {"x": {0: "batch"}}; or capture a part of it'
        " with inside='backbone', the dotted name of a submodule"
    )


def _place_of(size: str, trace_again: Callable[[], object]) -> str:
    """`" (model.py:7 in forward)"`, where the size became a constant, or ""."""
    logger, messages = logging.getLogger(_LOGGER), _Messages()
    before = logger.level, logger.propagate, logger.handlers[:]
    logger.handlers[:] = [messages]
    logger.propagate = False
    logger.setLevel(logging.INFO)
    try:
        trace_again()
    except Exception:  # the error that is described
        pass
    finally:
        level, logger.propagate, logger.handlers[:] = before
        logger.setLevel(level)
    text = "\n".join(messages.texts)
    symbol = re.search(rf"create_symbol (\w+) = \d+ for {re.escape(size)}", text)
    place = symbol and re.search(rf"eval Eq\({symbol[1]}, \d+\) \[guard added\] \(([^()]*:\d+ in \w+)\)", text)
    own = place and not re.search(r"_subclasses/|graph/layers/", place[1])  # of the model, not of torch or this library
    return f" ({place[1]})" if place and own else ""


#: Relative to the largest output: what two orders of the same sums differ by.
SAME = 1e-3
#: Sizes that are tried for one condition and for all, and how many times the example's the largest of them may be.
TRIALS, ALL_TRIALS, LARGEST = 6, 24, 4
#: Conditions that are looked at, of which windows of attention make a thousand, and that are told.
EXAMINED, TOLD = 200, 4
_SIZE = re.compile(r"L(?:\['\w+'\]|\[\d+\])+\.size\(\)\[\d+\]")
_OPERATIONS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.USub: operator.neg, ast.Not: operator.not_,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
#: Functions of `math` and torch in conditions, such as `math.trunc(0.5*torch.sym_float(L['x'].size()[2])) == 8`.
_OF_NUMBERS: dict[str, Callable[..., Any]] = {
    "sym_float": float, "sym_int": int, "sym_max": max, "sym_min": min, "sym_sqrt": math.sqrt, "sym_sum": sum,
    "ceil": math.ceil, "exp": math.exp, "floor": math.floor, "log": math.log, "log2": math.log2, "pow": math.pow,
    "sqrt": math.sqrt, "trunc": math.trunc, "abs": abs, "max": max, "min": min, "round": round,
}  # fmt: skip
_told: dict[type, set[tuple[str, ...]]] = {}


def traced_after_other_sizes(
    error: BaseException,
    model: nn.Module,
    example: Inputs,
    dims: Sequence[tuple[int, int]],
    trace: Callable[[], torch.export.ExportedProgram],
) -> torch.export.ExportedProgram | None:
    """Trace a model that remembers the sizes of its last call, as heads of detectors do, and makes a table anew for others.

    Where the last call was with the sizes that are traced, its code compares those to numbers, and they become constants. So it
    is called with sizes twice as large first.

    Args:
        error: that tracing the model raised.
        model, example: what is traced, in eval mode; the caller puts back what the call sets.
        dims: those that vary, (leaf of the example, dimension).
        trace: does the same once more.

    Returns the program; None where another error was raised, the model remembers nothing, or this is no help.
    """
    if _CONSTANT.search(str(error)) is None:
        return None
    leaves, form = pytree.tree_flatten(example)
    for leaf, dim in dims:
        leaves[leaf] = torch.cat([leaves[leaf], leaves[leaf]], dim)
    before = _state_of(model)
    with suppress(Exception):  # not every model takes such sizes, nor is each helped by them
        call(model, copied_tensors(pytree.tree_unflatten(leaves, form)))
        if _state_of(model) != before:
            return trace()
    return None


def _state_of(model: nn.Module) -> set[tuple[int, str, int]]:
    """Which objects the attributes and buffers of all modules are."""
    return {
        (id(module), name, id(value)) for module in model.modules() for name, value in {**module._buffers, **vars(module)}.items()
    }


def warn_of_conditions(
    program: torch.export.ExportedProgram,
    model: nn.Module,
    example: Inputs,
    dims: list[tuple[int, int]],
) -> None:
    """Warn, once for a class of models, where the graph of a model computes what the model does for some sizes alone.

    Args:
        program: the graph.
        model: was captured, in eval mode; it is not changed.
        example: its inputs, of which those of other sizes are made.
        dims: those that vary, (leaf of the example, dimension).
    """
    if not dims or isinstance(model, fx.GraphModule):  # a graph takes no branches; of its model was warned when it was captured
        return
    conditions = [code for code in vars(program).get("_guards_code") or () if _SIZE.search(code)]
    sizes = _OtherSizes(program, model, example, dims)
    found: dict[str, str] = {}
    for condition in conditions[:EXAMINED]:
        if len(found) < TOLD and (shapes := sizes.broken_by(condition, [*found])):
            found[condition] = shapes
    shapes = next(iter(found.values()), "") or sizes.differ_at_one()
    warned = _told.setdefault(type(model), set())
    if shapes and tuple(found) not in warned:
        warned.add(tuple(found))
        where = " and ".join(map(_readable, found)) or "no size that varies is 1"
        warnings.warn(
            f"{type(model).__name__} decides by the sizes of its inputs: the graph of it, and a file, are right only where"
            f" {where}; for inputs of shape {shapes}, for one, the model gives something else. Take an example of the sizes that"
            " will come, the largest where a table grows with them; or leave the dimension out of dynamic=",
            stacklevel=4,
        )


class _OtherSizes:
    """Runs a model and its graph on inputs of other sizes than the example's; see `warn_of_conditions`."""

    def __init__(
        self, program: torch.export.ExportedProgram, model: nn.Module, example: Inputs, dims: list[tuple[int, int]]
    ) -> None:
        """dims: those that vary, (leaf of the example, dimension)."""
        self.program, self.model, self.example = program, model, example
        self.leaves, self.form = pytree.tree_flatten(example)
        self.together: dict[int, frozenset[tuple[int, int]]] = {}  # dimensions by their size in the example
        for leaf, dim in dims:
            size = self.leaves[leaf].shape[dim]
            self.together[size] = self.together.get(size, frozenset()) | {(leaf, dim)}
        self.tried: dict[tuple[frozenset[tuple[int, int]], int], bool] = {}  # whether the model gives something else

    def broken_by(self, condition: str, known: Sequence[str]) -> str:
        """Shapes of inputs that break a condition and for which the model gives something else; "" where none were found.

        known: conditions that are broken by other inputs, and hold for these.
        """
        new = 0
        for group, size in self._candidates(condition):
            with suppress(Exception):  # inputs, or attributes of them, that the condition does not read like that
                holds = functools.partial(_holds, arguments=self._arguments(self._resized(group, size, device="meta")))
                if holds(condition) or not all(map(holds, known)):
                    continue
                if (key := (group, size)) not in self.tried:
                    if new == TRIALS or len(self.tried) == ALL_TRIALS:
                        continue
                    new, self.tried[key] = new + 1, self._differs(self._resized(group, size))
                if self.tried[key]:
                    return str(shapes_of(self._resized(group, size, device="meta")))
        return ""

    def differ_at_one(self) -> str:
        """Shapes with dimensions of 1 for which the model gives something else, which no condition says; "" where none do."""
        for group in self.together.values():
            inputs = self._resized(group, 1)
            if self._differs(inputs):
                return str(shapes_of(inputs))
        return ""

    def _candidates(self, condition: str) -> Iterator[tuple[frozenset[tuple[int, int]], int]]:
        """Dimensions and another size of them, near ones first: all dimensions of a size together, then each alone."""
        alone = [(size, frozenset({place})) for size, group in self.together.items() if len(group) > 1 for place in sorted(group)]
        named = [int(number) for number in re.findall(r"(?<![\w\[])\d+(?!\w|\])", condition)]
        tries = []
        for order, (size, group) in enumerate([*self.together.items(), *alone]):
            near = {size - 1, size + 1, size + 2, size + 3, 1, 2, 2 * size, *(n + k for n in named for k in (-1, 0, 1))}
            tries += [(abs(n - size), order, n, group) for n in near if 0 < n <= LARGEST * max(size, 16) and n != size]
        for _, _, n, group in sorted(tries, key=lambda entry: entry[:3]):
            yield group, n

    def _resized(self, group: frozenset[tuple[int, int]], size: int, *, device: str | None = None) -> Inputs:
        """The example with other sizes: its values again, or fewer of them. device: "meta" for the sizes alone."""
        leaves = [leaf.to(device) if isinstance(leaf, Tensor) and device else leaf for leaf in self.leaves]
        for i, d in group:
            leaves[i] = leaves[i].index_select(d, torch.arange(size, device=leaves[i].device) % leaves[i].shape[d])
        return pytree.tree_unflatten(leaves, self.form)  # type: ignore[no-any-return]

    def _arguments(self, inputs: Inputs) -> dict[str, Any]:
        args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
        return inspect.signature(self.model.forward).bind(*args, **kwargs).arguments

    def _differs(self, inputs: Inputs) -> bool:
        """Whether the model runs on inputs and its graph gives something else, or nothing, though not on the example."""
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with state_kept(self.model):
                    wanted = call(self.model, copied_tensors(inputs))
            except Exception:  # sizes that the model does not take
                return False
            return not self._gives(inputs, wanted) and self._agrees_on_the_example

    @functools.cached_property
    def _unchecked(self) -> fx.GraphModule:
        """The graph without assertions, which are not in a file either."""
        module = fx.GraphModule(self.program.graph_module, copy.deepcopy(self.program.graph))
        for node in [node for node in module.graph.nodes if node.target in _ASSERTIONS]:
            module.graph.erase_node(node)
        module.recompile()
        return module

    @functools.cached_property
    def _agrees_on_the_example(self) -> bool:
        """Not so where the model gives something else every time."""
        with state_kept(self.model):
            return self._gives(self.example, call(self.model, copied_tensors(self.example)))

    def _gives(self, inputs: Inputs, wanted: Any) -> bool:
        """Whether the graph gives these outputs, or is not for such inputs."""
        try:
            got = _run_program(self.program, self._unchecked, inputs)
        except Exception:
            return False
        if got is None:
            return True
        leaves = [leaf for leaf in pytree.tree_leaves(wanted) if isinstance(leaf, Tensor)]
        return all(_alike(a, b) for a, b in zip(leaves, got, strict=True))


def _holds(condition: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a condition of torch holds, such as `L['x'].size()[1] % 4 == 0`. L: the arguments of `forward`."""

    def value(node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name(id="L"):
                return arguments
            case ast.Subscript():
                return value(node.value)[value(node.slice)]
            case ast.Call(func=ast.Attribute(attr="size", value=tensor), args=[]):
                return value(tensor).shape
            case ast.Call(func=ast.Attribute(attr=name, value=ast.Name()) | ast.Name(id=name)) if name in _OF_NUMBERS:
                return _OF_NUMBERS[name](*map(value, node.args))
            case ast.BinOp():
                return _OPERATIONS[type(node.op)](value(node.left), value(node.right))
            case ast.UnaryOp():
                return _OPERATIONS[type(node.op)](value(node.operand))
            case ast.BoolOp():
                return (all if isinstance(node.op, ast.And) else any)(map(value, node.values))
            case ast.Compare():
                sides = [value(node.left), *map(value, node.comparators)]
                return all(_OPERATIONS[type(op)](*pair) for op, pair in zip(node.ops, pairwise(sides), strict=True))
        raise ValueError(ast.dump(node))

    return bool(value(_syntax_of(condition)))


@functools.lru_cache(maxsize=1024)
def _syntax_of(condition: str) -> ast.expr:
    return ast.parse(condition, mode="eval").body


def _run_program(program: torch.export.ExportedProgram, module: fx.GraphModule, inputs: Inputs) -> list[Tensor] | None:
    """The tensors that a graph of a program gives; None where dimensions that are one in the program are not: kernels would
    end the process.

    To make its `module()` takes longer than these runs, and it checks the conditions.
    """
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    names = program.call_spec.in_spec.children()[1].context  # of keyword arguments, in the order of the parameters
    leaves = iter(pytree.tree_leaves(copied_tensors((args, {name: kwargs[name] for name in names or ()}))))
    given: list[Any] = []
    sizes: dict[Any, int] = {}
    for spec, node in zip(program.graph_signature.input_specs, program.graph.find_nodes(op="placeholder"), strict=True):
        if spec.kind is InputKind.USER_INPUT:
            given.append(next(leaves))
            if isinstance(given[-1], Tensor):
                for size, symbol in zip(given[-1].shape, node.meta["val"].shape, strict=True):
                    if sizes.setdefault(str(symbol), size) != size:
                        return None
        else:
            assert spec.target is not None
            stored = program.state_dict.get(spec.target, program.constants.get(spec.target))
            given.append(copied_tensors(stored) if spec.kind is InputKind.BUFFER else stored)
    outputs = module(*given)
    kinds = [spec.kind for spec in program.graph_signature.output_specs]
    return [
        value for kind, value in zip(kinds, outputs, strict=True) if kind is OutputKind.USER_OUTPUT and isinstance(value, Tensor)
    ]


def _alike(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return bool((a != b).float().mean() < SAME) if a.numel() else True
    largest = float(a.nan_to_num(0.0, 0.0, 0.0).abs().max()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=0.0, atol=SAME * largest, equal_nan=True)


def _readable(condition: str) -> str:
    """`x.size(1) <= 10` of `L['x'].size()[1] <= 10`."""
    text = re.sub(r"L\['(\w+)'\]", r"\1", condition)
    return re.sub(r"\.size\(\)\[(\d+)\]", r".size(\1)", text)
