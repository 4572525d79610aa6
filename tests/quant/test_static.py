"""Static quantization of whole models and of one part (`inside`)."""

from __future__ import annotations

import math
import re

import networks
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from networks import build, image, images_task
from torch import nn

import compresskit as ck
from compresskit.base.errors import ModelError, SettingError
from compresskit.measure import session
from compresskit.quant import Quantized, quantize_dynamic, quantize_static


@pytest.mark.parametrize("settings", [{"samples": 0}])
def test_settings_out_of_range_are_refused(settings) -> None:
    with pytest.raises(SettingError, match=r"StaticQuant\("):
        ck.StaticQuant(**settings)
    with pytest.raises(SettingError, match=r"QAT\("):
        ck.QAT(epochs=1, **settings)
    with pytest.raises(SettingError, match="freeze"):
        ck.QAT(epochs=1, freeze=2)


class Detector(nn.Module):
    """A list of images of different sizes in, boxes out: how many depends on the values, so that only the backbone is a graph."""

    def __init__(self):
        super().__init__()
        self.backbone, self.head = nn.Sequential(networks.conv(3, 16), networks.conv(16, 16, s=2)), nn.Conv2d(16, 1, 1)

    def forward(self, images):
        size = [max(i.shape[d] for i in images) for d in (1, 2)]
        batch = torch.stack([F.pad(i, (0, size[1] - i.shape[2], 0, size[0] - i.shape[1])) for i in images])
        scores = self.head(self.backbone(batch))[:, 0]
        return [s[s > s.mean()] for s in scores]


def photos(*sizes):
    return ([torch.randn(3, *size) for size in sizes],)


def detector():
    model = Detector()
    for _ in range(10):
        model.train()(*photos((16, 20), (24, 16)))
    return model.eval()


def test_inside_quantizes_one_part(tmp_path) -> None:
    model = detector()
    batches = [photos((16, 20), (24, 16)), photos((20, 20), (20, 28), (8, 8))]
    with pytest.raises(ModelError, match="inside='backbone'"):
        quantize_static(model, batches)
    whole = quantize_static(model, batches, inside="backbone", dynamic=(0, 2, 3))
    assert isinstance(whole, Detector)
    assert isinstance(whole.backbone, Quantized)
    assert not isinstance(model.backbone, Quantized)
    found = whole(*photos((32, 16), (16, 16)))
    assert [f.ndim for f in found] == [1, 1]
    path = ck.export_onnx(whole, tmp_path / "backbone.onnx", batches[0], inside="backbone")
    assert session(path).get_inputs()[0].shape == ["batch", 3, "dim_2", "dim_3"]
    # Multiply-accumulates of the two layers at 32 x 32 and 16 x 16 positions, though the file names no size.
    assert ck.audit(path, size=32).macs == 32 * 32 * 16 * 27 + 16 * 16 * 16 * 16 * 9
    assert ck.audit(path).integer_fraction == 1.0
    proof = ck.verify_onnx(path, whole, [*batches, photos((40, 16))], inside="backbone")
    assert proof.passed, proof
    assert torch.is_grad_enabled()
    assert proof.quantized
    assert proof.samples == 6
    with pytest.raises(ModelError, match="its part 'backbone' is quantized already"):
        quantize_static(whole, [(photos((16, 16)),)])
    with pytest.raises(ModelError, match="this model is quantized already"):
        quantize_static(whole, batches, inside="backbone")
    whole = quantize_static(whole, batches, inside="head", dynamic=(0, 2, 3))
    assert isinstance(whole.head, Quantized)
    ck.save(whole, tmp_path / "saved")
    again = ck.load(Detector(), tmp_path / "saved")
    x = photos((32, 16), (16, 16))
    assert all(torch.equal(a, b) for a, b in zip(again.eval()(*x), whole.eval()(*x), strict=True))


def test_inside_is_calibrated_with_what_it_receives() -> None:
    """The part is calibrated with what it receives: the images behind a layer that makes them ten times larger."""
    model = nn.Sequential(nn.Conv2d(3, 3, 1, bias=False), build(networks.Chain)).eval()
    nn.init.dirac_(model[0].weight)
    model[0].weight.data *= 10
    x = image(16)
    whole = quantize_static(model, [x], inside="1")
    low, high = whole[1].activation_quantizers()[0].observer.range()
    assert low.item() == pytest.approx(10 * x[0].min().item())
    assert high.item() == pytest.approx(10 * x[0].max().item())


