"""Inputs of a model in the forms that callers use."""

from __future__ import annotations

import networks
import pytest
import torch
from networks import build
from torch import nn

import compresskit as ck
from compresskit.base.errors import DataError, ModelError
from compresskit.base.inputs import call_checked, call_inputs, not_finite
from compresskit.graph.capture import capture
from compresskit.measure import latency


def test_one_tensor_stands_for_the_inputs(tmp_path) -> None:
    model, x = build(networks.Chain).eval(), torch.randn(8, 3, 16, 16)
    assert ck.count_macs(model, x) == ck.count_macs(model, (x,))
    plan = ck.prune.plan_channels(model, x, budget=ck.keep(macs=0.5), round_to=4)
    assert ck.prune.prove(model, plan, x) is None
    quantized = ck.quant.quantize_static(model, [x, [x]])
    assert ck.quant.equalize_(model, x) >= 0
    assert ck.quant.quantize_dynamic(model, x)(x).shape == (8, 10)
    assert ck.quant.quantize_weights(model, [x], rounding=ck.quant.weight_only.gptq)(x).shape == (8, 10)
    path = ck.export_onnx(quantized, tmp_path / "m.onnx", x)
    assert ck.verify_onnx(path, quantized, [x]).passed
    assert len(latency([path], x, seconds=0.01)) == 1
    torch.testing.assert_close(capture(model, x).module(x), model(x))
    ck.quant.correct_bias_(quantized, [x])
    ck.quant.diagnose(quantized, [x])
    ck.quant.prepare_qat(model, [x])
    ck.prune.reestimate_batchnorm_(model, [x])
    with pytest.raises(DataError, match="quantize_static: wanted batches of inputs, such as .*, or one batch, got int"):
        ck.quant.quantize_static(model, 3)
    with pytest.raises(DataError, match=r"the example: wanted inputs as a tensor, a tuple or a dict of them, got int"):
        capture(model, 3)


def test_labels_among_the_inputs_are_named() -> None:
    model, x, labels = build(networks.Chain).eval(), torch.randn(8, 3, 16, 16), torch.arange(8)
    message = r"wanted 1 input \(x\), got 2; batches must be inputs alone, without labels, such as \[\(x,\) for x, y in loader\]"
    with pytest.raises(ModelError, match=rf"\[\(8, 3, 16, 16\), \(8,\)\]\): {message}"):
        ck.quant.quantize_static(model, [(x, labels)])
    with pytest.raises(DataError, match=message):
        call_checked(model, (x, labels), "data")
    with pytest.raises(ModelError, match=r"wanted 1 input \(x\), got 2 \('labels' too many\); batches must be inputs alone"):
        ck.quant.quantize_static(model, [{"x": x, "labels": labels}])
    with pytest.raises(DataError, match="data: the model does not run on inputs of shape .*: .*channels"):
        call_checked(model, (x[:, :2],), "data")


class Two(nn.Module):
    """Compares two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, a, b, scale=1.0):
        return (self.layer(a) - self.layer(b)) * scale


@pytest.mark.parametrize("kind", [tuple, list])
def test_inputs_inside_of_one_another_are_named(kind, tmp_path) -> None:
    """As a dataset of pairs gives them: `((a, b), label)`."""
    pair, labels = kind([torch.randn(8, 4), torch.randn(8, 4)]), torch.arange(8) % 3
    message = rf"wanted 2 inputs \(a, b\), got one, a {kind.__name__} of 2; give them side by side.* \(a, b, target\)"
    task = ck.Task(train=[(pair, labels)], val=[(pair, labels)])
    with pytest.raises(ModelError, match=message):
        ck.Recipe(ck.Train(epochs=1)).run(Two(), task, tmp_path / "run")
    with pytest.raises(DataError, match=message):
        call_checked(Two(), (pair,), "data")
    assert not (tmp_path / "run").exists()
    with pytest.raises(DataError, match="data: the model does not run .*: .*mat1 and mat2"):
        call_checked(Two(), (pair[0][:, :2], pair[1]), "data")


class EncoderDecoder(nn.Module):
    """Makes what its decoder reads of the labels where it is not given, as those of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)

    def forward(self, input_ids, labels=None, decoder_input_ids=None):
        if decoder_input_ids is None and labels is not None:
            decoder_input_ids = labels.roll(1, 1)
        if decoder_input_ids is None:
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        return self.head(self.table(decoder_input_ids) + self.table(input_ids).mean(1, keepdim=True))


