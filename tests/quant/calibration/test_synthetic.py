"""Inputs made of BatchNorm statistics: what layers see of them, how well they calibrate, and what is refused."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compresskit.base.errors import DataError, ModelError, SettingError
from compresskit.quant import diagnose, quantize_static
from compresskit.quant.calibration import CalibrationComparison, compare_calibration, synthesize


def real_inputs(n: int, seed: int = 0) -> torch.Tensor:
    """Smooth pictures, brighter than noise of unit size: (n, 3, 8, 8)."""
    noise = torch.randn(n, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    return 20 * F.interpolate(noise, scale_factor=2, mode="bilinear") + torch.tensor([30.0, 0.0, -10.0]).view(3, 1, 1)


class Net(nn.Module):
    """Pictures to (N, 4): three convolutions with BatchNorm, one in a residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv, self.second = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = F.relu(self.first(self.stem(x)))
        x = F.relu(x + self.second(self.conv(x)))
        return self.head(x.mean((2, 3)))


@pytest.fixture(scope="module")
def trained() -> Net:
    torch.manual_seed(0)
    model = Net().train()
    model.first.momentum = model.second.momentum = None  # the mean of all batches
    with torch.no_grad():
        for seed in range(8):
            model(real_inputs(32, seed))
    return model.eval()


@pytest.fixture(scope="module")
def made(trained) -> list[tuple[torch.Tensor]]:
    return synthesize(trained, torch.zeros(1, 3, 8, 8), samples=48, batch_size=32, steps=40, rate=0.2)


def distances(model: Net, x: torch.Tensor) -> list[float]:
    """For each BatchNorm layer, computed by hand: the mean distance of the channels' means, in kept standard deviations."""
    with torch.no_grad():
        a = model.stem(x)
        b = model.conv(F.relu(model.first(a)))
    return [
        float(((v.mean((0, 2, 3)) - norm.running_mean).abs() / norm.running_var.sqrt()).mean())
        for v, norm in ((a, model.first), (b, model.second))
    ]


def test_layers_see_the_statistics_of_training(trained, made) -> None:
    assert [tuple(x.shape) for (x,) in made] == [(32, 3, 8, 8), (16, 3, 8, 8)]
    inputs = torch.cat([x for (x,) in made])
    for ours, theirs in zip(distances(trained, inputs), distances(trained, torch.randn(96, 3, 8, 8)), strict=True):
        assert ours < 0.2 * theirs
    with torch.no_grad():
        spread = trained.stem(inputs).std((0, 2, 3)) / trained.first.running_var.sqrt()
    assert 0.8 < float(spread.mean()) < 1.25
    assert inputs.std() > 5  # the scale of the inputs was found, too


def test_they_calibrate_better_than_noise(trained, made) -> None:
    test = [real_inputs(64, 1000)]
    ours = diagnose(quantize_static(trained, made), test).sqnr
    noise = diagnose(quantize_static(trained, torch.randn(64, 3, 8, 8)), test).sqnr
    assert ours > noise + 10


def test_every_setting_matters_and_a_seed_repeats(trained) -> None:
    make = partial(synthesize, trained, torch.zeros(2, 3, 8, 8), **(plain := dict(samples=4, steps=3, batch_size=4)))
    before, state = make()[0][0], torch.get_rng_state()
    with torch.no_grad():  # also in the block of a user who wants no gradients
        assert torch.equal(make()[0][0], before)
    assert torch.equal(torch.get_rng_state(), state)
    for changed in (dict(steps=4), dict(rate=0.2), dict(seed=1), dict(batch_size=2)):
        assert not torch.equal(synthesize(trained, torch.zeros(2, 3, 8, 8), **plain | changed)[0][0][:2], before[:2])
    assert len(synthesize(trained, torch.zeros(2, 3, 8, 8), **plain | dict(samples=1))[0][0]) == 1


def test_the_model_stays_as_it_is(trained) -> None:
    model = copy.deepcopy(trained).train()
    model.second.eval()
    before = copy.deepcopy(model.state_dict())
    synthesize(model, torch.zeros(2, 3, 8, 8), samples=4, steps=2)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [model.first.training, model.second.training] == [True, False]
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not model.first._forward_pre_hooks


