"""Writes in place, into views most of all: numbers written into a mask become a constant, everything else keeps what eager mode
computes.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import compresskit as ck
from compresskit.graph.capture import capture
from compresskit.graph.normalize import is_inplace


class MaskInPieces(nn.Module):
    """A mask made by writes of numbers into views, as shifted windows do."""

    def forward(self, x: Tensor) -> Tensor:
        mask = x.new_zeros(4, 4)
        mask[:2, 1:] = 3
        mask[1].mul_(2)
        row = mask[0]
        mask[0].add_(1)
        return x @ mask + row


class WholeMaskWrittenThroughItsPart(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(4, 4)
        mask[1:] = 2
        upper, _ = mask.split(2)
        upper.add_(3)
        return x @ mask


class ReadBetweenTwoWrites(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(4, 4)
        mask[0] = 1
        first = x @ mask
        mask[1:] = 2
        return first + x @ mask


class WrittenWithAValue(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(4, 4)
        mask[1:] = x.mean()
        return x @ mask


class MaskOfTheBatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(x.shape[0], 4)
        mask[:, 1] = 1
        return x + mask


class HalfOfAValue(nn.Module):
    """The chunk is a view, so the write changes `y`."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x)
        half, _ = y.chunk(2, 1)
        half.add_(1)
        return y * 2


class TheOtherHalf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x)
        half, other = y.split(2, 1)
        half += 1
        return y * 2 + torch.cat([other, other], 1)


class PartOfAValue(nn.Module):
    """What a shortcut is added to is a view: the first of the values that were joined."""

    def forward(self, x: Tensor) -> Tensor:
        part = torch.cat([x, torch.relu(x)], 1)[:, :6]
        part += torch.cat([x, x], 1)[:, 1:7]
        return part


class WholeOfAValue(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y, z = torch.relu(x), torch.zeros_like(x)
        y[:] += x.sigmoid()
        z[:, :] = y * 2
        return y + z[:, -4:]


class ReadElsewhere(nn.Module):
    """The part that is read is not the one that was written, or has another step."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x)
        y[:, :2] += x.sigmoid()[:, :2]
        y[:, 1::2] *= 3
        return torch.cat([y[:, :2], y[:, 1:3], y[:, ::2], y[:, 1::2]], 1)


class WrittenInHalf(nn.Module):
    """What is written is rounded to the dtype of what it is written into."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x).half()
        y[:] = x * 1.001
        y[:, :2] = x[:, :2] / 3
        return y[:, :2].float() + y[:, 2:].float()


WRITTEN = [PartOfAValue, WholeOfAValue, ReadElsewhere, WrittenInHalf]
MODELS = [MaskInPieces, WholeMaskWrittenThroughItsPart, ReadBetweenTwoWrites, WrittenWithAValue, MaskOfTheBatch]


@pytest.mark.parametrize("kind", [*MODELS, *WRITTEN, HalfOfAValue, TheOtherHalf])
def test_a_graph_computes_what_its_model_writes(kind: type[nn.Module]) -> None:
    model = kind()
    captured = capture(model, (torch.randn(3, 4),))
    assert not any(map(is_inplace, captured.module.graph.nodes))
    for rows in (1, 5):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(captured.module(x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize("kind", [PartOfAValue, WholeOfAValue])
def test_what_is_written_and_read_again_is_not_copied(kind: type[nn.Module]) -> None:
    """A copy would be rounded again, in another range; onnxruntime runs two such roundings as one of its own."""
    module = capture(kind(), (torch.randn(3, 4),)).module
    assert "aten.slice_scatter.default" not in {str(node.target) for node in module.graph.nodes}


class Shortcut(nn.Module):
    """in_place: whether a shortcut is added to the first channels of a view in place, as in GhostNet."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.first, self.second, self.last = (nn.Conv2d(i, o, 3, padding=1) for i, o in ((3, 8), (8, 8), (8, 6)))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        y = torch.cat([self.second(x), x], 1)[:, :8]
        if self.in_place:
            y += x
            y[:] = torch.relu(y)
        else:
            y = torch.relu(y + x)
        return self.last(y)


def test_a_shortcut_in_place_is_rounded_as_any_other() -> None:
    torch.manual_seed(0)
    written = Shortcut(in_place=True).eval()
    plain = Shortcut(in_place=False).eval()
    plain.load_state_dict(written.state_dict())
    x = torch.randn(4, 3, 8, 8)
    one, other = (ck.quant.quantize_static(model, [x]) for model in (written, plain))
    assert torch.equal(one(x), other(x))
    assert len(list(one.quantizers())) == len(list(other.quantizers()))


def test_a_mask_written_in_pieces_is_one_constant() -> None:
    captured = capture(MaskInPieces(), (torch.randn(3, 4),))
    targets = [str(node.target) for node in captured.module.graph.nodes if node.op == "call_function"]
    assert targets == ["aten.select.int", "aten.matmul.default", "aten.add.Tensor"]
    (constant,) = captured.module.buffers()
    assert constant.tolist() == [[1, 4, 4, 4], [0, 6, 6, 6], [0] * 4, [0] * 4]


class WritesOfAnotherKind(nn.Module):
    """In-place operators whose functional form has another name, or another dtype."""

    def forward(self, x: Tensor) -> Tensor:
        powers, large, equal, nothing, half = (x.clone() for _ in range(5))
        powers.abs_().pow_(1.5).pow_(torch.ones_like(x)).floor_divide_(torch.full_like(x, 0.01))
        large.gt_(0.1)
        equal.eq_(x)
        nothing.logical_not_()
        half = half.half()
        half.add_(x)
        return powers + large @ torch.ones(4, 4) + equal + nothing + half.float()


def test_operators_in_place_have_the_dtype_of_what_they_write() -> None:
    model = WritesOfAnotherKind()
    module = capture(model, (torch.randn(3, 4),)).module
    assert not any(map(is_inplace, module.graph.nodes))
    x = torch.tensor([[0.0, 0.2, -0.3, 1.7]])
    torch.testing.assert_close(module(x), model(x), rtol=0, atol=0)


class OtherNames(nn.Module):
    """Operators by their other names, and one that pruning has no rule of its own for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.clip(self.first(x), 0, 6)
        y = torch.concatenate([torch.negative(x), torch.special.expit(x)], 1).clip_(-1, 1)
        y = torch.vstack([y, torch.hstack([torch.absolute(x), x])])
        return self.last(torch.erfc(torch.true_divide(y, 2)))


def test_other_names_of_operators_are_their_usual_ones() -> None:
    torch.manual_seed(0)
    model, x = OtherNames().eval(), torch.randn(6, 8)
    module = capture(model, (x,)).module
    targets = {str(node.target) for node in module.graph.nodes if node.op == "call_function"}
    usual = {"aten.clamp.default", "aten.cat.default", "aten.neg.default", "aten.sigmoid.default", "aten.div.Tensor"}
    assert usual <= targets
    torch.testing.assert_close(module(x), model(x))
    quantized = ck.quant.quantize_static(model, [x])
    assert not any("no rule for aten.clip" in reason for reason in quantized.placement.floating.values())
    plan = ck.prune.plan_channels(model, x, budget=ck.keep(macs=0.6), round_to=1)
    assert ck.prune.apply_(model, plan).last.in_features < 32
