"""From a float model to the graph that quantizers are inserted into."""

from __future__ import annotations

import copy

import networks
import onnxruntime as ort
import pytest
import torch
from networks import build, image
from oracles import sqnr
from torch import Tensor, nn

import compresskit as ck
from compresskit.base.errors import DataError, ModelError
from compresskit.quant import prepare_qat, quantize_dynamic, quantize_static, quantize_to_accuracy, quantize_weights
from compresskit.quant.passes.unfold_batchnorm import conv_bn_layers


def test_the_float_model_is_not_changed() -> None:
    model = build(networks.Residual).train()
    before = copy.deepcopy(model.state_dict())
    quantized = quantize_static(model, [image(16)])
    assert model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    own = {p.data_ptr() for p in model.parameters()}
    assert not own & {p.data_ptr() for p in quantized.parameters()}


def test_what_cannot_be_quantized_is_refused() -> None:
    quantized = quantize_static(build(networks.Chain), [image(16)])
    for again in (quantize_static, prepare_qat):
        with pytest.raises(ModelError, match="this model is quantized already; quantize the float model it came from"):
            again(quantized, [image(16)])
    with pytest.raises(ModelError, match=r"wanted fp32 weights, but a\.0\.weight is torch\.bfloat16; quantize model\.float\(\)"):
        quantize_static(build(networks.Chain).bfloat16(), [(image(2)[0].bfloat16(),)])
    with pytest.raises(DataError, match="no calibration batch"):
        quantize_static(build(networks.Chain), [])


class Halved(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).float()


@pytest.mark.parametrize("quantize", [quantize_static, quantize_dynamic, quantize_weights])
def test_other_precisions_than_fp32_are_refused(quantize) -> None:
    with pytest.raises(ModelError, match=r"wanted fp32 weights, but 0\.weight is torch\.float64; quantize model\.float\(\)"):
        quantize(nn.Sequential(nn.Linear(4, 4)).double(), torch.randn(2, 4).double())
    place = r"but 0 computes in torch\.bfloat16 under torch\.autocast \(at .*test_prepare_graph\.py:\d+: return super\(\)"
    with pytest.raises(ModelError, match=rf"Sequential: wanted fp32 in forward, {place}"):
        quantize(nn.Sequential(Halved(4, 4)).eval(), torch.randn(2, 4))


def test_weights_that_are_nan_are_named() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4)).eval()
    with torch.no_grad():
        model[3].weight[1, 2] = float("nan")
    x = torch.randn(16, 3, 8, 8)
    for refused in (
        lambda: quantize_static(model, [x]),
        lambda: quantize_static(model, [x], effort="balanced"),
        lambda: quantize_dynamic(model, x),
        lambda: quantize_to_accuracy(model, [x], sqnr=30),
        lambda: prepare_qat(model, [x]),
    ):
        with pytest.raises(ModelError, match=r"Sequential: 3\.weight holds nan; mend the model before it is quantized"):
            refused()


@pytest.mark.parametrize(("momentum", "wanted"), [(0.3, 0.3), (0.0, 0.0), (None, 0.1)])
def test_statistics_that_the_float_model_keeps_are_kept_in_training(momentum, wanted) -> None:
    """A momentum of 0 keeps them; None, the mean of all batches, follows."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=momentum)).eval()
    x = torch.randn(8, 3, 6, 6) + 2
    quantized = prepare_qat(model, [x]).train()
    quantized(x)
    (norm,) = conv_bn_layers(quantized.body)
    torch.testing.assert_close(norm.running_mean, wanted * model[0](x).mean((0, 2, 3)), rtol=0.02, atol=1e-3)


class Forgets(nn.Linear):
    """What it adds to its results in eval mode was given to it, and train mode forgets it; or it merges a scale for eval mode."""

    def __init__(self, merges: bool) -> None:
        super().__init__(4, 4)
        self.scale, self.merges, self.added = nn.Parameter(torch.tensor(3.0)), merges, torch.zeros(4)

    @torch.no_grad()
    def train(self, mode: bool = True) -> Forgets:
        if mode:
            self.added = torch.zeros(4)
        if self.merges and mode != self.training:
            self.weight.data.mul_(1 / self.scale if mode else self.scale)
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + self.added if not self.training else y * self.scale


@pytest.mark.parametrize("merges", [False, True])
@torch.no_grad()
def test_what_eval_mode_has_of_other_origin_than_parameters_is_in_the_graph(merges) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Forgets(merges)).eval()
    model[1].added = torch.tensor([5.0, -5.0, 3.0, 0.0])
    x = torch.randn(64, 4)
    wanted, weight = model(x), model[1].weight.clone()
    torch.testing.assert_close(quantize_static(model, [x])(x), wanted, atol=0.1, rtol=0.05)
    assert torch.equal(model(x), wanted)
    assert torch.equal(model[1].weight, weight)


class Merging(nn.Linear):
    """Low-rank factors that are merged into the weight for eval mode, in place, as LoRA libraries do."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.factor, self.merged = nn.Parameter(torch.randn(4, 4)), False

    def train(self, mode: bool = True) -> Merging:
        if mode == self.merged:
            self.weight.data += self.factor.data * (-1 if mode else 1)
            self.merged = not mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.merged else super().forward(x) + x @ self.factor.T


@pytest.mark.parametrize("training", [False, True])
def test_a_graph_keeps_what_is_merged_for_eval_mode(training, tmp_path) -> None:
    """It shares parameters with its model, which takes them apart where it is told that it is in train mode again."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Merging(), nn.ReLU(), Merging()).train(training), torch.randn(64, 4)
    wanted = copy.deepcopy(model).eval()(x).detach()
    assert sqnr(wanted, quantize_static(model, [x])(x).detach()) > 25
    file = ck.export_onnx(model, tmp_path / "model.onnx", (x,))
    session = ort.InferenceSession(file)
    (output,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(output), wanted, rtol=1e-4, atol=1e-5)
    assert [module.training for module in model.modules()] == [training] * 4
