"""Residual blocks are found by what they compute, in any family, and what cannot be removed is named with the reason."""

from __future__ import annotations

import pytest
import torch
from networks import Chain, build, image
from residual import Basic, Mobile, Pair, ResNet, Transformer
from torch import nn

from compresskit.prune.depth import find_blocks

EXPECTED = {
    "resnet": (ResNet, ["layer1.0", "layer1.1", "layer1.2", "layer2.1", "layer2.2"]),
    "mobile": (Mobile, ["blocks.0", "blocks.1", "blocks.2"]),
    "norms before": (Transformer, ["layers.0", "layers.1", "layers.2"]),
    "norms after": (lambda: Transformer(before=False), ["layers.0", "layers.1", "layers.2"]),
    "no addition": (Chain, []),
}


@pytest.mark.parametrize("family", EXPECTED)
def test_residual_blocks_of_every_family(family) -> None:
    make, paths = EXPECTED[family]
    found = find_blocks(build(make), image(2))
    assert list(found.removable) == paths
    assert {block.norms for block in found.removable.values()} <= ({2} if family == "norms after" else {0})


def test_how_a_block_is_called_is_known() -> None:
    block = find_blocks(build(Transformer), image(2)).removable["layers.1"]
    assert (block.argument, block.outputs, block.index, block.shape) == ("hidden", 2, 0, (2, 16, 16))
    torch.testing.assert_close(block.bypass()(1.0, hidden=torch.ones(2))[0], torch.ones(2))
    assert block.bypass()(1.0, hidden=torch.ones(2))[1] is None


def test_what_cannot_be_removed_is_named() -> None:
    found = find_blocks(build(ResNet), image(2), ignore=("layer1.2",))
    assert found.locked == {"layer1.2": "ignore=", "layer2.0": "its output is (16, 8, 8) where its input is (8, 16, 16)"}
    shared = build(ResNet)
    shared.layer1[1] = shared.layer1[0]
    found = find_blocks(shared, image(2))
    assert found.locked["layer1.0"] == "it is called 2 times, one after another"
    assert "layer1.0" not in found.removable


def test_what_both_inputs_go_through_is_a_block_that_is_called_twice() -> None:
    once, twice = find_blocks(build(ResNet), image(2)), find_blocks(build(Pair), (*image(2), *image(2)))
    assert list(twice.removable) == [f"encoder.{path}" for path in once.removable]
    assert {block.calls for block in twice.removable.values()} == {2}
    assert {block.calls for block in once.removable.values()} == {1}
    for path, block in once.removable.items():
        assert len(twice.removable[f"encoder.{path}"].skipped) == 2 * len(block.skipped)


class ByNameToo(nn.Module):
    """One block, called by position and by name: no argument is what both calls would hand on."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Basic(3, 3)])

    def forward(self, x):
        return self.blocks[0](x) + self.blocks[0](x=x.flip(3))


def test_a_block_whose_calls_would_hand_on_other_arguments_stays() -> None:
    found = find_blocks(build(ByNameToo), image(2))
    assert found.removable == {}
    assert found.locked == {"blocks.0": "it is called 2 times, in other ways"}


class Outside(nn.Module):
    """BERT's way: the sum and its norm stand in a module that gets the branch as an argument."""

    def __init__(self):
        super().__init__()
        self.a, self.dense, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, branch, x):
        return self.norm(self.dense(branch) + x)


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.rest, self.head = nn.Linear(8, 8), nn.ModuleList([Outside()]), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.rest[0](torch.relu(self.first(x)), x))


def test_a_sum_whose_branch_begins_elsewhere_is_no_block() -> None:
    found = find_blocks(Halves().eval(), (torch.randn(2, 8),))
    assert found.removable == {}
    assert found.locked == {"rest.0": "its branch begins outside of it"}


@pytest.mark.parametrize(
    ("add", "found"),
    [
        (lambda x, y: torch.add(y, x), ["1"]),
        (lambda x, y: torch.add(x, y, alpha=0.5), ["1"]),
        (lambda x, y: torch.add(y, x, alpha=0.5), []),
        (lambda x, y: x + x + y, []),
        (lambda x, y: x + y + y, ["1"]),
    ],
)
def test_a_sum_that_scales_its_input_is_no_block(add, found) -> None:
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.branch = nn.Linear(8, 8)

        def forward(self, x):
            return add(x, torch.relu(self.branch(x)))

    model = nn.Sequential(nn.Linear(8, 8), Block(), nn.Linear(8, 2)).eval()
    assert list(find_blocks(model, (torch.randn(2, 8),)).removable) == found


def test_a_group_of_blocks_is_not_one_block() -> None:
    class Group(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.last = nn.Sequential(Basic(8, 8), Basic(8, 8)), nn.Conv2d(8, 8, 3, 1, 1)

        def forward(self, x):
            return x + self.last(self.blocks(x))

    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), Group())
    assert list(find_blocks(model.eval(), image(2)).removable) == ["2.blocks.0", "2.blocks.1"]


@pytest.mark.parametrize("result", [lambda y: (y, {"hidden": y}), lambda y: (y, [y]), lambda y: (y, y.mean())])
def test_a_block_whose_other_results_cannot_be_given_stays(result) -> None:
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.branch = nn.Linear(8, 8)

        def forward(self, x):
            return result(x + self.branch(x).relu())

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(8, 2)

        def forward(self, x):
            for block in self.blocks:
                x, _ = block(x)
            return self.head(x)

    assert find_blocks(Model().eval(), (torch.randn(2, 8),)).removable == {}


def test_a_block_that_has_two_names_stays() -> None:
    class Aliased(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.blocks, self.head = nn.Conv2d(3, 8, 3), nn.ModuleList([Basic(8, 8), Basic(8, 8)]), nn.Conv2d(8, 2, 1)
            self.first = self.blocks[0]

        def forward(self, x):
            return self.head(self.blocks[1](self.first(self.stem(x).relu())))

    assert list(find_blocks(build(Aliased), image(2)).removable) == ["blocks.1"]
