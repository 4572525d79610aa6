"""Memory: bytes per parameter of every policy, and activations kept for backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from mixed_runs import USER_WARNINGS
from torch import nn

from compresskit import mixed
from compresskit.base.errors import ModelError, SettingError
from compresskit.mixed import (
    FP32,
    MASTER_BF16,
    SPLIT_BF16,
    memory_report,
    prepare,
)

pytestmark = USER_WARNINGS
#: By policy: bytes per parameter of the foreach step, and of the compiled one.
BYTES = dict.fromkeys(("FP32", "TF32", "AMP_BF16", "AMP_FP16"), (16, 16))
BYTES |= dict.fromkeys(("MASTER_BF16", "MASTER_FP16", "FP8"), (18, 16)) | dict.fromkeys(("SPLIT_BF16", "KAHAN_BF16"), (16, 14))
BYTES |= {"SR_BF16": (14, 12), "PURE_BF16": (8, None), "PURE_FP16": (8, None)}


@pytest.mark.parametrize("backend", ["foreach", "compiled"])
@pytest.mark.parametrize("name", BYTES)
def test_bytes_per_parameter_are_the_table_of_the_docs(name, backend) -> None:
    """Weight, master or remainder, moments, gradient: the table of docs/mixed.md. The compiled step differs in its gradients."""
    wanted = BYTES[name][backend == "compiled"]
    if wanted is None:
        pytest.skip("no compiled step")
    policy = getattr(mixed, name)
    policy = replace(policy, fp8="emulated") if policy.fp8 else policy
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    run = prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True), policy)
    if backend == "compiled" and run._weights.halves:
        run._weights.use_fp32_gradients_(enabled=False)  # what prepare(backend="compiled") does
    for _ in range(2):
        run.backward(run(torch.randn(16, 64)).sum())
        held = [*model.parameters(), *(p.grad for p in model.parameters()), *(h.master for h in run._weights.halves)]
        held += [h.remainder for h in run._weights.halves if h.remainder is not None]
        held += [v for state in run.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor) and v.ndim]
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}
        run.step()
    assert sum(storages.values()) == wanted * 64 * 64


def test_masters_and_half_weights_take_one_and_a_half_of_fp32() -> None:
    model = nn.Linear(64, 64, bias=False)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), MASTER_BF16)
    full = 64 * 64 * 4
    masters = sum(m.untyped_storage().nbytes() for m in run.masters())
    assert masters + model.weight.untyped_storage().nbytes() == 1.5 * full


def test_half_weights_halve_the_activations_kept_for_backward() -> None:
    """A convolutional network saves more of it than one of few large products, as weights are no part of it."""
    kept = {}
    for policy in (FP32, MASTER_BF16):
        model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Flatten())
        run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
        weights = {p.data_ptr() for p in model.parameters()}
        sizes = {}

        def pack(t, sizes=sizes, weights=weights):
            if t.data_ptr() not in weights:
                sizes[t.data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            run(torch.randn(8, 3, 16, 16))
        kept[policy.name] = sum(sizes.values())
    assert kept["MASTER_BF16"] == 0.5 * kept["FP32"]


def test_transient_masters_take_no_memory_between_steps() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    run = prepare(model, optimizer, SPLIT_BF16)
    for _ in range(2):
        assert all(p.untyped_storage().nbytes() == 0 for g in optimizer.param_groups for p in g["params"])
        run.backward(run(torch.randn(4, 8)).square().sum())
        run.step()
    assert model.weight.dtype == torch.bfloat16


def test_the_memory_report_is_the_table_of_the_docs() -> None:
    """Between two steps: the table's bytes without the gradients, which the step drops, and a few numbers that count steps."""
    model = nn.Linear(64, 64, bias=False)
    report = memory_report(model, torch.randn(16, 64))
    wanted = {"FP32": 12, "AMP_BF16": 12, "MASTER_BF16": 14, "SPLIT_BF16": 12, "KAHAN_BF16": 12, "SR_BF16": 10}
    assert {row.policy: row.allocated // 64**2 for row in report.rows} == wanted
    assert all(row.allocated % 64**2 < 256 for row in report.rows)
    assert model.weight.dtype == torch.float32
    assert model.weight.grad is None
    for row in report.rows:
        assert row.peak > row.allocated
        assert row.reserved is row.peak_reserved is None
    assert "live tensors; the allocator does not tell what it reserves" in str(report)
    assert len(str(report).splitlines()) == 2 + len(wanted)


def test_the_peak_has_the_activations_in_it() -> None:
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh())])
    few, many = (memory_report(model, (torch.randn(n, 16), torch.randn(n, 16)), loss=nn.functional.mse_loss, policies=[FP32])
                 for n in (8, 808))  # fmt: skip
    kept = 6 * 800 * 16 * 4  # what each tanh keeps for its backward pass, for 800 samples more
    assert kept <= many.rows[0].peak - few.rows[0].peak <= 3 * kept
    assert few.rows[0].allocated == many.rows[0].allocated


def test_a_memory_report_of_nothing_is_refused() -> None:
    with pytest.raises(SettingError, match=r"memory_report\(policies=...\): wanted at least one policy"):
        memory_report(nn.Linear(2, 2), torch.ones(1, 2), policies=[])
    with pytest.raises(SettingError, match=r"memory_report\(steps=...\): wanted a whole number >= 1, got True"):
        memory_report(nn.Linear(2, 2), torch.ones(1, 2), steps=True)
    with pytest.raises(SettingError, match=r"memory_report\(policies=...\)"):
        memory_report(nn.Linear(2, 2), torch.ones(1, 2), policies=["O2"])
    with pytest.raises(ModelError, match="which MASTER_BF16 does not cast"):
        memory_report(nn.Linear(2, 2).double(), torch.ones(1, 2), policies=[MASTER_BF16])
