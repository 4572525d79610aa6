"""Rewrites for ONNX Runtime: other operators in the file, the same outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.measure import numpy_inputs, session


def files(layers: nn.Module, x: torch.Tensor, folder: Path) -> list[Path]:
    """The quantized file without and with the rewrites."""
    paths = []
    for tuned in (False, True):
        quantized = ck.quant.quantize_static(layers.eval(), [(x,)], target=replace(ck.quant.X86, tuned=tuned))
        paths.append(ck.export_onnx(quantized, folder / f"{tuned}.onnx", (x,)))
    return paths


def operators(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path).graph.node)


def outputs(path: Path, x: torch.Tensor) -> np.ndarray:
    runtime = session(path)
    return np.asarray(runtime.run(None, numpy_inputs(runtime, (x,)))[0])


@pytest.mark.matrix
@pytest.mark.parametrize("channels", [1, 2, 3, 6])
@pytest.mark.parametrize("conv", [{"kernel_size": 3, "stride": 2, "padding": 1}, {"kernel_size": 5, "padding": (2, 0)}])
def test_input_channels_are_padded_to_fours(channels: int, conv: dict, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, channels, 32, 28)
    plain, tuned = files(nn.Sequential(nn.Conv2d(channels, 8, **conv), nn.ReLU()), x, tmp_path)
    assert operators(plain)["Pad"] == 0
    assert operators(tuned)["Pad"] == 1
    shapes = {tuple(i.dims) for i in onnx.load(tuned).graph.initializer if len(i.dims) == 4}
    assert {shape[1] % 4 for shape in shapes} == {0}
    np.testing.assert_array_equal(outputs(plain, x), outputs(tuned, x))


@pytest.mark.parametrize(("size", "padding"), [(5, 0), (5, 1), (5, 2), (6, 2), (7, 3), (7, 0)])
def test_large_strided_kernels_read_images_folded_2x2(size: int, padding: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 32, 26)
    plain, tuned = files(nn.Sequential(nn.Conv2d(3, 8, size, stride=2, padding=padding), nn.ReLU()), x, tmp_path)
    assert operators(tuned)["SpaceToDepth"] == 1
    np.testing.assert_array_equal(outputs(plain, x), outputs(tuned, x))


@pytest.mark.parametrize("shape", [(4, 32, 32), (3, 8, 8)], ids=["channels in fours already", "small image"])
def test_convolutions_that_padding_would_slow_are_kept(shape: tuple[int, ...], tmp_path: Path) -> None:
    x = torch.randn(2, *shape)
    _, tuned = files(nn.Sequential(nn.Conv2d(shape[0], 8, 3), nn.ReLU()), x, tmp_path)
    assert not operators(tuned).keys() & {"Pad", "SpaceToDepth"}


def pooled(pool: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), pool, nn.Conv2d(8, 8, 1))


@pytest.mark.parametrize(
    "pool", [nn.AvgPool2d(2), nn.AvgPool2d(3, stride=1, padding=1), nn.AvgPool2d((3, 2), stride=(2, 1))], ids=["2", "3p1", "3x2"]
)
def test_average_pooling_is_a_depthwise_convolution(pool: nn.Module, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 25, 25)
    plain, tuned = files(pooled(pool), x, tmp_path)
    assert operators(plain)["AveragePool"] == 1
    assert operators(tuned)["AveragePool"] == 0
    assert operators(tuned)["Conv"] == 3
    span = np.ptp(outputs(plain, x))  # its own kernel sums in float: a tie may round the other way
    assert np.abs(outputs(plain, x) - outputs(tuned, x)).max() <= 0.02 * span


@pytest.mark.parametrize(
    "pool",
    [nn.AvgPool2d(3, padding=1, count_include_pad=False), nn.AvgPool2d(3, stride=2, ceil_mode=True)],
    ids=["edges", "ceil"],
)
def test_pools_whose_windows_differ_in_size_are_kept(pool: nn.Module, tmp_path: Path) -> None:
    _, tuned = files(pooled(pool), torch.randn(2, 4, 26, 26), tmp_path)
    assert operators(tuned)["AveragePool"] == 1


class Read(nn.Module):
    """A linear layer, an activation, and readers in float, in integers, by another layer, or the caller."""

    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor], readers: str, bias: bool) -> None:
        super().__init__()
        self.activation, self.readers = activation, readers.split()
        self.first, self.last, self.norm = nn.Linear(8, 8, bias=bias), nn.Linear(8, 8, bias=bias), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        h = self.activation(self.first(x))
        readers = {"norm": self.norm, "layer": self.last, "caller": lambda v: v, "both": lambda v: self.last(self.norm(v))}
        return [readers[name](h) for name in self.readers]


class Branches(nn.Module):
    """Every kind of reader beside each other, so that one file answers for all."""

    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor], bias: bool) -> None:
        super().__init__()
        readers = ("norm", "layer", "caller", "both", "layer norm", "layer caller", "norm caller")
        self.parts = nn.ModuleList(Read(activation, names, bias) for names in readers)

    def forward(self, x: torch.Tensor) -> list[list[torch.Tensor]]:
        return [part(x) for part in self.parts]


#: Weights whose products saturate on no machine that runs the test.
SMALL_WEIGHTS = ck.quant.targets.X86_NO_VNNI.weights


@pytest.mark.matrix
@pytest.mark.parametrize(
    "target", [ck.quant.targets.X86_NO_VNNI, replace(ck.quant.ARM, weights=SMALL_WEIGHTS)], ids=lambda t: t.name
)
@pytest.mark.parametrize(
    ("activation", "bias", "layers"),  # two linear layers with nothing between them become one
    [(torch.nn.functional.relu, True, 11), (lambda h: h, False, 10), (lambda h: h.clamp(-0.5, 0.5), True, 11)],
    ids=["relu", "none", "clamp"],
)
def test_linear_layers_run_in_integers_whatever_reads_them(activation, bias, layers, target, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 8)
    quantized = ck.quant.quantize_static(Branches(activation, bias).eval(), [(x,)], target=target, smooth=False)
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", (x,))
    found, planned = ck.audit(path), quantized.placement.coverage
    assert planned.macs == (64 * layers, 64 * layers)  # layers of 8 x 8
    assert (found.macs_integer, found.macs) == planned.macs, found.floating
    assert ck.verify_onnx(path, quantized, [(x,)]).passed


@pytest.mark.parametrize("between", [nn.Identity(), nn.PReLU(8), nn.Hardswish()], ids=["nothing", "prelu", "hardswish"])
def test_a_pool_behind_a_float_convolution_runs_in_float(between: nn.Module, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), between, nn.MaxPool2d(2), nn.Conv2d(8, 8, 3)).eval()
    x = torch.randn(4, 3, 20, 20)
    quantized = ck.quant.quantize_static(model, [x], skip=("0",))
    path = ck.export_onnx(quantized, tmp_path / "m.onnx", x)
    assert ck.verify_onnx(path, quantized, [x]).passed
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    nodes = onnx.load(tmp_path / "optimized.onnx").graph.node
    makers = {name: node.op_type for node in nodes for name in node.output}
    (pool,) = [node for node in nodes if "MaxPool" in node.op_type]
    assert makers[pool.input[0]] != "QuantizeLinear"
    assert not any(node.op_type == "Clip" for node in nodes), "what keeps the rounding behind it costs nothing"


def test_a_pool_behind_an_integer_convolution_stays_in_integers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3)).eval()
    x = torch.randn(4, 3, 20, 20)
    path = ck.export_onnx(ck.quant.quantize_static(model, [x]), tmp_path / "m.onnx", x)
    nodes = onnx.load(path).graph.node
    (pool,) = [node for node in nodes if node.op_type == "MaxPool"]
    makers = {name: node.op_type for node in nodes for name in node.output}
    assert makers[pool.input[0]] == "QuantizeLinear"


def test_a_float_pool_whose_value_is_read_rounded_elsewhere_stays(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3, stride=2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x).relu()
            return self.second(nn.functional.max_pool2d(x, 2)).mean((2, 3)) + self.third(x).mean((2, 3))

    torch.manual_seed(0)
    model, x = Twice().eval(), torch.randn(4, 3, 20, 20)
    quantized = ck.quant.quantize_static(model, [x], skip=("first",))
    path = ck.export_onnx(quantized, tmp_path / "m.onnx", x)
    assert ck.verify_onnx(path, quantized, [x]).passed
