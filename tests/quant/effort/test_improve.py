"""Effort levels of static quantization: each remedy by itself, what is kept, and what is refused."""

from __future__ import annotations

import itertools
import logging
import math
from dataclasses import replace
from types import SimpleNamespace

import networks
import oracles
import pytest
import torch
from networks import build, image, images_task
from torch import Tensor, nn

import compresskit as ck
from compresskit.base.errors import DataError, SettingError
from compresskit.quant import X86, Quantized, correct_bias_, quantize_static, static
from compresskit.quant.build import build_quantized
from compresskit.quant.effort import improve, trials
from compresskit.quant.effort.biases import correct_biases_, correct_weight_errors_
from compresskit.quant.effort.ranges import SeveralRanges, choose_ranges_
from compresskit.quant.effort.samples import OutputError, halves, joined_samples, mean_decibels, tell_of_loss
from compresskit.quant.effort.tuning import minimise_error_
from compresskit.quant.measured_placement import beside_float
from compresskit.quant.measured_placement.latency_search import MeasuredChoice
from compresskit.quant.numerics.targets import Deployment

W3 = replace(X86, name="W3", weights=replace(X86.weights, bits=3))


def test_halves_share_the_rows_of_every_batch() -> None:
    fit, judge = halves([(torch.arange(9),), (torch.arange(9, 20),), (torch.arange(20, 21),)], "here")
    rows = [torch.cat([b[0] for b in part]).tolist() for part in (fit, judge)]
    assert sorted(rows[0] + rows[1]) == list(range(21))
    assert min(map(len, rows)) >= 9


@pytest.mark.parametrize("error", [math.nan, math.inf])
def test_an_output_that_is_not_finite_is_the_worst(error, caplog) -> None:
    assert mean_decibels([0.01, error]) == pytest.approx((20 - 120) / 2)
    found = SimpleNamespace(of=lambda model: [0.01, error], outputs=[[torch.ones(2), torch.ones(2)]])
    tell_of_loss(found, nn.Identity(), "x", "see y")
    assert "x: the poorest output on the example has -120.0 dB against that of the float model; see y" in caplog.text


def test_samples_of_one_shape_are_joined() -> None:
    batches = [(torch.zeros(3, 4), 7), (torch.zeros(2, 5), 7), (torch.ones(4, 4), 7)]
    joined = joined_samples(batches, 6)
    assert joined[1] == 7
    assert joined[0].sum(1).tolist() == [0, 0, 0, 4, 4, 4]
    spread = joined_samples([(torch.arange(60),), (torch.arange(60, 100),)], 10)
    assert spread[0].tolist() == list(range(0, 100, 10))  # of data in the order of its classes, some of each
    scalar = (torch.zeros(3, 4), torch.zeros(()))
    assert joined_samples([scalar, scalar], 2) is scalar


@pytest.mark.parametrize("effort", ["balanced", "best"])
def test_too_little_data_says_how_many_are_needed(effort) -> None:
    with pytest.raises(
        DataError, match=rf'quantize_static\(effort="{effort}"\): wanted at least 16 calibration samples.* got 10'
    ):
        quantize_static(build(networks.Chain), [image(10)], effort=effort)


def test_an_unknown_effort_is_refused() -> None:
    with pytest.raises(SettingError, match=r'StaticQuant\(effort=...\): wanted "fast", "balanced" or "best", got "most"|most'):
        ck.StaticQuant(effort="most")


def test_ranges_leave_out_an_outlier() -> None:
    model, x = build(networks.Chain), image(16)
    x[0][0, 0, 0, 0] = 300.0
    quantized = build_quantized(model, x, X86, SeveralRanges)
    quantized.calibrate_([x])
    error = OutputError(model, [tuple(v[1:] for v in x)], 16)
    before = error.decibels(quantized)
    assert choose_ranges_(quantized, tuple(v[1:] for v in x)) >= 1
    assert error.decibels(quantized) > before + 0.3


def test_biases_in_one_pass_are_those_of_a_pass_for_each_layer() -> None:
    model, x = build(networks.Residual), image(16)
    one, many = (quantize_static(model, [x], target=W3) for _ in range(2))
    assert correct_biases_(one, x) == correct_bias_(many, [x]) == 5
    biases = [dict(q.body.named_parameters()) for q in (one, many)]
    for name, value in biases[0].items():
        torch.testing.assert_close(value, biases[1][name], rtol=0, atol=2e-2 * float(value.detach().abs().max()), msg=name)


