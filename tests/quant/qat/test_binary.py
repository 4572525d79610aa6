"""Layers of signs: what they compute, how they start, how they train, and one bit for each weight in the file."""

from __future__ import annotations

import copy

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compresskit as ck
from compresskit.base.errors import CheckpointError, ModelError, SettingError
from compresskit.export.check.agreement import QUANTIZED_STEPS
from compresskit.graph.replacements import Signed
from compresskit.graph.surgery import restructure_, structure
from compresskit.quant import quantize_weights
from compresskit.quant.numerics.block_grid import BlockScheme
from compresskit.quant.qat import Binarize, binarize_, sign_formats

ROWS = BlockScheme(bits=8, block_size=None)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1, groups=4, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 64),
        nn.ReLU(),
        nn.Linear(64, 4),
    ).eval()


def pictures(n: int = 32) -> torch.Tensor:
    return torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def signed() -> nn.Sequential:
    return binarize_(network(), [pictures()[:16], pictures()[16:]]).eval()


def test_the_first_and_the_last_layer_stay(signed) -> None:
    assert [i for i, module in enumerate(signed) if isinstance(module, Signed)] == [3, 5, 10]
    assert [signed[i].sizes for i in (3, 5, 10)] == [(4, 4), (4, 4), ()]
    whole = binarize_(network(), pictures(), ends=True, skip=("5",), factors="channels")
    assert [i for i, module in enumerate(whole) if isinstance(module, Signed)] == [0, 3, 10, 12]
    assert whole[3].sizes == ()


def test_a_layer_is_the_formula_of_the_paper() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2)
    layer = Signed(copy.deepcopy(conv), (4, 3))
    for parameter in (layer.threshold, *layer.factors):
        nn.init.normal_(parameter)
    x = torch.randn(2, 4, 7, 6)
    signs = np.where(x.numpy() >= layer.threshold.detach().numpy()[:, None, None], 1.0, -1.0)
    weight = np.where(conv.weight.detach().numpy() >= 0, 1.0, -1.0)
    wanted = F.conv2d(torch.tensor(signs), torch.tensor(weight), None, 2, 1, 1, 2).numpy()
    channels, rows, columns = (f.detach().numpy() for f in layer.factors)
    for o, i, j in np.ndindex(6, 4, 3):
        wanted[:, o, i, j] = wanted[:, o, i, j] * channels[o] * rows[i] * columns[j] + conv.bias[o].item()
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(layer(x).detach().numpy(), wanted.astype(np.float32), rtol=1e-5, atol=1e-5)


def test_it_starts_at_means_and_least_squares(signed) -> None:
    model, x = network(), pictures()
    with torch.no_grad():
        inputs = model[:3](x)
        wanted = model[3](inputs).movedim(1, -1).flatten(0, 2).double()
    layer = signed[3]
    torch.testing.assert_close(layer.threshold.detach(), inputs.mean((0, 2, 3)))
    signs = torch.where(inputs >= layer.threshold[:, None, None], 1.0, -1.0)
    raw = F.conv2d(signs, model[3].weight.sign(), None, 2, 1).movedim(1, -1).flatten(0, 2).double()
    for channel in (0, 7, 31):
        matrix = torch.stack([raw[:, channel], torch.ones(len(raw))], 1)
        factor, offset = torch.linalg.lstsq(matrix, wanted[:, channel]).solution
        assert layer.factors[0][channel].item() == pytest.approx(factor.item(), abs=1e-5)
        assert layer.bias[channel].item() == pytest.approx(offset.item(), abs=1e-5)
    far = (inputs - layer.threshold[:, None, None]).abs().mean()
    assert layer.window.item() == pytest.approx(2 * far.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("gradient", "slope"),
    [
        ("clip", lambda u: float(abs(u) < 1)),
        ("polynomial", lambda u: max(0.0, 2 - 2 * abs(u))),
        ("tanh", lambda u: 1 - np.tanh(u) ** 2),
    ],
)
def test_gradients_of_a_sign(gradient, slope) -> None:
    layer = Signed(nn.Linear(1, 1, bias=False), gradient=gradient)
    with torch.no_grad():
        layer.threshold.fill_(0.25)
        layer.window.fill_(0.5)
        layer.layer.weight.fill_(0.3)
        layer.factors[0].fill_(1.5)
    for value in (-0.5, -0.1, 0.2, 0.3, 0.6, 2.0):
        x = torch.tensor([[value]], requires_grad=True)
        layer.zero_grad()
        layer(x).backward()
        wanted = 1.5 * slope((value - 0.25) / 0.5) / 0.5
        assert x.grad.item() == pytest.approx(wanted, abs=1e-6)
        assert layer.threshold.grad.item() == pytest.approx(-wanted, abs=1e-6)
        side = 1.0 if value >= 0.25 else -1.0
        assert layer.factors[0].grad.item() == pytest.approx(side)
        assert layer.layer.weight.grad.item() == pytest.approx(1.5 * side)


