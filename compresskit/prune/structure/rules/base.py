"""What pruning rules are written with: the operator at hand, what propagation has found so far, and the table of rules.

A rule is a function `(call: OperatorCall) -> labels of the result`, entered with `@rule_for(operators)`:

    @rule_for(aten.linear.default)
    def rule_linear(call: OperatorCall) -> RuleResult:
        x, weight = call.args[:2]
        ...

An operator without a rule locks every channel that reaches it: an unknown operator costs sparsity, never correctness.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from compresskit.graph.normalize import Node, aten
from compresskit.graph.surgery import get_tensor
from compresskit.prune.structure.channel_sets import (
    UNCONSTRAINED,
    ChannelSets,
    Role,
    collapse,
    collapse_expanded,
    expand_along,
    fixed_labels,
)
from compresskit.prune.structure.constraints import (
    AxisSplit,
    ChannelCut,
    ChannelStatistic,
    ComputedWeight,
    DependsOnAll,
    HardCodedSize,
    SizeAttribute,
    WidthScaling,
)
from compresskit.prune.structure.rules.parameter_view import ParameterAxis, ParameterView
from compresskit.prune.structure.trace import Trace

#: Labels of an activation, or a view of a parameter.
Labelled = Tensor | ParameterView
#: What a rule returns: the labels of the result, or of each of several results; None where the result is no tensor.
RuleResult = Labelled | Sequence[Labelled] | None

#: Operators that give the same values, as far as channels are concerned.
IDENTITY_OPERATORS = """dropout feature_dropout alpha_dropout feature_alpha_dropout contiguous clone alias detach lift_fresh
 lift_fresh_copy to _to_copy type_as"""
#: Operators that only move values, or copy them.
MOVING_OPERATORS = """reshape view flatten unflatten permute transpose squeeze unsqueeze expand repeat t mT movedim moveaxis
 pixel_unshuffle roll expand_as tile repeat_interleave view_as reshape_as swapaxes swapdims numpy_T atleast_2d _unsafe_view
 adjoint unfold ravel"""
#: Those of them whose numbers are dimensions or distances, and no sizes.
_NAME_DIMS = frozenset("flatten permute transpose squeeze unsqueeze movedim moveaxis roll swapaxes swapdims".split())
#: Operators whose results hold nothing but values of their first argument.
_SAME_VALUES = frozenset(f"{IDENTITY_OPERATORS} {MOVING_OPERATORS} slice select narrow split unbind chunk zeros_like".split())


class ChannelPropagation:
    """What propagation over a trace finds: the channel sets, the constraints on them, and what operators cost.

    sets: union-find over the labels of channels. locked_tensors: parameter -> why it is never cut.
    unfollowed_weights: those of them that are weights of layers whose rule gave up.
    splits ... size_attributes: see `constraints.py`.
    costs: MACs of one sample of an operator, and the labels along the dimensions that they are a product of.
    linear_layers: (path, labels of the outputs, labels of the inputs) of each linear layer. conv_layers: of each convolution.
    The rest is state of the propagation: `shapes` of the run at hand, whether it is the `main_run`, `calls` of each operator so
    far, `blank` nodes (tensors that were made to be written into and hold nothing yet), `products` that sum over channels,
    `data_free` nodes (computed from nothing but parameters and constants), and, where two channels make a complex number, the
    label of the `imaginary` part by that of the real one, which stands for both. `copies`: node -> the dimensions along which a
    value without channels, such as a mask, repeats itself.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace, self.sets = trace, ChannelSets()
        self.locked_tensors: dict[str, str] = {}
        self.unfollowed_weights: set[str] = set()
        self.splits: list[AxisSplit] = []
        self.dependencies: list[DependsOnAll] = []
        self.hard_coded_sizes: list[HardCodedSize] = []
        self.cuts: list[ChannelCut] = []
        self.width_scalings: list[WidthScaling] = []
        self.statistics: list[ChannelStatistic] = []
        self.computed_weights: list[ComputedWeight] = []
        self.size_attributes: list[SizeAttribute] = []
        self.costs: list[tuple[float, list[Tensor]]] = []
        self.linear_layers: list[tuple[str, Tensor, Tensor]] = []
        self.conv_layers: list[tuple[str, Tensor, Tensor]] = []
        self.shapes, self.main_run = trace.shapes, True
        self.calls: Counter[Any] = Counter()
        self.blank: set[Node] = set()
        self.data_free: set[Node] = set()
        self.copies: dict[Node, frozenset[int]] = {}
        self.products: dict[Node, tuple[Tensor, int, bool]] = {}
        self.imaginary: dict[int, int] = {}
        self._axis_labels: dict[tuple[str, int], Tensor] = {}
        self._axes_of_computed: set[tuple[str, int]] = set()

    def size(self, tensor: str, dim: int) -> int:
        """Size of a dimension of a parameter or buffer."""
        return get_tensor(self.trace.module, tensor).shape[dim]

    def axis_labels(self, tensor: str, dim: int, *, computed: bool = False) -> Tensor:
        """Labels of a parameter's own along one of its dimensions; new ones at the first call.

        computed: a value is computed from the parameter; whether the dimension is one of channels is not known yet.
        """
        if (tensor, dim) not in self._axis_labels:
            self._axis_labels[tensor, dim] = self.sets.fresh(self.size(tensor, dim))
            self.sets.add_axis(tensor, dim, self._axis_labels[tensor, dim], "with")
            if computed:
                self._axes_of_computed.add((tensor, dim))
        if not computed:
            self._axes_of_computed.discard((tensor, dim))
        return self._axis_labels[tensor, dim]

    def drop_axes_without_channels(self) -> None:
        """Forget the labels of dimensions of computed weights that turned out to have no channels, such as a kernel's height."""
        records = Counter((axis.tensor, axis.dim) for axis in self.sets.axes)
        alone = {key for key in self._axes_of_computed if records[key] == 1}
        if not alone:
            return
        others = [self.sets.roots(axis.labels) for axis in self.sets.axes if (axis.tensor, axis.dim) not in alone]
        met = torch.cat(others) if others else torch.zeros(0, dtype=torch.long)
        self.sets.axes = [
            axis
            for axis in self.sets.axes
            if (axis.tensor, axis.dim) not in alone or bool(torch.isin(self.sets.roots(axis.labels), met).any())
        ]

    def lock_tensor(self, tensor: str, reason: str) -> None:
        """Never cut this parameter; the first reason counts."""
        self.locked_tensors.setdefault(tensor, reason)

    def lock_value(self, value: Labelled, reason: str) -> None:
        """Lock all channels of a value: those of its labels, or the parameter that it is."""
        if isinstance(value, ParameterView):
            self.lock_tensor(value.name, reason)
        else:
            self.sets.lock(value, reason)


