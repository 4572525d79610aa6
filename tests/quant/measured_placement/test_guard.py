"""The guard of an effort's speed: what it times, when it looks for a better placement, and where it leaves all as it is."""

from __future__ import annotations

import logging
import platform
from dataclasses import replace

import pytest
import torch
from networks import Chain, build, image
from torch import nn

import compresskit as ck
from compresskit.base.errors import ExportError, SettingError
from compresskit.export.check.profile.layers import LayerTime, Profile, ProfiledLayer
from compresskit.quant import quantize_static
from compresskit.quant.effort import improve
from compresskit.quant.measured_placement import beside_float, latency_search
from compresskit.quant.measured_placement.placement_model import layer_graph, operator_times
from compresskit.quant.numerics.targets import ARM, TENSORRT, X86, Deployment, Target
from compresskit.quant.passes.placement import place_quantizers
from compresskit.quant.passes.prepare_graph import prepare_graph


class Clock:
    """A `latency` that gives files made-up times by the operators that they run in integers, and counts the files."""

    def __init__(self, everything: float, part: float, nothing: float) -> None:
        self.times = {"all": everything, "part": part, "float": nothing}
        self.files, self.deployments = 0, set[tuple[int, int]]()

    def __call__(self, paths, inputs, *, threads, seconds) -> list[float]:
        self.files += len(paths)
        self.deployments.add((threads, len(inputs[-1])))
        kinds = [{kind for kind, (done, _) in ck.audit(path).operators.items() if done} for path in paths]
        return [self.times["all" if "Gemm" in k else "part" if "Conv" in k else "float"] for k in kinds]


@pytest.fixture
def here(monkeypatch):
    """This machine is the target's; nothing is profiled."""
    monkeypatch.setattr(Target, "runs_here", property(lambda self: True))
    empty = Profile(path="q", against="f", threads=1, rows=1, milliseconds=1.0, outside=0.0, scale=1.0, layers=())
    for module in (latency_search, beside_float):
        monkeypatch.setattr(module, "profile_layers", lambda *_, **__: empty)

    def clock(*times: float) -> Clock:
        made = Clock(*times)
        for module in (latency_search, beside_float):
            monkeypatch.setattr(module, "latency", made)
        return made

    return clock


def test_a_faster_file_of_the_rules_is_timed_once_and_kept(here) -> None:
    clock = here(1.0, 0.5, 2.0)
    found = quantize_static(build(Chain), [image(32)], effort="balanced", float_macs=0.0)
    assert clock.files == 2
    assert "linear" in found.placement.integer.values()
    assert (found.origin.measured.milliseconds, found.origin.measured.float_milliseconds) == (1.0, 2.0)
    assert found.origin.measured.floating == 0


def test_where_integers_save_too_little_a_better_placement_is_found(here, caplog) -> None:
    clock = here(1.9, 1.0, 2.0)
    with caplog.at_level(logging.INFO, logger="compresskit.quant.measured_placement.latency_search"):
        found = quantize_static(
            build(Chain), [image(32)], effort="balanced", float_macs=0.0, deployment=Deployment(threads=2, batch=3)
        )
    assert "linear" not in found.placement.integer.values()
    assert "conv" in found.placement.integer.values()
    assert found.origin.measured.milliseconds == 1.0
    assert clock.deployments == {(2, 3)}
    assert "measured placement (batch 3, threads 2)" in caplog.text


def test_no_layer_is_left_float_that_makes_the_file_slower_than_float(here, monkeypatch) -> None:
    monkeypatch.setattr(improve, "ENOUGH", 200.0)
    here(1.0, 2.5, 2.0)
    found = quantize_static(build(Chain), [image(32)], effort="best", float_macs=0.9)
    tried = [remedy for remedy in found.origin.remedies if remedy.milliseconds is not None]
    assert tried
    assert [remedy.kept for remedy in tried if remedy.milliseconds == 2.5] in ([False], [False, False])


