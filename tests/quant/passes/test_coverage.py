"""What can be captured, quantized, exported and proved: operator families, parts of models, dimensions that vary, the zoo."""

from __future__ import annotations

import json

import checkout
import networks
import onnx
import pytest
import torch
import torch.nn.functional as F
from networks import build, image, images_task
from torch import nn

import compresskit as ck
from compresskit.base.errors import DataError, ExportError, ModelError, SettingError
from compresskit.measure import numpy_inputs, session
from compresskit.quant import Quantized, prepare_qat, quantize_static


class Sequence(nn.Module):
    """Embedding, conv1d, pooling in one dimension, an upsampling: (N, 24) integers."""

    def __init__(self):
        super().__init__()
        self.embed, self.conv = nn.Embedding(50, 16), nn.Conv1d(16, 32, 3, padding="same")
        self.up, self.head = nn.ConvTranspose1d(32, 16, 4, 2, 1), nn.Linear(16 * 3, 10)

    def forward(self, tokens):
        x = F.relu(self.conv(self.embed(tokens).transpose(1, 2)))
        x = self.up(F.max_pool1d(x, 2))
        return self.head(F.adaptive_avg_pool1d(x, 3).flatten(1))


class Volume(nn.Module):
    """conv3d with a residual, pooling in three dimensions: (N, 3, 4, 8, 8)."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Conv3d(3, 16, 3, 1, 1), nn.Conv3d(16, 16, (1, 3, 3), 1, (0, 1, 1)), nn.BatchNorm3d(16)
        self.up, self.head = nn.ConvTranspose3d(16, 8, 2, 2), nn.Linear(8, 10)

    def forward(self, x):
        x = F.relu(self.a(x))
        x = F.max_pool3d(F.relu(self.norm(self.b(x)) + x), 2)
        return self.head(F.adaptive_avg_pool3d(F.avg_pool3d(self.up(x), 2), 1).flatten(1))


class Attention(nn.Module):
    """Patches, attention (scaled dot product), bmm and einsum, layer norm, GELU, a window rolled and cut as in Swin."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm1, self.norm2 = nn.Conv2d(3, 32, 4, 4), nn.LayerNorm(32), nn.LayerNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down, self.head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x):
        x = torch.roll(self.embed(x), (-1, -1), (2, 3)).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, 4, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        a = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(a.transpose(1, 2).flatten(2))
        scores = torch.einsum("nid,njd->nij", x, x).softmax(-1)
        x = x + torch.bmm(scores, x)
        return self.head((x + self.down(F.gelu(self.up(self.norm2(x))))).mean(1))


class Resizer(nn.Module):
    """interpolate (nearest and bilinear), pixel shuffle, a pad that reflects, slices with steps, a concat of all."""

    def __init__(self):
        super().__init__()
        self.stem, self.wide, self.out = networks.conv(3, 16), nn.Conv2d(16, 16, 3), nn.Conv2d(36, 8, 1)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        x = self.stem(x)
        y = F.interpolate(self.wide(F.pad(x, (1, 1, 1, 1), mode="reflect"))[:, :, ::2, ::2], scale_factor=2, mode="nearest")
        z = F.interpolate(F.pixel_shuffle(x, 2), size=x.shape[-2:], mode="bilinear", align_corners=False)
        return self.head(F.relu(self.out(torch.cat([x, y, z], 1))))


class Pools(nn.Module):
    """Pooling that rounds up, leaves the padding out, ends at 2 x 3 positions; a channel shuffle; a squeeze-and-excite."""

    def __init__(self):
        super().__init__()
        self.stem, self.mix, self.gate = networks.conv(3, 16), nn.Conv2d(16, 16, 1, groups=4), nn.Conv2d(16, 16, 1)
        self.head = nn.Linear(16 * 6, 10)

    def forward(self, x):
        x = F.max_pool2d(self.stem(x), 3, 2, ceil_mode=True)
        x = self.mix(F.channel_shuffle(F.avg_pool2d(x, 3, 1, 1, ceil_mode=True, count_include_pad=False), 4))
        x = x * torch.sigmoid(self.gate(F.adaptive_avg_pool2d(x, 1)))
        x = F.avg_pool2d(x, 2, ceil_mode=True) + F.lp_pool2d(x, 2, 2)
        return self.head(F.adaptive_avg_pool2d(F.pad(x, (0, 2, 0, 0)), (2, 3)).flatten(1))


