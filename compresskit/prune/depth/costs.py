"""What removing a block saves: `(model, example, blocks) -> {path: cost}`, larger = more is saved.

milliseconds   of the block in ONNX Runtime on this machine, one sample on one thread, in float or in another form: the default;
               of all of the example where its rows are no samples (see `timed_rows`)
macs           multiply-accumulates of one sample
parameters     of the block
"""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from compresskit.base.errors import first_line
from compresskit.base.progress import progress_bar
from compresskit.base.task import Inputs, call
from compresskit.export import export_onnx
from compresskit.graph.surgery import copy_model, frozen_copy, no_attention_fastpath
from compresskit.measure import count_macs, latency
from compresskit.mixed.compiled_model import as_written
from compresskit.prune.channels.candidates import Form
from compresskit.prune.depth.find_blocks import ResidualBlock
from compresskit.prune.depth.importance import bypassed
from compresskit.prune.structure.repeatable import timed_rows

log = logging.getLogger(__name__)

REPEATS = 3  # times that a block is run in a row in a file, beside a file that runs it once: loading a sample does not count
SECONDS = 0.5  # for each file

Cost = Callable[[nn.Module, Inputs, Mapping[str, ResidualBlock]], dict[str, float]]


def macs(model: nn.Module, example: Inputs, blocks: Mapping[str, ResidualBlock]) -> dict[str, float]:
    """Multiply-accumulates of one sample that the model does without each block."""
    model = frozen_copy(model)
    whole = count_macs(model, example)
    saved = {}
    for path, block in blocks.items():
        with bypassed(model, [block]):
            saved[path] = float(whole - count_macs(model, example))
    return saved


def parameters(model: nn.Module, example: Inputs, blocks: Mapping[str, ResidualBlock]) -> dict[str, float]:
    """Parameters of each block."""
    return {path: float(max(1, block.parameters)) for path, block in blocks.items()}


def milliseconds(
    model: nn.Module, example: Inputs, blocks: Mapping[str, ResidualBlock], form: Form | None = None
) -> dict[str, float]:
    """Milliseconds of each block for one sample: exported alone and run in ONNX Runtime on one thread.

    Blocks of the same layers and inputs are measured once, and count as often as the model calls them. Where one cannot be
    exported alone, all count their MACs instead, and a warning says so.
    form: what is measured of each block, such as `quant.quantize_static`; None measures it in float.
    """
    times = times_alone(model, example, blocks, form)
    return macs(model, example, blocks) if times is None else times


def times_alone(
    model: nn.Module, example: Inputs, blocks: Mapping[str, ResidualBlock], form: Form | None, *, instead: str = "MACs"
) -> dict[str, float] | None:
    """The milliseconds of `milliseconds`; None, and a warning, where a block cannot be measured alone.

    instead: what the caller compares blocks by then, for the warning.
    """
    model = frozen_copy(model)
    alike: dict[str, list[str]] = {}
    received = received_by(model, example, blocks)
    for path in blocks:
        shapes = pytree.tree_map(_argument_form, received[path], is_leaf=lambda v: not isinstance(v, tuple | list | dict))
        alike.setdefault(f"{model.get_submodule(path)} {shapes}", []).append(path)
    try:
        bar = progress_bar(alike.values(), desc="time blocks", unit="block")
        times = [_milliseconds(model, blocks[paths[0]], *received[paths[0]], form) for paths in bar]
    except Exception as error:  # whatever the exporter or the runtime raises
        log.warning(
            "blocks are compared by %s: %s cannot be measured alone (%s)", instead, type(model).__name__, first_line(error)
        )
        return None
    return {path: time * blocks[path].calls for paths, time in zip(alike.values(), times, strict=True) for path in paths}


def whole_milliseconds(model: nn.Module, example: Inputs, form: Form | None = None) -> float:
    """Milliseconds of a model for one sample, as `milliseconds` measures those of a block."""
    model = frozen_copy(model)
    with tempfile.TemporaryDirectory() as folder:
        file = export_onnx(model if form is None else form(model, example), Path(folder) / "model.onnx", example)
        return latency([file], timed_rows(model, example), seconds=SECONDS)[0]


