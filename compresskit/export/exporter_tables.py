"""torch's ONNX exporter with its tables built once in a process, instead of once in every call, and without a second trace.

Every call of `torch.onnx.export` parses the source of the 500 translations of onnxscript again, and looks up every composite
operator of torch once for each namespace. Neither depends on the model. It traces every program a second time, which few need;
see `decompositions`. It tries every rewrite rule at every node, and a rule of several outputs lists the whole graph each time.
All are internals of torch and onnxscript, so a release that has them elsewhere is left as it is: slower, same result. One thing
changes what is written: constants are matched exactly, so that a small number that is added is not taken for nothing.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

from compresskit.export.decompositions import replace_or


@contextlib.contextmanager
def quick_exporter() -> Iterator[None]:
    """While it lasts, `torch.onnx.export` takes translations from memory, and traces only what it must."""
    with contextlib.ExitStack() as stack:
        if registry := _holder("torch.onnx._internal.exporter._registration.ONNXRegistry", "from_torchlib"):
            stack.enter_context(_patched(registry, "from_torchlib", staticmethod(_copier(registry.from_torchlib))))
        if operators := _holder("torch._export.utils", "_materialize_cpp_cia_ops"):
            # Of this call only: a user may define operators before the next.
            once = functools.cache(operators._materialize_cpp_cia_ops)
            stack.enter_context(_patched(operators, "_materialize_cpp_cia_ops", once))
        if passes := _holder("torch.onnx._internal.exporter._fx_passes", "decompose_with_registry"):
            stack.enter_context(_patched(passes, "decompose_with_registry", replace_or(passes.decompose_with_registry)))
        if rule := _holder("onnxscript.rewriter._rewrite_rule.RewriteRule", "try_rewrite"):
            stack.enter_context(_patched(rule, "try_rewrite", _tried_where_it_fits(rule.try_rewrite)))
        if matcher := _holder("onnxscript.rewriter._matcher.SimplePatternMatcher", "_match_constant"):
            stack.enter_context(_patched(matcher, "_match_constant", _matched_exactly(matcher._match_constant)))
        yield


def _holder(path: str, name: str) -> Any:
    """The module or class at `path` if this release of torch has it and it defines `name`, else None."""
    module, _, leaf = path.rpartition(".")
    holder: Any = None
    with contextlib.suppress(ImportError):
        holder = vars(importlib.import_module(module)).get(leaf)
        holder = importlib.import_module(path) if holder is None else holder  # a module that nothing has imported yet
    return holder if holder is not None and name in vars(holder) else None


@contextlib.contextmanager
def _patched(holder: Any, name: str, function: Any) -> Iterator[None]:
    original = vars(holder)[name]  # not `getattr`, which unwraps a class method
    setattr(holder, name, function)
    try:
        yield
    finally:
        setattr(holder, name, original)


def _tried_where_it_fits(try_rewrite: Callable[..., Any]) -> Callable[..., Any]:
    """Tries a rule only at nodes of the operator that its pattern ends in."""

    def tried(rule: Any, model: Any, graph: Any, node: Any, **settings: Any) -> Any:
        try:
            last = rule._target_pattern.output_nodes[0]
            fits = last.domain.matches(node.domain) and last.op.matches(node.op_type)
        except AttributeError:  # another release
            fits = True
        if not fits:
            return None
        return try_rewrite(rule, model, graph, node, **settings)

    return tried


def _matched_exactly(match: Callable[..., bool]) -> Callable[..., bool]:
    """Takes no other number for the 0 or 1 of a rule: `x + 0` matched `x + 1e-8`, which keeps quotients and logarithms finite."""

    def matched(matcher: Any, pattern: Any, value: Any) -> bool:
        found = match(matcher, pattern, value)
        if found and pattern.value in (0, 1) and value.const_value.numpy().item() != pattern.value:
            return bool(matcher.fail(f"{value.name} is not exactly {pattern.value}"))
        return found

    return matched


def _copier(build: Callable[..., Any]) -> Callable[..., Any]:
    """Gives copies of what `build` made first, because a call of the exporter adds its own translations."""

    def copied(*args: Any, **kwargs: Any) -> Any:
        registry = copy.copy(_built(build, args, tuple(kwargs.items())))
        registry.functions = {target: list(found) for target, found in registry.functions.items()}
        return registry

    return copied


@functools.cache
def _built(build: Callable[..., Any], args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> Any:
    return build(*args, **dict(kwargs))
