"""Layers that stay float because their rounding makes much noise: the choice, its bounds, and the setting."""

from __future__ import annotations

import itertools

import networks
import pytest
import torch
from networks import build, image
from torch import Tensor, nn

import compresskit as ck
from compresskit.base.errors import SettingError
from compresskit.quant import StaticQuant, quantize_static
from compresskit.quant.calibration.rounding_noise import rounding_noise
from compresskit.quant.effort import improve, trials
from compresskit.quant.effort.float_layers import (
    CONVERSION,
    LEAST_RATIO,
    FloatLayers,
    _conversions,
    _less_conversions,
    _served,
    _times,
    _work,
    choose_float_layers,
)
from compresskit.quant.effort.samples import OutputError
from compresskit.quant.effort.trials import Trials
from compresskit.quant.measured_placement.placement_model import OperatorTimes
from compresskit.quant.passes.prepare_graph import Remedy


class Narrow(nn.Module):
    """A wide body that is most of the work, and a narrow layer at its end, whose values have two very different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU())
        self.narrow, self.last = nn.Conv2d(32, 4, 1), nn.Conv2d(4, 8, 1)
        with torch.no_grad():
            self.narrow.weight[0] *= 200
            self.last.weight[:, 0] /= 200

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.narrow(self.body(x)))


def narrow() -> nn.Module:
    torch.manual_seed(0)
    return Narrow().eval()


@pytest.mark.matrix
@pytest.mark.parametrize("kind", [networks.Chain, networks.Residual, networks.Depthwise])
@pytest.mark.parametrize("by_time", [False, True])
@pytest.mark.parametrize("ratio", [LEAST_RATIO, LEAST_RATIO / 8])
def test_no_set_of_operators_is_a_better_bargain(kind, by_time, ratio) -> None:
    """Against every set of operators that leaves a layer in integers, at the price of the least ratio."""
    x = image(16)
    quantized = quantize_static(build(kind), [x])
    noise, placement = rounding_noise(quantized, x), quantized.placement
    found = choose_float_layers(quantized, noise, 1.0, by_time=by_time, least_ratio=ratio)
    work = {n.name: _work(n, placement) for n in quantized.body.graph.nodes if n.name in placement.integer}
    needs = {node: _served(node, placement) for node in noise}
    all_work, all_noise = sum(work.values()), sum(noise.values())

    def bargain(names) -> float:
        saved = sum(noise[node] for node, served in needs.items() if served <= set(names))
        between = sum(value for (a, b), value in conversions.items() if a in names and b not in names)
        return saved / all_noise - ratio * (sum(times[name] for name in names) + between) / all_work

    conversion = float(CONVERSION) if by_time else 0.0
    times = _less_conversions(_times(quantized, work) if by_time else work, noise, placement, conversion)
    conversions = _conversions(noise, placement, conversion)
    every = itertools.chain.from_iterable(itertools.combinations(work, k) for k in range(len(work) + 1))
    best = max(every, key=bargain)
    layers = {name for name in work if name in placement.costs}
    assert not layers <= found.names
    assert layers <= set(best) or bargain(found.names) == pytest.approx(bargain(best), abs=1e-9)


def test_the_narrow_layers_stay_float_and_the_outputs_gain(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(improve, "ENOUGH_OF_MAPS", 100.0)
    model, x = narrow(), image(64)
    none, some = (quantize_static(model, [x], effort="balanced", float_macs=share) for share in (0.0, 0.1))
    tried = next(remedy for remedy in some.origin.remedies if remedy.name.startswith("float layers"))
    assert tried.kept
    assert not any(remedy.name.startswith("float layers") for remedy in none.origin.remedies)
    assert {"conv2d_2", "conv2d_3"} <= set(some.origin.floating)
    assert "conv2d_1" in some.placement.integer
    inside, every = some.placement.coverage.macs
    assert inside >= 0.9 * every
    error = OutputError(model, [image(64)], 64)
    assert error.decibels(some) > error.decibels(none) + 1
    ck.save(some, tmp_path / "saved")
    loaded = ck.load(narrow(), tmp_path / "saved")
    assert loaded.placement.floating == some.placement.floating
    with torch.no_grad():
        torch.testing.assert_close(loaded(*x), some(*x), rtol=0, atol=0)
    path = ck.export_onnx(some, tmp_path / "f.onnx", x)
    assert ck.verify_onnx(path, some, [image(5)]).passed


def test_the_share_is_a_bound_and_strict_leaves_none() -> None:
    model, x = narrow(), image(64)
    quantized = quantize_static(model, [x])
    noise = rounding_noise(quantized, x)
    assert choose_float_layers(quantized, noise, 0.0001).names == frozenset()
    assert choose_float_layers(quantized, noise, 0.01).work <= 0.01
    assert choose_float_layers(quantized, noise, 0.1).work <= 0.1
    assert choose_float_layers(quantized, dict.fromkeys(noise, 0.0), 1.0).names == frozenset()
    strict = quantize_static(model, [x], effort="balanced", strict=True)
    assert not strict.origin.floating


@pytest.mark.parametrize("share", [-0.1, 1.0, 7])
def test_a_share_that_is_none_is_refused(share) -> None:
    with pytest.raises(SettingError, match=r"StaticQuant\(float_macs=...\): wanted a share of the MACs"):
        StaticQuant(effort="balanced", float_macs=share)


def test_a_share_without_an_effort_is_refused() -> None:
    with pytest.raises(SettingError, match=r'only the other effort levels measure the noise; write effort="balanced"'):
        StaticQuant(float_macs=0.1)


@pytest.mark.usefixtures("all_steps")
def test_what_is_float_already_counts(monkeypatch) -> None:
    """Two steps keep to one bound, and the second is left where it does not halve the noise."""
    monkeypatch.setattr(improve, "FIRST_SHARES", {"balanced": 0.0, "best": 0.05})
    monkeypatch.setattr(improve, "FLOAT_MACS", {"balanced": 0.0, "best": 0.6})
    monkeypatch.setattr(improve, "TUNING_STEPS", {"best": 1})
    shares = []
    for least in (0.05, 100.0):
        monkeypatch.setattr(improve, "LEAST_FURTHER", least)
        quantized = quantize_static(narrow(), [image(64)], effort="best", float_macs=0.5, choose="rules")
        tried = [remedy for remedy in quantized.origin.remedies if remedy.name.startswith("float layers")]
        assert [remedy.kept for remedy in tried[-2:]] == [True, least < 1]
        shares.append(1 - quantized.placement.coverage.macs[0] / quantized.placement.coverage.macs[1])
    assert shares[1] < shares[0] <= 0.5


@pytest.mark.parametrize(("enough", "tried"), [(-100.0, False), (100.0, True)])
def test_balanced_leaves_layers_float_only_while_the_outputs_are_far(monkeypatch, enough, tried) -> None:
    monkeypatch.setattr(improve, "FIRST_SHARES", {"balanced": 0.05})
    monkeypatch.setattr(improve, "TUNING_STEPS", {"balanced": 1})
    monkeypatch.setattr(improve, "ENOUGH_OF_MAPS", enough)
    quantized = quantize_static(narrow(), [image(64)], effort="balanced", float_macs=0.5)
    assert any(remedy.name.startswith("float layers") for remedy in quantized.origin.remedies) == tried
    assert bool(quantized.origin.floating) == tried


def test_the_share_of_a_second_choice_contains_the_first() -> None:
    x = image(16)
    first = quantize_static(narrow(), [x])
    found = choose_float_layers(first, rounding_noise(first, x), 0.1)
    again = quantize_static(narrow(), [x], skip=sorted(found.names))
    further = choose_float_layers(again, rounding_noise(again, x), 1.0, found.names)
    nodes = {node.name: node for node in again.body.graph.nodes}
    work = {name: _work(nodes[name], again.placement) for name in {*again.placement.integer, *found.names}}
    assert not further.names & found.names
    assert further.work == pytest.approx(sum(work[name] for name in further.names | found.names) / sum(work.values()))


class Alternating(nn.Module):
    """Pointwise and depthwise convolutions in turn, on maps that are large for their few channels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(3, 8, 1), *(nn.Conv2d(8, 8, 3, padding=1, groups=8) for _ in range(3))])
        self.last = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.last(x)


