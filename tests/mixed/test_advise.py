"""Advice on sizes, gradients and the policy."""

from __future__ import annotations

import copy
import re
import sys
import time

import pytest
import torch
from torch import nn

from compresskit.base.errors import ModelError, SettingError
from compresskit.mixed import AMP_BF16, AMP_FP16, FP32, MASTER_BF16, MASTER_FP16, advise

advise_module = sys.modules["compresskit.mixed.advise"]  # the function of this name hides it in the package


def test_sizes_that_are_no_multiple_of_eight_are_named() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    before = copy.deepcopy(model.state_dict())
    advice = advise(model, torch.randn(8, 3, 8, 8))
    assert [(layer.name, layer.unaligned) for layer in advice.layers] == [("0", ("in_channels",)), ("4", ("out_features",))]
    assert advice.layers[1].unaligned_fp8 == ("rows", "out_features")
    assert advice.others == ("BatchNorm2d",)
    assert "4 (Linear): out_features = 10; pad to a multiple of 8" in str(advice)
    assert advice.policy in (FP32, MASTER_BF16)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())


def test_the_histogram_counts_what_fp16_would_flush() -> None:
    model = nn.Linear(4, 1, bias=False)
    x = torch.tensor([[2.0**-30, 2.0**-26, 2.0**-10, 1.0]])
    advice = advise(model, x, loss=lambda out: out.sum())
    assert advice.exponents == {-30: 0.25, -26: 0.25, -10: 0.25, 0: 0.25}
    assert advice.flushed == 0.5
    assert advice.scale == 2.0**6  # 2^-30 comes to 2^-24
    assert "50.00% below 2^-24" in str(advice)


def test_recurrent_and_attention_layers_are_listed() -> None:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.attention = nn.LSTM(8, 12, batch_first=True), nn.MultiheadAttention(12, 2, batch_first=True)

        def forward(self, x):
            x, _ = self.rnn(x)
            return self.attention(x, x, x)[0]

    advice = advise(Net(), (torch.randn(2, 5, 8),))
    assert {layer.name: layer.unaligned for layer in advice.layers} == {
        "rnn": ("hidden_size",),
        "attention": ("embed_dim", "head_dim"),
    }


def test_advice_without_gradients_is_refused() -> None:
    with pytest.raises(ModelError, match="advise: no output depends on a parameter with requires_grad"):
        advise(nn.ReLU(), torch.ones(1))


def test_data_slower_than_the_model_is_noted() -> None:
    model, example = nn.Linear(8, 8), torch.randn(16, 8)

    def slow():
        for _ in range(5):
            time.sleep(0.05)
            yield example

    text = str(advise(model, example, batches=slow()))
    assert "faster numbers gain nothing before the data comes faster" in text
    big = nn.Sequential(nn.Linear(512, 2048), nn.Linear(2048, 512))
    assert "it keeps up" in str(advise(big, torch.randn(512, 512), batches=[1, 2, 3, 4]))
    assert advise(model, example).notes == ()


def test_cudnn_that_is_off_is_noted(monkeypatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    assert "cuDNN is off" in advise_module._obstacles(torch.device("cuda"), None, lambda: None)[0]
    assert advise_module._obstacles(torch.device("cpu"), None, lambda: None) == ()


@pytest.mark.parametrize(
    ("capability", "name"), [((6, 1), "FP32"), ((7, 0), "MASTER_FP16"), ((8, 0), "MASTER_BF16"), ((9, 0), "MASTER_BF16")]
)
def test_the_policy_follows_the_compute_capability(monkeypatch, capability, name) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    policy, why = advise_module._suggested_policy(torch.device("cuda"))
    assert policy.name == name
    assert f"{capability[0]}.{capability[1]}" in why


class Made(nn.Linear):
    """Its code makes fp32 values, and with `scattered` gives them and half ones to an operator."""

    def __init__(self, *, scattered: bool):
        super().__init__(8, 8)
        self.scattered = scattered

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x * torch.ones(8))
        return torch.zeros(len(x), 8).index_add(0, torch.arange(len(x)), y) if self.scattered else y


@pytest.mark.parametrize("suggested", [MASTER_BF16, MASTER_FP16], ids=lambda policy: policy.name)
def test_a_policy_under_which_the_model_does_not_run_is_not_suggested(monkeypatch, suggested) -> None:
    monkeypatch.setattr(advise_module, "_suggested_policy", lambda device: (suggested, "this chip multiplies halves"))
    autocast = AMP_BF16 if suggested is MASTER_BF16 else AMP_FP16
    x = torch.randn(4, 8)
    assert (plain := advise(nn.Linear(8, 8), x)).policy is suggested
    assert plain.why == "this chip multiplies halves"
    model = Made(scattered=False)
    before = copy.deepcopy(model.state_dict())
    advice = advise(model, x)
    assert advice.policy is autocast
    assert re.match(rf"this chip .*; Made \(test_advise\.py:\d+\): {suggested.name} does not suit its forward \(", advice.why)
    assert all(torch.equal(value, before[name]) and value.dtype is torch.float32 for name, value in model.state_dict().items())
    assert (none := advise(Made(scattered=True), x)).policy is FP32
    assert f"{autocast.name} does not suit its forward" in none.why


def test_the_limits_of_fp16_are_those_of_torch() -> None:
    smallest = 2.0**advise_module.FP16_SMALLEST_EXPONENT
    assert torch.finfo(torch.float16).max == advise_module.FP16_LARGEST
    assert torch.tensor(smallest).half() > 0
    assert torch.tensor(smallest / 4).half() == 0


class Named(nn.Linear):
    def forward(self, *, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def test_advise_takes_keyword_inputs_and_leaves_the_generator() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout())
    before = torch.get_rng_state()
    advise(model, torch.zeros(2, 8), batches=[1, 2, 3, 4])
    assert torch.equal(torch.get_rng_state(), before)
    assert advise(Named(8, 4), {"x": torch.randn(2, 8)}).layers[0].sizes["rows"] == 2


class Counting(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.register_buffer("runs", torch.ones(()), persistent=False)
        return super().forward(x)


def test_advise_takes_a_model_that_makes_a_buffer_when_it_runs() -> None:
    assert advise(Counting(8, 4), torch.zeros(2, 8)).layers[0].sizes["rows"] == 2


def test_advise_says_what_does_not_fit() -> None:
    with pytest.raises(ModelError, match="Linear does not run on the example: .*mat1 and mat2"):
        advise(nn.Linear(8, 4), torch.randn(2, 7))
    for loss in (lambda y: y, lambda y: y.sum().detach(), lambda y: y.argmax(), lambda y: 1.0):
        with pytest.raises(SettingError, match="loss must return one floating number that depends on the output, got"):
            advise(nn.Linear(8, 4), torch.randn(2, 8), loss=loss)