def test_the_file_has_one_bit_for_each_weight(signed, tmp_path) -> None:
    x = pictures()
    packed = quantize_weights(signed, x[:4], overrides=sign_formats(signed), scheme=ROWS, convolutions=ROWS)
    stored = {row.name: row for row in packed.plan.rows}
    assert stored["3.layer.weight"].bytes < 8 * 32 * 9 / 8 + 32
    assert stored["3.layer.weight"].sqnr >= 100
    assert not [row for row in packed.plan.rows if "weight" not in row.name]
    path = ck.export_onnx(packed, tmp_path / "signs.onnx", (x[:2],))
    assert path.stat().st_size < sum(4 * p.numel() for p in signed.parameters()) / 2
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for batch in (x[:1], x[:7]):
        (found,) = session.run(None, {session.get_inputs()[0].name: batch.numpy()})
        # A value at a threshold may fall to either side; one sign of 128 changes the outputs by 0.01 of their spread at most.
        torch.testing.assert_close(torch.tensor(found), packed(batch).detach(), rtol=0, atol=0.01 * packed(x).std().item())


def test_a_sign_at_its_threshold_is_no_difference(tmp_path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4096), Signed(nn.Linear(4096, 32)), nn.Linear(32, 16)).eval()
    x = torch.randn(64, 8)
    with torch.no_grad():
        model[1].threshold[0] = model[0](x)[:, 0].max() - 1e-3
        outputs = model(x)
    path = ck.export_onnx(model, tmp_path / "signs.onnx", (x,))
    with torch.no_grad():
        model[1].threshold[0] += 2e-3  # one sign of one sample is now another in PyTorch
        assert (model(x) != outputs).any(1).sum() == 1
    found = ck.export.verify_onnx(path, model, [x])
    assert found.passed
    assert found.quantized


def test_a_sign_at_its_threshold_may_move_all_outputs_of_its_sample(tmp_path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), Signed(nn.Linear(16, 32)), nn.Linear(32, 16)).eval()
    x = torch.randn(256, 8)
    with torch.no_grad():
        model[1].factors[0].fill_(3.0)
        model[1].threshold[0] = model[0](x)[:, 0].max() - 1e-3
        before = model(x)
    path = ck.export_onnx(model, tmp_path / "signs.onnx", (x,))
    with torch.no_grad():
        model[1].threshold[0] += 2e-3
        steps = (model(x) - before).abs().max() / ((before.max() - before.min()) / 255)
    assert steps > QUANTIZED_STEPS  # of one sample of 256
    assert ck.export.verify_onnx(path, model, [x]).passed
    with torch.no_grad():
        model[1].threshold[:2] = 0.5  # of many samples
    assert not ck.export.verify_onnx(path, model, [x]).passed


def test_layers_in_torchs_transformer_and_under_two_names() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.Sequential(nn.Linear(16, 16), nn.TransformerEncoder(layer, 2), nn.Linear(16, 4)).eval()
    x = torch.randn(8, 5, 16)
    binarize_(model, [x])
    with torch.no_grad():
        outputs = model(x)  # torch's fused kernels would ask for the weights of replaced layers
        torch.testing.assert_close(outputs, model.requires_grad_(True).train(False)(x), rtol=1e-4, atol=1e-4)
        padding = torch.zeros(8, 5, dtype=torch.bool)
        padding[0, 3:] = True
        assert model[1](model[0](x), src_key_padding_mask=padding).shape == (8, 5, 16)
    twice = nn.Linear(8, 8)
    model = nn.Sequential(nn.Linear(8, 8), twice, nn.ReLU(), twice, nn.Linear(8, 2))
    binarize_(model, torch.randn(8, 8))
    assert isinstance(model[1], Signed)
    assert model[3] is model[1]


