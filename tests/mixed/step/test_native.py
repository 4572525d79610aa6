"""The step's one file of C++ gives the bits of the formats in Python, for all layouts and numbers of threads."""

from __future__ import annotations

import pytest
import torch
from mixed_runs import HAS_COMPILER
from torch import nn

from compresskit.mixed import FP32, MASTER_BF16, SPLIT_BF16, SR_BF16, prepare
from compresskit.mixed.formats import bf16_formats
from compresskit.mixed.step import compiled, native
from compresskit.mixed.step.compiled import StepTensors

pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler here")
FORMATS = [None, "split", "kahan", "stochastic"]
RATE, SEED, OFFSET = 0.25, 2**33 + 7, 3  # an odd place, and a seed of two words
SETTINGS = {"lr": RATE, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False}


def half_weights(bf16_format, count=2**17 + 1001):
    """A master and what holds it; numbers that are not finite, too."""
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(count, generator=generator)
    value[:4] = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0])
    half = torch.zeros_like(value, dtype=torch.bfloat16)
    half, remainder = bf16_formats.from_fp32(value, half, half, bf16_format, SEED, torch.tensor(0), OFFSET)
    remainder = None if remainder is None else remainder.clone()
    grad = torch.randn(count, generator=generator)
    grad[4:7] = torch.tensor([float("inf"), float("nan"), 0.0])
    return value, half.clone(), None if bf16_format in (None, "stochastic") else remainder, grad


def as_tensors(master, half, remainder, grad, offset=OFFSET):
    return StepTensors([master], [half], [remainder], [offset], [grad], [[]])


def step(bf16_format, tensors, steps=5):
    group = native.NativeGroup()
    assert group.take(tensors, [], bf16_format)
    group.update("sgd", SETTINGS, SEED, torch.tensor(0.5), torch.tensor(steps))


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bf16_format", FORMATS)
def test_weights_are_those_of_the_formats_bit_for_bit(bf16_format, grad_dtype) -> None:
    value, half, remainder, grad = half_weights(bf16_format)
    grad = grad.to(grad_dtype)
    old = value if bf16_format is None else bf16_formats.to_fp32(half, remainder, bf16_format)
    wanted_value = old - RATE * (grad.float() * 0.5)
    wanted = bf16_formats.from_fp32(wanted_value, half, remainder, bf16_format, SEED, torch.tensor(5), OFFSET)
    wanted = [None if t is None else t.clone() for t in wanted]
    master = value.clone() if bf16_format is None else None
    step(bf16_format, as_tensors(master, half, remainder, grad))
    finite = ~wanted_value.isnan()  # of the others, the remainder is free
    for got, expected in ((master, wanted_value), (half, wanted[0]), (remainder, wanted[1])):
        if got is not None:
            assert got.dtype == expected.dtype
            torch.testing.assert_close(got[finite], expected[finite], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(half.isnan(), wanted[0].isnan())


@pytest.mark.parametrize("bf16_format", FORMATS)
def test_threads_change_nothing(bf16_format, monkeypatch) -> None:
    monkeypatch.setattr(native, "VALUES_OF_THREAD", 1000)
    results = []
    for threads in (1, 2, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        value, half, remainder, grad = half_weights(bf16_format)
        step(bf16_format, as_tensors(value if bf16_format is None else None, half, remainder, grad))
        results.append(half.view(torch.int16))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_tensors_that_lie_alike_run_natively_and_others_do_not() -> None:
    weight, half = torch.randn(8, 4, 3, 3), torch.randn(8, 4, 3, 3).bfloat16()
    last = [t.contiguous(memory_format=torch.channels_last) for t in (weight, half)]
    assert native.runs_natively([[weight, half, None]])
    assert native.runs_natively([last])
    assert not native.runs_natively([[weight, last[1]]])
    assert not native.runs_natively([[torch.randn(8, 8)[:, ::2]]])
    assert not native.runs_natively([[weight.half()]])
    assert not native.runs_natively([[weight.to("meta")]])
    assert native.laid_as(weight, last[0]).stride() == last[0].stride()
    assert torch.equal(native.laid_as(weight, last[0]), weight)
    assert native.laid_as(weight, weight) is weight


@pytest.mark.parametrize("policy", [MASTER_BF16, SPLIT_BF16, SR_BF16], ids=lambda policy: policy.name)
def test_convolutions_with_channels_last_are_covered(policy, monkeypatch) -> None:
    monkeypatch.setattr(compiled, "_compile_copy", lambda function: pytest.fail("asked for torch.compile"))
    x, results = torch.randn(4, 8, 6, 6), []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = nn.Conv2d(8, 16, 3).to(memory_format=layout)
        run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), policy, backend="compiled")
        for _ in range(3):
            run.backward(run(x.contiguous(memory_format=layout)).square().mean())
            run.step()
        results.append(run.finish().weight.detach())
    torch.testing.assert_close(*results, atol=2e-2, rtol=2e-2)


def test_a_compiler_that_cannot_build_the_file_is_not_asked_again(monkeypatch, tmp_path) -> None:
    broken = tmp_path / "update.cpp"
    broken.write_text("this is not C++")
    monkeypatch.setattr(native, "SOURCE", broken)
    native.native_update.cache_clear()
    try:
        assert native.native_update() is None
        monkeypatch.undo()
        assert native.native_update() is None
    finally:
        native.native_update.cache_clear()


def test_tensors_that_move_are_found_again(monkeypatch) -> None:
    monkeypatch.setattr(compiled, "_compile_copy", lambda function: pytest.fail("asked for torch.compile"))
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    plain = nn.Linear(8, 8)
    plain.load_state_dict(model.state_dict())
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, plain)]
    run = prepare(model, optimizers[0], FP32, backend="compiled")
    x = torch.randn(4, 8)
    for step in range(6):
        run.backward(run(x).square().mean())
        run.step()
        optimizers[1].zero_grad()
        plain(x).square().mean().backward()
        optimizers[1].step()
        if step == 1:  # state of the user's: another memory, other values
            for optimizer in optimizers:
                for state in optimizer.state.values():
                    state["exp_avg"], state["step"] = state["exp_avg"].clone() * 0.5, state["step"] + 3
        if step == 3:
            for each in (model, plain):
                each.weight.data = each.weight.data.clone() * 2
    torch.testing.assert_close(model.weight, plain.weight)


def test_a_shorter_tensor_in_the_same_memory_is_found() -> None:
    group, whole, grad = native.NativeGroup(), torch.zeros(8), torch.ones(8)
    for count in (8, 5):
        assert group.take(as_tensors(whole[:count], None, None, grad[:count]), [], None)
        group.update("sgd", SETTINGS, SEED, None, torch.tensor(0))
    assert whole.tolist() == [-2 * RATE] * 5 + [-RATE] * 3
