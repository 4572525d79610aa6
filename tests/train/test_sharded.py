"""A model under FSDP2 is trained on two processes (gloo), saved on its way, and goes on with the same bits."""

from __future__ import annotations

import fsdp_ranks as ranks
import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What each rank found, by case, and the folder of their checkpoints."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(ranks.main, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)], folder


@pytest.mark.parametrize("case", ["resumed", "best", "snapshots", "in_half"])
def test_a_stopped_training_goes_on_with_the_same_bits(two, case) -> None:
    for found in (rank[case] for rank in two[0]):
        assert found["whole"].keys() == found["again"].keys()
        for name, value in found["whole"].items():
            assert torch.equal(value, found["again"][name]), name
    first, second = (rank[case]["whole"] for rank in two[0])
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_finished_training_is_read(two) -> None:
    for rank in two[0]:
        found = rank["resumed"]
        assert found["files"] == ["1-4.safetensors", "1-6.safetensors", "stage.json"]
        assert all(torch.equal(value, found["read"][name]) for name, value in found["whole"].items())


def test_one_process_continues_what_two_began(two) -> None:
    alone = ranks.train(two[1] / "elsewhere", sharded=False)
    assert all(torch.isfinite(value).all() for value in alone.values())
    # Dropout and the order of sums differ; the epochs that were trained before do not.
    fresh = {name: value.detach() for name, value in ranks.net(sharded=False).named_parameters()}
    assert any(not torch.equal(value, alone[name]) for name, value in fresh.items())


def test_a_recipe_says_what_it_cannot_copy(two) -> None:
    assert all("FSDPSequential is sharded by FSDP2" in rank["refused"] for rank in two[0])