def test_a_recipe_trains_and_stores_it(tmp_path) -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 16)
    y = (x[:, :8].sum(1) > 0).long()
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    task = ck.Task(train=[(x, y)], val=[(x, y)])
    recipe = ck.Recipe(
        ck.Train(epochs=30, optimizer=torch.optim.Adam),
        Binarize(finetune=ck.Train(epochs=60, optimizer=lambda p: torch.optim.Adam(p, lr=0.01), objective=ck.imitate())),
        export="last",
    )
    result = recipe.run(model, task, tmp_path)
    assert isinstance(result.model[2], Signed)
    assert result.rows[-1].metric > 0.85
    (folder,) = tmp_path.glob("2-*")
    stored = ck.load(model, folder)
    assert isinstance(stored[2], Signed)
    assert torch.equal(stored.eval()(x), result.model.eval()(x))


def test_weights_alone_then_both() -> None:
    model, x = network(), pictures()
    binarize_(model, x, activations=False)
    first = model[3]
    assert (first.weights, first.activations) == (True, False)
    before = first.factors[0].detach().clone()
    binarize_(model, x, gradient="tanh")
    assert model[3] is first
    assert (first.weights, first.activations, first.gradient) == (True, True, "tanh")
    assert torch.equal(first.factors[0], before)


def test_a_stored_model_is_made_again(signed) -> None:
    record = structure(signed)
    again = network()
    for _ in range(2):
        restructure_(again, record)
    again.load_state_dict(signed.state_dict())
    with torch.no_grad():
        assert torch.equal(again.eval()(pictures()), signed(pictures()))


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        ("3", {"sizes": [0]}, "3: not the record of a layer of signs, got"),
        ("3", {"gradient": "run"}, "3: not the record of a layer of signs"),
        ("3", {"weights": 1}, "3: not the record of a layer of signs"),
        ("2", {}, r"2: the record says a layer of signs of sizes \[4, 4\], the model has ReLU; it is of another model"),
    ],
)
def test_a_damaged_record_is_refused(signed, path, change, message) -> None:
    record = signed[3].record() | change
    with pytest.raises(CheckpointError, match=message):
        restructure_(network(), structure(network()) | {"replaced": {path: record}})


def test_pictures_of_another_size_are_refused(signed) -> None:
    with pytest.raises(ModelError, match=r"factors for outputs of \(4, 4\), got \(5, 5\).*factors=\"channels\""):
        signed(torch.randn(1, 3, 10, 10))


def test_bad_input() -> None:
    model, x = network(), pictures(2)
    with pytest.raises(SettingError, match=r"binarize_\(weights=False, activations=False\): no sign would be taken"):
        binarize_(model, x, weights=False, activations=False)
    normed = network()
    torch.nn.utils.parametrizations.weight_norm(normed[3])
    with pytest.raises(ModelError, match="3: its weight is computed from other parameters already; leave it out with skip="):
        binarize_(normed, x)
    with pytest.raises(SettingError, match=r"Binarize\(weights=False, activations=False\)"):
        Binarize(finetune=None, weights=False, activations=False)
    with pytest.raises(SettingError, match=r"Binarize\(samples=...\): wanted a whole number >= 1, got 0"):
        Binarize(finetune=None, samples=0)
    with pytest.raises(SettingError, match=r"binarize_\(skip=\['layer9'\]\): Sequential has no module of that name"):
        binarize_(model, x, skip=("layer9",))
    with pytest.raises(ModelError, match="no linear layer or convolution is left to replace"):
        binarize_(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.randn(2, 4))
    masked = network()
    ck.prune.plan_mask(masked, ck.remove(weights=0.5)).apply_(masked)
    with pytest.raises(ModelError, match="has masks, and a sign is never zero"):
        binarize_(masked, x)