def test_time_counts_conversions_and_cheap_depthwise_layers() -> None:
    """A float layer among integers costs conversions; the first and the last save one; depthwise ones cost little else."""
    x = image(16)
    quantized = quantize_static(build(Alternating), [x])
    placement = quantized.placement
    names = [n.name for n in quantized.body.graph.nodes if placement.integer.get(n.name) == "conv"]
    noise = rounding_noise(quantized, x)
    conversions = _conversions(noise, placement, 20.0)
    assert set(conversions) == {pair for a, b in itertools.pairwise(names) for pair in ((a, b), (b, a))}
    work = {n.name: float(_work(n, placement)) for n in quantized.body.graph.nodes if n.name in placement.integer}
    times = _less_conversions(_times(quantized, work), noise, placement, 20.0)
    assert times[names[0]] == times[names[-1]] == 0
    assert times[names[2]] < work[names[2]] / 9


@pytest.mark.parametrize(
    ("timed", "found", "wanted"), [(None, False, [0.15]), (len, False, [0.06, 0.15, 0.25]), (len, True, [0.06])]
)
def test_a_step_too_small_for_any_layer_ends_nothing_where_latency_decides(timed, found, wanted) -> None:
    """found: whether the steps find layers, which are then refused."""
    shares, remedies = list[float](), list[str]()

    class Stub:
        worst, gives_maps = 31.0, False

        def try_float_layers(self, share, *, by_time, least):
            shares.append(share)
            remedies.extend(["refused"] if found else [])
            return False

    stub = Stub()
    stub.timed, stub.remedies = timed, remedies
    improve._try_float_layers(stub, 0.25, "balanced")
    assert shares == pytest.approx(wanted)


