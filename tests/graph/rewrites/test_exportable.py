"""What torch's exporter cannot write is written by other operators, or refused with the line of the model's code."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import compresskit as ck
from compresskit.base.errors import ModelError
from compresskit.graph.capture import capture
from compresskit.measure import session


class Mixed(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = x.clamp(0, 0.3).clip(min=-1, max=0.25)
        return y, F.adaptive_max_pool2d(y, (3, 4)), F.adaptive_max_pool1d(x[0], 5), F.adaptive_max_pool2d(x, 2)


def test_mixed_bounds_and_adaptive_max_pooling_are_written(tmp_path: Path) -> None:
    model, x = Mixed().eval(), torch.randn(2, 3, 8, 6)
    for got, wanted in zip(capture(model, x, dynamic=()).module(x), model(x), strict=True):
        assert torch.equal(got, wanted)
    path = ck.export_onnx(model, tmp_path / "f.onnx", x, dynamic=())
    assert ck.verify_onnx(path, model, [x]).passed


class Pyramid(nn.Module):
    """Pools to several sizes, as PSPNet and spatial pyramid pooling do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        levels = [F.interpolate(F.adaptive_avg_pool2d(y, k), size=y.shape[2:], mode="bilinear") for k in (1, 2, 3)]
        return self.out(torch.cat([y, *levels], 1))


class Area(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(x * 2, size=(4, 5), mode="area")


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(
    ("model", "shapes", "dynamic"),
    [
        (nn.AdaptiveAvgPool2d(3), [(2, 3, 8, 8), (1, 3, 33, 20), (7, 3, 5, 31)], (0, 2, 3)),
        (nn.AdaptiveAvgPool2d((2, None)), [(2, 3, 8, 8), (1, 3, 33, 20)], (0, 2, 3)),
        (nn.AdaptiveAvgPool2d(3), [(2, 3, 8, 8), (1, 3, 33, 8)], (0, 2)),
        (nn.Sequential(nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(147, 5)), [(2, 3, 8, 8), (1, 3, 33, 20)], (0, 2, 3)),
        (nn.AdaptiveAvgPool1d(4), [(2, 3, 10), (1, 3, 15), (5, 3, 6)], (0, 2)),
        (nn.AdaptiveAvgPool3d(2), [(2, 3, 6, 6, 6), (1, 3, 6, 6, 6)], (0,)),
        (nn.AdaptiveAvgPool3d((2, 1, 3)), [(2, 3, 6, 6, 6), (1, 3, 7, 8, 9)], (0, 2, 3, 4)),
        (nn.AdaptiveMaxPool2d(1), [(2, 3, 8, 8), (1, 3, 33, 20)], (0, 2, 3)),
        (nn.AdaptiveMaxPool2d((3, 1)), [(2, 3, 8, 8), (1, 3, 33, 20)], (0, 2, 3)),
        (Pyramid(), [(2, 3, 12, 12), (1, 3, 33, 20)], (0, 2, 3)),
        (Area(), [(2, 3, 12, 12), (1, 3, 33, 20)], (0, 2, 3)),
    ],
    ids=["3", "2 and as it is", "height", "head", "1d", "3d", "3d varies", "max 1", "max 3, 1", "pyramid", "area"],
)  # fmt: skip
def test_adaptive_pooling_of_other_sizes_than_the_examples(model, shapes, dynamic, tmp_path: Path) -> None:
    """The exporter writes the windows of the example; they follow the input."""
    model, inputs = model.eval(), [torch.randn(shape) for shape in shapes]
    graph = capture(model, inputs[0], dynamic=dynamic).module
    run = session(ck.export_onnx(model, tmp_path / "f.onnx", inputs[0], dynamic=dynamic))
    for x in inputs:
        wanted = model(x)
        for got in (graph(x), torch.from_numpy(run.run(None, {run.get_inputs()[0].name: x.numpy()})[0])):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_indices_of_adaptive_max_pooling_are_refused() -> None:
    class Indices(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.adaptive_max_pool2d(x, 3, return_indices=True)[1]

    with pytest.raises(ModelError, match=r"to \[3, 3\] of \[8, 6\] positions has no form in ONNX .*: pool with nn\.MaxPool2d"):
        capture(Indices(), torch.randn(2, 3, 8, 6))


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], 8)
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
        return state