def received_by(model: nn.Module, example: Inputs, paths: Iterable[str]) -> dict[str, tuple[Any, Any]]:
    """The arguments, by position and by name, that each of some submodules gets for one sample; see `timed_rows`.

    They are as the submodule got them: a cache of keys and values is still without those of this run.
    """
    received: dict[str, tuple[Any, Any]] = {}
    handles = [
        model.get_submodule(path).register_forward_pre_hook(
            lambda _, args, kwargs, path=path: received.update({path: _copied_arguments((args, kwargs))}), with_kwargs=True
        )
        for path in paths
    ]
    try:
        with torch.no_grad(), no_attention_fastpath(), as_written():
            call(model, timed_rows(model, example))
    finally:
        for handle in handles:
            handle.remove()
    return received


class _SharedTensors(TorchFunctionMode):
    """Inside the block, `copy.deepcopy` copies objects and shares their tensors; for parameters, see `_kept_whole`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.__deepcopy__ else func(*args, **(kwargs or {}))


def _copied_arguments(arguments: Any) -> Any:
    """Arguments of a call that another call of the same code does not change: a cache fills itself in each."""
    try:
        with _SharedTensors():
            return copy.deepcopy(arguments, _kept_whole(arguments))
    except Exception:  # whatever the classes of a user's objects raise
        return arguments


def _kept_whole(arguments: Any) -> dict[int, Any]:
    """The modules and parameters among arguments and in their objects, for `copy.deepcopy` not to copy; by their ids.

    An export takes a copy of a parameter that is made while it traces for no constant.
    """
    found: dict[int, Any] = {}
    seen = set[int]()
    left = [arguments]
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module | nn.Parameter):
            found[id(value)] = value
        elif isinstance(value, Mapping):
            left += value.values()
        elif isinstance(value, list | tuple | set):
            left += value
        elif not isinstance(value, Tensor | type | ModuleType):
            with suppress(TypeError):  # it has no attributes of its own
                left += vars(value).values()
    return found


def _argument_form(value: Any) -> Any:
    """What of an argument tells calls apart: the shape of a tensor, a number or string, the layers of a module, of any other
    object its class.
    """
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, nn.Module):
        return str(value)
    return value if isinstance(value, int | float | str) else type(value).__qualname__


class _InARow(nn.Module):
    """A block several times in a row, with the other arguments that it got as constants, in every call as it got them."""

    def __init__(
        self, module: nn.Module, block: ResidualBlock, args: tuple[Any, ...], kwargs: dict[str, Any], times: int
    ) -> None:
        super().__init__()
        self.module, self.block, self.args, self.kwargs, self.times = module, block, args, kwargs, times

    def forward(self, x: Tensor) -> Tensor:
        """The block's output after several calls."""
        for _ in range(self.times):
            given, kwargs = _copied_arguments((self.args, self.kwargs))
            args = list(given)
            if isinstance(self.block.argument, int):
                args[self.block.argument] = x
            else:
                kwargs[self.block.argument] = x
            output = self.module(*args, **kwargs)
            x = output[self.block.index] if self.block.outputs else output
        return x


def _milliseconds(
    model: nn.Module, block: ResidualBlock, args: tuple[Any, ...], kwargs: dict[str, Any], form: Form | None
) -> float:
    module = copy_model(model.get_submodule(block.path))
    x = args[block.argument] if isinstance(block.argument, int) else kwargs[block.argument]
    rows = [_InARow(module, block, args, kwargs, times).eval() for times in (1, 1 + REPEATS)]
    with tempfile.TemporaryDirectory() as folder:
        files = [
            export_onnx(row, Path(folder) / f"{row.times}.onnx", (x,), dynamic=())
            if form is None
            else export_onnx(form(row, (x,)), Path(folder) / f"{row.times}.onnx", (x,))
            for row in rows
        ]
        once, often = latency(files, (x,), seconds=SECONDS)
    # Noise may make the difference vanish; a part of the whole is then nearer.
    return max((often - once) / REPEATS, 0.2 * once)