@pytest.mark.parametrize(("worst", "wanted"), [(31.0, [0.06]), (29.0, [0.06, 0.7])])
def test_a_poor_output_takes_more_where_the_file_stays_the_faster_one(worst, wanted) -> None:
    """Smaller steps failed: their layers are too slow, which says nothing about larger ones."""
    shares = list[float]()

    class Stub:
        gives_maps, timed, remedies = False, len, list[str]()

        def try_float_layers(self, share, *, by_time, least):
            shares.append(share)
            self.remedies.append("refused")
            return False

    stub = Stub()
    stub.worst = worst
    improve._try_float_layers(stub, 0.7, "balanced")
    assert shares == pytest.approx(wanted)


def steps_of_best(worst: float, timed: object, most: float = 0.98) -> list[tuple[float, bool, bool]]:
    """Share, by time, anew: of each step of "best" where none pays."""
    steps = list[tuple[float, bool, bool]]()

    class Stub:
        gives_maps, remedies = False, list[str]()

        def try_float_layers(self, share, *, by_time=False, least=0.0, anew=False):
            steps.append((pytest.approx(share), by_time, anew))
            self.remedies.append("too slow")
            return False

    stub = Stub()
    stub.worst, stub.timed = worst, timed
    improve._try_float_layers(stub, most, "best")
    return steps


def test_best_goes_on_after_a_step_that_is_too_slow() -> None:
    work = [(share, False, False) for share in (0.14, 0.35, 0.6, 0.8)]
    assert steps_of_best(20.0, len) == [(0.06, True, False), (0.8, True, False), *work, (0.98, True, True)]
    assert steps_of_best(20.0, len, 0.5)[-1] == (0.5, True, True)


def test_best_chooses_anew_from_nearly_all_layers_only_where_outputs_are_far_and_time_is_known() -> None:
    work = [(share, False, False) for share in (0.14, 0.35, 0.6, 0.8)]
    assert steps_of_best(35.0, len) == [(0.06, True, False), *work, (0.98, True, True)]
    assert steps_of_best(37.0, len) == [(0.06, True, False), *work]
    assert not any(anew for _, _, anew in steps_of_best(20.0, None, 0.6))


def test_what_is_chosen_anew_takes_the_place_of_what_was_float(monkeypatch) -> None:
    """Its layers are chosen on a model of which all are in integers, and the same set is not tried again."""
    sets, seen = iter([{"conv2d_2"}, {"conv2d_3"}, {"conv2d_3"}]), []

    def choose(quantized, noise, most, before, *, least_ratio, **_) -> FloatLayers:
        seen.append((len(quantized.placement.floating), least_ratio))
        return FloatLayers(frozenset(next(sets)), 0.1, 0.1)

    def attempts(self, *_, **__) -> None:
        if len(seen) == 3:
            return
        assert original(self, 0.5, least=-1000.0)
        assert set(self.floating) == {"conv2d_2"}
        assert original(self, 0.98, least=-1000.0, anew=True)
        assert set(self.floating) == {"conv2d_3"}
        assert not original(self, 0.98, least=-1000.0, anew=True)

    original = Trials.try_float_layers
    monkeypatch.setattr(trials, "choose_float_layers", choose)
    monkeypatch.setattr(Trials, "try_float_layers", attempts)
    monkeypatch.setattr(improve, "TUNING_STEPS", {"best": 1})
    quantized = quantize_static(narrow(), [image(32)], effort="best", choose="rules")
    assert "conv2d_3" in quantized.origin.floating
    assert "conv2d_2" not in quantized.origin.floating
    assert [ratio for _, ratio in seen] == [LEAST_RATIO, LEAST_RATIO / 8, LEAST_RATIO / 8]
    assert len({floating for floating, _ in seen}) == 1