class OperatorCall:
    """One operator of the trace as its rule sees it.

    args, kwargs: its arguments, with labels in place of activations and a `ParameterView` in place of parameters.
    state: the propagation, where rules join and lock channel sets (`sets`) and record constraints.
    """

    def __init__(self, state: ChannelPropagation, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.state, self.node, self.args, self.kwargs = state, node, args, kwargs
        self.sets, self.target = state.sets, node.target

    # -- the operator

    @property
    def path(self) -> str:
        """The module in whose forward the operator ran."""
        return str(self.node.meta.get("path", ""))

    @property
    def module(self) -> nn.Module:
        """That module."""
        return self.state.trace.module.get_submodule(self.path)

    @property
    def kind(self) -> str:
        """The operator's name: `add` for `aten.add_.Tensor`."""
        return operator_name(self.target).rstrip("_")

    @property
    def where(self) -> str:
        """`add in layer1.0`: the operator as a person would look for it."""
        return self._where(self.node)

    def _where(self, node: Node) -> str:
        kind, path = operator_name(node.target).rstrip("_"), str(node.meta.get("path", ""))
        return f"{kind} in {'.'.join(p for p in (self.state.trace.prefix, path) if p) or 'the model'}"

    @property
    def has_one_result(self) -> bool:
        """Whether the result is one tensor."""
        return self.node.name in self.state.shapes

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result, where it is one tensor."""
        return self.state.shapes[self.node.name]

    @property
    def part_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the results, where there are several."""
        shapes: list[tuple[int, ...]] = self.node.meta["parts"]
        return shapes

    @property
    def is_data_free(self) -> bool:
        """Whether it reads nothing but parameters, constants, and what is computed from them."""
        return all(node in self.state.data_free for node in self.node.all_input_nodes)

    def expand_along(self, vector: Tensor, dim: int) -> Tensor | list[Tensor]:
        """Labels of the result, or of each of the results, with `vector` along `dim`."""
        if self.has_one_result:
            return expand_along(vector, dim, self.shape)
        return [expand_along(vector, dim, shape) for shape in self.part_shapes]

    def argument(self, name: str, default: Any = None) -> Any:
        """An argument by name, however it was passed."""
        if name in self.kwargs:
            return self.kwargs[name]
        for position, entry in enumerate(self.target._schema.arguments):
            if entry.name == name:
                return self.args[position] if position < len(self.args) else entry.default_value
        return default

    def is_blank(self, node: Any) -> bool:
        """Whether a node makes a tensor only to be written into (zeros, empty)."""
        if node.op != "call_function" or node.meta.get("constant"):
            return False
        kind = operator_name(node.target).removeprefix("new_")
        return node in self.state.blank or kind in ("zeros", "ones", "empty", "full", "zeros_like")

    def blank_behind(self, node: Any) -> Node | None:
        """The node that made a blank tensor of which `node` is a copy, a view or a part, as of a first state; None for others.

        A tensor into which values were written by way of a view is not blank.
        """
        made = None
        while isinstance(node, fx.Node) and node.op == "call_function":
            if self.is_blank(node):
                made = node
            if not _has_same_values(node):
                break
            node = node.args[0]
        return None if made is None or _is_written_by_a_view(made) else made

    def take_copies(self, dims: Iterable[int]) -> None:
        """The result repeats itself along these dimensions."""
        if found := frozenset(dims):
            self.state.copies[self.node] = found

    # -- labels of what it reads

    def first_of_copies(self, value: Tensor, node: Any) -> Tensor:
        """The labels of an argument; of one without channels that repeats itself, those of one copy: it takes any width there."""
        if (dims := self.state.copies.get(node)) and not bool((collapse_expanded(value) != 0).any()):
            for dim in dims:
                value = value.narrow(dim, 0, 1)
        return value

    def labels_along(self, value: Any, dim: int) -> Tensor:
        """One label for each index of `dim`; sets that share an index of it are joined.

        A first state of zeros has labels of its own: what is read in its place in the next step says which channels they are.
        """
        if isinstance(value, ParameterView):
            if (labels := self._channels_of_parameter(value, dim)) is not None:
                return labels
            self.state.lock_tensor(value.name, "used as if it were an activation")
            return torch.zeros(value.shape[dim], dtype=torch.long)
        if (made := self._blank_behind_labels(value)) is not None:
            return self.labels_of_blank(made, tuple(value.shape), dim)
        size = value.shape[dim]
        rows = collapse(value).movedim(dim, 0)
        rows = rows.reshape(rows.shape[0], -1)
        if rows.shape[1] > 1:
            self.sets.join(rows[:, :1], rows, "positions of one channel that cannot all be cut")
        return (rows.amax(1) if rows.shape[1] else rows.new_zeros(len(rows))).expand(size)

    def _blank_behind_labels(self, value: Tensor) -> Node | None:
        """`blank_behind` of the argument that has these labels, where they are zeros."""
        if bool((collapse_expanded(value) != 0).any()):
            return None
        labels, nodes = (pytree.tree_leaves(v) for v in ((self.args, self.kwargs), (self.node.args, self.node.kwargs)))
        return next((self.blank_behind(n) for v, n in zip(labels, nodes, strict=True) if v is value), None)

    def labels_of_blank(self, made: Node, shape: tuple[int, ...], dim: int) -> Tensor:
        """(shape[dim],) new labels along a dimension of a blank tensor that `made` made, in this shape."""
        if shape[dim] < 2:
            return torch.zeros(shape[dim], dtype=torch.long)
        labels = self.sets.fresh(shape[dim])
        self.add_size_of_blank(made, expand_along(labels, dim, shape))
        return labels

    def _channels_of_parameter(self, parameter: ParameterView, dim: int) -> Tensor | None:
        """Labels along a dimension of a parameter that is read as an activation, such as learned queries; the others stay."""
        dim %= len(parameter.shape)
        axis = parameter.axis(dim)
        if axis is None or parameter.computed or parameter.same_layout:
            return None
        for other, indices in enumerate(parameter.axes):
            if other != axis[0] and self.state.size(parameter.name, other) > 1 and indices.numel():
                rows = torch.zeros(self.state.size(parameter.name, other), dtype=torch.long)
                self.sets.add_axis(parameter.name, other, rows, "with")
        return self.state.axis_labels(parameter.name, axis[0])[axis[1]]

    def parameter_labels(self, parameter: ParameterView, dim: int) -> Tensor | None:
        """The parameter's own labels along `dim` of what is read; None where that is not one of its dimensions."""
        axis = parameter.axis(dim)
        if axis is None:
            return None
        return expand_along(self.state.axis_labels(parameter.name, axis[0])[axis[1]], dim, parameter.shape)

    def vector_labels(self, parameter: ParameterView) -> Tensor | None:
        """Labels of a parameter that is a vector, read in any shape; None where it is not a vector."""
        dims = [d for d in range(len(parameter.axes)) if self.state.size(parameter.name, d) > 1]
        return self.state.axis_labels(parameter.name, dims[0])[parameter.axes[dims[0]]] if len(dims) == 1 else None

    # -- what the rule says about parameters

    def assign(self, parameter: ParameterView, axis: ParameterAxis, labels: Tensor, role: Role) -> None:
        """The indices that are read along a dimension of a parameter belong to the sets of `labels`."""
        dim, indices = axis
        for name, dims in ((parameter.name, tuple(range(len(parameter.axes)))), *parameter.same_layout):
            if (stored := dims[dim]) is None:
                continue
            size = self.state.size(name, stored)
            axis_labels = labels
            if parameter.computed and bool((labels == 0).any()):  # inputs of the model, say: no reason is worth a line
                self.sets.lock(self.state.axis_labels(name, stored, computed=True)[indices[labels == 0]], "")
            if len(indices) != size or not bool((indices == torch.arange(size)).all()):
                axis_labels = torch.full((size,), UNCONSTRAINED).index_put((indices,), labels)
            self.sets.add_axis(name, stored, axis_labels, role)

    def assign_vector(self, parameter: Any, labels: Tensor, dim: int = 0) -> None:
        """A parameter with one entry per channel along `dim` goes with the channels; what is no parameter is ignored."""
        if not isinstance(parameter, ParameterView):
            return
        axis = (dim, torch.arange(parameter.shape[dim])) if not parameter.moved else parameter.axis(dim)
        if axis is None or parameter.shape[dim] != len(labels):
            self.sets.lock(labels, f"{parameter.name} is read by {self.where} in an order of its own")
            self.state.lock_tensor(parameter.name, f"used by {self.where}")
        else:
            self.assign(parameter, axis, labels, "with")

    def assign_bias(self, labels: Tensor) -> None:
        """The operator's bias goes with its outputs."""
        bias = self.argument("bias")
        if isinstance(bias, ParameterView):
            self.assign_vector(bias, labels)
        elif isinstance(bias, Tensor):
            reason = f"the bias of {self.where} is put together from pieces that cannot be cut"
            self.sets.join(labels, self.labels_along(bias, bias.ndim - 1), reason)

    def lock_inputs(self, reason: str | None = None) -> RuleResult:
        """Lock every channel that reaches the operator; returns labels of a result that cannot be cut."""
        for value in tensor_leaves((self.args, self.kwargs)):
            self.state.lock_value(value, reason or f"{self.where} could not be followed")
        if "parts" in self.node.meta:
            return [fixed_labels(shape) for shape in self.part_shapes]
        return fixed_labels(self.shape) if self.has_one_result else None

    # -- constraints, resolved once the whole graph has been seen

    def add_split(self, view: Tensor) -> None:
        """One dimension of channels is viewed as several."""
        reason = f"split into equal parts by {self.where}"
        self.state.splits.append(AxisSplit(path=self.path, labels=collapse_expanded(view), reason=reason))

    def add_dependency(self, parts: Tensor, results: Tensor, reason: str) -> None:
        """Each of `results` can be removed where all the `parts` that broadcast against it are, and only there."""
        self.state.dependencies.append(DependsOnAll(parts=parts, results=results, reason=reason))

    def add_hard_coded_size(self, labels: Tensor) -> None:
        """The code gives a size for the result, which has channels."""
        if self._gives_sizes():
            self.add_given_size(labels, "to sizes written in the code")

    def add_given_size(self, labels: Tensor, how: str = "with a value of a size written in the code") -> None:
        """The code gives a size that the channels of the result have to have."""
        self._add_size(self.path, labels, f"{self.where} {how}")

    def add_size_beside_blank(self, made: Node, labels: Tensor) -> None:
        """The channels of the result have to have the size that the code gives to a blank value that `made` made."""
        self._add_size(str(made.meta.get("path", "")), labels, f"{self.where} with a value of a size written in the code")

    def add_size_of_blank(self, made: Node, labels: Tensor) -> None:
        """The code gives the size of a blank tensor with these channels; torch's own layers make theirs as wide as they are."""
        path = str(made.meta.get("path", ""))
        if not type(self.state.trace.module.get_submodule(path)).__module__.startswith("torch."):
            width = collapse_expanded(labels).numel()
            self._add_size(path, labels, f"{self._where(made)} makes a state of {width} channels, as the code says")

    def _add_size(self, path: str, labels: Tensor, reason: str) -> None:
        small = collapse_expanded(labels)
        if bool((small > 0).any()):
            given = self.kind not in _NAME_DIMS
            size = HardCodedSize(path=path, labels=small, shape=tuple(labels.shape), reason=reason, given=given)
            self.state.hard_coded_sizes.append(size)

    def add_hard_coded_size_of(self, view: ParameterView) -> None:
        """The code gives a size for a view of a parameter that has one entry per channel."""
        if self._gives_sizes() and (labels := self.vector_labels(view)) is not None:
            self.add_hard_coded_size(labels)

    def _gives_sizes(self) -> bool:
        return any(type(size) is int and size > 1 for size in pytree.tree_leaves(self.node.args[1:]))

    def add_size_attribute(self, attribute: str, labels: Tensor, position: int | None = None) -> None:
        """An attribute of a norm without weights repeats a width."""
        if hasattr(self.module, attribute) and getattr(self.module, "weight", None) is None:
            size = SizeAttribute(path=self.path, attribute=attribute, labels=labels, position=position)
            self.state.size_attributes.append(size)

    def add_number_of_groups(self, result: Tensor, labels: Tensor) -> None:
        """A group norm has as many groups as channels; the number is an attribute of torch's layer, or given by the code."""
        if isinstance(self.module, nn.GroupNorm):
            self.state.size_attributes.append(SizeAttribute(path=self.path, attribute="num_groups", labels=labels))
        else:
            self.add_hard_coded_size(result)

    def add_statistic(self, labels: Tensor, dim: int) -> None:
        """The operator takes statistics over the channels along `dim`."""
        if self.state.main_run:
            nth = self.state.calls[self.target]
            self.state.statistics.append(ChannelStatistic(target=self.target, nth=nth, labels=labels, dim=dim))

    def add_cost(self, macs: float, *along: Tensor | None) -> None:
        """The operator's multiply-accumulates are a product of the dimensions with these labels."""
        if self.state.main_run and macs:
            self.state.costs.append((macs / self.state.trace.rows, [labels for labels in along if labels is not None]))


PropagationRule = Callable[[OperatorCall], RuleResult]

#: Operator, or the name of one that only some installations have -> its rule.
PROPAGATION_RULES: dict[Any, PropagationRule] = {}


def rule_for(*targets: Any) -> Callable[[PropagationRule], PropagationRule]:
    """A decorator that makes a function the rule of some operators."""

    def enter(function: PropagationRule) -> PropagationRule:
        PROPAGATION_RULES.update(dict.fromkeys(targets, function))
        return function

    return enter


def overloads(*names: str) -> list[Any]:
    """All overloads of ATen operators, and of their in-place forms, that this torch has; a string may hold several names."""
    operators = []
    for name in (n for text in names for base in text.split() for n in (base, f"{base}_")):
        packet = getattr(aten, name, None)
        if packet is not None:
            operators += [getattr(packet, o) for o in packet.overloads() if not {"out", "output"} & {*o.split("_")}]
    return operators


def operator_name(target: Any) -> str:
    """`aten.add_.Tensor` to `add_`, and `torchvision.nms.default` to `nms`."""
    names = str(target).split(".")
    return names[min(1, len(names) - 1)]


def _has_same_values(node: Node) -> bool:
    """Whether an operator gives nothing but values of its first argument."""
    return node.target is operator.getitem or operator_name(node.target) in _SAME_VALUES


def _is_written_by_a_view(node: Node) -> bool:
    """Whether values are written into a tensor where other tensors share its memory."""
    return any(
        (user.meta.get("aliased") and user.args[0] is node) or (_has_same_values(user) and _is_written_by_a_view(user))
        for user in node.users
        if user.op == "call_function"
    )


def tensor_leaves(value: Any) -> list[Labelled]:
    """The labels and parameters inside nested dicts, lists and tuples."""
    return [v for v in pytree.tree_leaves(value) if isinstance(v, Tensor | ParameterView)]
