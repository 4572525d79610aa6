"""Find the weights of a graph that can be rounded, and report how each one is stored.

weights_of(graph)     every weight matrix, the operators that read it, and why it cannot be rounded
WeightPlan            how each weight is stored in the file; `print(quantized.plan)`
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor, fx

from compresskit.graph.capture import module_path, parameter_name
from compresskit.graph.layers.stored import CONVS
from compresskit.graph.normalize import Node, aten
from compresskit.graph.surgery import get_tensor
from compresskit.metrics import decibels
from compresskit.quant.numerics.operators import PRODUCTS


@dataclass(frozen=True, kw_only=True)
class GraphWeight:
    """A weight of a graph and the operators that read it.

    name: of the parameter.
    kind: "product", "embedding", "conv", or "" where it cannot be rounded; then `reason` says why.
    axis: its dimension of inputs.
    readers: names of the nodes that read it.
    layer: dotted name of the module whose forward holds the first of them.
    looked_up: whether rows of it are looked up, beside products or alone.
    """

    name: str
    kind: str
    axis: int
    readers: tuple[str, ...]
    layer: str
    reason: str = ""
    looked_up: bool = False


def weights_of(module: fx.GraphModule) -> list[GraphWeight]:
    """Return every floating point parameter of two or more dimensions, in the order in which the graph reads them."""
    reads: dict[str, list[tuple[Node, Node]]] = {}
    for node in module.graph.nodes:
        name = parameter_name(node)
        if name is not None and get_tensor(module, name).ndim >= 2 and get_tensor(module, name).is_floating_point():
            reads.setdefault(name, []).extend((node, user) for user in node.users)
    return [_graph_weight(name, uses) for name, uses in reads.items() if uses]


def _graph_weight(name: str, uses: list[tuple[Node, Node]]) -> GraphWeight:
    """uses: (node of the weight, node that reads it)."""
    roles = [_role(weight, user) for weight, user in uses]
    readers, layer = tuple(user.name for _, user in uses), module_path(uses[0][1])
    reason = next((reason for kind, _, reason in roles if not kind), "")
    if not reason and len({axis for _, axis, _ in roles}) > 1:
        reason = "its readers take it with different dimensions for the inputs"
    kinds = [kind for kind, _, _ in roles]
    kind = "" if reason else "product" if "product" in kinds else kinds[0]
    looked_up = "embedding" in kinds
    return GraphWeight(name=name, kind=kind, axis=roles[0][1], readers=readers, layer=layer, reason=reason, looked_up=looked_up)


def _role(weight: Node, user: Node) -> tuple[str, int, str]:
    """(kind, dimension of inputs, why it cannot be rounded) for one reader of a weight."""
    value = weight.meta["val"]
    if user.target in PRODUCTS and value.ndim == 2:
        _, place, axis = PRODUCTS[user.target]
        if len(user.args) > place and user.args[place] is weight and user.args.count(weight) == 1:
            if user.target is aten.addmm.default and user.kwargs:
                return "", 0, "it is scaled inside the operator that reads it"
            return "product", axis, ""
    if user.target is aten.embedding.default and user.args[0] is weight:
        return "embedding", 1, ""
    if user.target in CONVS and user.args[1] is weight:
        return "conv", 1, ""
    return "", 0, f"{user.target} reads it"


@dataclass(frozen=True, kw_only=True)
class WeightRow:
    """One weight: how it is stored, or why it stays float.

    name: of the parameter. layer: dotted name of the module that reads it. runs: its number format, or "float: " and the reason.
    parameters: how many weights it has. bytes: its size in the file, scales included.
    sqnr: signal-to-quantization-noise ratio of the rounded weight in dB; None for a float or a rescaled one.
    note: a remark, such as padding or AWQ's scaling.
    """

    name: str
    layer: str
    runs: str
    parameters: int
    bytes: int
    sqnr: float | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class WeightPlan:
    """How every weight of a model is stored; prints as a table."""

    rows: tuple[WeightRow, ...] = field(default_factory=tuple)

    @property
    def bytes(self) -> int:
        """Size of all weights in the file, in bytes."""
        return sum(row.bytes for row in self.rows)

    def __str__(self) -> str:
        fp32_bytes = 4 * sum(row.parameters for row in self.rows)
        fraction = f", {self.bytes / fp32_bytes:.1%} of fp32" if fp32_bytes else ""
        table = [("weight", "stored as", "parameters", "SQNR dB", "note")]
        table += [(r.name, r.runs, f"{r.parameters:,}", "" if r.sqnr is None else f"{r.sqnr:.1f}", r.note) for r in self.rows]
        widths = [max(len(cells[i]) for cells in table) for i in range(4)]
        lines = [
            "  "
            + "  ".join(c.rjust(w) if i in (2, 3) else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=False)))
            + (f"  {cells[4]}" if cells[4] else "")
            for cells in table
        ]
        rounded = sum(not row.runs.startswith("float") for row in self.rows)
        return "\n".join(
            [f"{rounded} of {len(self.rows)} matrices rounded, {self.bytes:,} bytes{fraction}", *map(str.rstrip, lines)]
        )

    def to_json(self) -> list[dict[str, Any]]:
        """JSON-ready record."""
        return [asdict(row) for row in self.rows]

    @staticmethod
    def from_json(saved: Any) -> WeightPlan:
        """Read the record that `to_json` wrote."""
        return WeightPlan(rows=tuple(WeightRow(**row) for row in saved))


def sqnr(exact: Tensor, rounded: Tensor) -> float:
    """Signal-to-quantization-noise ratio in dB; 200 where there is no noise."""
    exact, rounded = exact.detach().double(), rounded.detach().double()
    return decibels(float(exact.square().sum()), float((exact - rounded).square().sum()), most=200.0)
