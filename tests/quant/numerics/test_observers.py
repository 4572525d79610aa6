"""Observers against numpy over all values at once; one pass, bounded memory, joined over ranks."""

from __future__ import annotations

import math

import networks
import numpy as np
import pytest
import torch
from networks import build, image

import compresskit as ck
from compresskit.base.errors import SettingError
from compresskit.quant import prepare_qat, quantize_static
from compresskit.quant.numerics.histogram import least_divergence
from compresskit.quant.numerics.observers import OBSERVERS, Entropy, HistogramMSE, MinMax, MovingAverage, Percentile


def test_moving_average_weighs_the_newest_batch() -> None:
    slow, fast = MovingAverage(0.1), MovingAverage(0.9)
    for observer in (slow, fast):
        observer.update(torch.tensor([[0.0, 1.0]]))
        observer.update(torch.tensor([[0.0, 11.0]]))
    assert slow.range()[1].item() == pytest.approx(2.0)
    assert fast.range()[1].item() == pytest.approx(10.0)
    with pytest.raises(SettingError, match="momentum"):
        MovingAverage(0)


def batches(kind: str, count: int = 6) -> list[torch.Tensor]:
    """(3, 4000) each: wide and narrow channels, later batches wider, as activations are."""
    scales = torch.tensor([[1.0], [0.01], [30.0]])
    values = [torch.randn(3, 4000) * scales * (1 + 0.3 * i) for i in range(count)]
    return [v.relu() for v in values] if kind == "relu" else [v + 2 * scales for v in values] if kind == "shifted" else values


@pytest.mark.parametrize("kind", ["normal", "relu", "shifted"])
@pytest.mark.parametrize("observer", OBSERVERS, ids=lambda o: o.__name__)
def test_every_observer_returns_a_range_inside_the_values(observer, kind) -> None:
    seen, every = observer(), batches(kind)
    with pytest.raises(SettingError, match="seen no values"):
        seen.range()
    for batch in every:
        seen.update(batch)
    low, high = seen.range()
    joined = torch.cat(every, 1)
    assert low.shape == high.shape == (3,)
    assert low.dtype == torch.float32
    assert (low >= joined.amin(1) - 1e-6).all()
    assert (high <= joined.amax(1) + 1e-6).all()
    assert (low < high).all()
    assert (high - low > 0.3 * (joined.amax(1) - joined.amin(1))).all()  # nobody throws the body of the values away
    again = seen.range()
    assert torch.equal(again[0], low)
    assert torch.equal(again[1], high)
    for c in range(3):  # channels do not see one another
        alone = observer()
        for batch in every:
            alone.update(batch[c : c + 1])
        torch.testing.assert_close(alone.range()[1][0], high[c])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("observer", OBSERVERS, ids=lambda o: o.__name__)
def test_values_that_are_not_finite_make_the_range_not_finite(observer, bad) -> None:
    seen = observer()
    seen.update(torch.tensor([[1.0, 2.0]]))
    seen.update(torch.tensor([[1.0, bad]]))
    seen.update(torch.tensor([[1.0, 2.0]]))
    assert not all(torch.isfinite(bound).all() for bound in seen.range())


def test_min_max_equals_numpys() -> None:
    every = batches("normal")
    seen = MinMax()
    for batch in every:
        seen.update(batch)
    joined = torch.cat(every, 1).numpy()
    assert np.array_equal(seen.range()[0], joined.min(1))
    assert np.array_equal(seen.range()[1], joined.max(1))


