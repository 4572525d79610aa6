"""Other ways to trace a model where the usual one takes a dimension that should vary for a constant."""

from __future__ import annotations

import inspect
import logging
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from compresskit.base.task import Inputs, call, copied_tensors
from compresskit.graph.tracing import log_level
from compresskit.graph.varying.conditions import OtherSizes
from compresskit.graph.varying.constant_sizes import takes_constant


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
    if not takes_constant(error):
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
    if not takes_constant(error):
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
        if OtherSizes(program, model, example, dims).agrees_on_the_example:
            return program
    return None


def traced_with_len(
    error: BaseException, model: nn.Module, trace: Callable[[], torch.export.ExportedProgram]
) -> torch.export.ExportedProgram | None:
    """Trace a model by running its code, in which `len(x)` of a tensor is `x.shape[0]`, a size that may vary.

    For models of packed sequences, which torch does not follow by reading the code. It is so in the files of the model's classes.

    Args:
        error: that tracing the model raised.
        model: what is traced.
        trace: does the same once more.

    Returns the program; None where another error was raised, or this fails, too.
    """
    if not takes_constant(error):
        return None
    names = {cls.__module__ for module in model.modules() for cls in type(module).__mro__}
    own = [
        vars(sys.modules[name]) for name in names if name in sys.modules and name.partition(".")[0] not in ("torch", "builtins")
    ]
    files = [file for file in own if "len" not in file]
    try:
        for file in files:
            file["len"] = _len
        with suppress(Exception):
            return trace()
    finally:
        for file in files:
            del file["len"]
    return None


def _len(value: Any) -> Any:
    return value.shape[0] if isinstance(value, torch.Tensor) and value.ndim else len(value)


def _state_of(model: nn.Module) -> dict[tuple[nn.Module, str], Any]:
    """The attributes and buffers of all modules. They are held, since a new object may get the id of one that is gone."""
    return {(module, name): value for module in model.modules() for name, value in {**module._buffers, **vars(module)}.items()}
