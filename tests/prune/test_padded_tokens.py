"""Torch's own encoder over padded sentences, which in eval mode has a fast path without inner layers: each stage prunes it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import networks
import pytest
import torch
import torch.nn.functional as F
from networks import padded_tokens
from pruned import assert_equals_zeroed
from torch import Tensor, nn

import compresskit as ck
from compresskit.distill import Teacher
from compresskit.prune import criteria
from compresskit.prune.depth import Depth, costs, narrow
from compresskit.prune.low_rank import LowRank
from compresskit.prune.structure.plan import Plan

STAGES = {
    "channels": ck.Prune(budget=ck.keep(macs=0.8)),
    "activations": ck.Prune(budget=ck.keep(macs=0.8), criterion=criteria.mean_activation),
    "ranks": LowRank(budget=ck.keep(macs=0.8), finetune=None),
    "blocks": Depth(blocks=1, cost=costs.macs, finetune=None),
    "narrow": lambda model, task: narrow(model, task.example(), width=0.5),
}


def tokens_task() -> ck.Task:
    """Three batches of padded sentences; the padded tokens have a label that does not count."""
    data = []
    for _ in range(3):
        x, padded = padded_tokens(8)
        data.append((x, padded, torch.randint(0, 3, padded.shape).masked_fill(padded, -100)))
    return ck.Task(
        train=data,
        val=data,
        loss=lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()),
        metric=lambda z, y: float((z.argmax(-1) == y)[y >= 0].float().mean()),
        higher_is_better=True,
    )


NESTED = "ignore:The PyTorch API of nested tensors"  # which torch's fast path makes, and warns of


@pytest.mark.matrix
@pytest.mark.filterwarnings(NESTED)
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize("name", STAGES)
def test_an_encoder_of_padded_sentences_is_pruned(name, nested) -> None:
    torch.manual_seed(0)
    model, task, inputs = networks.PaddedEncoder(nested).eval(), tokens_task(), padded_tokens(5, 7, longest=6)
    small = STAGES[name](copy.deepcopy(model), task)
    assert ck.count_macs(small, inputs) < ck.count_macs(model, inputs)
    assert torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad():
        fast = small(*inputs)  # as users run it
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            wanted = small(*inputs)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    torch.testing.assert_close(fast[~inputs[1]], wanted[~inputs[1]])


def test_a_recipe_prunes_and_quantizes_it(tmp_path) -> None:
    torch.manual_seed(0)
    recipe = ck.Recipe(ck.Train(epochs=1), STAGES["channels"], ck.StaticQuant(dynamic=(0, 1)), dynamic=(0, 1))
    result = recipe.run(networks.PaddedEncoder(), tokens_task(), out=tmp_path)
    assert all(row.verified for row in result.rows)
    assert ck.verify_onnx(tmp_path / "model.onnx", result.model, [padded_tokens(3, 5, longest=4)]).passed


def test_a_teacher_gives_what_its_layers_compute_at_padded_positions() -> None:
    model, inputs = networks.PaddedEncoder().eval(), padded_tokens(4, 10)
    torch.testing.assert_close(Teacher(model).predictions(inputs, tokens_task()), model(*inputs))  # with gradients: all layers


MASKED = {
    "sizes": lambda y, valid: y * valid[..., None].expand(y.size()).float(),
    "a width": lambda y, valid: y * valid[..., None].expand(-1, -1, y.shape[2]),
    "repeated": lambda y, valid: y * valid[..., None].repeat(1, 1, y.shape[2]),
    "tiled": lambda y, valid: y * valid[..., None].tile(1, 1, y.shape[2]),
    "filled": lambda y, valid: y.masked_fill(~valid[..., None].expand(y.size()), 0),
    "filled in place": lambda y, valid: y.clone().masked_fill_(~valid[..., None].expand(y.size()), 0),
    "added": lambda y, valid: y + (1 - valid[..., None].expand(y.size()).float()) * -1e3,
    "chosen": lambda y, valid: torch.where(valid[..., None].expand(y.size()), y, 0),
    "beside zeros": lambda y, valid: torch.where(valid[..., None], y, y.new_zeros(y.shape)),
    "before zeros": lambda y, valid: torch.where(~valid[..., None], y.new_zeros(y.shape), y),
    "of zeros": lambda y, valid: y * torch.zeros_like(y).masked_fill(valid[..., None], 1.0),
    "turned": lambda y, valid: (y.transpose(1, 2) * valid[:, None].expand(-1, y.shape[2], -1)).transpose(1, 2),
    "mean": lambda y, valid: (
        (y * valid[..., None].expand(y.size())).sum(1, keepdim=True) / valid[..., None].expand(y.size()).sum(1, keepdim=True)
    ),
}


class MaskedTokens(nn.Module):
    """A residual stream whose padded tokens code takes out."""

    def __init__(self, masked: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.masked = masked
        self.enter, self.up, self.down, self.head = nn.Linear(6, 16), nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        y = self.enter(x)
        return self.head(self.masked(y + self.down(self.up(y).relu()), valid))


def masked_plan(
    masked: Callable[[Tensor, Tensor], Tensor], **settings: dict[str, float]
) -> tuple[MaskedTokens, tuple[Tensor, Tensor], Plan]:
    """The model, its inputs, and a plan of its channels."""
    torch.manual_seed(0)
    model, inputs = MaskedTokens(masked).eval(), (torch.randn(4, 7, 6), torch.arange(7) < torch.tensor([7, 3, 2, 5])[:, None])
    return model, inputs, ck.prune.plan_channels(model, inputs, ck.keep(macs=0.7), round_to=1, **settings)


@pytest.mark.parametrize("how", MASKED)
def test_a_mask_as_wide_as_the_tokens_locks_no_channels(how) -> None:
    model, inputs, plan = masked_plan(MASKED[how], ratios={"enter": 0.5})
    assert len(plan.remove["head.weight"][1]) == 8
    assert [*plan.locked] == ["an output of the model"]
    assert_equals_zeroed(model, plan, inputs)


@pytest.mark.parametrize(
    ("masked", "reason"),
    [
        (lambda y, valid: y * valid[..., None].expand(-1, -1, 16), "mul in the model with a value of a size written in the code"),
        (lambda y, valid: y * (valid[..., None].expand(y.size()) & (torch.arange(16) > 3)), "cannot be cut, by mul in the model"),
    ],
    ids=["a width in code", "channels"],
)
def test_a_mask_of_one_width_locks_channels(masked, reason) -> None:
    model, inputs, plan = masked_plan(masked)
    assert any(reason in locked for locked in plan.locked), plan.locked
    assert_equals_zeroed(model, plan, inputs)


class Emptied(nn.Module):
    """A residual stream in which code writes a number over padded tokens, as Wav2Vec2's encoder does."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.enter, self.up, self.down, self.head = nn.Linear(6, 16), nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 5)
        self.register_buffer("first", torch.arange(16) < 3)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        y = self.enter(x)
        match self.how:
            case "rows":
                y[~valid] = 0
            case "repeated":
                y[~valid.unsqueeze(-1).repeat(1, 1, y.shape[2])] = 0
            case "expanded":
                y[~valid[..., None].expand_as(y)] = 1.5
            case "numbers":
                y[torch.tensor([0, 1]), 2] = -1
            case "by value":
                y[y < 0] = 0
            case "a width in code":
                y[~valid.unsqueeze(-1).repeat(1, 1, 16)] = 0
            case "channels":
                y[valid.unsqueeze(-1).repeat(1, 1, y.shape[2]) & (torch.arange(y.shape[2]) > 3)] = 0
            case "stored":
                y[:, :, self.first] = 0
        return self.head(y + self.down(self.up(y).relu()))


