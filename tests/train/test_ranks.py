"""Two processes (gloo): a model under FSDP2 goes on with the same bits; rows of one's own, or of all; what the processes read."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import training_ranks as ranks
from rank_pairs import both

from compresskit.base.distributed import running_statistics
from compresskit.quant import prepare_qat

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What each rank found, by case, and the folder of their checkpoints."""
    folder = tmp_path_factory.mktemp("ranks")
    return both(ranks.main, folder), folder


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
    """Dropout draws other numbers in one process; the six steps that two took are read, not taken again."""
    whole, rest = [], []
    fresh = ranks.train(None, sharded=False, seen=whole)
    alone = ranks.train(two[1] / "elsewhere", sharded=False, seen=rest)
    assert rest == whole[6:]
    assert all(torch.isfinite(value).all() for value in alone.values())
    assert any(not torch.equal(value, alone[name]) for name, value in fresh.items())


def test_a_recipe_says_what_it_cannot_copy(two) -> None:
    assert all("FSDPSequential is sharded by FSDP2" in rank["refused"] for rank in two[0])


def test_own_rows_are_the_step_of_ddp(two) -> None:
    """Each half of the batch has its own statistics; gradients and running averages are the means of the halves."""
    x, y = ranks.pictures(10)
    whole, halves = ranks.plain(), [ranks.plain(), ranks.plain()]
    for model, rows in zip(halves, (slice(0, 5), slice(5, 10)), strict=True):
        F.cross_entropy(model(x[rows]), y[rows]).backward()
    expected = {name: value.clone() for name, value in whole.state_dict().items()}
    for name, parameter in whole.named_parameters():
        expected[name] = parameter - 0.1 * sum(dict(model.named_parameters())[name].grad for model in halves) / 2
    for name in ("1.running_mean", "1.running_var"):
        expected[name] = sum(model.state_dict()[name] for model in halves) / 2
    expected["1.num_batches_tracked"] += 1
    for found in (rank["own_rows"] for rank in two[0]):
        for name, value in expected.items():
            torch.testing.assert_close(found["step"][name], value)
        assert not torch.allclose(found["step"]["1.running_var"], found["step, exact"]["1.running_var"], rtol=1e-4)


def test_frozen_statistics_are_not_averaged() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(2), torch.nn.BatchNorm2d(2).eval())
    assert [id(value) for value in running_statistics(model)] == [id(model[0].running_mean), id(model[0].running_var)]
    quantized = prepare_qat(ranks.plain().eval(), [ranks.pictures(8)[0]]).train()
    assert len(running_statistics(quantized)) > 2
    quantized.freeze_statistics_()
    assert not running_statistics(quantized)


@pytest.mark.parametrize(("name", "dtype", "near"), [("step", torch.float32, 1e-5), ("float64", torch.float64, 1e-13)])
def test_exact_is_the_step_of_one_process(two, name, dtype, near) -> None:
    x, y = ranks.pictures(10)
    model = ranks.plain().to(dtype)
    F.cross_entropy(model(x.to(dtype)), y).backward()
    for found in (rank["own_rows"][f"{name}, exact"] for rank in two[0]):
        for key, parameter in model.named_parameters():
            torch.testing.assert_close(found[key], (parameter - 0.1 * parameter.grad).detach(), atol=near, rtol=10 * near)
        torch.testing.assert_close(found["1.running_var"], model.state_dict()["1.running_var"], atol=near, rtol=10 * near)


@pytest.mark.parametrize("case", ["own_rows", "quantized"])
def test_both_processes_have_the_same_bits(two, case) -> None:
    first, second = (rank[case] for rank in two[0])
    for name, state in first.items():
        assert all(torch.equal(value, second[name][key]) for key, value in state.items()), name
        assert all(torch.isfinite(value).all() for value in state.values() if value.is_floating_point())


def test_ranges_of_own_rows_are_close_to_those_of_all(two) -> None:
    found = two[0][0]["quantized"]
    assert any(not torch.equal(value, found["exact"][name]) for name, value in found["own"].items())
    assert F.cosine_similarity(found["own"]["outputs"].flatten(), found["exact"]["outputs"].flatten(), 0) > 0.9


@pytest.mark.filterwarnings("ignore:fp16 on a CPU:UserWarning")
def test_a_layer_that_one_process_does_not_use_gets_the_mean(two) -> None:
    first, second = (rank["experts"] for rank in two[0])
    for precision, tolerance in (("FP32", 1e-6), ("MASTER_BF16", 1e-2), ("MASTER_FP16", 1e-2)):
        alone = ranks.expert_steps(precision)
        for name, value in alone.items():
            assert torch.equal(first[precision][name], second[precision][name]), name
            torch.testing.assert_close(first[precision][name], value, atol=tolerance, rtol=tolerance)
    for name, value in ranks.expert_steps(dtype=torch.float64).items():
        assert torch.equal(first["float64"][name], second["float64"][name]), name
        torch.testing.assert_close(first["float64"][name], value, atol=1e-14, rtol=1e-12)
    torch.manual_seed(0)
    torch.randn(16, 8)
    assert torch.equal(first["FP32"]["none.weight"], ranks.Experts().none.weight), "what no process uses is not decayed"


def test_exact_weighs_labels_as_the_loss_does(two) -> None:
    for name, alone in ranks.by_losses().items():
        for found in (rank["losses"][name] for rank in two[0]):
            torch.testing.assert_close(found["weight"], alone["weight"], atol=1e-6, rtol=1e-5, msg=name)
        torch.testing.assert_close(two[0][0]["losses"][name]["told"], alone["told"], atol=1e-5, rtol=1e-5, msg=name)


def test_processes_that_read_other_samples_are_refused(two) -> None:
    first, second = (rank["reads"] for rank in two[0])
    for name in ("part", "order"):
        for found in (first, second):
            assert found[name].startswith("refused: epoch 1, batch 1: process 1 reads other samples than process 0."), name
            assert "DistributedSampler" in found[name]
    assert "process 1 reads another batch than process 0. That is well where augmentations alone differ" in first["augmented"]
    assert not second["augmented"]
    for name in ("same", "sampler", "rows"):
        assert not first[name], name
        assert not second[name], name


def test_batches_that_differ_are_a_warning_where_nothing_may_be_lost(two) -> None:
    first, second = (rank["unsure"] for rank in two[0])
    for name in ("drawn labels", "simulated", "around a loader"):
        assert first[name].startswith("epoch 1, batch 1: process 1 reads another batch than process 0."), name
    assert "process 1 has 6 rows in its batch, process 0 has 8." in first["rows"]
    assert "DistributedSampler" not in first["simulated"]
    assert "DistributedSampler as the `sampler` of the loader itself" in first["around a loader"]
    assert first["pixels"] == second["pixels"]
    assert first["pixels"].startswith("refused: epoch 1, batch 1: process 1 reads other samples")


def test_an_epoch_tells_the_loss_of_all_rows_and_what_it_froze_is_frozen_in_all(two) -> None:
    first, second = (rank["told"] for rank in two[0])
    assert not second["reported"]
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4))
    model.load_state_dict({**model.state_dict(), **first["start"]})
    assert first["reported"][0] == pytest.approx(F.cross_entropy(model(first["x"]), torch.arange(16) % 4).item(), rel=1e-4)
    for name, value in first["after"].items():
        assert torch.equal(value, second["after"][name]), name
    assert not torch.equal(first["frozen"][0], first["start"]["0.weight"])
    assert all(torch.equal(weight, first["after"]["0.weight"]) for weight in first["frozen"])
