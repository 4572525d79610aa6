"""The profile of a file by layer: it sums to the latency, and names the layers that are no faster and why."""

from __future__ import annotations

import json
from dataclasses import asdict

import networks
import onnx
import pytest
import torch
from networks import build, image
from onnx import TensorProto, helper
from torch import nn

import compresskit as ck
from compresskit.base.errors import ExportError, SettingError
from compresskit.export.check.profile.file_layers import FileLayer, file_layers, match_layers
from compresskit.export.check.profile.kernels import profiler_events
from compresskit.export.check.profile.layers import LayerTime, Profile, ProfiledLayer, profile_layers, slow_cause
from compresskit.export.files import DiskError
from compresskit.quant import quantize_static


class Separable(nn.Module):
    """A depthwise convolution, PReLU for each channel, a transposed convolution and attention over the pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.depthwise = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.slope, self.up = nn.PReLU(16), nn.ConvTranspose2d(16, 8, 2, 2)
        self.mix = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.up(self.slope(self.depthwise(torch.relu(self.first(x)))))
        return self.head(self.mix(x.flatten(2).transpose(1, 2)).mean(1))


def pair(model, x, folder):
    torch.manual_seed(0)
    plain = ck.export_onnx(model, folder / "f.onnx", x)
    return plain, ck.export_onnx(quantize_static(model, [x]), folder / "q.onnx", x)


def test_a_profile_that_a_full_disk_cuts_short_is_named(tmp_path) -> None:
    """ONNX Runtime writes what fits, and says nothing."""

    class CutShort:
        def end_profiling(self) -> str:
            (tmp_path / "profile.json").write_text('[{"cat": "Node", "name": "co')
            return str(tmp_path / "profile.json")

    with pytest.raises(DiskError, match=rf"{tmp_path}: wanted .* got a file that was cut short; free space there"):
        profiler_events(CutShort())


@pytest.mark.parametrize("threads", [1, 2])
def test_layers_and_what_is_outside_of_them_sum_to_the_latency(threads, tmp_path) -> None:
    plain, small = pair(build(networks.Residual), image(2), tmp_path)
    profile = ck.audit(small, profile=True, against=plain, threads=threads, seconds=0.1).profile
    assert sum(layer.this.milliseconds for layer in profile.layers if layer.this) + profile.outside == pytest.approx(
        profile.milliseconds
    )
    both = sum(layer.other.milliseconds for layer in profile.layers if layer.other) + profile.against_outside
    assert both == pytest.approx(profile.against_milliseconds)
    assert profile.outside >= -1e-9
    assert (profile.threads, profile.rows) == (threads, 1)
    weights = {name.rpartition(".")[0] for name, p in build(networks.Residual).named_parameters() if p.ndim > 1}
    assert {layer.name for layer in profile.layers} - {"(inputs)"} == weights
    assert all(layer.this and layer.other for layer in profile.layers if layer.name != "(inputs)")
    assert all(layer.this.in_integers == "yes" for layer in profile.layers if layer.name not in ("(inputs)", "fc", "head"))


def test_layers_keep_their_names_through_every_rewrite(tmp_path) -> None:
    """Transposed convolutions become others, weights are padded or transposed, and equal ones stored once."""
    x = (torch.randn(2, 3, 8, 8),)
    plain, small = pair(Separable().eval(), x, tmp_path)
    profile = profile_layers(small, (x[0][:1],), against=plain, seconds=0.1)
    both = {layer.name: layer for layer in profile.layers if layer.this and layer.other}
    assert {"first", "depthwise", "up", "head"} <= set(both)
    rows = [layer for layer in profile.layers if layer.name != "(inputs)"]
    assert len(rows) == 8
    assert all(layer.this and layer.other for layer in rows)
    assert both["depthwise"].this.floats.keys() <= {"PRelu", "Max", "Mul", "LeakyRelu"}
    assert both["first"].other.in_integers == "no"
    alone = profile_layers(small, (x[0][:1],), seconds=0.1)
    assert alone.against == ""
    assert all(layer.other is None and not layer.cause for layer in alone.layers)
    assert "in float" in str(alone)


class _Data:
    def __init__(self, values):
        self.batches = iter([{"input": values}])

    def get_next(self):
        return next(self.batches, None)


@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
def test_files_of_another_tool(form, tmp_path) -> None:
    from onnxruntime.quantization import QuantFormat, quantize_static

    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(512, 10)).eval()
    x = torch.randn(4, 3, 12, 12)
    source, path = ck.export_onnx(model, tmp_path / "f.onnx", (x,)), tmp_path / "q.onnx"
    quantize_static(str(source), str(path), _Data(x.numpy()), quant_format=QuantFormat[form])
    profile = ck.audit(path, profile=True, against=source, seconds=0.1).profile
    assert [layer.name for layer in profile.layers if layer.this and layer.other and layer.name != "(inputs)"] == ["0", "2", "4"]
    assert json.loads(json.dumps(asdict(profile)))["layers"][-1]["name"] == "4"


def test_nodes_without_names_and_inner_graphs(tmp_path) -> None:
    """A file of any tool: no node has a name, and an If has operators of its own, whose time is that of the If."""
    value = helper.make_tensor_value_info
    branches = [
        helper.make_graph(
            [helper.make_node(kind, ["y"], [f"{kind}_out"])], kind, [], [value(f"{kind}_out", TensorProto.FLOAT, None)]
        )
        for kind in ("Exp", "Neg")
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "w"], ["y"]),
        helper.make_node("If", ["flag"], ["z"], then_branch=branches[0], else_branch=branches[1]),
    ]
    weight = helper.make_tensor("w", TensorProto.FLOAT, [8, 8], [0.1] * 64)
    inputs = [value("x", TensorProto.FLOAT, [1, 8]), value("flag", TensorProto.BOOL, [1])]
    graph = helper.make_graph(nodes, "g", inputs, [value("z", TensorProto.FLOAT, None)], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    profile = profile_layers(tmp_path / "m.onnx", (torch.randn(1, 8), torch.tensor([True])), seconds=0.05)
    assert [layer.name for layer in profile.layers] == ["MatMul_h", "MatMul_y"]
    assert profile.layers[1].this.operators == ("MatMul", "If")
    assert sum(layer.this.milliseconds for layer in profile.layers) + profile.outside == pytest.approx(profile.milliseconds)


def layer(name: str, *shape: int, kind: str = "Conv", groups: int = 1) -> FileLayer:
    return FileLayer(name=name, node=f"node_{name}", kind=kind, shape=shape, groups=groups)


def test_layers_match_by_name_then_by_size_then_by_place() -> None:
    first = [layer("a", 8, 3, 3, 3), layer("b", 8, 8, 1, 1), layer("n1", 16, 8, kind="MatMul"), layer("c", 4, 8, 3, 3)]
    second = [layer("x", 8, 4, 3, 3), layer("b", 8, 8, 1, 1), layer("n7", 8, 16, kind="Gemm"), layer("c", 12, 8, 2, 2)]
    assert match_layers(first, second) == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert match_layers(first[:2], [layer("a", 8, 3, 3, 3), layer("z", 9, 9, kind="Gemm")]) == [(0, 0), (1, None), (None, 1)]


def test_a_slow_layer_is_told_with_its_cause() -> None:

    plain = LayerTime(milliseconds=1.0, head=1.0, floats={"Conv": 1.0}, operators=("Conv",))
    slow = LayerTime(milliseconds=2.0, head=2.0, integer=True, operators=("Conv",))
    assert slow_cause(layer("d", 32, 1, 3, 3, groups=32), slow, plain) == "depthwise kernel"
    assert slow_cause(layer("d", 32, 3, 3, 3), slow, plain) == "few channels: 3"
    assert slow_cause(layer("d", 32, 32, 3, 3), slow, plain) == "integer kernel"
    assert slow_cause(layer("d", 32, 4, kind="Gemm"), slow, plain) == "few features: 4"
    assert slow_cause(layer("d", 32, 32, 3, 3), plain, slow) == ""
    in_float = LayerTime(milliseconds=2.0, head=2.0, floats={"Conv": 2.0}, operators=("Conv",))
    assert slow_cause(layer("d", 32, 32, 3, 3), in_float, plain) == "in float: Conv"
    converting = LayerTime(milliseconds=2.0, head=0.5, conversions=1.5, integer=True, operators=("Conv", "QuantizeLinear"))
    assert slow_cause(layer("d", 32, 32, 3, 3), converting, plain) == "conversions: QuantizeLinear"
    without = LayerTime(
        milliseconds=2.0, head=0.5, floats={"Exp": 0.2, "PRelu": 1.3}, integer=True, operators=("Conv", "PRelu", "Exp")
    )
    assert slow_cause(layer("d", 32, 32, 3, 3), without, plain) == "no integer kernel: PRelu, Exp"
    more = LayerTime(milliseconds=2.0, head=0.5, integer=True, operators=("Conv", "Clip"))
    assert slow_cause(layer("d", 32, 32, 3, 3), more, plain) == "operators of their own: Clip"


def test_the_table_names_the_worst_layers_first() -> None:
    slow = [
        ProfiledLayer(
            name=name, this=LayerTime(milliseconds=ms, integer=True), other=LayerTime(milliseconds=1.0), cause="few channels: 3"
        )
        for name, ms in (("a", 1.5), ("b", 3.0))
    ]
    fast = ProfiledLayer(name="c", this=LayerTime(milliseconds=0.5, integer=True), other=LayerTime(milliseconds=1.0))
    profile = Profile(
        path="q", against="f", threads=1, rows=1, milliseconds=5.5, outside=0.5, scale=1.5,
        against_milliseconds=3.2, against_outside=0.2, layers=(*slow, fast),
    )  # fmt: skip
    text = str(profile)
    assert "eat the gain: b +2.000 ms (few channels: 3); a +0.500 ms (few channels: 3)" in text
    assert "latency 5.500 ms with 1 thread, 1 at a time; f 3.200 ms (1.72x)" in text
    assert "multiplied by 1.50 to sum to the latency" in text
    assert text.splitlines()[-3].split() == ["sum", "3.200", "5.500"]


def test_what_cannot_be_profiled_is_one_error(tmp_path) -> None:
    plain, _ = pair(build(networks.Residual), image(2), tmp_path)
    other = ck.export_onnx(
        nn.Sequential(nn.Flatten(), nn.Linear(image(1)[0][0].numel(), 3)).eval(), tmp_path / "o.onnx", image(2)
    )
    with pytest.raises(SettingError, match=r"have no layer in common: wanted two files of one network"):
        ck.audit(plain, profile=True, against=other, seconds=0.05)
    with pytest.raises(SettingError, match=r"wanted threads >= 1 and seconds > 0, got 0 and 1.0"):
        ck.audit(plain, profile=True, threads=0)
    with pytest.raises(SettingError, match=r"audit\(against=...\): a second file is .*; write profile=True, too"):
        ck.audit(plain, against=plain)
    with pytest.raises(ExportError, match=r"f\.onnx: ONNX Runtime cannot run it: .*dimensions"):
        ck.audit(plain, profile=True, inputs=torch.randn(1, 3, 5, 5))
    (tmp_path / "bad.onnx").write_bytes(b"no")
    with pytest.raises(ExportError, match="cannot load it"):
        ck.audit(tmp_path / "bad.onnx", profile=True)
    free = ck.export_onnx(nn.Conv2d(3, 4, 3).eval(), tmp_path / "free.onnx", (torch.randn(2, 3, 8, 8),), dynamic=(0, 2, 3))
    with pytest.raises(
        SettingError, match=r"audit\(profile=True\): .*free.onnx takes any size of input .*; give inputs=, or size="
    ):
        ck.audit(free, profile=True)
    assert ck.audit(free, profile=True, size=8, seconds=0.05).profile.milliseconds > 0


def test_a_layer_is_named_for_its_weight_or_its_node(tmp_path) -> None:
    plain, small = pair(build(networks.Residual), image(2), tmp_path)
    named = [{entry.key: entry.name for entry in file_layers(onnx.load(path).graph)} for path in (plain, small)]
    assert set(named[0]) & set(named[1])
    assert all("." not in name or name.rpartition(".")[2] != "weight" for name in named[0].values())


def test_what_only_this_file_has_eats_the_gain_too(tmp_path) -> None:
    """Large pictures and little to compute: rounding the inputs takes longer than all layers in integers."""
    model = nn.Sequential(nn.Conv2d(3, 16, 8, 8), nn.ReLU(), nn.Conv2d(16, 16, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)).eval()
    x = torch.randn(4, 3, 256, 256)
    plain, small = pair(model, (x,), tmp_path)
    profile = ck.audit(small, profile=True, against=plain, inputs=(x[:1],), seconds=0.1).profile
    assert profile.eating[0].name == "(inputs)"
    assert profile.eating[0].cause.startswith("conversions of the inputs: QuantizeLinear")


def test_a_layer_that_the_other_file_has_not_is_compared_with_no_time() -> None:
    head = LayerTime(milliseconds=2.0, head=1.5, conversions=0.5, integer=True, operators=("Conv", "QuantizeLinear"))
    assert slow_cause(layer("d", 8, 1, 1, 1, groups=8), head, None) == "a layer that the other file does not have"
    converting = LayerTime(milliseconds=2.0, head=0.5, conversions=1.5, integer=True, operators=("Conv", "QuantizeLinear"))
    assert slow_cause(layer("d", 8, 8, 1, 1), converting, None) == "conversions: QuantizeLinear"
    assert slow_cause(layer("d", 8, 8, 1, 1), LayerTime(operators=("Conv",)), None) == ""
    assert slow_cause(layer("d", 8, 8, 1, 1), None, head) == ""
    inputs = LayerTime(milliseconds=1.0, conversions=1.0, operators=("QuantizeLinear", "Transpose"))
    assert slow_cause(None, inputs, None) == "conversions of the inputs: QuantizeLinear, Transpose"
    computing = LayerTime(milliseconds=1.0, floats={"Mul": 1.0}, operators=("Mul",))
    assert slow_cause(None, computing, None) == "no integer kernel: Mul"
    assert slow_cause(None, None, inputs) == ""


def test_a_slower_file_whose_layers_are_all_faster_is_slow_outside_of_them() -> None:
    fast = ProfiledLayer(name="c", this=LayerTime(milliseconds=0.5), other=LayerTime(milliseconds=1.0))
    both = {"path": "q", "against": "f", "threads": 1, "rows": 1, "scale": 1.0, "layers": (fast,)}
    slower = Profile(milliseconds=2.5, outside=2.0, against_milliseconds=1.2, against_outside=0.2, **both)
    assert str(slower).endswith("every layer is faster than in the other file, what is outside of kernels is not")
    faster = Profile(milliseconds=0.7, outside=0.2, against_milliseconds=1.2, against_outside=0.2, **both)
    assert str(faster).endswith("every layer is faster than in the other file")


def test_layers_of_a_half_precision_file_are_told_apart(tmp_path) -> None:
    """ONNX Runtime computes them in fp32 here, and renames what it converts."""
    model, x = Separable().half().eval(), torch.randn(2, 3, 8, 8).half()
    profile = profile_layers(ck.export_onnx(model, tmp_path / "h.onnx", (x,)), (x,), seconds=0.05)
    by_name = {row.name: row.this for row in profile.layers}
    assert {"first", "depthwise", "up", "head"} <= set(by_name)
    assert all("Conv" in by_name[name].floats for name in ("first", "depthwise"))
    assert "Conv" not in by_name["(inputs)"].floats
