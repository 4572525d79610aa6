"""Work of the library inside torch.autocast, torch.inference_mode or torch.no_grad of the caller gives what it gives outside."""

from __future__ import annotations

import copy
from functools import partial

import networks
import pytest
import torch
from networks import build, image
from torch import nn
from torch.nn.utils import rnn

import compresskit as ck
from compresskit.base.errors import ModelError
from compresskit.graph.capture import capture
from compresskit.prune import criteria, low_rank

MODES = {
    "autocast": partial(torch.autocast, "cpu", dtype=torch.bfloat16),
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
}


def task() -> ck.Task:
    data = [(image(8)[0], torch.arange(8) % 10) for _ in range(3)]
    return ck.Task(train=data, val=data)


def static(model: nn.Module, data: ck.Task) -> nn.Module:
    return ck.quant.quantize_static(model, [x for x, _ in data.train])


def pruned(model: nn.Module, data: ck.Task) -> nn.Module:
    return ck.Prune(budget=ck.keep(macs=0.5), criterion=criteria.taylor)(model, data)


def factored(model: nn.Module, data: ck.Task) -> nn.Module:
    return low_rank.LowRank(budget=ck.keep(macs=0.6))(model, data)


def rounded_weights(model: nn.Module, data: ck.Task) -> nn.Module:
    scheme = ck.quant.BlockScheme(bits=4, block_size=None)
    inputs = [x for x, _ in data.train]
    return ck.quant.quantize_weights(model, inputs, rounding=ck.quant.weight_only.gptq, convolutions=scheme)


def signs(model: nn.Module, data: ck.Task) -> nn.Module:
    return ck.quant.qat.Binarize(finetune=None, ends=True)(model, data)


def learned(model: nn.Module, data: ck.Task) -> nn.Module:
    quantized = static(model, data)
    ck.quant.reconstruct_blocks_(quantized, [x for x, _ in data.train], steps=2)
    ck.quant.correct_bias_(quantized, [x for x, _ in data.train])
    return quantized


@pytest.mark.matrix
@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("work", [static, pruned, factored, rounded_weights, signs, learned])
def test_the_model_has_the_same_bits_and_can_be_trained(work, name) -> None:
    data, model = task(), build(networks.Chain)
    wanted, within = work(copy.deepcopy(model), data), copy.deepcopy(model)
    with MODES[name]():
        got = work(within, data)
    assert all(torch.equal(v, got.state_dict()[key]) for key, v in wanted.state_dict().items())
    nn.functional.cross_entropy(got(data.train[0][0]), data.train[0][1]).backward()


def test_training_inside_no_grad() -> None:
    data, model = task(), build(networks.Chain)
    wanted, within = ck.fit_(copy.deepcopy(model), data, ck.Train(epochs=1)), copy.deepcopy(model)
    with torch.no_grad():
        got = ck.fit_(within, data, ck.Train(epochs=1))
    assert all(torch.equal(v, got.state_dict()[key]) for key, v in wanted.state_dict().items())


def test_training_inside_autocast_computes_in_it_and_says_so(caplog) -> None:
    data = [(torch.randn(8, 6).bfloat16(), torch.arange(8) % 4)] * 2
    model, dtypes, metrics = nn.Sequential(nn.Linear(6, 4)), [], []
    model[0].register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    train = ck.Train(epochs=1, validate_every=1, on_epoch=lambda report: metrics.append(report.metric))
    with MODES["autocast"](), caplog.at_level("INFO", "compresskit"):
        ck.fit_(model, ck.Task(train=data, val=data), train)
    assert set(dtypes) == {torch.bfloat16}  # of measurements on the way, too
    assert metrics[0] is not None
    assert "train: its steps compute in torch.bfloat16" in caplog.text


@pytest.mark.parametrize("name", MODES)
def test_verification(name, tmp_path) -> None:
    model = build(networks.Chain)
    with MODES[name]():
        path = ck.export_onnx(model, tmp_path / "model.onnx", image(2))
        assert ck.verify_onnx(path, model, [image(4)]).passed
    with torch.no_grad():
        model.head.bias.add_(1)
    with MODES[name]():
        found = ck.verify_onnx(path, model, [image(4)])
    assert not found.passed


def test_a_model_that_was_made_in_inference_mode_has_no_scores_by_gradients() -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Flatten(), nn.Linear(768, 10))
    with pytest.raises(
        ModelError, match=r"^Sequential: 1.weight was made inside torch.inference_mode\(\).*outside of that block"
    ):
        ck.prune.plan_mask(model, ck.remove(weights=0.5), criterion=criteria.snip, task=task())


def test_advice_inside_no_grad() -> None:
    with torch.no_grad():
        assert ck.mixed.advise(build(networks.Chain), image(2)).layers


class Packed(nn.Module):
    """Its first states are zeros, into the first of which something may be written."""

    def __init__(self, written: bool) -> None:
        super().__init__()
        self.written, self.lstm = written, nn.LSTM(5, 6, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        h0, c0 = torch.zeros(1, len(x), 6), torch.zeros(1, len(x), 6)
        if self.written:
            h0[0] = x[:, 0, :1]
        return self.lstm(packed, (h0, c0))[1][0][-1]


@pytest.mark.parametrize("written", [False, True])
def test_first_states_of_packed_sequences_inside_inference_mode(written) -> None:
    torch.manual_seed(0)
    model, example = Packed(written).eval(), (torch.randn(2, 4, 5), torch.tensor([2, 4]))
    with torch.inference_mode():
        got = capture(model, example).module(*example)
    torch.testing.assert_close(got, model(*example))