class TwoOutputs(nn.Module):
    """One output that rounding hardly changes, and the difference of two values that are nearly one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(x)
        return features, features.mean((2, 3)) - features[:, :, 1:].mean((2, 3))


def test_the_worst_output_is_known_beside_their_mean(monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(Trials, "try_float_layers", lambda self, *_, **__: seen.append((self.worst, self.quality)))
    monkeypatch.setattr(improve, "TUNING_STEPS", {"best": 1})
    quantize_static(build(TwoOutputs), [image(32)], effort="best", choose="rules")
    assert all(worst < mean - 3 for worst, mean in seen)
    assert seen


def test_a_set_is_tried_once_and_where_it_saves_noise_or_time(monkeypatch) -> None:
    tried, original = [], Trials.try_float_layers

    def attempts(self, *_, **__) -> None:
        for noise, slower in ((0.95, True), (0.95, False), (0.1, True)):
            found = FloatLayers(frozenset({"conv2d"}), 0.1, noise, slower=slower)
            monkeypatch.setattr(trials, "choose_float_layers", lambda *_, found=found, **__: found)
            before = len(self.remedies)
            assert not original(self, 0.5, least=1000.0)
            tried.append(len(self.remedies) - before)

    monkeypatch.setattr(Trials, "try_float_layers", attempts)
    monkeypatch.setattr(improve, "TUNING_STEPS", {"best": 1})
    quantize_static(narrow(), [image(32)], effort="best", choose="rules")
    assert tried[:3] == [0, 1, 0]


class HeavyMiddle(nn.Module):
    """A second layer that is most of the work, behind a pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(3, 28, 3), nn.Conv2d(28, 48, 3), nn.Conv2d(48, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(torch.max_pool2d(self.first(x).relu(), 4)).relu())


def test_a_layer_too_large_for_the_bound_does_not_stand_in_the_way_of_others() -> None:
    quantized = quantize_static(build(HeavyMiddle), [image(16)])
    names = [node.name for node in quantized.body.graph.nodes if node.name in quantized.placement.costs]
    extra = {names[0]: -0.01, names[1]: 0.01, names[2]: 0.01}
    measured = OperatorTimes(extra=extra, conversion=1e-7, milliseconds=0.1)
    rounded = [node for node in quantized.body.graph.nodes if node.op == "call_module" and node.args[0].op != "get_attr"]
    noise = {node: 1.0 if names[1] in _served(node, quantized.placement) else 1e-9 for node in rounded}
    noise |= {node: 0.5 for node in rounded if _served(node, quantized.placement) == {names[0]}}
    found = choose_float_layers(quantized, noise, 0.25, by_time=True, measured=measured)
    assert found.names == {names[0]}
    assert found.free == {names[0]}
    assert not found.slower
    slow = OperatorTimes(extra={**extra, names[0]: 0.001}, conversion=1e-7, milliseconds=0.1)
    found = choose_float_layers(quantized, noise, 0.25, by_time=True, measured=slow)
    assert (found.names, found.free, found.slower) == ({names[0]}, set(), True)


def test_a_conversion_behind_a_pooling_is_of_fewer_values() -> None:
    quantized = quantize_static(build(HeavyMiddle), [image(16)])
    placement = quantized.placement
    names = [node.name for node in quantized.body.graph.nodes if node.name in placement.costs]
    rounded = [node for node in quantized.body.graph.nodes if node.op == "call_module" and node.args[0].op != "get_attr"]
    found = _conversions(rounded, placement, 1.0)
    pooled = next(node for node in quantized.body.graph.nodes if "max_pool2d" in node.name)
    assert found[names[0], names[1]] == pooled.meta["val"][:1].numel()


