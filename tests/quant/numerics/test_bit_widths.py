"""How many bits each layer takes: by name, in the file, and what cannot be expressed."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.base.errors import SettingError
from compresskit.quant import X86, quantize_static
from compresskit.quant.calibration.layer_outputs import integer_layers
from compresskit.quant.numerics.bit_widths import Bits, bits_of_layer
from compresskit.quant.numerics.block_grid import BlockScheme
from compresskit.quant.numerics.palette import Palette
from compresskit.quant.numerics.quantizers import ActivationQuantizer, WeightQuantizer
from compresskit.quant.numerics.scheme import Scheme, fake_quantize, to_integers
from compresskit.quant.numerics.targets import TENSORRT
from compresskit.quant.qat.qat import prepare_qat


def net() -> nn.Module:
    torch.manual_seed(0)
    convs = nn.Conv2d(4, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.Hardswish()
    return nn.Sequential(nn.Sequential(*convs), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)).eval()


X = torch.randn(16, 4, 12, 12, generator=torch.Generator().manual_seed(1))


def test_the_longest_name_that_a_layer_lies_in_counts() -> None:
    bits = {"": Bits(weights=4, activations=8), "a": Bits(weights=3), "a.b": Bits(activations=6)}
    assert bits_of_layer(bits, "a.b.conv") == Bits(weights=3, activations=6)
    assert bits_of_layer(bits, "a.c") == Bits(weights=3, activations=8)
    assert bits_of_layer(bits, "ab") == Bits(weights=4, activations=8)


@pytest.mark.parametrize(
    ("bits", "weights", "opset"),
    [
        (Bits(), {onnx.TensorProto.INT8: 3}, 20),
        (Bits(weights=3), {onnx.TensorProto.INT4: 3}, 21),
        (Bits(weights=2, activations=5), {onnx.TensorProto.INT2: 3}, 25),
        ({"": Bits(weights=4), "0.2": Bits(weights=2), "3": Bits(weights=8)},
         {onnx.TensorProto.INT4: 1, onnx.TensorProto.INT2: 1, onnx.TensorProto.INT8: 1}, 25),
    ],
)  # fmt: skip
def test_files_store_few_bits_packed_and_run_in_integers(bits, weights, opset, tmp_path) -> None:
    quantized = quantize_static(net(), [X], bits=bits)
    path = ck.export_onnx(quantized, tmp_path / "m.onnx", (X,))
    file = onnx.load(path)
    stored = [t.data_type for t in file.graph.initializer if len(t.dims) > 1]
    assert {kind: stored.count(kind) for kind in stored} == weights
    assert file.opset_import[0].version == opset
    ck.verify_onnx(path, quantized, [(X,), (X[:7],)])
    audit = ck.audit(path)
    assert audit.integer_fraction == 1.0
    narrow = [t for t in file.graph.initializer if t.data_type in (onnx.TensorProto.INT4, onnx.TensorProto.INT2)]
    for tensor in narrow:
        size = 2 if tensor.data_type == onnx.TensorProto.INT4 else 4
        values = torch.Size(tensor.dims).numel()
        assert len(tensor.raw_data) == -(-values // size)


@pytest.mark.parametrize("width", [2, 5, 8, 11, 16])
def test_activations_take_no_more_values_than_their_bits_allow_in_the_file_too(width, tmp_path) -> None:
    x = 8 * X  # a hard-swish of small values is float
    quantized = quantize_static(net(), [x], bits=Bits(activations=width))
    assert {q.scheme.bits for q in quantized.activation_quantizers() if q.anchor is None} == {width}
    assert {q.scheme.bits for q in quantized.activation_quantizers() if q.anchor is not None} == {min(width, 8)}
    path = ck.export_onnx(quantized, tmp_path / "m.onnx", (x,))
    far = 20 * x  # saturates: the ends of the narrow format, not those of 8 bits
    ck.verify_onnx(path, quantized, [(x,), (far,)])
    first = quantized.activation_quantizers()[0]
    assert len(first(far).unique()) <= 2**width


def test_activation_bits_are_those_of_the_value_that_a_layer_reads() -> None:
    quantized = quantize_static(net(), [X], bits={"0.2": Bits(activations=4)})
    by_label = {q.label: q.scheme.bits for q in quantized.activation_quantizers()}
    assert [bits for bits in by_label.values() if bits != 8] == [4]
    assert by_label["0.1"] == 4, "the ReLU that the second convolution reads"


class Fork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x):
        x = self.a(x).relu()
        return self.b(x).relu() + self.c(x)  # a plain sum of layers of one value would be one layer


def test_a_value_that_two_layers_read_takes_the_wider_format() -> None:
    quantized = quantize_static(Fork().eval(), [X], bits={"": Bits(activations=4), "c": Bits(activations=6)})
    widths = {q.label: q.scheme.bits for q in quantized.activation_quantizers()}
    assert widths.pop("x") == 4
    assert sum(bits == 6 for bits in widths.values()) == 1


def test_weights_that_really_read_8_bits_cannot_overflow_whatever_their_layer_asked_for() -> None:
    """`b` asks for 6 bits, with which no pair of products overflows, but its input has 8, which `c` reads, too."""
    quantized = quantize_static(Fork().eval(), [X], bits={"b": Bits(activations=6)})
    packed = {layer.weight: layer.quantizer.packing is not None for layer in integer_layers(quantized)}
    assert packed == {"a.weight": True, "b.weight": True, "c.weight": True}
    narrow = quantize_static(Fork().eval(), [X], bits={"b": Bits(activations=6), "c": Bits(activations=6)})
    assert not any(layer.quantizer.packing for layer in integer_layers(narrow) if layer.weight != "a.weight")


def test_quantization_aware_training_takes_bits_and_stores_them(tmp_path) -> None:
    quantized = prepare_qat(net(), [X], bits=Bits(weights=2, activations=4), learned=True)
    optimizer = torch.optim.SGD(quantized.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        quantized(X).square().mean().backward()
        optimizer.step()
    quantized.convert_()
    quantized.eval()
    path = ck.export_onnx(quantized, tmp_path / "m.onnx", (X,))
    ck.verify_onnx(path, quantized, [(X,)])
    assert onnx.TensorProto.INT2 in {t.data_type for t in onnx.load(path).graph.initializer}


def test_a_saved_model_keeps_its_bits(tmp_path) -> None:
    quantized = quantize_static(net(), [X], bits={"": Bits(weights=4), "0.2": Bits(weights=2, activations=5)})
    ck.save(quantized, tmp_path / "m")
    loaded = ck.load(net(), tmp_path / "m")
    assert torch.equal(loaded(X), quantized(X))
    widths = [q.scheme.bits for q in loaded.quantizers() if isinstance(q, ActivationQuantizer | WeightQuantizer)]
    assert widths == [q.scheme.bits for q in quantized.quantizers() if isinstance(q, ActivationQuantizer | WeightQuantizer)]
    assert sorted(set(widths)) == [2, 4, 5, 8]


def test_an_older_opset_stores_the_same_integers_in_the_types_that_it_has(tmp_path) -> None:
    quantized = quantize_static(net(), [X], bits=Bits(weights=2))
    for opset, kind in ((21, onnx.TensorProto.UINT8), (17, onnx.TensorProto.INT8), ("lowest", onnx.TensorProto.INT8)):
        path = ck.export_onnx(quantized, tmp_path / "m.onnx", (X,), opset=opset)
        assert kind in {t.data_type for t in onnx.load(path).graph.initializer if len(t.dims) > 1}
        ck.verify_onnx(path, quantized, [(X,)])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 4}, r"quantize_static\(bits=\.\.\.\): wanted Bits\(\.\.\.\) or .*, got 4"),
        (
            {"bits": {"nowhere": Bits(weights=4)}},
            r"no layer with weights stands in a module of that name; the layers are \['0.0'",
        ),
        ({"bits": Bits(activations=4), "target": TENSORRT}, r"Target TENSORRT: activations.bits must be 8, got 4"),
        ({"bits": {"0.2": Bits(activations=4)}, "target": TENSORRT}, r"Target TENSORRT, 0.2: activations.bits must be 8, got 4"),
        ({"bits": Bits(shortcuts=16), "target": TENSORRT}, r"Target TENSORRT: activations.bits must be 8, got 16"),
        (
            {"bits": {"0.2": Bits(weights=1)}},
            r"quantize_static\(bits=\.\.\.\): '0.2': one bit needs training with learned scales; write QAT\(bits=",
        ),
    ],
)
def test_what_cannot_be_expressed_is_refused(settings, message) -> None:
    with pytest.raises(SettingError, match=message):
        quantize_static(net(), [X], **settings)


@pytest.mark.parametrize(
    ("name", "value"), [("weights", 0), ("weights", 9), ("activations", 0), ("activations", 17), ("shortcuts", 1)]
)
def test_widths_out_of_range_are_refused(name, value) -> None:
    with pytest.raises(SettingError, match=rf"Bits\({name}=\.\.\.\): wanted [12]\.\.(8|16), got {value}"):
        Bits(**{name: value})


@pytest.mark.parametrize("kind", [BlockScheme, Palette, Bits])
def test_bits_may_be_a_number_of_numpy_but_no_text(kind) -> None:
    """The message showed no quotes: "wanted 2..8, got 4"."""
    name = "weights" if kind is Bits else "bits"
    made = kind(**{name: np.int64(4)})
    assert made == kind(**{name: 4})
    assert type(vars(made)[name]) is int  # a record has no others
    with pytest.raises(SettingError, match=rf"{kind.__name__}\({name}=\.\.\.\): wanted a whole number.* got '4'"):
        kind(**{name: "4"})


def test_other_settings_of_blocks_are_checked() -> None:
    with pytest.raises(SettingError, match=r"BlockScheme\(block_size=\.\.\.\): wanted 16, 32, 64, .* got '32'"):
        BlockScheme(block_size="32")
    with pytest.raises(SettingError, match=r"BlockScheme\(symmetric=\.\.\.\): wanted True or False, got 'no'"):
        BlockScheme(symmetric="no")


def test_four_bits_need_no_room_against_overflow() -> None:
    weights = [
        q for q in quantize_static(net(), [X], target=X86, bits=Bits(weights=4)).quantizers() if isinstance(q, WeightQuantizer)
    ]
    assert all(q.packing is None for q in weights)


class Block(nn.Module):
    """Two residual blocks: the sum of the first is read by a convolution and by the next addition."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(4, 8, 3, padding=1), nn.Linear(8, 10)
        self.a, self.b, self.c, self.d = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))

    def forward(self, x):
        x = self.stem(x).relu()
        x = (self.b(self.a(x).relu()) + x).relu()
        x = (self.d(self.c(x).relu()) + x).relu()
        return self.head(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))


