"""Weights that are computed in the forward pass from parameters alone: standardized, normalised, masked or scaled ones.

They stay a `ParameterView` of the parameter with the most dimensions. What is combined with it entry by entry gets its channels,
and the statistics that are taken on the way are recorded: after a cut they are over fewer inputs, like those of a layer norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from compresskit.prune.structure.channel_sets import collapse, varying_dims
from compresskit.prune.structure.constraints import ComputedWeight
from compresskit.prune.structure.rules.base import Labelled, OperatorCall, RuleResult
from compresskit.prune.structure.rules.parameter_view import ParameterView


def is_computed_weight(call: OperatorCall, values: Sequence[Any]) -> bool:
    """Whether an operator computes a matrix or filter from parameters alone."""
    return call.is_data_free and any(
        isinstance(v, ParameterView) and (v.computed or len(_dims_read(call, v, every=True)) > 1) for v in values
    )


def is_scaled_table(call: OperatorCall, values: Sequence[Any]) -> bool:
    """Whether an operator combines a matrix of parameters with values that cannot be cut and have one entry along a dimension of
    it, such as a number of each sample, or of each row (NetVLAD): channels that it meets later may run along that dimension.
    """
    tables = [v for v in values if isinstance(v, ParameterView) and len(_dims_read(call, v)) > 1]
    others = [v for v in values if isinstance(v, Tensor)]
    if not tables or call.target._schema.is_mutable or not all(map(call.sets.all_locked, others)):
        return False
    rank = len(call.shape)
    moving = {d + rank - len(table.shape) for table in tables for axis in table.axes for d in varying_dims(axis)}
    return any(all(_padded(v, rank).shape[d] == 1 for v in others) for d in moving)


def combine_parameters(call: OperatorCall, values: Sequence[Labelled]) -> RuleResult:
    """The result of an elementwise operator on parameters, and on labels of vectors, that broadcast to its shape."""
    views = [v for v in values if isinstance(v, ParameterView)]
    main = max(views, key=lambda v: (len(_dims_read(call, v)), v.numel))
    if call.target._schema.is_mutable and not main.computed:
        return call.lock_inputs(f"{call.where} changes the parameter {main.name}")
    expanded = tuple(_padded(a, len(call.shape)).expand(call.shape) for a in main.axes)
    result = replace(main, axes=expanded, moved=main.moved or main.shape != call.shape, computed=True)
    for value in values:
        if value is not main and not all(_join_dim(call, result, labels) for _, labels in _labels_of(call, value)):
            return call.lock_inputs(f"{call.where} computes a weight from parameters of different layouts")
    return _record_value(call, result)


def reduce_parameter(call: OperatorCall, view: ParameterView, dims: Sequence[int], *, statistic: bool) -> RuleResult:
    """A reduction of a parameter over `dims`; whether it is a statistic, or a sum, to which removed entries add nothing."""
    if not _reduces_whole_dims(call, view, dims):
        return call.lock_inputs(f"{call.where} reduces a part of a dimension of {view.name}")
    if statistic:
        _add_statistics(call, view, dims)
    gone = {d for d in _dims_read(call, view) if {*varying_dims(view.axes[d])} & {*dims}}

    def reduced(shape: tuple[int, ...]) -> ParameterView:
        axes = []
        for axis in view.axes:
            for d in dims:
                axis = axis.narrow(d, 0, 1)
            axes.append(axis if len(shape) == axis.ndim else torch.squeeze(axis, tuple(dims)))
        return replace(view, axes=tuple(axes), moved=True, computed=True, reduced=view.reduced | gone)

    if call.has_one_result:
        return _record_value(call, reduced(call.shape))
    return [_record_value(call, reduced(shape), part) for part, shape in enumerate(call.part_shapes)]


def normalize_parameter(call: OperatorCall, view: ParameterView, others: Sequence[Any]) -> RuleResult:
    """A weight viewed as (1, outputs, entries of each) and normalised by `batch_norm`. others: vectors of an entry per output."""
    dims = [d for d in range(len(view.shape)) if d != 1]
    if not _reduces_whole_dims(call, view, dims):
        return call.lock_inputs(f"{call.where} normalises a part of a dimension of {view.name}")
    _add_statistics(call, view, dims)
    result = replace(view, computed=True)
    for other in others:
        for _, labels in _labels_of(call, other):
            vector = labels.reshape(-1, *[1] * (len(dims) - 1))
            if not _join_dim(call, result, vector.expand(view.shape[1:])):
                return call.lock_inputs(f"{call.where} computes a weight from parameters of different layouts")
    return _record_value(call, result)


def _dims_read(call: OperatorCall, view: ParameterView, *, every: bool = False) -> list[int]:
    """Stored dimensions of more than one entry that the values tell apart; `every`: also those that were reduced."""
    dims = range(len(view.axes))
    return [d for d in dims if call.state.size(view.name, d) > 1 and (every or d not in view.reduced)]


def _labels_of(call: OperatorCall, value: Any) -> Iterator[tuple[int, Tensor]]:
    """(stored dimension, labels along it in the shape that is read) of a parameter; the labels of anything else."""
    if isinstance(value, ParameterView):
        for d in _dims_read(call, value):
            yield d, call.state.axis_labels(value.name, d, computed=True)[value.axes[d]]
    elif isinstance(value, Tensor):
        yield 0, value


def _padded(value: Tensor, ndim: int) -> Tensor:
    return value.reshape([1] * (ndim - value.ndim) + list(value.shape))


def _join_dim(call: OperatorCall, view: ParameterView, labels: Tensor) -> bool:
    """Join labels that broadcast to a view with those of its own dimension that varies as they do; False where none does."""
    labels = _padded(labels, len(view.shape))
    reason = f"computed with values that cannot be cut, by {call.where}"
    moving = varying_dims(labels)
    if not moving:
        call.sets.lock(labels, reason)
        if bool((collapse(labels) == 0).any()):
            for d, own in _labels_of(call, view):  # a constant of exactly that size
                if any(labels.shape[along] > 1 for along in varying_dims(view.axes[d])):
                    call.sets.lock(own, reason)
        return True
    for _, own in _labels_of(call, view):
        if varying_dims(own) == moving:
            call.sets.join(collapse(own), collapse(labels), reason)
            return True
    return False


def _reduces_whole_dims(call: OperatorCall, view: ParameterView, dims: Sequence[int]) -> bool:
    """Whether a reduction takes all the indices of a dimension or keeps all apart, and takes them along one dimension read."""
    along = [varying_dims(view.axes[d]) for d in _dims_read(call, view)]
    return all(len(each) == 1 or not {*each} & {*dims} for each in along)


def _add_statistics(call: OperatorCall, view: ParameterView, dims: Sequence[int]) -> None:
    for _, labels in _labels_of(call, view):
        along = varying_dims(labels)
        if along and along[0] in dims:
            call.add_statistic(labels.movedim(along[0], 0).reshape(labels.shape[along[0]], -1)[:, 0], along[0])


def _record_value(call: OperatorCall, view: ParameterView, part: int = 0) -> ParameterView:
    """Record a computed value, so that the proof counts its removed entries as zero."""
    if call.state.main_run:
        labels = tuple(collapse(each) for _, each in _labels_of(call, view))
        nth = call.state.calls[call.target]
        call.state.computed_weights.append(ComputedWeight(target=call.target, nth=nth, part=part, labels=labels))
    return view