@pytest.mark.parametrize("share", [0.9, 0.999])
@pytest.mark.parametrize("kind", ["normal", "relu", "shifted"])
def test_percentile_equals_numpys_quantile(kind, share) -> None:
    seen, every = Percentile(share), batches(kind)
    for batch in every:
        seen.update(batch)
    joined = torch.cat(every, 1).double().numpy()
    step = 2 * (joined.max(1) - joined.min(1)) / 1024  # two bins, the range having doubled
    for bound, q in zip(seen.range(), ((1 - share) / 2, (1 + share) / 2), strict=True):
        assert (np.abs(bound.numpy() - np.quantile(joined, q, axis=1)) < step).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MovingAverage(0), "momentum"),
        (lambda: Percentile(0.4), "fraction"),
        (lambda: HistogramMSE(9), "bits"),
        (lambda: Entropy(1), "bits"),
        (lambda: Entropy("8"), r"Entropy\(bits=\.\.\.\): wanted a whole number of 2\.\.8, got '8'"),
        (lambda: Percentile(bins=63), "bins"),
    ],
)
def test_settings_out_of_range_are_refused(make, message) -> None:
    with pytest.raises(SettingError, match=message):
        make()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (MinMax(), r"got an instance; .* write observer=MinMax, or functools\.partial\(MinMax, \.\.\.\)"),
        ("minmax", r"wanted a class such as quant\.observers\.MinMax, got 'minmax'"),
    ],
)
def test_what_makes_no_observers_is_refused(given, message) -> None:
    for refused in (
        lambda: quantize_static(build(networks.Chain), [image(4)], observer=given),
        lambda: prepare_qat(build(networks.Chain), [image(4)], observer=given),
        lambda: ck.StaticQuant(observer=given),
        lambda: ck.QAT(epochs=1, observer=given),
    ):
        with pytest.raises(SettingError, match=rf"\(observer=\.\.\.\): {message}" if isinstance(given, str) else message):
            refused()


def test_a_class_of_the_users_is_an_observer() -> None:
    class Fixed:
        def update(self, values: torch.Tensor) -> None: ...

        def range(self) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.tensor([-4.0]), torch.tensor([4.0])

    quantized = quantize_static(build(networks.Chain), [image(4)], observer=Fixed)
    assert {round(q.scale.item() * 255, 2) for q in quantized.activation_quantizers() if q.clamp is None} == {8.0}


def test_every_setting_changes_the_range() -> None:
    values = torch.cat([torch.randn(5000), torch.randn(50) * 9])[None]

    def high(observer):
        observer.update(values)
        observer.update(2 * values)
        return observer.range()[1].item()

    assert high(MovingAverage(0.1)) != high(MovingAverage(0.9))
    assert high(Percentile(0.9)) < high(Percentile(0.99))
    assert high(HistogramMSE(3)) < high(HistogramMSE(8))
    assert high(Entropy(4)) < high(Entropy(8))
    assert high(Percentile(0.9, bins=64)) != high(Percentile(0.9))


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("observer", OBSERVERS, ids=lambda o: o.__name__)
def test_every_observer_calibrates_a_network(observer) -> None:
    model, x = build(networks.Residual), image(64)
    quantized = quantize_static(model, [x, image(64)], observer=observer)
    with torch.no_grad():
        wanted, got = model(*x), quantized(*x)
    assert 10 * torch.log10(wanted.square().sum() / (wanted - got).square().sum()) > 18


@pytest.mark.parametrize(("signs", "levels"), [((1.0,), 2**4), ((-1.0,), 2**4), ((1.0, -1.0), 2**3)])
def test_values_of_one_sign_use_all_levels_of_the_divergence(signs, levels) -> None:
    values = torch.randn(1, 20000, generator=torch.Generator().manual_seed(0)).abs()
    observer = Entropy(4)
    observer.update(values * torch.tensor(signs).repeat(20000 // len(signs)))
    bounds = {count: least_divergence(observer.histogram, 0, float(values.max()), count) for count in (2**3, 2**4)}
    assert bounds[2**3] != bounds[2**4]
    assert max(-observer.range()[0], observer.range()[1]) == pytest.approx(min(bounds[levels], float(values.max())))


@pytest.mark.parametrize("observer", OBSERVERS, ids=lambda o: o.__name__)
def test_a_constant_is_its_own_range(observer) -> None:
    """In bins of such a width, all values between it and 0 would take terabytes."""
    seen = observer()
    seen.update(torch.full((2, 50), 3.0))
    assert seen.range()[1].tolist() == pytest.approx([3.0, 3.0], rel=1e-5)
