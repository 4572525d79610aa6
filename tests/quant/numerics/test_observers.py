"""Observers against numpy over all values at once; one pass, bounded memory, joined over ranks."""

from __future__ import annotations

import itertools
import math

import networks
import numpy as np
import oracles
import pytest
import torch
from networks import build, image
from torch import nn

import compresskit as ck
from compresskit.base.errors import DataError, SettingError
from compresskit.quant import prepare_qat, quantize_static
from compresskit.quant.numerics.histogram import Histogram
from compresskit.quant.numerics.observers import OBSERVERS, Entropy, HistogramMSE, MinMax, MovingAverage, Percentile


def batches(kind: str, count: int = 6) -> list[torch.Tensor]:
    """(3, 4000) each: wide and narrow channels, later batches wider, as activations are."""
    scales = torch.tensor([[1.0], [0.01], [30.0]])
    values = [torch.randn(3, 4000) * scales * (1 + 0.3 * i) for i in range(count)]
    return [v.relu() for v in values] if kind == "relu" else [v + 2 * scales for v in values] if kind == "shifted" else values


@pytest.mark.parametrize("kind", ["normal", "relu", "shifted"])
@pytest.mark.parametrize("observer", OBSERVERS, ids=lambda o: o.__name__)
def test_contract(observer, kind) -> None:
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
def test_what_is_not_finite_shows(observer, bad) -> None:
    seen = observer()
    seen.update(torch.tensor([[1.0, 2.0]]))
    seen.update(torch.tensor([[1.0, bad]]))
    seen.update(torch.tensor([[1.0, 2.0]]))
    assert not all(torch.isfinite(bound).all() for bound in seen.range())


def test_extremes_are_numpys() -> None:
    every = batches("normal")
    seen = MinMax()
    for batch in every:
        seen.update(batch)
    joined = torch.cat(every, 1).numpy()
    assert np.array_equal(seen.range()[0], joined.min(1))
    assert np.array_equal(seen.range()[1], joined.max(1))


def test_moving_average_is_its_recurrence() -> None:
    seen, low, high = MovingAverage(0.3), None, None
    for values in batches("normal"):
        seen.update(values)
        least, most = values.numpy().min(1), values.numpy().max(1)
        low = least if low is None else 0.7 * low + 0.3 * least
        high = most if high is None else 0.7 * high + 0.3 * most
    for found, expected in zip(seen.range(), (low, high), strict=True):
        torch.testing.assert_close(found, torch.from_numpy(expected))


@pytest.mark.parametrize("share", [0.9, 0.999])
@pytest.mark.parametrize("kind", ["normal", "relu", "shifted"])
def test_percentile_is_numpys(kind, share) -> None:
    seen, every = Percentile(share), batches(kind)
    for batch in every:
        seen.update(batch)
    joined = torch.cat(every, 1).double().numpy()
    step = 2 * (joined.max(1) - joined.min(1)) / 1024  # two bins, the range having doubled
    for bound, q in zip(seen.range(), ((1 - share) / 2, (1 + share) / 2), strict=True):
        assert (np.abs(bound.numpy() - np.quantile(joined, q, axis=1)) < step).all()


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_least_error_is_the_least(bits, symmetric) -> None:
    """No range of a fine search over real roundings does clearly better."""
    values = torch.cat([torch.randn(4000), torch.randn(40) * 6]).double()
    if not symmetric:
        values = values.relu() + 0.0
    seen = HistogramMSE(bits, symmetric=symmetric)
    for part in values.float().split(500):
        seen.update(part[None])

    def error(low, high):
        if symmetric:
            high = max(-low, high)
            scale, zero, ends = high / (2 ** (bits - 1) - 1), 0, (1 - 2 ** (bits - 1), 2 ** (bits - 1) - 1)
        else:
            scale, ends = (high - low) / (2**bits - 1), (0, 2**bits - 1)
            zero = round(-low / scale)
        back = (oracles.quantize(values, scale, zero, *ends) - zero) * scale
        return float(((values.numpy() - back) ** 2).mean())

    low, high = (float(b[0]) for b in seen.range())
    top = float(values.abs().max())
    best = min(error(-t if symmetric else 0.0, t) for t in np.linspace(0.02, 1, 400) * top)
    assert error(low, high) < 1.1 * best
    if bits < 8:
        assert error(low, high) < 0.8 * error(float(values.min()), top)


