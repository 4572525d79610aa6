"""Rename modules and tensors of a model whose names a `fx.GraphModule` has for itself, such as `graph`, `code` or `meta`."""

from __future__ import annotations

import itertools

from torch import fx, nn
from torch.export import ExportedProgram

#: Attributes of every graph module: no tensor of a user can be stored in one under such a name.
RESERVED = frozenset(dir(fx.GraphModule(nn.Module(), fx.Graph())))


def reserved_names(model: nn.Module) -> dict[str, str]:
    """First part of each dotted name of the model that is reserved -> what takes its place in the graph: `graph` -> `graph_1`."""
    own = {name.partition(".")[0] for name, _ in itertools.chain(model.named_parameters(), model.named_buffers())}
    own |= {name for name, _ in model.named_children()}
    renamed: dict[str, str] = {}
    for name in sorted(own & RESERVED):
        tried = (f"{name}_{i}" for i in itertools.count(1))
        renamed[name] = next(free for free in tried if free not in own and free not in RESERVED)
    return renamed


def rename_first(name: str, renamed: dict[str, str]) -> str:
    """A dotted name with its first part renamed, where it is one of those in `renamed`."""
    first, *rest = name.split(".")
    return ".".join([renamed.get(first, first), *rest])


def rename_reserved_(program: ExportedProgram, renamed: dict[str, str]) -> None:
    """Rename the parameters, buffers and constants of an exported program, in place; see `reserved_names`."""
    if not renamed:
        return
    for spec in (*program.graph_signature.input_specs, *program.graph_signature.output_specs):
        if spec.target is not None:
            spec.target = rename_first(spec.target, renamed)
    for tensors in (program.state_dict, program.constants):
        for name in [name for name in tensors if name.partition(".")[0] in renamed]:
            tensors[rename_first(name, renamed)] = tensors.pop(name)
