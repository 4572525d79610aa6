"""Two processes on a CPU (gloo): DDP and FSDP2 train as one process does, and skip together."""

from __future__ import annotations

import mixed_ranks as ranks
import pytest
import torch
from rank_pairs import both
from torch import nn

from compresskit import mixed
from compresskit.base.errors import SettingError
from compresskit.mixed import MASTER_BF16, PURE_BF16, fsdp_policy, prepare

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo"),
    pytest.mark.filterwarnings("ignore:fp16 on a CPU:UserWarning"),
]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What each rank found, by case."""
    return both(ranks.main, tmp_path_factory.mktemp("ranks"))


def alone(policy, **settings):
    model = ranks.net()
    run = prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), policy, **settings)
    ranks.go(run, 0, 1)
    return run


def close(one, other, tolerance):
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", ["FP32", "AMP_BF16", "MASTER_BF16", "SPLIT_BF16", "SR_BF16"])
def test_ddp_trains_as_one_process_and_ranks_agree_bit_for_bit(two, name) -> None:
    """Half all-reduce; SR draws by a hash of the place, so that ranks need no common generator."""
    first, second = (rank["ddp"][name] for rank in two)
    assert all(torch.equal(first[key], second[key]) for key in first)
    # Adam steps by parts of the rate whatever the gradient's size, so that one near 0 counts as it is rounded.
    tolerance = {"FP32": 1e-6, "SR_BF16": 8e-3}.get(name, 1e-3)
    close(first, ranks.numbers(alone(getattr(mixed, name), clip=0.5)), tolerance)


def test_ddp_reduces_in_fp32_by_the_hook(two) -> None:
    first, second = (rank["ddp"]["hook"] for rank in two)
    assert all(torch.equal(first[key], second[key]) for key in first)
    close(first, ranks.numbers(alone(MASTER_BF16, clip=0.5)), 4e-3)
    means = [rank["small"] for rank in two]
    assert [m["half"].item() for m in means] == [0, 0]
    assert [m["fp32"].item() for m in means] == [-1, -1]


def test_ddp_ranks_skip_together_when_one_overflows(two) -> None:
    first, second = (rank["overflow"] for rank in two)
    assert first["skipped"] == second["skipped"] == 1
    assert first["scale"] == second["scale"]
    assert all(torch.equal(first[name], second[name]) and torch.isfinite(first[name]).all() for name in first if "." in name)


def test_accumulation_under_ddp_is_one_large_batch(two) -> None:
    model = ranks.net()
    run = prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), MASTER_BF16)
    with run.accumulate(4):
        for x in ranks.batches(4):
            run.backward(run(x).square().mean())
    run.step()
    for rank in two:
        close(rank["accumulated"], ranks.numbers(run), 4e-3)
    assert "inside no_sync() the ranks would not share the gradients" in two[0]["ddp"]["no_sync"]


@pytest.mark.parametrize("policy", [mixed.FP32, MASTER_BF16, ranks.SCALED], ids=lambda p: p.name)
def test_fsdp2_shards_are_the_masters(two, policy) -> None:
    first, second = (rank["fsdp"] for rank in two)
    assert all(torch.equal(first[policy.name][key], second[policy.name][key]) for key in first[policy.name])
    assert {value.dtype for value in first[policy.name].values()} == {torch.float32}
    dtype = str(policy.param_dtype or torch.float32)
    assert first[policy.name, "seen"] == [dtype]
    run = alone(policy, clip=0.5)
    close(first[policy.name], ranks.numbers(run), 1e-5 if policy is mixed.FP32 else 1e-3)
    # The norm is that of all shards together.
    assert first[policy.name, "norm"] == pytest.approx(run.stats()["grad_norm"], rel=1e-5 if policy is mixed.FP32 else 2e-2)


def test_fsdp2_resumes_bit_for_bit(two) -> None:
    for rank in two:
        whole, again = rank["fsdp"]["resumed"]
        assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_fsdp2_with_fp16_skips_on_all_ranks_when_one_overflows(two) -> None:
    for rank in two:
        found = rank["fsdp_overflow"]
        assert not found["moved"]
        assert found["skipped"] == 1
    assert torch.equal(*(rank["fsdp_overflow"]["average"] for rank in two))


def test_fsdp2_without_the_policys_casts_is_refused(two) -> None:
    for wanted, got in zip(
        (
            "MASTER_BF16 computes in torch.bfloat16, the model was sharded for torch.float32; give fully_shard(mp_policy=",
            "SPLIT_BF16: FSDP2 keeps fp32 shards, which are masters already; use MASTER_BF16",
            "FSDP2 lays its shards out itself; leave flat=True and backend='compiled' out",
            "the optimizer holds tensors that FSDP2 has put together for a forward pass, not the model's shards; make it right",
        ),
        two[0]["fsdp_refused"],
        strict=True,
    ):
        assert wanted in got


def test_fsdp_policy_sets_every_dtype() -> None:
    for policy, param in (
        (mixed.FP32, None),
        (mixed.AMP_BF16, None),
        (MASTER_BF16, torch.bfloat16),
        (mixed.MASTER_FP16, torch.float16),
    ):
        made = fsdp_policy(policy)
        assert (made.param_dtype, made.reduce_dtype) == (param, torch.float32)
        assert made.output_dtype is None
        assert made.cast_forward_inputs is (param is not None)
    with pytest.raises(SettingError, match="PURE_BF16: FSDP2 keeps fp32 shards"):
        fsdp_policy(PURE_BF16)


def test_a_plain_model_is_not_sharded() -> None:
    assert not mixed.formats.parallel.is_sharded(nn.Linear(2, 2))


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_a_model_is_wrapped_in_ddp_after_prepare(tmp_path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        weights = []
        for wrap in (False, True):
            torch.manual_seed(0)
            model = nn.Linear(4, 2)
            run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), MASTER_BF16)
            if wrap:
                run.model = nn.parallel.DistributedDataParallel(run.model)
            with run.accumulate(2):
                for i in range(2):
                    run.backward(run(torch.ones(3, 4) * (i + 1)).square().mean())
            run.step()
            weights.append(run.masters()[0].clone())
            assert run.state_dict()["weights"].keys() == {"weight", "bias"}
            if wrap:
                with pytest.raises(Exception, match="wrap the model in DistributedDataParallel after prepare"):
                    prepare(run.model, run.optimizer, MASTER_BF16)
        torch.testing.assert_close(*weights, atol=1e-3, rtol=1e-2)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_a_root_with_a_norm_trains_under_fsdp2_and_its_outputs_are_fp32(tmp_path) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        model, policy = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 3)), fsdp_policy(MASTER_BF16)
        for part in (model[0], model):
            fully_shard(part, mp_policy=policy, mesh=mesh)
        run = prepare(model, torch.optim.AdamW(model.parameters()), MASTER_BF16)
        output = run(torch.randn(8, 16))
        assert output.dtype == torch.float32
        run.backward(output.square().mean())
        run.step()
    finally:
        torch.distributed.destroy_process_group()