class Masked(nn.Module):
    def __init__(self, **settings: bool) -> None:
        super().__init__()
        self.layers, self.settings = nn.Transformer(16, 2, 1, 1, 32, batch_first=True), settings

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = self.layers.generate_square_subsequent_mask(target.shape[1])
        return self.layers(source, target, tgt_mask=mask, **self.settings)


def test_a_loop_over_a_dimension_that_varies_is_refused_with_its_line() -> None:
    place = (
        r"dimension 1 of input 'x' should vary, but the code takes it for the constant 5 \(.*test_exportable\.py:\d+ in forward\)"
    )
    with pytest.raises(ModelError, match=rf"Steps cannot be captured as a graph: {place}.*; use nn\.LSTM or nn\.GRU"):
        capture(Steps().eval(), torch.randn(3, 5, 8), dynamic=(0, 1))
    assert capture(Steps().eval(), torch.randn(3, 5, 8)).shapes["x"] == (2, 5, 8)


def test_a_loop_over_the_length_of_a_tensor_is_refused_with_what_to_write() -> None:
    class Rows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([x[i] * 2 for i in range(len(x))])

    with pytest.raises(ModelError, match=r"dimension 0 of input .* \(.*test_exportable\.py.*write x\.shape\[0\] for len\(x\)"):
        capture(Rows(), torch.randn(3, 8))
    with pytest.raises(ModelError, match=r"leave the dimension out of dynamic=, where \(\) takes all sizes of the example"):
        capture(Rows(), torch.randn(3, 8))
    assert capture(Rows(), torch.randn(3, 8), dynamic=()).shapes["x"] == (3, 8)


def test_a_transformer_that_looks_at_its_mask_says_how_to_tell_it() -> None:
    example = (torch.randn(2, 5, 16), torch.randn(2, 6, 16))
    with pytest.raises(ModelError, match=r"looks at the values of a mask.* tgt_is_causal=True\), or False"):
        capture(Masked().eval(), example)
    capture(Masked(tgt_is_causal=True).eval(), example)


def test_a_weight_for_each_sample_is_refused_with_its_line(tmp_path: Path) -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            rows = x.shape[0]
            return F.conv2d(x.reshape(1, -1, 8, 8), weight.reshape(-1, 2, 3, 3), groups=rows).reshape(rows, -1, 6, 6)

    example = (torch.randn(3, 2, 8, 8), torch.randn(3, 4, 2, 3, 3))
    place = r"as many groups as an input has rows \(at .*test_exportable\.py:\d+: return F\.conv2d"
    with pytest.raises(ModelError, match=rf"{place}.*torch\.bmm, or export with dynamic=\(\)"):
        ck.export_onnx(Own(), tmp_path / "f.onnx", example)


class Attending(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, scale=0.3) + F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("shape", [(4, 5, 8), (4, 2, 3, 5, 8), (4, 2, 3, 2, 5, 8)], ids=["3", "5", "6"])
def test_attention_of_any_rank_is_written(shape: tuple[int, ...], tmp_path: Path) -> None:
    model, example = Attending(), tuple(torch.randn(shape) for _ in range(3))
    path = ck.export_onnx(model, tmp_path / "f.onnx", example)
    assert ck.verify_onnx(path, model, [tuple(torch.randn(7, *shape[1:]) for _ in range(3))]).passed


