"""Which operators run in integers, and why the others stay float."""

from __future__ import annotations

import networks
import oracles
import pytest
import torch
import torch.nn.functional as F
from networks import build, image, trained_like
from torch import nn

import compresskit as ck
from compresskit.base.errors import ModelError, SettingError
from compresskit.graph.capture import capture
from compresskit.prune import plan_channels
from compresskit.quant import Target, quantize_static
from compresskit.quant.numerics.targets import ARM, OPENVINO, TENSORRT, X86, Support


def test_a_placement_prints_kinds_and_reasons() -> None:
    placement = quantize_static(build(networks.Unknown), [image(16)]).placement
    text = str(placement)
    assert "integer conv" in text
    assert "float: no rule for aten.sort" in text
    assert "a.0" in text


def test_skipped_modules_stay_float(tmp_path) -> None:
    quantized = quantize_static(build(networks.Residual), [image(16)], skip=("inner",))
    assert "skipped by the user" in quantized.placement.floating.values()
    audit = ck.audit(ck.export_onnx(quantized, tmp_path / "q.onnx", image(2)))
    assert 0 < audit.integer_fraction < 1
    assert len(audit.floating) == 1


def test_a_skipped_name_is_no_beginning_of_others() -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(11)]).eval()
    placement = quantize_static(model, [torch.randn(16, 8)], skip=("1",)).placement
    assert [placement.layers[node] for node in placement.floating] == ["1"]


@pytest.mark.parametrize(("name", "reason"), [("x", "it reads x, which the user skipped"), ("cat", "it reads cat, which")])
def test_values_of_the_root_module_are_skipped_by_name(name, reason) -> None:
    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(8, 4, 1)

        def forward(self, x):
            x = self.a(x)
            return self.b(torch.cat([x, x], 1))

    placement = quantize_static(Joined().eval(), [image(4)], skip=(name,)).placement
    assert name not in {point.node for point in placement.points}
    assert any(why.startswith(reason) for why in placement.floating.values())
    with pytest.raises(SettingError, match=r"skip=\['y'\]: .* no value is called so; .* the inputs are \['x'\]"):
        quantize_static(Joined().eval(), [image(4)], skip=("y",))


def test_a_target_of_the_users_decides_what_runs_in_integers() -> None:
    convs = Target(name="CONVS", operators={"conv": Support()})
    quantized = quantize_static(build(networks.Residual), [image(16)], target=convs)
    assert set(quantized.placement.integer.values()) == {"conv"}
    assert "CONVS runs no linear in integers" in quantized.placement.floating.values()
    nothing = Target(name="NOTHING", operators={})
    with pytest.raises(ModelError, match="NOTHING can run none"):
        quantize_static(build(networks.Residual), [image(16)], target=nothing)