class FirstOfFew(nn.Module):
    """A first convolution of three channels, which is half of the work, as in detectors and networks for pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3, 2)
        self.last = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x).relu()).relu())


def test_by_time_a_first_convolution_of_few_channels_costs_little_in_float() -> None:
    """Its integer kernel is no faster, so that no limit of float work keeps it from being left float."""
    quantized = quantize_static(build(FirstOfFew), [image(16)])
    nodes = {n.name: n for n in quantized.body.graph.nodes}
    first, *_, last = [name for name in quantized.placement.integer if quantized.placement.layers[name] in ("first", "last")]
    noise = rounding_noise(quantized, image(16))
    work = {name: float(_work(nodes[name], quantized.placement)) for name in quantized.placement.integer}
    assert work[first] > 0.4 * sum(work.values())
    assert _less_conversions(_times(quantized, work), noise, quantized.placement, 20.0)[first] == 0
    loud = {n: 1.0 if n.name == first else 1e-6 for n in noise}  # its weights
    assert first in choose_float_layers(quantized, loud, 0.15, by_time=True).names
    assert first not in choose_float_layers(quantized, loud, 0.15).names
    assert last not in choose_float_layers(quantized, loud, 0.0, by_time=True).names


def test_measured_times_take_the_place_of_estimates() -> None:
    """What is faster in float goes there though its rounding makes little noise, with no more than half of the work."""
    x = image(16)
    quantized = quantize_static(build(networks.Chain), [x])
    noise = dict.fromkeys(rounding_noise(quantized, x), 1e-6)
    convs = [name for name, kind in quantized.placement.integer.items() if kind == "conv"]
    shares = {
        name: cost.macs / sum(c.macs for c in quantized.placement.costs.values())
        for name, cost in quantized.placement.costs.items()
    }
    small, large = sorted(convs, key=shares.__getitem__)
    assert shares[small] < 0.5 < shares[large]
    for name, wanted in ((small, {small}), (large, set())):
        extra = {n: -1.0 if n == name else 5.0 for n in quantized.placement.integer}
        measured = OperatorTimes(extra, conversion=0.0, milliseconds=10.0)
        found = choose_float_layers(quantized, noise, 0.01, by_time=True, measured=measured)
        assert found.names == wanted
    dear = OperatorTimes({n: -1.0 if n == small else 5.0 for n in quantized.placement.integer}, conversion=1.0, milliseconds=10.0)
    assert not choose_float_layers(quantized, noise, 0.01, by_time=True, measured=dear).names


def test_what_takes_no_longer_in_float_does_not_count_in_the_next_step() -> None:
    x = image(16)
    first = quantize_static(build(networks.Chain), [x])
    convs = [name for name, kind in first.placement.integer.items() if kind == "conv"]
    free = min(convs, key=lambda name: first.placement.costs[name].macs)
    extra = {name: -1.0 if name == free else 5.0 for name in first.placement.integer}
    measured = OperatorTimes(extra, conversion=0.0, milliseconds=10.0)
    found = choose_float_layers(first, rounding_noise(first, x), 0.0, by_time=True, measured=measured)
    assert found.free == found.names == {free}
    again = quantize_static(build(networks.Chain), [x], skip=[free])
    last = next(name for name, kind in again.placement.integer.items() if kind == "linear")
    loud = {node: 1.0 if node.name == last else 1e-9 for node in rounding_noise(again, x)}
    work = choose_float_layers(again, loud, 0.05, found.names, free=found.free).names
    assert last in work
    assert last not in choose_float_layers(again, loud, 0.05, found.names).names


def test_best_goes_on_where_a_step_gains_too_little(monkeypatch) -> None:
    shares = []

    def tried(self, share, *, least=0.05, by_time=False):
        if not by_time:
            shares.append((share, least))
        self.remedies.append(Remedy(name="float layers", before=0.0, after=0.0, kept=share > 0.5, seconds=0.0))
        return share > 0.5

    monkeypatch.setattr(Trials, "try_float_layers", tried)
    monkeypatch.setattr(improve, "TUNING_STEPS", {"best": 1})
    quantize_static(narrow(), [image(64)], effort="best", choose="rules")
    assert shares == [(0.35, 0.05), (0.6, 3.0)]
    shares.clear()
    quantize_static(narrow(), [image(64)], effort="best", float_macs=0.7, choose="rules")
    assert shares == [(0.35, 0.05), (0.6, 3.0), (0.7, 3.0)]
    settings = StaticQuant(effort="best")
    assert settings.most_float == (0.8 if settings.target.runs_here else 0.6)
    assert StaticQuant(effort="best", choose="rules").most_float == 0.6