@pytest.mark.parametrize(
    "settings",
    [
        dict(effort="fast"),
        dict(effort="balanced", choose="rules"),
        dict(effort="balanced", strict=True),
        dict(effort="balanced", target=TENSORRT),
    ],
    ids=["fast", "rules", "strict", "another runtime"],
)
def test_where_nothing_is_timed(settings, here, monkeypatch) -> None:
    clock = here(3.0, 1.0, 2.0)
    monkeypatch.setattr(Target, "runs_here", property(lambda self: self.onnxruntime))
    found = quantize_static(build(Chain), [image(32)], **settings)
    assert found.origin.measured is None
    assert clock.files == 0


def test_a_target_runs_on_processors_of_its_own(monkeypatch) -> None:
    monkeypatch.undo()
    for machine, wanted in (("x86_64", ["X86"]), ("AMD64", ["X86"]), ("aarch64", ["ARM"]), ("riscv64", [])):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        assert [target.name for target in (X86, ARM, TENSORRT) if target.runs_here] == wanted
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert not replace(X86, onnxruntime=False).runs_here


def test_a_deployment_belongs_to_what_is_timed() -> None:
    ck.StaticQuant(effort="balanced", deployment=Deployment(threads=2))
    for settings in (dict(), dict(effort="balanced", choose="rules"), dict(effort="best", strict=True)):
        with pytest.raises(SettingError, match="only a measured choice depends on it"):
            ck.StaticQuant(deployment=Deployment(threads=2), **settings)


class Unknown(nn.Module):
    """An operator without an ONNX form behind what is quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.lgamma(self.linear(x).abs() + 1)


def test_a_guard_that_cannot_measure_warns_and_goes_on(here, caplog) -> None:
    here(1.0, 1.0, 2.0)
    found = quantize_static(Unknown().eval(), [torch.randn(32, 8)], effort="balanced")
    assert found.origin.measured is None
    assert "Unknown is not timed beside its float model" in caplog.text
    with pytest.raises(ExportError):
        quantize_static(Unknown().eval(), [torch.randn(32, 8)], effort="balanced", choose="measure")


def test_a_first_input_without_dimensions(here) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, k: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).relu() * k

    here(1.0, 1.0, 2.0)
    batches = [(torch.tensor(2.0), torch.randn(8, 8)) for _ in range(4)]
    assert quantize_static(Scaled().eval(), batches, effort="balanced").origin.measured.float_milliseconds == 2.0


def test_times_of_operators_are_those_of_their_layers() -> None:
    captured, _, _ = prepare_graph(build(Chain), image(4), X86)
    graph = captured.module.graph
    placement = place_quantizers(graph, X86)
    rows = [
        ProfiledLayer(
            name=str(i),
            place=i,
            this=LayerTime(milliseconds=1.0, conversions=0.25),
            other=LayerTime(milliseconds=float(i), conversions=0.5),
        )
        for i in range(3)
    ]
    profile = Profile(path="q", against="f", threads=1, rows=1, milliseconds=3.0, outside=0.0, scale=1.0, layers=tuple(rows))
    found = operator_times(graph, placement, profile)
    names = [name for name, kind in placement.integer.items() if kind in ("conv", "linear")]
    assert [found.extra[name] for name in names] == pytest.approx([-1.25, -0.25, 0.75])
    assert found.milliseconds == 3.0
    assert found.conversion > 0
    more = operator_times(graph, placement, replace(profile, rows=16))
    assert more.conversion == pytest.approx(16 * found.conversion)
    wrong = replace(profile, layers=(*rows, replace(rows[0], place=7)))
    assert operator_times(graph, placement, wrong) is None
    one = replace(profile, layers=(replace(rows[0], other=None), *rows[1:]))
    assert operator_times(graph, placement, one) is None


def test_a_graph_with_quantizers_has_the_same_layers() -> None:
    model = build(Chain)
    captured, _, _ = prepare_graph(model, image(4), X86)
    placement = place_quantizers(captured.module.graph, X86)
    quantized = quantize_static(model, [image(16)])
    plain, with_quantizers = (layer_graph(graph, placement) for graph in (captured.module.graph, quantized.body.graph))
    assert plain.members == with_quantizers.members
    torch.testing.assert_close(
        torch.tensor(sorted(plain.sizes.values()), dtype=torch.float),
        torch.tensor(sorted(with_quantizers.sizes.values()), dtype=torch.float),
    )
