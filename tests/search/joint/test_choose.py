"""Channels and bits chosen together: within the size as exported, applied by pruning and quantization, also in a recipe."""

from __future__ import annotations

import copy
import functools
import itertools
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.prune.channels.reconstruct import InputStatistics, reconstruct_
from compresskit.prune.criteria import l2
from compresskit.prune.structure.plan import apply_
from compresskit.quant import X86
from compresskit.search.joint import JointPlan, JointSensitivities, choose, choose_channels_and_bits
from compresskit.search.joint.file_size import modelled_bytes
from compresskit.search.joint.sensitivities import GroupSensitivity, RoundingSensitivity, gptq_rounded
from compresskit.train.batchnorm import reestimate_batchnorm_

X = torch.randn(32, 3, 8, 8, generator=torch.Generator().manual_seed(1))
BATCHES = [X[:16], X[16:]]
WIDTHS, RATIOS, SIZE = (2, 8), (0.25, 0.5), 4700


class Small(nn.Module):
    """A stem, a residual block and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.second, self.head = nn.Conv2d(16, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x).relu()
        return self.head((x + self.second(self.norm(self.first(x)).relu())).mean((2, 3)))


@functools.cache
def small() -> nn.Module:
    torch.manual_seed(0)
    model = Small()
    model(X)
    return model.eval()


def exported_bytes(quantized, folder: Path) -> int:
    return ck.export_onnx(quantized, folder / "model.onnx", (X[:2],)).stat().st_size


@functools.cache
def plan() -> JointPlan:
    return choose_channels_and_bits(small(), BATCHES, SIZE, widths=WIDTHS, ratios=RATIOS)


def test_the_file_is_within_the_size_and_the_plan_says_what_was_measured(tmp_path) -> None:
    chosen = plan()
    pruned = chosen.pruned(small(), BATCHES)
    quantized = ck.quant.quantize_static(pruned, BATCHES, bits=chosen.bits)
    assert exported_bytes(quantized, tmp_path) == pytest.approx(chosen.file_bytes, abs=32)
    assert chosen.file_bytes <= SIZE
    lost = [choice.lost for choice in chosen.measured]
    assert lost == sorted(lost)
    assert len(lost) > 1
    assert all(choice.file_bytes <= SIZE for choice in chosen.measured)
    best = chosen.measured[0]
    assert tuple(chosen.kept[group.layer] for group in chosen.sensitivities.groups) == best.kept
    assert tuple(chosen.bits[layer.layer].weights for layer in chosen.sensitivities.layers) == best.bits
    assert chosen.file_bytes == best.file_bytes
    assert chosen.kept["first"] == pruned.first.out_channels == pruned.second.in_channels
    assert chosen.kept["stem"] == pruned.stem.out_channels
    text = str(chosen)
    assert "of 4,700" in text
    assert f"first: {pruned.first.out_channels} of 16" in text
    assert "measured together on outputs, of classes, 8 samples" in text


def test_a_smaller_file_loses_more_and_what_was_measured_serves_further_sizes() -> None:
    found = []
    for size in (4350, 5400):
        at = choose_channels_and_bits(
            small(), BATCHES, size, widths=WIDTHS, ratios=RATIOS, check=False, sensitivities=plan().sensitivities
        )
        assert at.file_bytes <= size
        assert at.measured == ()
        found.append((at.file_bytes, -at.predicted))
    assert found == sorted(found)
    assert len(set(found)) == 2


def test_sensitivities_are_of_one_group_or_layer_alone() -> None:
    losses = {layer.layer: layer.loss for layer in plan().sensitivities.layers}
    judged = X[24:]
    with torch.no_grad():
        wanted = small()(judged)
        for bits in WIDTHS:
            rounded = copy.deepcopy(small())
            rows = torch.cat([small().stem(X[:24]).relu()])
            summed = rows + small().second(small().norm(small().first(rows)).relu())
            inputs = InputStatistics()
            inputs.add(summed.mean((2, 3)))
            rounded.head.weight.copy_(gptq_rounded(small().head.weight, bits, inputs))
            error = (rounded(judged) - wanted).square().sum() / wanted.square().sum()
            assert losses["head"][bits] == pytest.approx(float(error), rel=1e-3)
    groups = {group.layer: group for group in plan().sensitivities.groups}
    assert groups["first"].size == 16
    assert set(groups["first"].loss) == {8, 12, 16}
    assert groups["first"].loss[16] == 0 < groups["first"].loss[12]


def error(model: nn.Module, x: torch.Tensor) -> float:
    with torch.no_grad():
        return float((model(x) - small()(x)).square().sum() / small()(x).square().sum())


def test_a_group_is_pruned_without_the_others_and_repaired() -> None:
    for group in plan().sensitivities.groups:
        for kept in set(group.loss) - {group.size}:
            ratios = {group.layer: 1 - kept / group.size}
            alone = ck.prune.plan_channels(small(), X[:2], ck.keep(channels=1.0), ratios=ratios)
            pruned = apply_(copy.deepcopy(small()), alone)
            reconstruct_(pruned, small(), alone, list(X[:24].split(8)))
            assert group.loss[kept] == pytest.approx(error(pruned.eval(), X[24:]), rel=1e-2)


def test_norms_of_a_pruned_model_are_estimated_again_only_where_that_helps() -> None:
    plain = apply_(copy.deepcopy(small()), plan().channels)
    reconstruct_(plain, small(), plan().channels, list(X.split(8)))
    again = copy.deepcopy(plain)
    reestimate_batchnorm_(again, BATCHES)
    each = [error(model.eval(), X) for model in (plain, again)]
    assert abs(each[0] - each[1]) > 0.1 * min(each)
    assert error(plan().pruned(small(), BATCHES), X) == pytest.approx(min(each), rel=1e-3)


@pytest.fixture
def choices(monkeypatch):
    """A function (bytes) -> the choices that are measured, by name, and their search; operators take more for fewer bits."""

    def exported(search, kept, bits):
        size = modelled_bytes(search.weights, kept, bits) + 2000 + 20 * sum(8 - width for width in bits)
        return choose._Choice(kept=kept, bits=bits, channels=None, file_bytes=round(size))

    def choices(size: int) -> tuple[dict[str, choose._Choice], choose._JointSearch]:
        how = choose.JointSettings(
            file_bytes=size, widths=(2, 4, 8), ratios=RATIOS, criterion=l2, task=None, target=X86, skip=(), ignore=()
        )
        groups = [("stem", 8, {8: 0.0, 6: 0.02, 4: 0.06}), ("first", 16, {16: 0.0, 12: 0.01, 8: 0.04})]
        known = JointSensitivities(
            groups=tuple(GroupSensitivity(layer=layer, size=size, loss=loss) for layer, size, loss in groups),
            layers=tuple(
                RoundingSensitivity(layer=layer, weights=1, loss={2: 0.3 / k, 4: 0.02 / k, 8: 1e-4 / k})
                for k, layer in enumerate(("stem", "first", "second", "head"), 1)
            ),
        )
        search = choose._JointSearch(small(), BATCHES, how, known)
        return dict(search._choices(every=True)), search

    monkeypatch.setattr(choose._JointSearch, "_export", exported)
    return choices


def test_each_choice_is_as_its_name_says_and_is_measured_once(choices) -> None:
    found, _ = choices(3800)
    everywhere = {bits for name, choice in found.items() if name == "4 bits everywhere" for bits in choice.bits}
    assert everywhere == {4}
    assert found["all channels"].kept == (8, 16)
    assert len({(choice.kept, choice.bits) for choice in found.values()}) == len(found) > 4


@pytest.mark.parametrize("size", [3500, 3800, 4100, 4400, 4700])
def test_a_file_whose_operators_take_more_for_some_bits_is_within_the_budget_and_loses_least(choices, size) -> None:
    """Of all choices whose files are within it."""
    found, search = choices(size)
    assert all(choice.file_bytes <= size for choice in found.values())
    options = search._options()
    every = [(pair[:2], pair[2:]) for pair in itertools.product(*options.groups, *options.layers)]
    best = min(options.loss(*pair) for pair in every if search._export(*pair).file_bytes <= size)
    first = found["losses add up"]
    assert options.loss(first.kept, first.bits) == pytest.approx(best)


def test_rounding_makes_up_for_the_errors_of_earlier_columns() -> None:
    random = torch.Generator().manual_seed(3)
    weight, x = torch.randn(6, 12, generator=random), torch.randn(200, 12, generator=random)
    x = x @ torch.randn(12, 12, generator=random)
    inputs = InputStatistics()
    inputs.add(x)
    nearest, better = gptq_rounded(weight, 3, None), gptq_rounded(weight, 3, inputs)
    for rounded in (nearest, better):
        assert all(len(row.unique()) <= 7 for row in rounded)
    lost = [float(((rounded - weight) @ x.T).square().sum()) for rounded in (nearest, better)]
    assert lost[1] < 0.8 * lost[0]


@pytest.mark.parametrize("bits", [2, 3])
def test_rounding_to_nearest_takes_the_step_of_least_error_for_each_output(bits) -> None:
    weight = torch.randn(6, 50, generator=torch.Generator().manual_seed(4)) * torch.logspace(-2, 1, 6)[:, None]
    top = 2 ** (bits - 1) - 1
    steps = torch.linspace(0.05, 1, 500)[:, None, None] * weight.abs().amax(1, keepdim=True) / top
    least = ((weight / steps).round().clamp(-top, top) * steps - weight).square().sum(2).amin(0)
    assert ((gptq_rounded(weight, bits, None) - weight).square().sum(1) < 1.03 * least).all()


def test_the_plan_is_two_stages_of_a_recipe(tmp_path) -> None:
    labels = small()(X).argmax(1)
    task = ck.Task(train=[(X[:16], labels[:16]), (X[16:], labels[16:])], val=[(X, labels)])
    chosen = plan()
    recipe = ck.Recipe(chosen.prune(samples=32), ck.StaticQuant(bits=chosen.bits, samples=32))
    result = recipe.run(copy.deepcopy(small()), task, out=tmp_path / "run")
    record = sum(len(entry.value) for entry in onnx.load(result.onnx).metadata_props)  # of the recipe
    assert result.onnx.stat().st_size - record == pytest.approx(chosen.file_bytes, abs=150)
    pruned = ck.prune.replayed(small(), chosen.channels)
    direct = chosen.prune(samples=32)(copy.deepcopy(small()), task)
    assert [p.shape for p in direct.parameters()] == [p.shape for p in pruned.parameters()]


def test_bad_input_says_what_to_do() -> None:
    with pytest.raises(ck.SettingError, match=r"the least that these ratios and widths allow is [\d,]+ bytes, got 100"):
        choose_channels_and_bits(
            small(), BATCHES, 100, widths=WIDTHS, ratios=RATIOS, check=False, sensitivities=plan().sensitivities
        )
    with pytest.raises(ck.SettingError, match=r"file_bytes=.*whole number of bytes >= 1, got 0\.5"):
        choose_channels_and_bits(small(), BATCHES, 0.5)  # type: ignore[arg-type]
    with pytest.raises(ck.SettingError, match=r"widths=.*whole numbers of 2..8, got \(1, 8\)"):
        choose_channels_and_bits(small(), BATCHES, 9000, widths=(1, 8))
    with pytest.raises(ck.SettingError, match=r"ratios=.*fractions in \(0, 1\), got \(1.0,\)"):
        choose_channels_and_bits(small(), BATCHES, 9000, ratios=(1.0,))
    with pytest.raises(ck.SettingError, match=r"reads gradients, which needs data; pass choose_channels_and_bits\(task=...\)"):
        choose_channels_and_bits(small(), BATCHES, 9000, criterion=ck.prune.criteria.taylor)