class AttendingWithMask(nn.Module):
    def forward(self, q: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


@pytest.mark.parametrize("shape", [(4, 5, 8), (4, 2, 3, 5, 8)], ids=["3", "5"])
@pytest.mark.parametrize("of_all", [True, False])
def test_masks_follow_the_attention_to_four_dimensions(shape: tuple[int, ...], of_all: bool, tmp_path: Path) -> None:
    def inputs(rows: int) -> tuple[Tensor, Tensor]:
        return torch.randn(rows, *shape[1:]), torch.randn((rows, *shape[1:-1], 5) if of_all else (5, 5))

    model = AttendingWithMask()
    path = ck.export_onnx(
        model, tmp_path / "f.onnx", inputs(4), dynamic={"q": {0: "batch"}, **({"mask": {0: "batch"}} if of_all else {})}
    )
    assert ck.verify_onnx(path, model, [inputs(7)]).passed


class Uncast(nn.Module):
    """A part that keeps its precision where the caller uses autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            x, y = self.inner(x).relu(), x.float() * 0.5
        return self.last(x + y)


def test_a_block_without_autocast_is_captured_quantized_pruned_and_written(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Uncast().eval(), torch.randn(16, 8)
    module = capture(model, x).module
    assert not any("autocast" in str(node.target) for node in module.graph.nodes)
    torch.testing.assert_close(module(x), model(x))
    quantized = ck.quant.quantize_static(model, [x])
    assert {"linear", "linear_1", "linear_2"} <= set(quantized.placement.integer)
    path = ck.export_onnx(quantized, tmp_path / "f.onnx", x)
    assert ck.verify_onnx(path, quantized, [torch.randn(5, 8)]).passed
    plan = ck.prune.plan_channels(model, x, budget=ck.keep(macs=0.6), round_to=1)
    assert ck.prune.apply_(model, plan).last.in_features < 16


class WithGradients(nn.Module):
    """Blocks that switch gradients on and off, as critics do, one of them within another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(True):
            x = self.first(x)
            with torch.autocast("cpu", enabled=False), torch.enable_grad():
                y = x.relu()
        with torch.no_grad():
            x = x * 0.5
        return self.last(x + y)


def test_blocks_of_gradients_are_captured_quantized_pruned_and_written(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = WithGradients().eval(), torch.randn(16, 8)
    quantized = ck.quant.quantize_static(model, [x])
    assert sum(name.startswith("linear") for name in quantized.placement.integer) == 2
    path = ck.export_onnx(quantized, tmp_path / "f.onnx", x)
    assert ck.verify_onnx(path, quantized, [torch.randn(5, 8)]).passed
    assert ck.verify_onnx(ck.export_onnx(model, tmp_path / "f.onnx", x), model, [torch.randn(5, 8)]).passed
    plan = ck.prune.plan_channels(model, x, budget=ck.keep(macs=0.6), round_to=1)
    assert ck.prune.apply_(model, plan).last.in_features < 16


@pytest.mark.parametrize(
    "pool",
    [
        lambda y: F.adaptive_avg_pool2d(y, (y.shape[2] // 2, y.shape[3] // 3)),
        lambda y: F.interpolate(y, scale_factor=0.5, mode="area"),
        lambda y: F.adaptive_avg_pool2d(y, (y.shape[2], 5)),
    ],
    ids=["sizes", "area", "one of its own size"],
)
def test_pooling_to_sizes_that_are_computed(pool, tmp_path: Path) -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 1)

        def forward(self, x):
            return self.last(pool(self.first(x)))

    torch.manual_seed(0)
    model, x, other = Pooled().eval(), torch.randn(2, 3, 16, 20), torch.randn(1, 3, 19, 26)
    path = ck.export_onnx(model, tmp_path / "f.onnx", (x,), dynamic=(0, 2, 3))
    assert ck.verify_onnx(path, model, [(other,)]).passed
    quantized = ck.quant.quantize_static(model, [(x,)], dynamic=(0, 2, 3))
    torch.testing.assert_close(quantized(other), model(other), rtol=0, atol=0.1)
    path = ck.export_onnx(quantized, tmp_path / "f.onnx", (x,))
    assert ck.verify_onnx(path, quantized, [(other,)]).passed


class Signal(nn.Module):
    """A convolution over a length that varies, with maxima of windows, and sorts that keep the order of equal values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(3, 8, 3, padding=1), nn.Conv1d(8, 4, 3, padding=1)
        self.pools = nn.MaxPool1d(3, 2, 1, ceil_mode=True), nn.MaxPool1d(2)

    def forward(self, x):
        y = self.pools[1](self.last(self.pools[0](self.first(x).relu())))
        return F.max_pool1d(y, kernel_size=[3], stride=[1]), x.round().argsort(dim=1, stable=True, descending=True)


def test_maxima_over_a_length_that_varies_and_stable_sorts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x, other = Signal().eval(), torch.randn(2, 3, 20), torch.randn(1, 3, 27)
    path = ck.export_onnx(model, tmp_path / "f.onnx", (x,), dynamic=(0, 2))
    assert ck.verify_onnx(path, model, [(x,), (other,)]).passed
    pools = [node for node in capture(model, (x,)).module.graph.nodes if str(node.target).startswith("aten.max_pool1d")]
    assert len(pools) == 3  # of a fixed length they stay what they are
    quantized = ck.quant.quantize_static(model, [(x,)], dynamic=(0, 2))
    path = ck.export_onnx(quantized, tmp_path / "f.onnx", (x,))
    assert ck.verify_onnx(path, quantized, [(other,)]).passed


@pytest.mark.parametrize("settings", [{"scale_factor": 0.6}, {"scale_factor": 2.0, "align_corners": True}])
def test_antialiasing_that_onnx_has_not_is_refused(settings, tmp_path: Path) -> None:
    class Resized(nn.Module):
        def forward(self, x):
            return F.interpolate(x, mode="bilinear", antialias=True, **settings)

    x = torch.randn(1, 3, 9, 12)
    with pytest.raises(ModelError, match=r"antialias=True\).*test_exportable.py:\d+: return F.interpolate.*: give size="):
        ck.export_onnx(Resized(), tmp_path / "f.onnx", x)


@pytest.mark.parametrize(
    "settings", [{"size": (4, 7)}, {"scale_factor": 0.5}, {"scale_factor": 0.6, "recompute_scale_factor": True}]
)
def test_antialiasing_by_the_ratio_of_sizes_is_written(settings, tmp_path: Path) -> None:
    class Resized(nn.Module):
        def forward(self, x):
            return F.interpolate(x, mode="bicubic", antialias=True, **settings)

    x = torch.randn(1, 3, 8, 12)
    assert ck.verify_onnx(ck.export_onnx(Resized(), tmp_path / "f.onnx", x), Resized(), [x]).passed


FAR = torch.tensor([0.0, 1.0, -1.0, 30.0, -30.0, 100.0, -200.0, 1e-6, -7.25, 1e4])


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: F.logsigmoid(a) + b,
        torch.logaddexp,
        torch.logaddexp2,
        torch.atan2,
        lambda a, b: torch.hypot(a * 1e30, b * 1e30),
        lambda a, b: torch.hypot(a.masked_fill(a > 90, torch.inf), b.masked_fill(b > 90, torch.inf)),
        lambda a, b: torch.view_as_complex(torch.stack([a, b], -1)).angle(),
        lambda a, b: torch.logaddexp(a.masked_fill(a < 0, -torch.inf), b.masked_fill(b < 0, -torch.inf)),
    ],
    ids=["logsigmoid", "logaddexp", "logaddexp2", "atan2", "hypot", "hypot of infinity", "angle", "logaddexp of infinity"],
)
def test_functions_are_right_at_far_values(function, tmp_path: Path) -> None:
    class Function(nn.Module):
        def forward(self, a, b):
            return function(a, b)

    inputs = FAR[:, None].repeat(1, len(FAR)), FAR.repeat(len(FAR), 1)
    path = ck.export_onnx(Function(), tmp_path / "f.onnx", inputs)
    (got,) = onnxruntime.InferenceSession(path).run(None, dict(zip("ab", (v.numpy() for v in inputs), strict=True)))
    torch.testing.assert_close(torch.from_numpy(got), function(*inputs))


@pytest.mark.parametrize(
    "reduced",
    [
        lambda y: y.amax(),
        lambda y: torch.aminmax(y)[1] - torch.aminmax(y)[0],
        lambda y: y.amin((0, -1)),
        lambda y: y.amax(1, keepdim=True),
        lambda y: (10 * y).int().amin().float() + 0.5,
    ],
    ids=["all", "both", "dimensions", "kept", "integers"],
)
def test_the_largest_of_all_values_or_along_dimensions(reduced, tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def forward(self, x):
            return x - reduced(x)

    inputs = [torch.randn(rows, 4) for rows in (3, 7, 1)]
    path = ck.export_onnx(Scaled(), tmp_path / "f.onnx", inputs[0])
    assert ck.verify_onnx(path, Scaled(), inputs).passed


@pytest.mark.parametrize("equation", ["...ij,...jk->...ik", "...ij,jk->...ik", "a...i,...ij->a...j"])
def test_einsum_of_operands_of_other_ranks(equation, tmp_path: Path) -> None:
    class Product(nn.Module):
        def forward(self, a, b):
            return torch.einsum(equation, a, b)

    shapes = ((2, 3, 5), (3, 5, 6)) if equation[0] == "a" else ((2, 3, 4, 5), (5, 6))
    inputs = tuple(torch.randn(shape) for shape in shapes)
    path = ck.export_onnx(Product(), tmp_path / "f.onnx", inputs, dynamic=())
    assert ck.verify_onnx(path, Product(), [inputs]).passed


def test_differences_from_integers_are_written(tmp_path: Path) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x, mask):
            y = self.layer(x) + (1.0 - mask[:, None]) * -10.0 + torch.rsub(mask[:, None], 2.5, alpha=2)
            return y + (1 - mask[:, None]) + (1.5 - mask[:, None].float()) + torch.rsub(mask[:, None], x[:, :1])

    model, inputs = Masked().eval(), (torch.randn(6, 8), torch.tensor([1, 0, 1, 1, 0, 3]))
    assert ck.verify_onnx(ck.export_onnx(model, tmp_path / "f.onnx", inputs), model, [inputs]).passed
    quantized = ck.quant.quantize_dynamic(model, inputs)
    assert ck.verify_onnx(ck.export_onnx(quantized, tmp_path / "f.onnx", inputs), quantized, [inputs]).passed


@pytest.mark.parametrize(
    ("output", "places"),
    [
        (lambda y: (y, 3, [y.mean(1), True]), "[1] is 3, [2][1] is True"),
        (lambda y: {"y": y, "kind": "a", "width": y.shape[1]}, "['kind'] is 'a', ['width'] is 8"),
        (lambda y: (y, None), ""),
    ],
)
def test_outputs_that_are_no_tensors_are_left_out(output, places, tmp_path, caplog) -> None:
    class Head(nn.Sequential):
        def forward(self, x):
            return output(super().forward(x))

    model, x = Head(nn.Linear(4, 8)).eval(), torch.randn(3, 4)
    for exported in (model, ck.quant.quantize_static(model, [x])):
        caplog.clear()
        path = ck.export_onnx(exported, tmp_path / "m.onnx", x)
        count = sum(isinstance(value, torch.Tensor) for value in pytree.tree_leaves(model(x)))
        assert len(session(path).get_outputs()) == count
        messages = [record.getMessage().partition("left out of the file: ")[2] for record in caplog.records]
        assert [text for text in messages if text] == ([places] if places else [])


@pytest.mark.parametrize(
    "code",
    [
        lambda x, n: x + (torch.arange(n) * (2 / (n - 1)) - 1)[:, None],
        lambda x, n: x + (1 / n + torch.arange(n) - n / 3)[:, None],
        lambda x, n: x + ((torch.arange(n, dtype=torch.int32) + 1) ** (1 / n))[:, None],
        lambda x, n: x.abs() ** (1 / n) + (x > 0) * (1 / n),
        lambda x, n: x.abs().pow_(2 / n),
        lambda x, n: x + ((torch.arange(n) % (n / 3.1)) // (n / 7))[:, None],
        lambda x, n: x % (n / 3.1) + x.exp().remainder_(1 / n),
        lambda x, n: (x.double() * (torch.arange(n) * (1 / n))[:, None]).float(),
    ],
    ids="product sums power floats inplace remainder remainders double".split(),
)
def test_integers_and_powers_by_a_fraction_of_a_size_that_varies(code, tmp_path: Path) -> None:
    class Fractions(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return code(x * 2, x.shape[1])

    model = Fractions().eval()
    run = session(ck.export_onnx(model, tmp_path / "f.onnx", torch.randn(3, 6, 4), dynamic=(0, 1)))
    for rows, length in ((3, 6), (1, 11), (7, 4), (2, 2)):
        x = torch.randn(rows, length, 4)
        torch.testing.assert_close(torch.from_numpy(run.run(None, {"x": x.numpy()})[0]), model(x), rtol=1e-5, atol=1e-5)