def entropy_by_hand(values: np.ndarray, levels: int, bins: int) -> float:
    """Migacz's search, one bin at a time."""
    top = np.abs(values).max()
    counts = np.histogram(np.abs(values[values != 0]), bins=bins, range=(0, top))[0].astype(float)
    best, bound = math.inf, top
    for end in range(levels, bins + 1, max(1, bins // 256)):
        p = counts[:end].copy()
        p[-1] += counts[end:].sum()
        q = np.zeros(end)
        edges = [math.ceil(i * end / levels) for i in range(levels + 1)]
        for a, b in itertools.pairwise(edges):
            filled = [i for i in range(a, b) if p[i] > 0]
            for i in filled:
                q[i] = counts[a:b].sum() / len(filled)
        p, q = p / p.sum(), q / q.sum()
        kl = sum(a * math.log(a / max(b, 1e-12)) for a, b in zip(p, q, strict=True) if a > 0)
        if kl < best:
            best, bound = kl, end / bins * top
    return bound


@pytest.mark.parametrize("side", [1, 2])
def test_entropy_is_migaczs(side) -> None:
    values = torch.cat([torch.randn(20000), torch.randn(20) * 8])
    values = values.abs() if side == 1 else values
    seen = Entropy(6)
    seen.update(values[None])
    wanted = entropy_by_hand(values.numpy(), 2**6 // side, 2048)
    assert seen.range()[1].item() == pytest.approx(wanted, rel=0.05)
    assert wanted < 0.7 * values.abs().max()


def test_a_histogram_grows_by_merging() -> None:
    """Counting piece by piece gives what counting at once on the final bins gives; the memory never grows."""
    histogram, values = Histogram(128), torch.randn(2, 3000) * torch.linspace(0.1, 9, 3000)
    for part in values.split(100, dim=1):
        histogram.update(part)
        assert histogram.counts.shape == (2, 128)
    assert histogram.counts.sum(1).tolist() == [3000, 3000]
    for c in range(2):
        edges = histogram.origin[c] + histogram.width[c] * torch.arange(129, dtype=torch.float64)
        wanted = np.histogram(values[c].double().numpy(), bins=edges.numpy())[0]
        assert np.abs(histogram.counts[c].numpy() - wanted).sum() <= 2  # a value on an edge
    spread = values.amax(1) - values.amin(1)
    assert (histogram.width * 128 < 4.1 * spread).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MovingAverage(0), "momentum"),
        (lambda: Percentile(0.4), "fraction"),
        (lambda: HistogramMSE(9), "bits"),
        (lambda: Entropy(1), "bits"),
        (lambda: Percentile(bins=63), "bins"),
    ],
)
def test_bad_settings(make, message) -> None:
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


def test_settings_matter() -> None:
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


@pytest.mark.parametrize("observer", OBSERVERS, ids=lambda o: o.__name__)
def test_each_calibrates_a_network(observer) -> None:
    model, x = build(networks.Residual), image(64)
    quantized = quantize_static(model, [x, image(64)], observer=observer)
    with torch.no_grad():
        wanted, got = model(*x), quantized(*x)
    assert 10 * torch.log10(wanted.square().sum() / (wanted - got).square().sum()) > 18


class Constant(nn.Module):
    """One layer that is always the same, or nan where asked."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.first, self.dead, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)
        nn.init.zeros_(self.dead.weight)
        nn.init.constant_(self.dead.bias, factor)

    def forward(self, x):
        return self.head(self.dead(self.first(x)))


@pytest.mark.parametrize(("factor", "message"), [(2.0, "dead: every one of its values is 2"), (math.nan, "dead: .* nan or inf")])
def test_constant_and_nan_name_the_layer(factor, message) -> None:
    with pytest.raises(DataError, match=message):
        quantize_static(Constant(factor).eval(), [image(4)])