ENDS = {"stem": Bits(weights=8, activations=8), "head": Bits(weights=8, activations=8)}


def test_sums_keep_more_bits_than_the_layers_that_read_them(tmp_path) -> None:
    torch.manual_seed(0)
    model = Block().eval()
    narrow = quantize_static(model, [X], bits={"": Bits(weights=4, activations=3), **ENDS})
    wide = quantize_static(model, [X], bits={"": Bits(weights=4, activations=3, shortcuts=8), **ENDS})
    widths = {q.label: q.scheme.bits for q in wide.activation_quantizers()}
    again = {label for label in widths if label.startswith("input of ")}
    assert again == {"input of a", "input of c"}  # of two values that an addition and a convolution read
    assert {widths[label] for label in again} == {3}
    assert sorted(widths[label] for label in widths if label not in again) == [3, 3, 8, 8, 8, 8, 8, 8, 8]
    wanted = model(X)
    assert (wide(X) - wanted).square().mean() < 0.5 * (narrow(X) - wanted).square().mean()
    path = ck.export_onnx(wide, tmp_path / "m.onnx", (X,))
    ck.verify_onnx(path, wide, [(X,), (X[:7],), (20 * X,)])
    assert ck.audit(path).integer_fraction == 1.0
    ck.save(wide, tmp_path / "saved")
    assert torch.equal(ck.load(Block(), tmp_path / "saved").eval()(X), wide(X))