FAMILIES = [
    (Sequence, lambda n: (torch.randint(0, 50, (n, 24)),)),
    (Volume, lambda n: (torch.randn(n, 3, 4, 8, 8),)),
    (Attention, image),
    (Resizer, image),
    (Pools, image),
]


@pytest.mark.parametrize(("kind", "inputs"), FAMILIES, ids=lambda v: getattr(v, "__name__", ""))
def test_operator_families(kind, inputs, tmp_path) -> None:
    model = kind()
    for _ in range(10):
        model.train()(*inputs(16))
    quantized = quantize_static(model.eval(), [inputs(16), inputs(16)])
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", inputs(2))
    proof = ck.verify_onnx(path, quantized, [inputs(32), inputs(3)])
    assert proof.passed, proof
    with torch.no_grad():
        x = inputs(32)
        wanted, got = model(*x), quantized(*x)
    assert 10 * torch.log10(wanted.square().sum() / (wanted - got).square().sum()) > 18
    operators = ck.audit(path).operators
    assert operators.get("Conv", (0, 0))[0] == operators.get("Conv", (0, 0))[1]
    assert operators.get("Gemm", (1, 0))[0] >= 1 or operators["MatMul"][0] >= 4


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


def test_inside_quantizes_a_part(tmp_path) -> None:
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
    assert ck.audit(path).share == 1.0
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


def test_calibration_in_pieces_sees_what_whole_batches_show(monkeypatch) -> None:
    from compresskit.quant import model as quantized_model
    from compresskit.quant.numerics.observers import MovingAverage

    model, x = build(networks.Residual), image(30)
    whole = quantize_static(model, [x]).state_dict()
    seen = []
    monkeypatch.setattr(quantized_model, "call_checked", lambda m, inputs, where: seen.append(len(inputs[0])) or m(*inputs))
    monkeypatch.setattr(quantized_model, "CALIBRATION_BYTES", 4 * 16 * 16 * 16 * 4)  # four rows of the largest activation
    for name, value in quantize_static(model, [x]).state_dict().items():
        torch.testing.assert_close(value, whole[name], msg=name)
    assert seen == [4] * 7 + [2]
    seen.clear()
    quantize_static(model, [x], observer=MovingAverage)
    assert seen == [30]


def test_inside_ranges_are_those_of_the_whole_model() -> None:
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


@pytest.mark.parametrize(("inside", "message"), [("neck", "Detector has no such module"), ("spare", "does not call")])
def test_inside_that_is_not_there(inside, message) -> None:
    model = detector()
    model.spare = nn.Conv2d(3, 3, 1)
    with pytest.raises(ModelError, match=f"inside='{inside}'.*{message}"):
        quantize_static(model, [photos((16, 16), (16, 16))], inside=inside)
    with pytest.raises(ModelError, match=f"inside='{inside}'"):
        ck.export_onnx(model, "x.onnx", photos((16, 16), (16, 16)), inside=inside)


def test_other_dimensions_vary(tmp_path) -> None:
    model = nn.Sequential(networks.conv(3, 16), networks.conv(16, 16, s=2), nn.Conv2d(16, 4, 1))
    model = networks.trained_like(model, image(16))
    for dynamic, names in (
        ((0, 2, 3), ["batch", 3, "dim_2", "dim_3"]),
        ({"input": {0: "images", 2: "height"}}, ["images", 3, "height", 16]),
        ((), [4, 3, 16, 16]),
    ):
        path = ck.export_onnx(model, tmp_path / "f.onnx", image(4), dynamic=dynamic)
        runtime = session(path)
        assert runtime.get_inputs()[0].shape == names
        tall = torch.randn(4, 3, 30, 16) if names[2] != 16 else torch.randn(4, 3, 16, 16)
        with torch.no_grad():
            wanted = model(tall)
        got = runtime.run(None, numpy_inputs(runtime, (tall,)))[0]
        torch.testing.assert_close(torch.from_numpy(got), wanted, atol=1e-4, rtol=1e-4)


