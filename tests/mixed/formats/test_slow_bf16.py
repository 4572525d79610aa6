"""bf16 on a processor without it is slow, and who asks for it is told."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.mixed import AMP_BF16, FP32, MASTER_BF16, prepare
from compresskit.mixed.formats import slow_bf16

HAS_BF16 = getattr(torch.cpu, "_is_avx512_bf16_supported", bool)()


@pytest.fixture(autouse=True)
def nothing_said_yet():
    slow_bf16._warn_once.cache_clear()
    yield
    slow_bf16._warn_once.cache_clear()


def prepared(policy) -> None:
    model = nn.Linear(2, 2)
    prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy).finish()


def test_a_processor_without_bf16_is_said_once(monkeypatch, caplog) -> None:
    monkeypatch.setattr(slow_bf16, "bf16_slowdown", lambda: 12.3)
    for _ in range(2):
        prepared(MASTER_BF16)
    said = [record.message for record in caplog.records]
    assert said == [
        "MASTER_BF16: this processor has no instructions for bf16, and a convolution takes 12 times as long as in fp32; use"
        " mixed.FP32 here"
    ]
    prepared(AMP_BF16)
    assert len(caplog.records) == 2


def test_a_stage_says_it_too(monkeypatch, caplog) -> None:
    monkeypatch.setattr(slow_bf16, "bf16_slowdown", lambda: 12.3)
    batches = [(torch.randn(4, 2), torch.arange(4) % 2)]
    ck.Train(epochs=1, precision=AMP_BF16)(nn.Linear(2, 2), ck.Task(train=batches, val=batches))
    assert "AMP_BF16: this processor has no instructions for bf16" in caplog.text


def test_a_processor_with_bf16_and_fp32_are_not_mentioned(monkeypatch, caplog) -> None:
    prepared(FP32)
    monkeypatch.setattr(slow_bf16, "bf16_slowdown", lambda: 1.2)
    prepared(MASTER_BF16)
    assert not caplog.records


def test_the_measurement_tells_processors_apart_and_draws_no_random_numbers() -> None:
    state = torch.get_rng_state()
    slowdown = slow_bf16.bf16_slowdown.__wrapped__()
    assert torch.equal(torch.get_rng_state(), state)
    if HAS_BF16:
        assert slowdown < slow_bf16.SLOW
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "DEFAULT"):
        assert slowdown > slow_bf16.SLOW


def test_a_sentence_says_what_to_train_in(monkeypatch) -> None:
    monkeypatch.setattr(slow_bf16, "bf16_slowdown", lambda: 12.3)
    assert slow_bf16.bf16_speed().endswith("12 times as long as in fp32; train in mixed.FP32 here")
    monkeypatch.setattr(slow_bf16, "bf16_slowdown", lambda: 0.63)
    assert slow_bf16.bf16_speed() == "bf16: a convolution takes 0.6 times as long as in fp32"