def emptied(how: str, macs: float) -> tuple[Emptied, tuple[Tensor, Tensor], Plan]:
    """The model, its inputs, and a plan of its channels."""
    torch.manual_seed(0)
    model, inputs = Emptied(how).eval(), (torch.randn(4, 7, 6), torch.arange(7) < torch.tensor([7, 3, 2, 5])[:, None])
    return model, inputs, ck.prune.plan_channels(model, inputs, ck.keep(macs=macs), round_to=1)


@pytest.mark.parametrize("how", ["rows", "repeated", "expanded", "numbers", "by value"])
def test_a_number_written_over_tokens_locks_no_channels(how) -> None:
    model, inputs, plan = emptied(how, macs=0.3)
    assert plan.remove["enter.weight"][0]
    assert plan.remove["head.weight"][1]
    assert [*plan.locked] == ["an output of the model"]
    assert_equals_zeroed(model, plan, inputs)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("a width in code", "index_put in the model with a value of a size written in the code"),
        ("channels", "cannot be cut, by index_put in the model"),
        ("stored", "overwritten by index_put in the model"),
    ],
)
def test_a_number_written_over_some_channels_locks_them(how, reason) -> None:
    model, inputs, plan = emptied(how, macs=0.7)
    assert any(reason in locked for locked in plan.locked), plan.locked
    assert_equals_zeroed(model, plan, inputs)