def test_inputs_that_a_model_makes_of_the_target_are_named(tmp_path) -> None:
    """The batches of the collators of Hugging Face for encoder-decoders."""
    ids, labels = torch.randint(0, 10, (2, 4, 6))
    batch = {"input_ids": ids, "labels": labels}
    message = (
        r"You must specify exactly one of input_ids or inputs_embeds; its forward makes decoder_input_ids of labels, which are"
        r" the target of a batch and no input: put decoder_input_ids into the batches, too"
    )
    model = EncoderDecoder()
    task = ck.Task(train=[batch], val=[batch], predict=lambda output: output.mT)
    with pytest.raises(DataError, match=f"validation data: .*: {message}"):
        ck.evaluate(model, task)
    with pytest.raises(ModelError, match=message):
        ck.Recipe(ck.Train(epochs=1)).run(model, task, tmp_path / "run")
    whole = batch | {"decoder_input_ids": labels.roll(1, 1)}
    assert ck.evaluate(model, ck.Task(train=[whole], val=[whole], predict=lambda output: output.mT)) >= 0
    with pytest.raises(DataError, match="(?s)index out of range(?!.*decoder_input_ids)"):
        call_checked(model, {"input_ids": ids + 20, "decoder_input_ids": ids}, "data")


def test_a_first_batch_without_rows_is_refused() -> None:
    model, x = build(networks.Chain).eval(), torch.randn(8, 3, 16, 16)
    with pytest.raises(
        DataError, match=r"^quantize_static: the first batch: wanted one row at least, got .*\[\(0, 3, 16, 16\)\]"
    ):
        ck.quant.quantize_static(model, [x[:0], x])
    with pytest.raises(DataError, match="^the example: wanted one row at least"):
        capture(model, x[:0])


def test_inputs_by_name_may_come_in_any_order() -> None:
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.linear = nn.Conv2d(3, 8, 3), nn.Linear(5, 8)

        def forward(self, image, size):
            return self.conv(image).mean((2, 3)) + self.linear(size)

    model, images, sizes = Sum().eval(), torch.randn(2, 8, 3, 8, 8), torch.randn(2, 8, 5)
    named = [{"image": i, "size": s} for i, s in zip(images, sizes, strict=True)]
    turned = [named[0], {"size": sizes[1], "image": images[1]}]
    wanted, got = (ck.quant.quantize_static(model, batches)(**named[0]) for batches in (named, turned))
    assert torch.equal(wanted, got)


@pytest.mark.filterwarnings("ignore:Sparse CS", "ignore:The PyTorch API of nested", "ignore:torch.quantize")
def test_values_that_are_not_finite_are_found_in_tensors_of_other_layouts() -> None:
    for value, wanted in ((1.0, ""), (torch.nan, "nan"), (torch.inf, "infinite values")):
        dense = torch.tensor([[value, 0.0], [0.0, 2.0]])
        assert not_finite([dense.to_sparse()]) == not_finite((dense.to_sparse() + dense.to_sparse(),)) == wanted
        assert not_finite({"x": dense.to_sparse_csc()}) == wanted
    others = [torch.ones(2, dtype=torch.float8_e4m3fn), torch.ones(2, device="meta"), torch.ones(2, dtype=torch.bool)]
    assert not_finite([*others, torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)]) == ""
    assert not_finite(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])) == ""


class Arguments(nn.Module):
    def forward(self, x, mask=None, *rest, flag=False, **others):
        return x


class PositionalOnly(nn.Module):
    def forward(self, x, /, mask=None):
        return x


def test_arguments_of_a_call_are_a_tuple_or_a_dict() -> None:
    model = Arguments()
    assert call_inputs(model, (1, 2, 3), {}, "here") == (1, 2, 3)
    assert call_inputs(model, (), {"mask": 2, "x": 1}, "here") == {"mask": 2, "x": 1}
    assert call_inputs(model, (1,), {"mask": None, "flag": True, "other": 4}, "here") == dict(x=1, mask=None, flag=True, other=4)
    for module, args, kwargs in (
        (model, (1, 2, 3), {"flag": True}),
        (model, (1,), {"x": 2}),
        (PositionalOnly(), (1,), {"mask": 2}),
    ):
        with pytest.raises(
            ModelError, match=r"here: it is called with \d positional arguments beside .* write parameters in the place"
        ):
            call_inputs(module, args, kwargs, "here")
