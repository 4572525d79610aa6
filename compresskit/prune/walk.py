"""Walk a captured graph once and find which channels live and die together."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from compresskit.graph import Captured, module_path
from compresskit.normalize import Node, aten
from compresskit.prune.moves import MOVES
from compresskit.prune.rules import ARITHMETIC, Raw
from compresskit.prune.units import Units, compact, nothing
from compresskit.surgery import get_tensor

RULES = ARITHMETIC | MOVES


class Walk:
    """The state of one walk: labels so far, and what rules ask of it."""

    def __init__(self, captured: Captured) -> None:
        self.captured, self.shapes, self.units = captured, captured.shapes, Units()
        self.pinned: dict[str, str] = {}
        self.tensors: list[Any] = []  # operands of the operator at hand
        #: Reshapes to sizes written as constants: code that may break once a width has changed. (labels, reason)
        self.suspects: list[tuple[Tensor, str]] = []

    def run(self) -> Units:
        """Label every activation; returns the units with their members and locks."""
        env: dict[Node, Any] = {}
        last_use = {a: node for node in self.captured.module.graph.nodes for a in node.all_input_nodes}
        for node in self.captured.module.graph.nodes:
            env[node] = self._visit(node, env)
            for used in node.all_input_nodes:
                if last_use[used] is node:
                    del env[used]
        for member in list(self.units.members):
            if member.tensor in self.pinned:
                self.units.lock(member.labels, self.pinned[member.tensor])
        return self.units

    def _visit(self, node: Node, env: dict[Node, Any]) -> Any:
        if node.op == "placeholder":
            return nothing(self.shapes[node.name]) if node.name in self.shapes else None
        if node.op == "get_attr":
            shape = self.shapes[node.name]
            return Raw(str(node.target), torch.arange(int(torch.tensor(shape).prod())).view(shape))
        args = fx.map_arg(node.args, lambda n: env[n])
        kwargs = fx.map_arg(node.kwargs, lambda n: env[n])
        tensors = [v for v in _leaves((args, kwargs)) if isinstance(v, Tensor | Raw)]
        if node.op == "output":
            for value in tensors:
                if isinstance(value, Tensor):
                    self.units.lock(value, "an output of the model")
            return None
        if node.target is aten.sym_size.int:
            return args[0].shape[args[1]]
        if not tensors:
            return nothing(self.shapes[node.name]) if node.name in self.shapes else node.target(*args, **kwargs)  # type: ignore[operator]
        if node.target is operator.getitem:
            return args[0][args[1]]
        rule = RULES.get(node.target)
        self.tensors = tensors
        if rule is not None:
            return rule(self, node, args, kwargs)  # type: ignore[arg-type]
        return self.give_up(node, f"no rule for {node.target} ({module_path(node) or 'the model'})")

    # -- what rules ask for

    def shape(self, node: Node) -> tuple[int, ...]:
        """Concrete shape of a node's value."""
        return self.shapes[node.name]

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a parameter or buffer."""
        return tuple(get_tensor(self.captured.module, name).shape)

    def where(self, node: Node) -> str:
        """`add in layer1.0`: an operator as a person would look for it."""
        kind = str(node.target).removeprefix("aten.").split(".")[0]
        return f"{kind} in {'.'.join(p for p in (self.captured.prefix, module_path(node)) if p) or 'the model'}"

    def along(self, value: Any, dim: int) -> Tensor:
        """One label for each index of `dim`; units that share an index of it become one."""
        if isinstance(value, Raw):
            self.pin(value.name, "used as if it were an activation")
            return torch.zeros(value.elements.shape[dim], dtype=torch.long)
        size = value.shape[dim]
        rows = compact(value).movedim(dim, 0)
        rows = rows.reshape(rows.shape[0], -1)
        if rows.shape[1] > 1:
            self.units.join(rows[:, :1], rows, "positions of one channel that cannot all be cut")
        return rows.amax(1).expand(size)

    def bias(self, bias: Any, labels: Tensor, node: Node) -> None:
        """The bias goes with the outputs."""
        if isinstance(bias, Raw) and not bias.moved:
            self.units.member(bias.name, 0, labels, "with")
        elif bias is not None:
            self.units.lock(labels, f"the bias of {self.where(node)} is computed in the forward pass")

    def pin(self, tensor: str, reason: str) -> None:
        """Never cut this parameter."""
        self.pinned.setdefault(tensor, reason)

    def give_up(self, node: Node, reason: str) -> Any:
        """Lock every channel that reaches an operator; its outputs are new values that cannot be cut."""
        for value in self.tensors:
            if isinstance(value, Raw):
                self.pin(value.name, reason)
            else:
                self.units.lock(value, reason)
        result = node.meta.get("val")
        if isinstance(result, list | tuple):
            return [nothing(tuple(int(s) if isinstance(s, int) else 2 for s in v.shape)) for v in result]
        return nothing(self.shapes[node.name]) if node.name in self.shapes else None

    def suspect(self, node: Node, labels: Tensor, sizes: Any) -> None:
        """Note a reshape to a constant that is the size of something labelled."""
        wanted = [s for s in _leaves(sizes) if type(s) is int and s > 1]
        if wanted and bool((labels > 0).any()) and "reshape" in str(node.target):
            self.suspects.append((compact(labels), f"{self.where(node)} to sizes written in the code"))


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for entry in value.values() for leaf in _leaves(entry)]
    if isinstance(value, list | tuple):
        return [leaf for entry in value for leaf in _leaves(entry)]
    return [value]