def test_quantized_models_whose_dimensions_vary(tmp_path) -> None:
    model = networks.trained_like(nn.Sequential(networks.conv(3, 16), nn.Conv2d(16, 4, 1)), image(16))
    quantized = quantize_static(model, [image(16)], dynamic=(0, 2, 3))
    assert quantized(torch.randn(2, 3, 20, 28)).shape == (2, 4, 20, 28)
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", image(2))
    assert ck.verify_onnx(path, quantized, [(torch.randn(8, 3, 20, 28),), image(4)]).passed
    with pytest.raises(ModelError, match=r"wanted inputs \[\('N', 3, 'any', 'any'\)\], got \[\(2, 4, 20, 28\)\]"):
        quantized(torch.randn(2, 4, 20, 28))
    fixed = quantize_static(build(networks.Shuffle), [image(16)])
    with pytest.raises(ModelError, match="cannot be captured as a graph"):
        ck.export_onnx(fixed, tmp_path / "n.onnx", image(2), dynamic=(0, 2, 3))


class Pair(nn.Module):
    """Two images, run as one batch and told apart again, as RAFT does."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(32, 8, 3)

    def forward(self, one, two):
        parts = F.relu(self.stem(torch.cat([one, two]))).chunk(2)
        return self.head(torch.cat(parts, 1))


def test_a_batch_that_is_cut_in_two(tmp_path) -> None:
    model, batches = Pair().eval(), [tuple(torch.randn(rows, 3, 12, 12) for _ in range(2)) for rows in (2, 5)]
    path = ck.export_onnx(model, tmp_path / "float.onnx", batches[0])
    assert ck.verify_onnx(path, model, batches).passed
    quantized = quantize_static(model, batches)
    path = ck.export_onnx(quantized, tmp_path / "int8.onnx", batches[0])
    assert ck.verify_onnx(path, quantized, batches).passed
    assert ck.audit(path).share == 1.0


@pytest.mark.parametrize(
    ("dynamic", "message"),
    [
        ((0, 4), "no input has a dimension 4"),
        ({"y": {0: "batch"}}, r"dynamic=\{'y': \.\.\.\}: the inputs are \['x'\]"),
        ({"x": {7: "depth"}}, r"input 'x' has dimensions 0\.\.3, got 7"),
    ],
)
def test_dimensions_that_are_not_there(dynamic, message, tmp_path) -> None:
    with pytest.raises(SettingError, match=message):
        ck.export_onnx(build(networks.Chain), tmp_path / "f.onnx", image(2), dynamic=dynamic)
    with pytest.raises(SettingError, match=message):
        quantize_static(build(networks.Chain), [image(2)], dynamic=dynamic)


def test_a_dimension_of_one_is_not_shown_to_vary() -> None:
    model = nn.Conv2d(3, 4, (3, 1), padding=(1, 0)).eval()
    with pytest.raises(SettingError, match="dimension 3 of input 'input' is 1 in the example"):
        quantize_static(model, [(torch.randn(4, 3, 8, 1),)], dynamic=(0, 2, 3))


def test_strict_names_every_operator_that_no_rule_knows() -> None:
    class Two(networks.Unknown):
        def forward(self, x):
            return super().forward(x).cumsum(1)

    model = build(Two)
    assert any("sort" in reason for reason in quantize_static(model, [image(16)]).placement.floating.values())
    with pytest.raises(ModelError, match=r"strict=True: no rule knows 2 operators.*aten\.sort.*aten\.cumsum"):
        quantize_static(model, [image(16)], strict=True)
    with pytest.raises(ModelError, match="strict=True"):
        ck.StaticQuant(strict=True)(model, images_task(ck))
    quantize_static(build(networks.Chain), [image(16)], strict=True)


def test_shapes_that_depend_on_data(tmp_path) -> None:
    class Selects(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x):
            x = self.conv(x)
            if x.sum() > 0:
                return x
            return -x

    class Keeps(Selects):
        def forward(self, x):
            x = self.conv(x)
            kept = x[x.mean((1, 2, 3)) > 0]
            if len(kept) > 1:
                return kept[:1]
            return kept

    for kind, line in ((Selects, r"x\.sum\(\) > 0"), (Keeps, r"len\(kept\) > 1")):
        for call in (
            lambda kind=kind: ck.export_onnx(kind(), tmp_path / "f.onnx", image(2)),
            lambda kind=kind: quantize_static(kind(), [image(2)]),
        ):
            with pytest.raises(ModelError, match=rf"(?s)cannot be captured as a graph.*{line}.*inside='backbone'"):
                call()
    assert not list(tmp_path.iterdir())


def test_what_is_not_quantized() -> None:
    quantized = quantize_static(build(networks.Chain), [image(16)])
    for again in (quantize_static, prepare_qat):
        with pytest.raises(ModelError, match="this model is quantized already; quantize the float model it came from"):
            again(quantized, [image(16)])
    with pytest.raises(ModelError, match=r"wanted fp32 weights, but a\.0\.weight is torch\.bfloat16; quantize model\.float\(\)"):
        quantize_static(build(networks.Chain).bfloat16(), [(image(2)[0].bfloat16(),)])
    with pytest.raises(DataError, match="no calibration batch"):
        quantize_static(build(networks.Chain), [])


# --- the zoo ---------------------------------------------------------------------------------------------------------------


def zoo() -> list[str]:
    text = json.loads((checkout.ROOT / "benchmarks" / "quantize_coverage.json").read_text())
    return sorted(text["rows"])


def test_the_committed_table_has_every_model() -> None:
    rows = json.loads((checkout.ROOT / "benchmarks" / "quantize_coverage.json").read_text())["rows"]
    torchvision = pytest.importorskip("torchvision")
    assert {name for name in torchvision.models.list_models() if "quantized" not in name} <= set(rows)
    assert all(row["verified"] for row in rows.values())


def test_the_committed_table_of_pruning_has_every_model() -> None:
    rows = json.loads((checkout.ROOT / "benchmarks" / "prune_zoo.json").read_text())["rows"]
    torchvision = pytest.importorskip("torchvision")
    assert {name for name in torchvision.models.list_models() if "quantized" not in name} <= set(rows)
    for name, row in rows.items():
        assert row["left"] <= 0.51 * row["macs"], name
        assert row["eval"], name
        assert row["train"], name
        assert row["kind"] == "detection" or row["export"] == "yes", name


def test_the_committed_table_says_why() -> None:
    rows = json.loads((checkout.ROOT / "benchmarks" / "quantize_coverage.json").read_text())["rows"]
    torchvision = pytest.importorskip("torchvision")
    assert set(rows) <= set(torchvision.models.list_models())
    for name, row in rows.items():
        assert row["verified"] or row["cause"], name


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo())
def test_torchvision(name) -> None:
    """The row of one model, measured again in a process of its own; the large ones take minutes and up to 8 GiB."""
    done = checkout.python(checkout.ROOT / "benchmarks" / "quantize_coverage.py", "--row", name, check=False)
    row = json.loads(done.stdout.splitlines()[-1])
    known = json.loads((checkout.ROOT / "benchmarks" / "quantize_coverage.json").read_text())["rows"][name]
    assert row["verified"] or not known["verified"], row
    assert row["captured"] or not known["captured"]


def test_bf16_and_fp16_files(tmp_path) -> None:
    for dtype, onnx_type in ((torch.float16, onnx.TensorProto.FLOAT16), (torch.bfloat16, onnx.TensorProto.BFLOAT16)):
        model = build(networks.Residual).to(dtype)
        x = (torch.randn(32, 3, 16, 16).to(dtype),)
        path = ck.export_onnx(model, tmp_path / "h.onnx", x)
        proof = ck.verify_onnx(path, model, [x])
        assert proof.passed, proof
        stored = [t.data_type for t in onnx.load(path).graph.initializer if len(t.dims) >= 2]
        assert stored == [onnx_type] * len(stored)
        assert len(stored) == 5
        wide = ck.export_onnx(build(networks.Residual), tmp_path / "f.onnx", image(2))
        assert path.stat().st_size < 0.75 * wide.stat().st_size
        with torch.no_grad():
            model.head.weight += 0.3
        assert not ck.verify_onnx(path, model, [x]).passed
    with pytest.raises(ExportError):
        ck.verify_onnx(tmp_path / "none.onnx", model, [x])