def test_a_model_with_a_quantized_part_is_exported_whole(tmp_path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 3, 1, 1), build(networks.Residual)).eval()
    task = images_task(ck)
    whole = ck.StaticQuant(inside="1", samples=32)(model, task)
    path = ck.export_onnx(whole, tmp_path / "w.onnx", image(2))
    assert ck.verify_onnx(path, whole, [image(32)]).passed
    audit = ck.audit(path)
    assert audit.operators["Conv"] == (4, 5)


class Gated(nn.Module):
    """A block that is called with arguments in order and by name, as those of nn.TransformerEncoder and of Hugging Face are."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, gate, *, bias=None, double=False):
        y = self.b(F.relu(self.a(x)) * gate)
        return y * 2 if double else y


class CallsByName(nn.Module):
    def __init__(self, part: nn.Module, reads: str = "") -> None:
        super().__init__()
        self.part, self.reads, self.twice = part, reads, False

    def forward(self, x):
        if self.reads:
            getattr(self.part, self.reads)
        return self.part(x, gate=x.mean(1, keepdim=True).sigmoid(), bias=None, double=self.twice)


def test_inside_takes_parts_that_are_called_with_some_arguments_by_name(tmp_path) -> None:
    model, x = CallsByName(Gated()).eval(), torch.randn(16, 8)
    file = ck.export_onnx(model, tmp_path / "float.onnx", x, inside="part")
    assert ck.verify_onnx(file, model, [(x,)], inside="part").passed
    assert ck.prune.plan_channels(model, x, ck.keep(macs=0.6), inside="part").remove
    whole = quantize_static(model, [x], inside="part")
    assert (whole(x) - model(x)).abs().max() < 0.1
    file = ck.export_onnx(whole, tmp_path / "part.onnx", x, inside="part")
    assert ck.verify_onnx(file, whole, [(x,)], inside="part").passed
    ck.save(whole, tmp_path / "saved")
    again = ck.load(CallsByName(Gated()), tmp_path / "saved")
    assert torch.equal(again(x), whole(x))
    again.twice = True
    with pytest.raises(ModelError, match="quantized Gated: wanted the input double=False that it was captured with, got True"):
        again(x)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 4)

    def forward(self, x, scale=1.0, flag=True, number=0, gate=None):
        return self.a(x) * scale + (0 if gate is None else gate)


def test_constants_are_compared_by_name(caplog) -> None:
    x = torch.randn(16, 8)
    for example in ((x, 2.0, True), {"x": x, "scale": 2.0, "number": 0, "gate": None}, (x, math.nan)):
        quantized = quantize_dynamic(Scaled().eval(), example)
        scale = quantized.example["scale"] if isinstance(example, dict) else example[1]
        others = {"flag": True} if len(example) == 3 else {"number": 0, "gate": None} if isinstance(example, dict) else {}
        quantized(x=x[:3], **others, scale=scale)
        with pytest.raises(ModelError, match="quantized Scaled: wanted the input scale=.* that it was captured with, got 3.0"):
            quantized(x, scale=3.0, **others)
        with pytest.raises(ModelError, match=r"wanted the inputs \['x', 'scale'.* got \['x'\]; give all of them"):
            quantized(x=x)
    quantized = quantize_dynamic(Scaled().eval(), {"x": x, "number": 0, "gate": None})
    with pytest.raises(ModelError, match="wanted the input gate=None that it was captured with, got 0.5"):
        quantized(x=x, number=0, gate=0.5)
    for _ in range(2):  # a counter, which it does not compute with, as far as anyone can tell
        quantized(x=x, number=5, gate=None)
    assert caplog.text.count("wanted the input number=0 that it was captured with, got 5") == 1


def test_code_that_reads_into_a_quantized_part_is_named() -> None:
    """As nn.TransformerEncoder reads `layers[0].self_attn`."""
    with pytest.raises(ModelError, match="inside='part': code around this module reads its 'a', which a quantized one does not"):
        quantize_static(CallsByName(Gated(), reads="a").eval(), [torch.randn(16, 8)], inside="part")


@pytest.mark.parametrize(("inside", "message"), [("neck", "Detector has no such module"), ("spare", "does not call")])
def test_inside_that_does_not_exist_is_refused(inside, message) -> None:
    model = detector()
    model.spare = nn.Conv2d(3, 3, 1)
    with pytest.raises(ModelError, match=f"inside='{inside}'.*{message}"):
        quantize_static(model, [photos((16, 16), (16, 16))], inside=inside)
    with pytest.raises(ModelError, match=f"inside='{inside}'"):
        ck.export_onnx(model, "x.onnx", photos((16, 16), (16, 16)), inside=inside)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"skip": "03"}, "skip=...): wanted a tuple of texts, got '03'"),
        ({"skip": None}, "skip=...): wanted a tuple of texts, got None"),
        ({"smooth": "no"}, "smooth=...): wanted True or False, got 'no'"),
        ({"float_macs": "0.1", "effort": "balanced"}, "float_macs=...): wanted a number or None, got '0.1'"),
        ({"inside": 3}, "inside=...): wanted a text or None, got 3"),
        ({"dynamic": 0}, "dynamic=...): wanted dimensions, such as (0, 2, 3), or their names"),
        ({"dynamic": "batch"}, "or () for none, got 'batch'"),
        ({"dynamic": {"x": "batch"}}, "or () for none, got {'x': 'batch'}"),
        ({"dynamic": (True,)}, "or () for none, got (True,)"),
    ],
)
def test_settings_of_another_type_are_refused(settings, message) -> None:
    with pytest.raises(SettingError, match=re.escape(message)):
        quantize_static(build(networks.Chain), [image(2)], **settings)


def test_settings_of_the_sister_functions_are_checked_too() -> None:
    for refuse in (ck.quant.prepare_qat, ck.quant.repair):
        with pytest.raises(SettingError, match=rf"^{refuse.__name__}\(skip=...\): wanted a tuple of texts, got 'x'"):
            refuse(build(networks.Chain), [image(16)], skip="x")
    for refuse in (quantize_static, ck.quant.prepare_qat, ck.quant.repair):
        with pytest.raises(SettingError, match=rf"^{refuse.__name__}\(skipped=...\): there is no such setting; write skip="):
            refuse(build(networks.Chain), [image(16)], skipped=("x",))
    with pytest.raises(SettingError, match=r"^quantize_dynamic\(dynamic=\.\.\.\): wanted dimensions, .* got 'batch'"):
        ck.quant.quantize_dynamic(build(networks.Chain), [image(2)], dynamic="batch")


def test_settings_may_be_lists_sets_and_numbers_of_numpy() -> None:
    model, x = build(networks.Chain).eval(), image(8)
    wanted = quantize_static(model, [x], skip=("a",), dynamic=(0, 2, 3), smooth=False)
    for skip in (["a"], {"a"}, {"a": 1}.keys()):
        dims = np.array([0, 2, 3])
        got = quantize_static(model, [x], skip=skip, dynamic=[*dims], smooth=np.bool_(False))
        assert got.placement == wanted.placement


@pytest.mark.parametrize("effort", ["fast", "balanced"])
def test_an_output_of_which_little_is_left_is_told(effort, caplog) -> None:
    """Sines of 30 times a layer, as in networks that represent pictures: a step of eight bits is a large angle."""

    class Sines(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.last = nn.Linear(2, 32), nn.Linear(32, 32), nn.Linear(32, 3)

        def forward(self, x):
            y = self.last(torch.sin(90 * self.second(torch.sin(90 * self.first(x)))))
            return torch.rand(()) * y if self.draws else y

        draws = False

    torch.manual_seed(0)
    model, x = Sines().eval(), torch.rand(64, 2)
    quantize_static(model, [x], effort=effort)
    assert re.search(r"quantize_static.*: the output on the example has -?\d\.\d dB .*`repair` tries what helps", caplog.text)
    caplog.clear()
    quantize_static(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3)).eval(), [x], effort=effort)
    model.draws = True
    quantize_static(model, [x])
    assert " dB " not in caplog.text