def test_dicts_several_inputs_and_frozen_statistics() -> None:
    class Frozen(nn.Module):
        """As torchvision's FrozenBatchNorm2d: the statistics are buffers."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("running_mean", torch.tensor([1.0, -1.0]))
            self.register_buffer("running_var", torch.tensor([4.0, 0.25]))

        def forward(self, x):
            return (x - self.running_mean[:, None]) / self.running_var.sqrt()[:, None]

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = Frozen()

        def forward(self, left, right):
            return self.norm(left) + right

    example = {"left": torch.zeros(3, 2, 5), "right": torch.zeros(3, 2, 5, dtype=torch.float64)}
    (made,) = synthesize(Two(), example, samples=32, steps=60, rate=0.2)
    assert made["left"].shape == made["right"].shape == (32, 2, 5)
    assert made["right"].dtype == torch.float64
    assert (made["left"].mean((0, 2)) - torch.tensor([1.0, -1.0])).abs().max() < 0.2
    assert (made["left"].std((0, 2)) - torch.tensor([2.0, 0.5])).abs().max() < 0.2


def test_the_comparison_with_real_inputs_says_what_is_lost(trained, made) -> None:
    real = [real_inputs(32, 5), real_inputs(33, 6)]
    quantize = partial(quantize_static, trained)
    found = compare_calibration(quantize, made, real)
    assert found.samples == 33
    other = [real[0][16:], real[1][16:]]
    assert found.real == diagnose(quantize([real[0][:16], real[1][:16]]), other).sqnr
    assert found.synthetic == diagnose(quantize(made), other).sqnr
    assert found.loss == found.real - found.synthetic
    line = str(CalibrationComparison(real=31.06, synthetic=28.0, samples=33))
    assert line == "calibrated by real inputs 31.1 dB, by synthetic ones 28.0 dB: 3.1 dB worse, on 33 other real inputs"
    with pytest.raises(DataError, match=r"real=...\): wanted two samples or more in each batch, got 1"):
        compare_calibration(quantize, made, real[0][:1])


X = torch.zeros(2, 3, 8, 8)


@pytest.mark.parametrize(
    ("model", "example", "error", "said"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), X, ModelError, "Sequential has no BatchNorm with running statistics"),
        (nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False)), X, ModelError, "calibrate with real inputs, some dozens"),
        (nn.Sequential(nn.InstanceNorm2d(3, track_running_stats=True)), X, ModelError, "no BatchNorm with running statistics"),
        (nn.Sequential(nn.BatchNorm2d(3)), X, ModelError, "mean 0 and variance 1; load trained weights first"),
        (Net(), X.long(), DataError, r"wanted inputs that are floating point tensors, got \['torch.int64'\]"),
        (Net(), (X, torch.zeros(3, 1)), DataError, "one row for each sample, got shapes"),
    ],
)
def test_models_and_inputs_that_do_not_fit_are_refused(model, example, error, said) -> None:
    with pytest.raises(error, match=said):
        synthesize(model, example)


def test_unused_norms_wrong_shapes_and_settings_are_refused(trained) -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(3)
            self.norm.running_mean.fill_(1.0)

        def forward(self, x):
            return x

    with pytest.raises(ModelError, match="no BatchNorm of Unused runs when it is called"):
        synthesize(Unused(), X)
    with pytest.raises(DataError, match="synthesize: the model does not run on inputs of shape"):
        synthesize(trained, torch.zeros(2, 5, 8, 8))
    with pytest.raises(ModelError, match="no BatchNorm with running statistics"):
        synthesize(quantize_static(trained, real_inputs(2)), X)
    for settings_, said in (
        (dict(samples=0), "samples=...\\): wanted a whole number >= 1, got 0"),
        (dict(steps=0), "steps=...\\): wanted"),
        (dict(batch_size=1), "one input has no variance, got 1"),
        (dict(rate=0.0), "rate=...\\): wanted a positive number, got 0.0"),
    ):
        with pytest.raises(SettingError, match=said):
            synthesize(trained, X, **settings_)