def test_one_bit_is_the_sign_times_a_scale() -> None:
    scheme = Scheme(bits=1, signed=True, symmetric=True, per_channel=True)
    weight = torch.tensor([[-2.0, -0.1, 0.0, 0.4], [3.0, -0.2, 0.1, -9.0]], requires_grad=True)
    scale = torch.tensor([0.5, 2.0], requires_grad=True)
    y = fake_quantize(weight, scale, torch.zeros(2), scheme, gradient_scale=0.25)
    assert y.tolist() == [[-0.5, -0.5, 0.5, 0.5], [2.0, -2.0, 2.0, -2.0]]
    assert to_integers(weight, scale, torch.zeros(2), scheme).tolist() == [[-1, -1, 1, 1], [1, -1, 1, -1]]
    y.backward(torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]))
    assert scale.grad.tolist() == [0.25 * (-1 - 2 + 3 + 4), 0.25 * (5 - 6 + 7 - 8)]
    assert weight.grad.tolist() == [[0.0, 2.0, 3.0, 4.0], [0.0, 6.0, 7.0, 0.0]]  # where |w| < 1.5 scale: 0.75 and 3
    with pytest.raises(SettingError, match=r"Scheme\(bits=1, signed=True\): the two integers are -1 and 1"):
        Scheme(bits=1, signed=True)