@pytest.mark.parametrize(
    ("layer", "shape"), [(nn.Conv2d(3, 6, 3), (3, 8, 8)), (nn.Linear(8, 6), (6, 8))], ids=["convolution", "tokens"]
)
def test_the_mean_error_of_rounded_weights_is_corrected(layer, shape) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(layer).eval(), torch.randn(16, *shape) + 1
    quantized = quantize_static(model, [(x,)], target=W3)

    def largest() -> float:
        with torch.no_grad(), quantized.float_activations():
            error = model(x) - quantized(x)
        return float(error.movedim(-1 if len(shape) == 2 else 1, 0).flatten(1).mean(1).abs().max())

    before = largest()
    assert correct_weight_errors_(quantized, (x,)) == 1
    assert largest() < 0.05 * before


def test_tuning_brings_the_outputs_closer_and_keeps_scales_frozen() -> None:
    model, x = build(networks.Residual), image(32)
    quantized = quantize_static(model, [x], target=W3)
    error = OutputError(model, [x], 16)
    before = error.decibels(quantized)
    minimise_error_(quantized, error, steps=30, batch=16)
    assert error.decibels(quantized) > before + 1
    assert not any(True for q in quantized.activation_quantizers() for _ in q.parameters())


@pytest.mark.parametrize("effort", ["balanced", "best"])
def test_each_remedy_says_what_it_bought_and_none_makes_it_worse(effort, caplog, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(improve, "TUNING_STEPS", {"balanced": 5, "best": 15})
    monkeypatch.setattr(trials, "RECONSTRUCTION_STEPS", 20)
    model, x = build(networks.Residual), image(64)
    with caplog.at_level(logging.INFO, logger="compresskit.quant.effort.trials"):
        quantized = quantize_static(model, [x], target=W3, effort=effort)
    remedies = quantized.origin.remedies
    names = [remedy.name.split(",")[0] for remedy in remedies]
    assert {"balance channels", "choose ranges", "correct biases"} <= set(names)
    assert names[-1] == "imitate the float model"
    assert ("reconstruct blocks" in names) == (effort == "best")
    assert remedies[-1].name.endswith({"balanced": "5 steps", "best": "15 steps"}[effort])
    assert [record.getMessage() for record in caplog.records[:-1]] == [str(remedy) for remedy in remedies]
    assert caplog.records[-1].getMessage().startswith("what was kept is made once more, from all data, not judged: ")
    for earlier, later in itertools.pairwise(remedies):
        assert later.before == (earlier.after if earlier.kept else earlier.before)
        assert not earlier.kept or earlier.after > earlier.before
    fresh = image(64)
    with torch.no_grad():
        wanted = model(*fresh)
        fast = oracles.sqnr(wanted, quantize_static(model, [x], target=W3)(*fresh))
        assert oracles.sqnr(wanted, quantized(*fresh)) > fast
    ck.save(quantized, tmp_path / "saved")
    loaded = ck.load(build(networks.Residual), tmp_path / "saved")
    assert isinstance(loaded, Quantized)
    assert loaded.origin.remedies == remedies
    with torch.no_grad():
        torch.testing.assert_close(loaded(*fresh), quantized(*fresh), rtol=0, atol=0)


def test_a_part_of_a_model_and_a_stage_take_the_setting() -> None:
    model, x = build(networks.Residual), image(32)
    inner = torch.nn.Sequential(model)
    whole = quantize_static(inner, [x], inside="0", effort="balanced")
    assert isinstance(whole[0], Quantized)
    assert whole[0].origin.remedies
    staged = ck.StaticQuant(effort="balanced", samples=32)(build(networks.Chain), images_task(ck))
    assert staged.origin.remedies


def test_balanced_does_not_train_a_large_network(monkeypatch) -> None:
    monkeypatch.setattr(improve, "MOST_TUNED_MACS", 1000)
    quantized = quantize_static(build(networks.Chain), [image(32)], effort="balanced")
    assert not any(remedy.name.startswith("imitate") for remedy in quantized.origin.remedies)


def test_reconstruction_pays_at_three_bits(monkeypatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(improve, "TUNING_STEPS", {"best": 1})
    monkeypatch.setattr(trials, "RECONSTRUCTION_STEPS", 40)
    quantized = quantize_static(build(networks.Residual), [image(64)], target=W3, effort="best", float_macs=0)
    remedy = next(remedy for remedy in quantized.origin.remedies if remedy.name == "reconstruct blocks, 40 steps")
    assert remedy.kept
    assert remedy.after > remedy.before + 2


def test_best_does_not_reconstruct_what_takes_too_long(monkeypatch, caplog) -> None:
    monkeypatch.setattr(improve, "TUNING_STEPS", {"best": 1})
    monkeypatch.setattr(trials, "MOST_RECONSTRUCTION_MACS", 1e6)
    with caplog.at_level(logging.INFO, logger="compresskit.quant.effort.trials"):
        quantized = quantize_static(build(networks.Chain), [image(32)], target=W3, effort="best")
    assert not any(remedy.name.startswith("reconstruct") for remedy in quantized.origin.remedies)
    assert any("blocks are not reconstructed: " in record.getMessage() for record in caplog.records)


def test_best_reconstructs_on_the_rows_that_fit_in_memory(monkeypatch) -> None:
    rows = list[int]()
    monkeypatch.setattr(improve, "TUNING_STEPS", {"best": 1})
    monkeypatch.setattr(trials, "MOST_RECONSTRUCTION_BYTES", 12 * 4 * 32 * 16 * 16)
    monkeypatch.setattr(trials, "reconstruct_blocks_", lambda q, data, **_: rows.extend(len(x[0]) for x in data))
    quantize_static(build(networks.Chain), [image(20), image(20)], target=W3, effort="best")
    assert rows[0] == 10


def test_best_does_not_reconstruct_eight_bits(monkeypatch) -> None:
    monkeypatch.setattr(improve, "TUNING_STEPS", {"best": 1})
    quantized = quantize_static(build(networks.Chain), [image(32)], effort="best")
    assert not any(remedy.name.startswith("reconstruct") for remedy in quantized.origin.remedies)


def test_what_was_kept_is_made_from_all_data(monkeypatch) -> None:
    """The largest input is in the half that judges; the range of the result holds it, and biases are corrected on both halves."""
    seen = list[int]()
    monkeypatch.setattr(trials, "PROBE_SAMPLES", 1000)
    monkeypatch.setattr(trials, "correct_biases_", lambda q, x: seen.append(len(x[0])) or correct_biases_(q, x))
    monkeypatch.setattr(trials.Trials, "try_ranges", lambda _: False)
    monkeypatch.setattr(trials.Trials, "try_weights_in_turn", lambda _: False)
    monkeypatch.setattr(improve, "MOST_TUNED_MACS", 0)
    x = image(64)
    x[0][40] *= 1.5 * float(x[0].abs().max() / x[0][40].abs().max())
    assert halves([x], "")[0][0][0].abs().max() < 0.9 * x[0].abs().max()
    quantized = quantize_static(build(networks.Residual), [x], target=W3, effort="balanced", float_macs=0)
    assert next(remedy for remedy in quantized.origin.remedies if remedy.name == "correct biases").kept
    assert seen == [32, 64]
    first = quantized.activation_quantizers()[0]
    assert float(first.scale) * 255 == pytest.approx(float(x[0].max() - x[0].min()), rel=0.02)


class Rounded(nn.Module):
    """Whole numbers in floating point, which have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build(networks.Chain)

    def forward(self, x: Tensor) -> Tensor:
        return (8 * self.inner(x)).argmax(1, keepdim=True).float()


class Stepped(Rounded):
    """An operator that has no derivative, before the outputs."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x).abs() + 1
        return torch.igamma(y, torch.ones_like(y))


@pytest.mark.parametrize("effort", ["balanced", "best"])
@pytest.mark.parametrize("kind", [Rounded, Stepped])
def test_outputs_without_gradients_get_the_other_remedies(kind, effort, caplog, monkeypatch) -> None:
    monkeypatch.setattr(trials, "RECONSTRUCTION_STEPS", 5)
    with caplog.at_level(logging.WARNING, logger="compresskit.quant.effort.trials"):
        quantized = quantize_static(kind().eval(), [image(32)], effort=effort)
    warned = [record.getMessage() for record in caplog.records]
    assert [text.startswith("no layers are kept float, and nothing is trained: ") for text in warned] == [True] * (
        kind is Stepped
    )
    names = {remedy.name for remedy in quantized.origin.remedies}
    assert {"choose ranges", "correct biases"} <= names
    assert not any(name.startswith(("float layers", "imitate")) for name in names)


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(
    ("milliseconds", "before", "kept"), [([1.0, 2.0], 0.5, True), ([1.99, 2.0], 1.8, False), ([3.0, 2.0], 3.0, True)]
)
def test_layers_stay_float_only_while_the_file_is_faster_than_the_float_one(
    milliseconds, before, kept, monkeypatch, tmp_path
) -> None:
    """Or no slower than before, as the third is, where no file in integers is faster."""
    timed = list[tuple[int, int]]()

    def made_up(files, inputs, *, threads, seconds):
        timed.append((threads, len(inputs[0])))
        assert [ck.audit(file).integer_fraction > 0 for file in files] == [True, False, True][: len(files)]
        return [*milliseconds, before][: len(files)]

    monkeypatch.setattr(static, "measured_choice", lambda *_: MeasuredChoice({}))
    monkeypatch.setattr(beside_float, "latency", made_up)
    monkeypatch.setattr(beside_float, "operator_times", lambda *_: None)
    monkeypatch.setattr(improve, "ENOUGH", 200.0)
    settings = {"choose": "measure", "deployment": Deployment(threads=2, batch=3)}
    model, x = build(networks.Residual), image(32)
    quantized = quantize_static(model, [x], effort="balanced", float_macs=0.9, **settings)
    tried = [remedy for remedy in quantized.origin.remedies if remedy.name.startswith("float layers") and remedy.milliseconds]
    assert [remedy.kept for remedy in tried] == [kept] * len(tried)
    assert 0 < len(tried) <= len(timed)
    assert kept or len(tried) == 1
    assert set(timed) == {(2, 3)}
    assert f"{milliseconds[0]:.3f} ms where float takes 2.000, {'kept' if kept else 'not kept'}" in str(tried[0])
    assert any(name.startswith("conv") for name in quantized.origin.floating) == kept
    ck.save(quantized, tmp_path / "saved")
    assert ck.load(build(networks.Residual), tmp_path / "saved").origin.remedies == quantized.origin.remedies


@pytest.mark.parametrize(("macs", "rows"), [(1e6, 8), (125e6, 8), (300e6, 3), (4e9, 2)])
def test_steps_of_larger_networks_have_fewer_rows(macs, rows, monkeypatch) -> None:
    monkeypatch.setattr(trials.Trials, "macs", macs)
    assert trials.Trials(build(networks.Chain), [], [], lambda **_: None).tuning_rows == rows


def test_remedies_with_gradients_are_tried_inside_inference_mode() -> None:
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval(), torch.randn(32, 8)
    wanted = quantize_static(model, [x], effort="balanced", choose="rules")
    with torch.inference_mode():
        quantized = quantize_static(model, [x.clone()], effort="balanced", choose="rules")
    assert [(r.name, r.after, r.kept) for r in quantized.origin.remedies] == [
        (r.name, r.after, r.kept) for r in wanted.origin.remedies
    ]
    assert all(torch.equal(v, quantized.state_dict()[name]) for name, v in wanted.state_dict().items())


@pytest.mark.parametrize(
    ("gained", "drop", "tolerance", "pays"),
    [
        (0.06, None, 0.0, True), (0.04, None, 0.0, False), (-9.0, None, 0.0, False),  # the outputs alone judge
        (-3.0, 0.38, 0.01, True), (-3.0, 0.395, 0.01, False), (-3.0, 0.4, 0.01, False),  # it lowers the second measure
        (-3.0, 0.38, 0.03, False), (-3.0, 0.393, 0.0, False), (-3.0, 0.391, 0.0, True),  # by more than is chance, and 2 %
        (0.06, 0.405, 0.01, True), (0.06, 0.415, 0.01, False), (0.04, 0.405, 0.01, False),  # closer, and no worse by more
        (0.06, 0.4, 0.0, False),  # where nothing is chance, the second measure alone judges
    ],
)  # fmt: skip
def test_a_remedy_pays_by_the_outputs_or_by_a_second_measure(gained, drop, tolerance, pays) -> None:
    found = trials.Trials(nn.Identity(), [], [], lambda **_: None, tolerance=tolerance)
    found.quality, found.drop = 30.0, None if drop is None else 0.4
    assert found._pays(30.0 + gained, drop, 0.05) == pays


@pytest.mark.parametrize("pays", [True, False])
def test_other_data_is_what_everything_is_made_by_only_where_it_paid(pays, monkeypatch) -> None:
    before, other, seen = [image(2)], [image(3)], []
    found = trials.Trials(nn.Identity(), before, [], lambda **_: None)
    monkeypatch.setattr(found, "_rebuilt", lambda: seen.append(found.fit))
    monkeypatch.setattr(found, "judged", lambda *_: pays)
    assert found.try_samples("more data", other) == pays
    assert seen == [other]
    assert found.fit is (other if pays else before)
