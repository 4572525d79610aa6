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
import os
import re
import traceback
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
from compresskit.graph.differences import without_fills
from compresskit.graph.surgery import state_kept
from compresskit.graph.tracing import SIZES_LOG, first_time, log_level

_ASSERTIONS = frozenset({torch.ops.aten._assert_scalar.default, torch.ops.aten._assert_async.msg})
_TORCH, _TRACER = os.path.dirname(torch.__file__) + os.sep, os.path.join(os.path.dirname(__file__), "capture.py")
_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep  # of this library
_CONSTANT = re.compile(r"You marked (\S+)\.size\(\)\[(\d+)\] as dynamic but your code specialized it to be a constant \((\d+)\)")


class _Messages(logging.Handler):
    """Keeps what torch logs about the sizes of a traced model, and where in the code of the model."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[tuple[str, str, bool]] = []  # with the innermost line of the model, and whether torch is called there

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self.texts.append((text, *_line_of_model(text)))


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
    line, in_torch = _place_of(f"{source}.size()[{dim}]", trace_again)
    if in_torch:
        why = f"but an operator of torch takes it for the constant {size}{line}; write that with other operators"
    else:
        why = (
            f"but the code takes it for the constant {size}{line}, as a loop over it does, and len(), int() and float() of it;"
            " use nn.LSTM or nn.GRU, or an operator over the whole input, write x.shape[0] for len(x) and x.shape[2] / 2"
            " without float()"
        )
    return (
        f"dimension {dim} of input {name!r} should vary, {why}, or leave the dimension out of dynamic=, where () takes all"
        ' sizes of the example, by name where another input has the same, {"x": {0: "batch"}}; or capture a part of it with'
        " inside='backbone', the dotted name of a submodule"
    )


def _place_of(size: str, trace_again: Callable[[], object]) -> tuple[str, bool]:
    """`" (model.py:7 in forward)"`, where the size became a constant, or ""; and whether in an operator that is called there."""
    logger, messages = logging.getLogger(SIZES_LOG), _Messages()
    before = logger.propagate, logger.handlers[:]
    logger.propagate, logger.handlers[:] = False, [messages]
    try:
        with log_level(SIZES_LOG, logging.INFO), suppress(Exception):  # the error that is described
            trace_again()
    finally:
        logger.propagate, logger.handlers[:] = before
    made = re.compile(rf"create_symbol (\w+) = \d+ for {re.escape(size)}")
    symbol = next((found[1] for text, *_ in messages.texts if (found := made.search(text))), None)
    for text, line, in_torch in messages.texts:
        if symbol and re.search(rf"eval Eq\({symbol}, \d+\) \[guard added\]", text):
            return line and f" ({line})", in_torch
    return "", False


def _line_of_model(text: str) -> tuple[str, bool]:
    """`model.py:7 in forward`, the innermost line of a model that is traced, or "", and whether torch is called there.

    text: what torch logs right now, with the line that it takes for the innermost.
    """
    if "[guard added]" not in text:
        return "", False
    iterates = False
    for frame, number in traceback.walk_stack(None):
        code = frame.f_code
        iterates |= code.co_name == "__iter__"  # of a tensor: a loop of the model, though the code is torch's
        if code.co_filename == _TRACER:
            break
        if not code.co_filename.startswith((_TORCH, _OWN, logging.__file__, "<")):
            line = f"{code.co_filename}:{number} in {code.co_name}"
            return line, not iterates and f"{os.path.basename(code.co_filename)}:{number} in " not in text
    return "", False


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
        after = _state_of(model)
        if after.keys() != before.keys() or any(after[place] is not before[place] for place in before):
            return trace()
    return None


def traced_by_code(
    error: BaseException,
    model: nn.Module,
    example: Inputs,
    dims: list[tuple[int, int]],
    trace: Callable[[], torch.export.ExportedProgram],
) -> torch.export.ExportedProgram | None:
    """Trace a model by reading its code, for which `len(x)`, and `int()` and `float()` of a size, are sizes that may vary.

    torch's usual trace runs the code, where Python makes constants of them. Reading it is slower, and not possible of all code,
    so it is tried where the model would be refused.

    Args:
        error: that tracing the model raised.
        model, example: what is traced, in eval mode; the caller puts back what the code sets.
        dims: those that vary, (leaf of the example, dimension).
        trace: does the same by reading the code.

    Returns the program; None where another error was raised, this fails too, or the program gives something else on the example.
    """
    if _CONSTANT.search(str(error)) is None:
        return None
    with suppress(Exception), log_level("torch._guards", logging.CRITICAL), log_level("torch._dynamo", logging.CRITICAL):
        program = trace()
        args, kwargs = ((), example) if isinstance(example, dict) else (example, {})
        arguments = dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)
        names = {id(leaf): pytree.keystr(path) for path, leaf in pytree.tree_flatten_with_path(arguments)[0]}
        sources = ["L" + names[id(leaf)] for leaf in pytree.tree_leaves((args, kwargs))]
        conditions = vars(program).get("_guards_code") or []
        numbered = re.compile(r"L\['flat_args'\]\[(\d+)\]")
        named = [numbered.sub(lambda found: sources[int(found[1])], code) for code in conditions]
        vars(program).update({"_guards_code": named} if conditions else {})
        if _OtherSizes(program, model, example, dims)._agrees_on_the_example:
            return program
    return None


def _state_of(model: nn.Module) -> dict[tuple[nn.Module, str], Any]:
    """The attributes and buffers of all modules. They are held, since a new object may get the id of one that is gone."""
    return {(module, name): value for module in model.modules() for name, value in {**module._buffers, **vars(module)}.items()}


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
    if shapes and first_time(type(model), ("sizes", *found)):
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
    a, b = without_fills(a, b)
    largest = float(a.nan_to_num(0.0, 0.0, 0.0).abs().max()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=0.0, atol=SAME * largest, equal_nan=True)


def _readable(condition: str) -> str:
    """`x.size(1) <= 10` of `L['x'].size()[1] <= 10`."""
    text = re.sub(r"L\['(\w+)'\]", r"\1", condition)
    return re.sub(r"\.size\(\)\[(\d+)\]", r".size(\1)", text)
