"""A step in parts: what one step gives, bit for bit, with the masters of one part in memory at a time."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from mixed_runs import USER_WARNINGS
from torch import nn

from compresskit.mixed import KAHAN_BF16, SPLIT_BF16, SR_BF16, Lion, prepare
from compresskit.mixed.memory import StorageTracker
from compresskit.mixed.step import parts

pytestmark = USER_WARNINGS
OPTIMIZERS = {
    "fused adamw": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "sgd": partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True),
    "adadelta": torch.optim.Adadelta,
    "lion": partial(Lion, lr=0.01),
}


class Network(nn.Module):
    """Convolutions in `channels_last`, an fp32 norm, a layer without gradient and a weight larger than a part."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(8)
        self.unused = nn.Linear(4, 4)
        self.head = nn.Linear(8, 50)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


def trained(policy, optimizer, steps=3):
    torch.manual_seed(0)
    model = Network()
    groups = [{"params": [*model.conv.parameters(), *model.norm.parameters()]}]
    groups += [{"params": [*model.unused.parameters()], "lr": 0.1}, {"params": [*model.head.parameters()], "lr": 0.02}]
    run = prepare(model, optimizer(groups), policy)
    for _ in range(steps):
        run.backward(run(torch.randn(4, 3, 9, 9)).square().mean())
        run.step()
    return run


def bits(run):
    tensors = [*run.model.state_dict().values(), *(h.remainder for h in run._weights.halves if h.remainder is not None)]
    tensors += [v for state in run.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return [t.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]) for t in tensors]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("policy", [SPLIT_BF16, KAHAN_BF16, SR_BF16], ids=lambda policy: policy.name)
def test_parts_give_what_one_step_gives(policy, optimizer, monkeypatch) -> None:
    whole = trained(policy, OPTIMIZERS[optimizer])
    monkeypatch.setattr(parts, "PART", 100)
    calls = []
    monkeypatch.setattr(parts, "_cut", lambda groups, made=parts._cut: (calls.append(part) or part for part in made(groups)))
    in_parts = trained(policy, OPTIMIZERS[optimizer])
    assert len(calls) == 3 * 4  # conv.weight, its bias with the norm, head.weight, head.bias
    for one, other in zip(bits(whole), bits(in_parts), strict=True):
        assert torch.equal(one, other)
    assert [len(group["params"]) for group in in_parts.optimizer.param_groups] == [4, 2, 2]
    assert all(half.master.untyped_storage().nbytes() == 0 for half in in_parts._weights.halves)
    assert torch.equal(whole.finish().head.weight, in_parts.finish().head.weight)


def test_a_pair_whose_value_did_not_move_stays_in_parts(monkeypatch) -> None:
    """Also where half and compensation lie between two bf16 numbers, of which rounding again would take the other."""
    run = trained(KAHAN_BF16, OPTIMIZERS["sgd"])
    half = next(half for half in run._weights.halves if half.name == "head.weight")
    odd = torch.full_like(half.parameter.data.view(torch.int16), 0x3F81).view(torch.bfloat16)  # 1 + 1/128
    half.parameter.data.copy_(odd)
    half.remainder.fill_(1 / 256)
    run._weights.record_()  # as if a step had written them
    before = [t.clone() for t in (half.parameter.data, half.remainder)]
    assert not torch.equal((odd.float() + 1 / 256).bfloat16(), odd)
    monkeypatch.setattr(parts, "PART", 100)
    run.optimizer.param_groups[2]["lr"] = 0.0
    run.backward(run(torch.randn(4, 3, 9, 9)).square().mean())
    run.step()
    assert all(torch.equal(*pair) for pair in zip(before, (half.parameter.data, half.remainder), strict=True))
    assert half.before is None


@pytest.mark.parametrize("policy", [SPLIT_BF16, KAHAN_BF16], ids=lambda policy: policy.name)
def test_masters_take_the_memory_of_one_part(policy, monkeypatch) -> None:
    peaks = []
    for part in (10**9, 64 * 64):
        monkeypatch.setattr(parts, "PART", part)
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
        with StorageTracker() as tracker:
            run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter, dtype=torch.float32)
            tracker.peak = 0
            run.step()
            peaks.append(tracker.peak)
    assert peaks[0] - peaks[1] >= 6 * 64 * 64 * 4


def test_what_looks_at_the_step_sees_one(monkeypatch) -> None:
    monkeypatch.setattr(parts, "PART", 100)
    run, seen = trained(SPLIT_BF16, OPTIMIZERS["sgd"]), []
    run.optimizer.register_step_post_hook(lambda optimizer, *_: seen.append(len(optimizer.param_groups)))
    masters = []
    run.after_update.append(lambda: masters.append(sum(m.untyped_storage().nbytes() for m in run.masters())))
    for _ in range(2):
        run.backward(run(torch.randn(4, 3, 9, 9)).square().mean())
        run.step()
    assert seen == [3, 3]
    assert min(masters) > 0


def test_a_failing_optimizer_keeps_its_groups(monkeypatch) -> None:
    monkeypatch.setattr(parts, "PART", 100)
    run = trained(SPLIT_BF16, OPTIMIZERS["sgd"])
    run.backward(run(torch.randn(4, 3, 9, 9)).square().mean())
    run.optimizer.param_groups[2]["lr"] = "fast"
    with pytest.raises(TypeError):
        run.step()
    assert [len(group["params"]) for group in run.optimizer.param_groups] == [4, 2, 2]
    assert all(half.master.untyped_storage().nbytes() == 0 for half in run._weights.halves)
