"""Models whose code makes fp32 values itself, or calls what takes no half ones: one error with the line and the remedy."""

from __future__ import annotations

import re

import pytest
import torch
from mixed_runs import FP16_ON_CPU
from torch import nn

import compresskit as ck
from compresskit.base.errors import TrainingError
from compresskit.mixed import AMP_BF16, FP32, MASTER_BF16, MASTER_FP16, SPLIT_BF16, Policy, prepare

pytestmark = FP16_ON_CPU
BYTES = torch.arange(2 * 8 * 8).reshape(2, 8, 8).to(torch.uint8)

#: What a forward makes of (rows, channels) with the layers of a model; the module that cannot take it, "" for the model itself.
IN_FP32 = {
    "uint8": (lambda m, h: m.conv(BYTES.float() / 255).mean(2), "conv"),
    "mask": (lambda m, h: m.block(h * (h > 0).float()), "block.linear"),
    "state": (lambda m, h: m.cell(h, torch.zeros(len(h), 8)), "cell"),
    "lstm": (lambda m, h: m.lstm(h, (torch.zeros(1, 8), torch.zeros(1, 8)))[0], "lstm"),
    "gru": (lambda m, h: m.gru(h + torch.arange(8) / 8)[0], "gru"),
    "norm": (lambda m, h: m.norm(h * torch.ones(8)), "norm"),
    "attention": (lambda m, h: m.attention(h + torch.ones(8), h, h)[0], "attention"),
    "rows": (lambda m, h: torch.zeros(len(h), 8).index_add(0, torch.arange(len(h)), h), ""),
    "places": (lambda m, h: torch.zeros(len(h), 8).index_put((h > 0,), h[h > 0]), ""),
}
NOT_IN_HALF = {
    "fft": lambda m, h: torch.fft.irfft(torch.fft.rfft(h), n=8),
    "complex": lambda m, h: torch.complex(h, h).abs(),
    "svd": lambda m, h: torch.linalg.svd(h)[2],
    "inverse": lambda m, h: torch.linalg.inv(h.T @ h + torch.eye(8, dtype=h.dtype)),
    "numpy": lambda m, h: torch.from_numpy(h.detach().numpy()),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x)


class Net(nn.Module):
    def __init__(self, then):
        super().__init__()
        self.first, self.block, self.conv, self.cell = nn.Linear(8, 8), Block(), nn.Conv1d(8, 8, 3), nn.GRUCell(8, 8)
        self.lstm, self.gru, self.norm, self.attention = nn.LSTM(8, 8), nn.GRU(8, 8), nn.LayerNorm(8), nn.MultiheadAttention(8, 2)
        self.then = then

    def forward(self, x):
        return self.then(self, self.first(x))


def outputs(then, policy: Policy):
    model = Net(then)
    return prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)(torch.randn(4, 8))


@pytest.mark.parametrize("policy", [MASTER_BF16, SPLIT_BF16, MASTER_FP16], ids=lambda p: p.name)
@pytest.mark.parametrize("case", IN_FP32)
def test_fp32_values_that_the_code_makes_are_named_with_their_line_and_remedy(case, policy) -> None:
    then, name = IN_FP32[case]
    line = then.__code__.co_firstlineno if name != "block.linear" else Block.forward.__code__.co_firstlineno + 1
    part, kept = (repr(name), f", keep {name!r} in fp32 by keep_fp32= of the policy,") if name else ("its forward", ",")
    amp = "AMP_FP16" if policy is MASTER_FP16 else "AMP_BF16"
    with pytest.raises(TrainingError) as caught:
        outputs(then, policy)
    begin = re.escape(f"Net (test_dtype_errors.py:{line}): {policy.name} does not suit {part} (")
    end = re.escape(
        "): what the code makes in fp32, such as by .float() or torch.zeros(...), is not cast; write .to(dtype of the weights)"
        f" behind it{kept} or take {amp}"
    )
    assert re.fullmatch(f"{begin}.+{end}", str(caught.value), re.DOTALL)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("case", [case for case, (_, name) in IN_FP32.items() if name])
def test_the_remedies_help(case) -> None:
    """Autocast, and keeping the named module in fp32."""
    then, name = IN_FP32[case]
    kept = Policy(name="KEPT", param_dtype=torch.bfloat16, master=True, keep_fp32=(name,))
    for policy in (AMP_BF16, kept):
        assert outputs(then, policy).dtype is torch.float32


@pytest.mark.parametrize("case", NOT_IN_HALF)
def test_operators_without_a_half_form_are_named(case) -> None:
    message = (
        r"Net \(test_dtype_errors\.py:\d+\): MASTER_BF16 does not suit its forward \(.+\): that operator takes no bfloat16; write"
        r" \.float\(\) before it, and \.to\(dtype of the weights\) behind it, or take FP32$"
    )
    with pytest.raises(TrainingError, match=message):
        outputs(NOT_IN_HALF[case], MASTER_BF16)
    assert outputs(lambda m, h: m.block(NOT_IN_HALF[case](m, h.float()).to(h.dtype)), MASTER_BF16).dtype is torch.float32


def test_autocast_has_its_own_remedies() -> None:
    with pytest.raises(TrainingError, match=r"AMP_BF16 does not suit its forward .*beside others in fp32; write \.to\(dtype of"):
        outputs(IN_FP32["rows"][0], AMP_BF16)
    with pytest.raises(TrainingError, match=r"that operator takes no bfloat16; write \.float\(\) before it, or take FP32$"):
        outputs(NOT_IN_HALF["complex"], AMP_BF16)


def test_other_errors_of_a_model_are_its_own() -> None:
    """Of shapes, of integers (which fp32 does not take either), of indices; and all under FP32."""
    for then in (lambda m, h: m.block(h[:, :7]), lambda m, h: m.block(h.long()), lambda m, h: h[:, 9]):
        for policy in (MASTER_BF16, AMP_BF16):
            with pytest.raises((RuntimeError, IndexError), match=r"mat1|m1 and m2|index 9"):
                outputs(then, policy)
    with pytest.raises(RuntimeError, match="dtype"):
        outputs(lambda m, h: m.block(h.double()), FP32)


def test_a_training_says_it() -> None:
    x, y = torch.randn(8, 8), torch.arange(8) % 3
    with pytest.raises(TrainingError, match=r"Net \(test_dtype_errors\.py:\d+\): MASTER_BF16 does not suit 'cell' .*take AMP_B"):
        ck.Train(epochs=1, precision=MASTER_BF16)(Net(IN_FP32["state"][0]), ck.Task(train=[(x, y)], val=[(x, y)]))