def test_a_mean_over_positions_runs_in_integers(tmp_path) -> None:
    """x.mean((2, 3)) and adaptive pooling end as one integer kernel."""

    class Head(nn.Module):
        def __init__(self, keep):
            super().__init__()
            self.conv, self.keep, self.head = nn.Conv2d(3, 8, 3), keep, nn.Linear(8, 4)

        def forward(self, x):
            return self.head(self.conv(x).mean((2, 3), keepdim=self.keep).flatten(1))

    for keep in (True, False):
        quantized = quantize_static(trained_like(Head(keep), image(16)), [image(16)])
        audit = ck.audit(ck.export_onnx(quantized, tmp_path / "q.onnx", image(2)))
        assert audit.operators["GlobalAveragePool"] == (1, 1)
        assert audit.conversions == 1


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
    """conv3d with a residual, pooling in three dimensions, wide enough for integers: (N, 3, 4, 8, 8)."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Conv3d(3, 96, 3, 1, 1), nn.Conv3d(96, 96, (1, 3, 3), 1, (0, 1, 1)), nn.BatchNorm3d(96)
        self.up, self.head = nn.ConvTranspose3d(96, 8, 2, 2), nn.Linear(8, 10)

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
def test_operator_families_are_exported_and_agree(kind, inputs, tmp_path) -> None:
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


def test_a_pixel_unshuffle_moves_integers(tmp_path) -> None:
    class Folded(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.inner, self.out = nn.Conv2d(12, 8, 3, padding=1), nn.Conv2d(8, 8, 3), nn.Conv2d(32, 8, 1)

        def forward(self, x):
            return self.out(F.pixel_unshuffle(self.inner(self.stem(F.pixel_unshuffle(x, 2)).relu()), 2).relu())

    model, x = Folded().eval(), image(5)
    quantized = quantize_static(model, [image(16)])
    assert not quantized.placement.floating
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", image(2))
    assert ck.verify_onnx(path, quantized, [x, image(1)]).plain.within_one == 1.0
    assert ck.audit(path).conversions == 2
    quantized.enable_(False)
    torch.testing.assert_close(quantized(*x), model(*x), atol=1e-5, rtol=1e-4)


def test_a_concat_of_clamped_and_plain_values_runs_in_integers(tmp_path) -> None:
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3), nn.Conv2d(16, 8, 1)

        def forward(self, x):
            return self.c(torch.cat([F.relu(self.a(x)), self.b(x)], 1))

    quantized = quantize_static(Mixed().eval(), [image(16)])
    audit = ck.audit(ck.export_onnx(quantized, tmp_path / "q.onnx", image(2)))
    assert audit.operators["Conv"] == (3, 3)
    assert audit.operators["Concat"] == (1, 1)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")  # it is what is tried
@pytest.mark.parametrize("kernel", [3, 4])
def test_convolutions_padded_by_name_run_in_integers(kernel, tmp_path) -> None:
    first, second = nn.Conv2d(3, 16, kernel, padding="same"), nn.Conv2d(16, 16, 3, padding="valid")
    model = nn.Sequential(first, nn.ReLU(), second, nn.Flatten(), nn.Linear(16 * 14 * 14, 4)).eval()
    graph = capture(model, image(2)).module
    x = image(4)
    torch.testing.assert_close(graph(*x), model(*x))
    assert plan_channels(model, image(2), budget=ck.keep(macs=0.7), round_to=4).remove
    quantized = quantize_static(model, [image(16)])
    assert ck.audit(ck.export_onnx(quantized, tmp_path / "q.onnx", image(2))).integer_fraction == 1.0


@pytest.mark.parametrize(
    ("layer", "floats"),
    [
        (nn.Conv3d(3, 16, 3), True),
        (nn.Conv3d(16, 16, 3), False),
        (nn.Conv3d(32, 32, 3, groups=4), True),  # 8 x 8 in each group
        (nn.Conv3d(32, 32, 3, groups=32), False),  # a kernel of its own
        (nn.Conv2d(3, 16, 3), False),
    ],
)
def test_narrow_convolutions_over_three_dimensions_stay_float_on_x86(layer, floats) -> None:
    x = torch.randn(2, layer.in_channels, *[5] * (layer.weight.ndim - 2))
    model = nn.Sequential(layer, nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)).eval()
    model(x)
    placement = quantize_static(model, [x], strict=True).placement
    assert [reason for reason in placement.floating.values() if "three dimensions" in reason] == (
        ["a convolution of so few channels over three dimensions is faster in float"] if floats else []
    )
    assert "conv" in quantize_static(model, [x], target=ck.quant.targets.ARM).placement.integer.values()


def test_where_nothing_else_runs_in_integers_narrow_convolutions_do() -> None:
    model, x = nn.Sequential(nn.Conv3d(3, 16, 3), nn.ReLU()).eval(), torch.randn(2, 3, 5, 5, 5)
    assert "conv" in quantize_static(model, [x]).placement.integer.values()


def test_a_matrix_times_itself_stays_float() -> None:
    class Gram(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.matrix = nn.Linear(8, 16), nn.Parameter(torch.randn(16, 16))

        def forward(self, x):
            return self.a(x) @ F.linear(self.matrix, self.matrix)

    model, x = Gram().eval(), torch.randn(32, 8)
    placement = quantize_static(model, [(x,)]).placement
    assert "it multiplies its weight by itself" in placement.floating.values()


class Warped(nn.Module):
    """Coordinates of pixels plus a flow, by which features are looked up; with `layer`, a convolution reads the sum."""

    def __init__(self, layer: bool) -> None:
        super().__init__()
        self.features, self.flow = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()), nn.Conv2d(8, 2, 3, padding=1)
        self.last = nn.Conv2d(2, 2, 1) if layer else nn.Identity()

    def forward(self, x):
        f, (h, w) = self.features(x), x.shape[2:]
        y, x = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        at = self.last(torch.stack([x, y]).float() + self.flow(f))
        return F.grid_sample(f, at.permute(0, 2, 3, 1) * torch.tensor([2 / (w - 1), 2 / (h - 1)]) - 1, align_corners=True)


class Pooled(nn.Module):
    """Attention pooling: weights of a softmax times values, summed."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.a, self.v, self.o = nn.Conv2d(3, 16, 3, padding=1), *(nn.Conv2d(16, 4, 1) for _ in range(2)), nn.Linear(4, 4)

    def forward(self, x):
        h = F.relu(self.f(x))
        return self.o((self.a(h).flatten(2).softmax(2) * self.v(h).flatten(2)).sum(2))


@pytest.mark.parametrize("target", [X86, ARM, TENSORRT, OPENVINO], ids=lambda target: target.name)
@pytest.mark.parametrize(("model", "name"), [(Warped(False), "add"), (Pooled(), "mul")])
def test_what_reads_a_float_value_and_no_layer_reads_stays_float(model, name, target) -> None:
    """Eight bits do not hold the coordinates of 300 pixels and a fraction of one, and its kernels are no faster."""
    if name not in target.operators:
        return
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 300)
    quantized = quantize_static(model.eval(), [(x,)], target=target)
    assert quantized.placement.floating[name] == "it reads a value in float, and nothing in integers reads it"
    with torch.no_grad():
        assert oracles.sqnr(model(x), quantized(x)) > 30


@pytest.mark.parametrize("target", [X86, TENSORRT], ids=lambda target: target.name)
def test_a_shortcut_that_is_rounded_for_a_layer_is_added_in_integers_at_the_end_too(target) -> None:
    class Shortcut(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x):
            y = F.relu(self.a(x))
            return F.relu(y + self.b(y))

    placement = quantize_static(Shortcut().eval(), [(torch.randn(4, 3, 8, 8),)], target=target, strict="all").placement
    assert "add" in placement.integer


def test_what_a_layer_reads_is_in_integers() -> None:
    assert "add" in quantize_static(Warped(True).eval(), [(torch.randn(4, 3, 8, 16),)]).placement.integer