def test_a_binary_network_is_trained_and_runs_in_integers(tmp_path) -> None:
    torch.manual_seed(0)
    bits = {"": Bits(weights=1, activations=1, shortcuts=8), **ENDS}
    quantized = prepare_qat(Block().eval(), [X], bits=bits, learned=True)
    first, weight = next((q, w) for q, w in quantized.rounded_weights() if q.scheme.bits == 1)
    torch.testing.assert_close(first.scale.detach(), weight.abs().mean((1, 2, 3)))  # 1603.05279, equation 6
    optimizer = torch.optim.Adam(quantized.parameters(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        quantized(X).square().mean().backward()
        optimizer.step()
    quantized.convert_()
    quantized.eval()
    for rounding, weight in quantized.rounded_weights():
        if rounding.scheme.bits == 1:
            assert (rounding(weight).abs() == rounding.qparams(weight)[0].view(-1, 1, 1, 1)).all()
    path = ck.export_onnx(quantized, tmp_path / "m.onnx", (X,))
    ck.verify_onnx(path, quantized, [(X,), (X[:1],), (X[:7],)])
    assert ck.audit(path).integer_fraction == 1.0
    ck.save(quantized, tmp_path / "saved")
    assert torch.equal(ck.load(Block(), tmp_path / "saved").eval()(X), quantized(X))


def test_one_bit_where_it_cannot_be_is_refused() -> None:
    with pytest.raises(SettingError, match=r"prepare_qat\(bits=\.\.\.\): one bit needs training with learned scales"):
        prepare_qat(Block(), [X], bits=Bits(weights=1))
    with pytest.raises(SettingError, match=r"x: Bits\(activations=1\) wanted for a value that no ReLU has made"):
        prepare_qat(Block(), [X], bits=Bits(weights=1, activations=1), learned=True)
