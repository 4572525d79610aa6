"""Torch's own encoder over padded sentences, which in eval mode has a fast path without inner layers: each stage prunes it."""

from __future__ import annotations

import copy

import networks
import pytest
import torch
import torch.nn.functional as F
from networks import padded_tokens

import compresskit as ck
from compresskit.distill import Teacher
from compresskit.prune import criteria
from compresskit.prune.depth import Depth, costs, narrow
from compresskit.prune.low_rank import LowRank

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
