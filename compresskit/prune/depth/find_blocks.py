"""Find the residual blocks of a model that can be removed: modules whose input reaches their output through additions.

A block computes y = x + f(x), whatever its class. One eager run is recorded as a graph of operators; from the output of every
module a walk goes backwards through additions, and through what only passes values on (norms, ReLU, reshapes), until it meets an
input of the module. Where it does, and shape and dtype are the same, the block can be replaced by that input.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from compresskit.base.task import Inputs, call, first_rows
from compresskit.graph.capture import check_runs
from compresskit.graph.differences import relative_difference
from compresskit.graph.normalize import IDENTITIES, Node, aten
from compresskit.graph.replacements import Bypass
from compresskit.graph.rewrites.layer_numbers import numbers_without
from compresskit.graph.surgery import copy_model, mode
from compresskit.prune.structure.repeatable import repeatable, state_restored, vary_constants_
from compresskit.prune.structure.trace import OperatorRecorder, running_modules

ADDITIONS = {aten.add.Tensor, aten.add_.Tensor}
#: Operators that a removed block takes with it where they stand between its input and its output: BERT's layers end in a norm.
NORM_OPERATORS = {aten.layer_norm.default, aten.batch_norm.default, aten.group_norm.default, aten.instance_norm.default}
NORM_OPERATORS |= {aten.rms_norm.default, aten.native_layer_norm.default, aten.native_batch_norm.default}
#: Operators that change no value that is not negative. The proof shows whether they change one.
RECTIFIERS = {aten.relu.default, aten.relu_.default, aten.hardtanh.default, aten.hardtanh_.default, aten.clamp.default}
RECTIFIERS |= {aten.clamp_min.default, aten.relu6.default, aten.relu6_.default}
MOVES = {aten.view.default, aten.reshape.default, aten.permute.default, aten.transpose.int, aten.unsqueeze.default}
MOVES |= {aten.squeeze.dim, aten.unflatten.int, aten.flatten.using_ints, aten._to_copy.default, aten.to.dtype}
SAME_OUTPUTS = 1e-9  # of two runs of one model


@dataclass(frozen=True, kw_only=True)
class ResidualBlock:
    """A module that can be replaced by one of its inputs.

    path: its dotted name. argument: position or name of the input that is handed on.
    outputs, index: length of the tuple that it returns, and the place of the output in it; 0 where it returns a tensor.
    shape: of its input and output. parameters: values in its parameters.
    norms: how many norms on the way from input to output are removed with it.
    calls: how often a run calls it, as the encoder that both inputs of a Siamese network go through.
    skipped: numbers of the additions and norms on that way, counted over all operators of one run -> position of the argument
        that they would hand on.
    renumbers: whether layers behind it take the number of the one before each; not where outputs depend on such numbers.
    """

    path: str
    argument: int | str
    outputs: int
    index: int
    shape: tuple[int, ...]
    parameters: int
    norms: int
    skipped: dict[int, int] = field(repr=False)
    calls: int = 1
    renumbers: bool = True

    def bypass(self) -> Bypass:
        """The module that takes its place."""
        return Bypass(self.argument, self.outputs, self.index, renumbers=self.renumbers)


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """What `find_blocks` found: the blocks that can be removed, by path, and why others, their siblings, cannot."""

    removable: dict[str, ResidualBlock]
    locked: dict[str, str]

    def without(self, locked: dict[str, str]) -> Blocks:
        """The same with more blocks locked, each for its reason."""
        removable = {path: block for path, block in self.removable.items() if path not in locked}
        return Blocks(removable=removable, locked=self.locked | locked)


@dataclass(kw_only=True)
class _Call:
    """One call of a module: its tensor arguments and results as nodes, with their places and dtypes."""

    path: str
    arguments: dict[int | str, tuple[Node, torch.dtype]]
    results: dict[int, tuple[Node, torch.dtype]] = field(default_factory=dict)
    outputs: int = 0


def find_blocks(model: nn.Module, example: Inputs, *, ignore: tuple[str, ...] = ()) -> Blocks:
    """Find the blocks of a model that can be removed; the model is not changed.

    Args:
        model: any module that runs on the example.
        example: its inputs.
        ignore: dotted names of modules that stay, with all blocks inside.

    Raises ModelError where the model does not run on the example.
    """
    check_runs(model, example)
    calls, recorder = _record(model, first_rows(example, 2)) or _record(model, example) or ([], None)
    assert recorder is not None
    numbers = _operator_numbers(recorder)
    names = _names_by_module(model)
    removable: dict[str, ResidualBlock] = {}
    reasons: dict[str, str] = {}
    by_path: dict[str, list[_Call]] = {}
    for one in calls:
        by_path.setdefault(one.path, []).append(one)
    for path, those in by_path.items():
        module = model.get_submodule(path)
        if sum(p.ndim > 1 for p in module.parameters()) == 0:
            continue
        found = _block_of_all(those, module, recorder.shapes, numbers)
        if isinstance(found, str):
            reasons[path] = found
        elif len(names[id(module)]) > 1:
            reasons[path] = f"it is one module under {len(names[id(module)])} names"
        elif covered(path, ignore):
            reasons[path] = "ignore="
        else:
            removable[path] = found
    for path in sorted(removable, key=lambda path: -path.count(".")):  # the innermost first
        if _is_container(model, path, removable):
            del removable[path]
    if _numbers_count(model, example, removable):
        removable = {path: replace(block, renumbers=False) for path, block in removable.items()}
    return Blocks(removable=removable, locked=_siblings(model, removable, reasons))


def _record(model: nn.Module, example: Inputs) -> tuple[list[_Call], OperatorRecorder] | None:
    """Run the model once in eval mode and record its operators and the calls of its modules; None where it does not run."""
    recorder, calls = OperatorRecorder(model), list[_Call]()
    for value in pytree.tree_leaves(example):
        if isinstance(value, Tensor):
            recorder.add_input(value)
    try:
        with (
            mode(model, training=False),
            state_restored(model),
            torch.random.fork_rng(),
            torch.inference_mode(),
            running_modules(model, recorder.paths),
            recorder,
            _calls_recorded(model, recorder, calls),
        ):
            call(model, example)
    except Exception:
        return None
    return calls, recorder


def _numbers_count(model: nn.Module, example: Inputs, removable: dict[str, ResidualBlock]) -> bool:
    """Whether the model without a block gives something else where the layers behind it are numbered anew.

    A cache asks only which layer is which; an attention whose scores are divided by the number of its layer does not.
    """
    seen: set[str] = set()
    for path in outermost(removable):
        numbers = numbers_without(model, path)
        if numbers.keys() <= seen:
            continue
        small = copy_model(model).requires_grad_(False)
        vary_constants_(small)
        small.set_submodule(path, removable[path].bypass())
        if (wanted := _values_of(small, example)) is None:
            continue
        seen |= numbers.keys()
        layers: dict[str, Any] = dict(small.named_modules())
        for name in numbers.keys() & layers.keys():
            layers[name].layer_idx = numbers[name]
        got = _values_of(small, example)
        if got is None or [v.shape for v in got] != [v.shape for v in wanted]:
            return True
        if not all(relative_difference(a, b) <= SAME_OUTPUTS for a, b in zip(wanted, got, strict=True)):
            return True
    return False


def _values_of(model: nn.Module, example: Inputs) -> list[Tensor] | None:
    """The floating point tensors that a model gives for an example, or for two rows of it; None where it does not run."""
    for inputs in (first_rows(example, 2), example):
        with suppress(Exception), mode(model, training=False), torch.random.fork_rng(), torch.inference_mode(), repeatable(model):
            return [v for v in pytree.tree_leaves(call(model, inputs)) if isinstance(v, Tensor) and v.is_floating_point()]
    return None


@contextmanager
def _calls_recorded(model: nn.Module, recorder: OperatorRecorder, calls: list[_Call]) -> Iterator[None]:
    open_calls: list[_Call] = []

    def enter(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        tensors = {key: v for key, v in named if isinstance(v, Tensor)}
        open_calls.append(_Call(path=path, arguments={k: (recorder.node_of(v), v.dtype) for k, v in tensors.items()}))

    def leave(output: Any) -> None:
        one = open_calls.pop()
        several = isinstance(output, tuple | list)
        one.outputs = len(output) if several else 0
        tensors = enumerate(output if several else (output,))
        one.results = {i: (recorder.node_of(v), v.dtype) for i, v in tensors if isinstance(v, Tensor)}
        if several and any(v is not None and not isinstance(v, Tensor) for v in output):
            one.results = {}  # what else is in there cannot be given
        calls.append(one)

    handles = []
    for path, module in model.named_modules():
        if path:
            handles.append(
                module.register_forward_pre_hook(lambda _, args, kwargs, path=path: enter(path, args, kwargs), with_kwargs=True)
            )
            handles.append(module.register_forward_hook(lambda _, __, output: leave(output)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _operator_numbers(recorder: OperatorRecorder) -> dict[Node, int]:
    """The place of every operator in the order in which they ran."""
    ran = [n for n in recorder.graph.nodes if isinstance(n.target, OpOverload) and not n.meta.get("constant")]
    return {node: number for number, node in enumerate(ran)}


def _names_by_module(model: nn.Module) -> dict[int, list[str]]:
    names = defaultdict(list)
    for path, module in model.named_modules(remove_duplicate=False):
        names[id(module)].append(path)
    return names


def _block_of_all(
    calls: list[_Call], module: nn.Module, shapes: dict[str, tuple[int, ...]], numbers: dict[Node, int]
) -> ResidualBlock | str:
    """The block that all calls of a module are of, or why it is none."""
    found = [_block(one, module, shapes, numbers) for one in calls]
    blocks = [block for block in found if isinstance(block, ResidualBlock)]
    if len(blocks) < len(calls):
        return next(reason for reason in found if isinstance(reason, str))
    first = blocks[0]
    if any((b.argument, b.outputs, b.index) != (first.argument, first.outputs, first.index) for b in blocks):
        return f"it is called {len(calls)} times, in other ways"
    given = {node for one in calls for node, _ in one.results.values()}
    read = [node for one in calls for node, _ in one.arguments.values()]
    if len(calls) > 1 and given & _before(read):
        return f"it is called {len(calls)} times, one after another"  # its removal would take the whole depth
    return replace(first, calls=len(calls), skipped={n: p for block in blocks for n, p in block.skipped.items()})


def _block(one: _Call, module: nn.Module, shapes: dict[str, tuple[int, ...]], numbers: dict[Node, int]) -> ResidualBlock | str:
    """The block that a call is of, or why it is none."""
    if len(one.results) != 1:
        return f"it returns {len(one.results) or 'no'} tensors"
    index, (output, dtype) = next(iter(one.results.items()))
    shape = shapes[output.name]
    if not dtype.is_floating_point or not one.arguments:
        return "it takes or gives no floating point values"
    same = {key: node for key, (node, kind) in one.arguments.items() if shapes[node.name] == shape and kind == dtype}
    if not same:
        first = shapes[next(iter(one.arguments.values()))[0].name]
        return f"its output is {shape[1:]} where its input is {first[1:]}"
    for key, source in same.items():
        way = way_back(output, source, shapes)
        if way is None or not any(node.target in ADDITIONS for node, _ in way):
            continue
        if any(other is not source and source in _before([other]) for other, _ in one.arguments.values()):
            return "its branch begins outside of it"
        skipped = {numbers[node]: position for node, position in way if node.target in ADDITIONS | NORM_OPERATORS}
        return ResidualBlock(
            path=one.path,
            argument=key,
            outputs=one.outputs,
            index=index,
            shape=shape,
            parameters=sum(p.numel() for p in module.parameters()),
            norms=sum(node.target in NORM_OPERATORS for node, _ in way),
            skipped=skipped,
        )
    return "no addition leads from its input to its output"


def way_back(output: Node, source: Node, shapes: dict[str, tuple[int, ...]]) -> list[tuple[Node, int]] | None:
    """Operators from an output back to the source, with the position of the argument that the way takes; None without one."""
    stack: list[tuple[Node, list[tuple[Node, int]]]] = [(output, [])]
    seen = set()
    while stack:
        node, way = stack.pop()
        if node is source:
            return way
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        if node.target in ADDITIONS:
            operands = [(i, a) for i, a in enumerate(node.args[:2]) if isinstance(a, type(node))]
            if len({a for _, a in operands}) < len(operands):  # x + x is no way for x
                continue
            if node.kwargs.get("alpha", 1) != 1:  # a factor of the second operand
                operands = [(i, a) for i, a in operands if i == 0]
            stack += [(a, [*way, (node, i)]) for i, a in operands if shapes.get(a.name) == shapes.get(node.name)]
        elif node.target in NORM_OPERATORS | RECTIFIERS | MOVES | IDENTITIES:
            stack.append((node.args[0], [*way, (node, 0)]))
        elif (
            not isinstance(node.target, OpOverload) and node.args[0].target in NORM_OPERATORS and node.args[1] == 0
        ):  # of several results
            stack.append((node.args[0], way))
    return None


def _before(nodes: Collection[Node]) -> set[Node]:
    """Some values, and all that they are computed from."""
    stack, seen = list(nodes), set(nodes)
    while stack:
        inputs = [n for n in stack.pop().all_input_nodes if n not in seen]
        seen.update(inputs)
        stack += inputs
    return seen


def _is_container(model: nn.Module, path: str, removable: dict[str, ResidualBlock]) -> bool:
    """Whether a module is a list of blocks rather than a block: several are inside, or all of its weights are."""
    if isinstance(model.get_submodule(path), nn.Sequential):
        return True
    inside = [other for other in removable if other.startswith(f"{path}.")]
    outermost = [a for a in inside if not any(a.startswith(f"{b}.") for b in inside)]
    weights = {id(p) for other in inside for p in model.get_submodule(other).parameters()}
    return len(outermost) > 1 or {id(p) for p in model.get_submodule(path).parameters() if p.ndim > 1} <= weights


def _siblings(model: nn.Module, removable: dict[str, ResidualBlock], reasons: dict[str, str]) -> dict[str, str]:
    """Reasons of the modules that stand in a list of modules and have several weighted layers, as blocks have."""
    lists = {path for path, module in model.named_modules() if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)}
    locked = {}
    for path, reason in reasons.items():
        related = any(f"{other}.".startswith(f"{path}.") or path.startswith(f"{other}.") for other in removable)
        layers = sum(p.ndim > 1 for p in model.get_submodule(path).parameters())
        if reason == "ignore=" or (path.rpartition(".")[0] in lists and layers > 1 and not related):
            locked[path] = reason
    outer = [path for path in locked if not any(path.startswith(f"{other}.") for other in locked)]
    return {path: locked[path] for path in outer}


def inside(path: str, others: Collection[str]) -> bool:
    """Whether a module is a part of one of the others."""
    return any(path.startswith(f"{other}.") for other in others)


def covered(path: str, others: Collection[str]) -> bool:
    """Whether a module is one of the others, or a part of one."""
    return path in others or inside(path, others)


def outermost(paths: Collection[str]) -> tuple[str, ...]:
    """The paths that are not inside of another one."""
    return tuple(path for path in paths if not inside(path, paths))
