"""Blocks of a quantized graph: they divide it, each is read at one point, and they are those of the network's author."""

from __future__ import annotations

import networks
import pytest
import torch
import torch.nn.functional as F
from matrix import some
from networks import build, conv, image
from torch import nn

from compresskit.base.errors import SettingError
from compresskit.quant import Quantized, quantize_static
from compresskit.quant.calibration import GraphBlock, find_graph_blocks


class Detector(nn.Module):
    """A trunk, and two heads at each of its two depths."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second = conv(3, 16, s=2), conv(16, 16), conv(16, 16, s=2)
        self.boxes, self.classes = (nn.ModuleList(nn.Conv2d(16, n, 3, 1, 1) for _ in range(2)) for n in (4, 2))

    def forward(self, x):
        a = self.first(self.stem(x))
        values = (a, self.second(a))
        heads = ([head(v).flatten(2) for head, v in zip(some, values, strict=True)] for some in (self.boxes, self.classes))
        boxes, classes = (torch.cat(some, 2) for some in heads)
        return boxes, classes.softmax(1)


class UNet(nn.Module):
    """A skip around everything, so that nothing is a cut."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([conv(3, 16), conv(16, 16, s=2), conv(16, 16, s=2)])
        self.up = nn.ModuleList([conv(32, 16), conv(32, 3)])

    def forward(self, x):
        a = self.down[0](x)
        b = self.down[1](a)
        y = self.up[0](torch.cat([F.interpolate(self.down[2](b), scale_factor=2.0), b], 1))
        return self.up[1](torch.cat([F.interpolate(y, scale_factor=2.0), a], 1))


class Transformer(nn.Module):
    """One encoder layer, norms first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(48, 32), nn.Linear(32, 10)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, norm_first=True)

    def forward(self, x):
        return self.head(self.layer(self.embed(x.reshape(-1, 16, 48))).mean(1))


def quantized_of(model: nn.Module, inputs=None) -> Quantized:
    return quantize_static(model.eval(), [inputs or image(8)])


def layers(blocks: list[GraphBlock]) -> list[int]:
    return [len(block.layers) for block in blocks]


def assert_divides(quantized: Quantized, blocks: list[GraphBlock]) -> None:
    """Every operator on data is in one block; a block is read at its output alone, and reads inputs and earlier outputs."""
    inside = [node for block in blocks for node in block.nodes]
    assert len(set(inside)) == len(inside)
    of_data = set()
    for node in quantized.body.graph.nodes:
        if node.op == "placeholder" or (node.op != "output" and of_data.intersection(node.all_input_nodes)):
            of_data.add(node)
    sizes = {node for node in of_data if node.op != "placeholder" and isinstance(node.meta["val"], int | torch.SymInt)}
    given = {node for node in of_data if node.op == "placeholder"} | sizes
    assert set(inside) == of_data - given
    known = set(given)
    for block in blocks:
        assert block.output is block.nodes[-1]
        assert {user for node in block.nodes[:-1] for user in node.users} <= set(block.nodes)
        assert {a for node in block.nodes for a in node.all_input_nodes if a in of_data} - set(block.nodes) == set(block.inputs)
        assert set(block.inputs) <= known
        known.add(block.output)
    assert sum(layers(blocks)) == len(quantized.rounded_weights())


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("kind", [*some(networks.NETWORKS), Detector, UNet], ids=lambda kind: kind.__name__)
def test_blocks_divide_the_graph(kind) -> None:
    quantized = quantized_of(build(kind))
    assert_divides(quantized, find_graph_blocks(quantized))
    single = find_graph_blocks(quantized, run=1, most=1)
    assert_divides(quantized, single)
    assert max(layers(single)) == 1


def test_several_inputs_are_divided() -> None:
    x = (torch.randn(8, 3, 16, 16), torch.randn(8, 8))
    quantized = quantized_of(networks.TwoInputs(), x)
    blocks = find_graph_blocks(quantized)
    assert_divides(quantized, blocks)
    assert sorted(layers(blocks))[-2:] == [1, 2]


def test_a_residual_block_is_one_and_runs_are_joined() -> None:
    quantized = quantized_of(build(networks.Residual))
    blocks = find_graph_blocks(quantized)
    assert layers(blocks) == [1, 2, 1, 1]  # the stem, the residual block, the rest: of logits a convolution cannot be learned
    assert str(blocks[0]).endswith(": conv2d")
    assert layers(find_graph_blocks(quantized_of(build(networks.Depthwise)))) == [1, 3, 1]
    plain = nn.Sequential(conv(3, 16), conv(16, 16), conv(16, 16), conv(16, 16), nn.Conv2d(16, 16, 1))
    quantized = quantized_of(build(lambda: plain))
    assert [layers(find_graph_blocks(quantized, run=run)) for run in (1, 2, 3)] == [[1] * 5, [2, 2, 1], [3, 2]]


def test_sublayers_of_a_transformer_are_blocks() -> None:
    quantized = quantize_static(Transformer().eval(), [torch.randn(8, 16, 48)], smooth=False)
    blocks = find_graph_blocks(quantized)
    assert_divides(quantized, blocks)
    assert layers([block for block in blocks if block.layers]) == [1, 2, 2, 1]


def test_heads_are_blocks_of_their_own() -> None:
    quantized = quantized_of(build(Detector))
    counts = layers([block for block in find_graph_blocks(quantized) if block.layers])
    assert sum(counts) == 7
    assert max(counts) == 2


def test_a_part_with_too_many_layers_is_divided() -> None:
    quantized = quantized_of(build(UNet))
    assert layers(find_graph_blocks(quantized)) == [1, 3, 1]
    blocks = find_graph_blocks(quantized, run=1, most=2)
    assert_divides(quantized, blocks)
    assert max(layers(blocks)) == 1


@pytest.mark.parametrize("settings", [{"run": 0}, {"most": 0}])
def test_numbers_below_one_are_refused(settings) -> None:
    name = next(iter(settings))
    with pytest.raises(SettingError, match=rf"find_graph_blocks\({name}=...\): wanted a whole number >= 1, got 0"):
        find_graph_blocks(quantized_of(build(networks.Chain)), **settings)
