"""Channels and bits chosen together: within the size as exported, applied by pruning and quantization, also in a recipe."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.prune.channels.reconstruct import InputStatistics
from compresskit.search.joint import JointPlan, choose_channels_and_bits
from compresskit.search.joint.sensitivities import gptq_rounded

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
