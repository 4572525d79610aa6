"""Running a graph one operator at a time, against calling the module."""

from __future__ import annotations

import weakref
from typing import Any

import networks
import pytest
import torch
from networks import build, image
from torch import Tensor, fx, nn

from compresskit.graph.capture import capture
from compresskit.graph.interpreter import execute, read_count, run_graph
from compresskit.graph.normalize import aten


@pytest.fixture(scope="module")
def residual() -> fx.GraphModule:
    return capture(build(networks.Residual), image(2)).module


def test_the_output_is_that_of_the_module(residual: fx.GraphModule) -> None:
    x = image(4)
    with torch.no_grad():
        assert torch.equal(run_graph(residual, x), residual(*x))


def test_outputs_keep_their_structure() -> None:
    example = {"image": torch.randn(2, 3, 16, 16), "numbers": torch.randn(2, 8)}
    module = capture(networks.TwoInputs().eval(), example).module
    with torch.no_grad():
        expected, outputs = module(**example), run_graph(module, list(example.values()))
    assert outputs.keys() == expected.keys()
    assert all(torch.equal(outputs[name], value) for name, value in expected.items())


def test_gradients_pass(residual: fx.GraphModule) -> None:
    weight = residual.get_parameter("head.weight")
    torch.manual_seed(1)
    x = image(2)
    (expected,) = torch.autograd.grad(residual(*x).square().sum(), weight)
    (gradient,) = torch.autograd.grad(run_graph(residual, x).square().sum(), weight)
    assert torch.equal(gradient, expected)


def test_the_visitor_sees_every_value_in_order(residual: fx.GraphModule) -> None:
    visited: list[fx.Node] = []
    run_graph(residual, image(2), lambda node, value: visited.append(node))
    assert visited == list(residual.graph.nodes)


def test_until_runs_only_what_the_node_depends_on(residual: fx.GraphModule) -> None:
    convs = [n for n in residual.graph.nodes if n.target is aten.conv2d.default]
    visited: list[fx.Node] = []
    value = run_graph(residual, image(2), lambda node, value: visited.append(node), until=convs[0])
    assert value.shape == (2, 16, 16, 16)
    assert visited[-1] is convs[0]
    assert not set(convs[1:]) & set(visited)


def test_a_value_that_depends_on_no_input_needs_none() -> None:
    module = capture(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), (torch.randn(2, 3),)).module
    linear = next(n for n in module.graph.nodes if n.target is aten.linear.default)
    assert run_graph(module, (), until=linear.args[1]).shape == (2, 3)


def test_compute_replaces_operators(residual: fx.GraphModule) -> None:
    def without_relu(node: fx.Node, value_of: Any) -> Any:
        return value_of(node.args[0]) if node.target is aten.relu.default else execute(residual, node, value_of)

    x = image(2)
    with torch.no_grad():
        assert not torch.equal(run_graph(residual, x, compute=without_relu), residual(*x))


def test_values_are_freed_after_their_last_reader() -> None:
    module = capture(nn.Sequential(*[nn.Sigmoid() for _ in range(6)]), (torch.randn(2, 3),)).module
    values: list[weakref.ref[Tensor]] = []
    most = 0

    def count(node: fx.Node, value: Any) -> None:
        nonlocal most
        if isinstance(value, Tensor):
            values.append(weakref.ref(value))
        most = max(most, sum(reference() is not None for reference in values))

    run_graph(module, (torch.randn(2, 3),), count)
    assert len(values) >= 7
    assert most <= 3  # the input of the caller, a value, and the one that is computed from it


def test_reads_are_counted_by_place() -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x, y = torch.relu(x), torch.relu(y)
            return torch.cat([x * x, x, y], 1)

    module = capture(Reads(), (torch.randn(2, 3), torch.randn(2, 3))).module
    x, y = (node for node in module.graph.nodes if node.target is aten.relu.default)
    assert (read_count(x), len(x.users), read_count(y)) == (3, 2, 1)
