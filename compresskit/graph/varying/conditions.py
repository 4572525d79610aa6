"""Conditions under which a graph computes what its model does: it is right for some sizes of dimensions that should vary alone.

Where code decides by a size (`if length > 10`, `pad = -width % 8`) a trace follows the branch that the example takes, and keeps
the condition. Whether anything depends on it, a run of the model at a size that breaks it shows.
"""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from compresskit.base.task import Inputs, call, copied_tensors, shapes_of
from compresskit.graph.differences import without_fills
from compresskit.graph.interpreter import run_graph
from compresskit.graph.surgery import state_kept
from compresskit.graph.tracing import first_time
from compresskit.graph.varying.condition_syntax import holds, in_words

_ASSERTIONS = frozenset({torch.ops.aten._assert_scalar.default, torch.ops.aten._assert_async.msg})
#: Relative to the largest output: what two orders of the same sums differ by.
SAME = 1e-3
#: Sizes that are tried for one condition and for all, and how many times the example's the largest of them may be.
TRIALS, ALL_TRIALS, LARGEST = 6, 24, 4
#: Conditions that are looked at, of which windows of attention make a thousand, and that are told.
EXAMINED, TOLD = 200, 4
_NUMBER = re.compile(r"^[^%=]+ == \d+$")  # what something is at few sizes, unlike a remainder
_SIZE = re.compile(r"L(?:\['\w+'\]|\[\d+\])+\.size\(\)\[\d+\]")


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
    sizes = OtherSizes(program, model, example, dims)
    found: dict[str, str] = {}
    for condition in sorted(conditions, key=lambda code: not _NUMBER.search(code))[:EXAMINED]:  # these fix most; trials run out
        if len(found) < TOLD and (shapes := sizes.broken_by(condition, [*found])):
            found[condition] = shapes
    found = {condition: found[condition] for condition in conditions if condition in found}
    shapes = next(iter(found.values()), "") or sizes.differ_at_one()
    if shapes and first_time(type(model), ("sizes", *found)):
        where = " and ".join(map(in_words, found)) or "no size that varies is 1"
        warnings.warn(
            f"{type(model).__name__} decides by the sizes of its inputs: the graph of it, and a file, are right only where"
            f" {where}; for inputs of shape {shapes}, for one, the model gives something else. Take an example of the sizes that"
            " will come, the largest where a table grows with them; or leave the dimension out of dynamic=",
            stacklevel=4,
        )


class OtherSizes:
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
                held = functools.partial(holds, arguments=self._arguments(self._resized(group, size, device="meta")))
                if held(condition) or not all(map(held, known)):
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
            return not self._gives(inputs, wanted) and self.agrees_on_the_example

    @functools.cached_property
    def _unchecked(self) -> fx.GraphModule:
        """The graph without assertions and parts that nothing reads, which are not in a file either."""
        module = fx.GraphModule(self.program.graph_module, copy.deepcopy(self.program.graph))
        for node in list(module.graph.nodes):
            if node.target in _ASSERTIONS or (node.target is operator.getitem and not node.users):
                module.graph.erase_node(node)
        return module

    @functools.cached_property
    def agrees_on_the_example(self) -> bool:
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
    outputs = run_graph(module, given)  # called, the module would print the traceback of an error that is expected
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
