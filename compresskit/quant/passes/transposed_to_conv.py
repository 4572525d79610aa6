"""Rewrite transposed convolutions, which no runtime executes in integers, as convolutions and depth to space."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, fx, nn

from compresskit.graph.capture import parameter_name
from compresskit.graph.layers.stored import CONV_OF_RANK, TRANSPOSED_CONVS, bias_of, each_dimension
from compresskit.graph.layers.transposed_convolution import ConvolutionForm, convolution_form
from compresskit.graph.masks import map_mask_
from compresskit.graph.normalize import Node, aten, insert_call
from compresskit.graph.surgery import get_tensor, owner

#: Fewest input channels that each output reads. Below, as in the depthwise layers that enlarge bilinearly, integer convolutions
#: run group by group and lose more than they gain.
FEWEST_CHANNELS = 4


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """Of a transposed convolution: one number of each for each spatial dimension, and the number of groups."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    output_padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @classmethod
    def of(cls, node: Node, spatial: int) -> _Settings:
        given = list(node.args[3:])
        stride, padding, output_padding, groups, dilation = given + [1, 0, 0, 1, 1][len(given) :]
        return cls(
            stride=each_dimension(stride, spatial),
            padding=each_dimension(padding, spatial),
            output_padding=each_dimension(output_padding, spatial),
            dilation=each_dimension(dilation, spatial),
            groups=groups,
        )


def rewrite_transposed_(module: fx.GraphModule) -> None:
    """Rewrite transposed convolutions whose weights are parameters that nothing else reads, in place.

    Parameters keep their names and get the shape of the convolution; so do their masks. Where a weight is used twice, both uses
    must have the same settings.
    """
    calls: dict[str, list[Node]] = {}
    for node in module.graph.nodes:
        if node.target in TRANSPOSED_CONVS and (weight := parameter_name(node.args[1])) is not None:
            calls.setdefault(weight, []).append(node)
    for weight, nodes in calls.items():
        spatial = get_tensor(module, weight).ndim - 2
        settings = {_Settings.of(node, spatial) for node in nodes}
        biases = {parameter_name(bias_of(node)) if bias_of(node) is not None else "" for node in nodes}
        if (
            len(settings) > 1
            or len(biases) > 1
            or None in biases
            or any(n.args[0].meta["val"].ndim != spatial + 2 for n in nodes)
        ):
            continue
        bias = biases.pop()
        if any(_calls_that_read(module, name) != set(nodes) for name in (weight, bias) if name):
            continue
        chosen = settings.pop()
        if get_tensor(module, weight).shape[0] // chosen.groups >= FEWEST_CHANNELS:
            _rewrite(module, nodes, chosen, weight, bias)


def _calls_that_read(module: fx.GraphModule, name: str) -> set[Node]:
    return {user for node in module.graph.nodes if parameter_name(node) == name for user in node.users}


def _rewrite(module: fx.GraphModule, nodes: list[Node], settings: _Settings, weight: str, bias: str | None) -> None:
    def form_of(values: Tensor) -> ConvolutionForm:
        s = settings
        return convolution_form(values, s.stride, s.padding, s.output_padding, s.dilation, s.groups)

    form = form_of(get_tensor(module, weight).detach())
    phases = math.prod(form.phases)
    _replace_parameter_(module, weight, form.weight)
    map_mask_(module, weight, lambda mask: form_of(mask.float()).weight.bool())
    if bias:
        _replace_parameter_(module, bias, get_tensor(module, bias).detach().repeat_interleave(phases))
        map_mask_(module, bias, lambda mask: mask.repeat_interleave(phases))
    for node in nodes:
        for read in (node.args[1], bias_of(node)):
            if read is not None:
                read.meta["val"] = node.args[0].meta["val"].new_empty(get_tensor(module, str(parameter_name(read))).shape)
        with module.graph.inserting_before(node):
            node.replace_all_uses_with(_depth_to_space(node, _convolution(node, form, settings.groups), form))
        module.graph.erase_node(node)


def _replace_parameter_(module: fx.GraphModule, name: str, values: Tensor) -> None:
    holder, leaf = owner(module, name)
    setattr(holder, leaf, nn.Parameter(values, requires_grad=get_tensor(module, name).requires_grad))


def _convolution(node: Node, form: ConvolutionForm, groups: int) -> Node:
    x, spatial = node.args[0], len(form.phases)
    padding = list(form.low)
    if form.low != form.high or min(padding) < 0:
        ends = [size for pair in zip(reversed(form.low), reversed(form.high), strict=True) for size in pair]
        x, padding = insert_call(node, aten.constant_pad_nd.default, x, ends), [0] * spatial
    settings = ([1] * spatial, padding, list(form.dilation), groups)
    return insert_call(node, CONV_OF_RANK[spatial + 2], x, node.args[1], bias_of(node), *settings)


def _depth_to_space(node: Node, result: Node, form: ConvolutionForm) -> Node:
    """Unfold (N, channels * phases, *size) as (N, channels, *(size * phases)), without the surplus."""
    phases, spatial = list(form.phases), len(form.phases)
    if phases == [phases[0]] * 2:
        result = insert_call(node, aten.pixel_shuffle.default, result, phases[0]) if phases[0] > 1 else result
    elif max(phases) > 1:
        channels = int(result.meta["val"].shape[1]) // math.prod(phases)
        result = insert_call(node, aten.unflatten.int, result, 1, [channels, *phases])
        order = [dim for i in range(spatial) for dim in (2 + spatial + i, 2 + i)]
        result = insert_call(node, aten.permute.default, result, [0, 1, *order])
        for dim in range(2, 2 + spatial):
            result = insert_call(node, aten.flatten.using_ints, result, dim, dim + 1)
    for i, count in enumerate(form.surplus):
        if count:
            result = insert_call(node, aten.slice.Tensor, result, 2 + i, 0, -count)
    return result
