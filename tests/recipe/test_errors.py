"""What went wrong once, on models and data that are not unusual; and messages that are asserted nowhere else."""

from __future__ import annotations

import copy
from functools import partial

import networks
import pytest
import torch
import torch.nn.functional as F
from networks import build, image, images_task, trained_like
from torch import nn

import compresskit as ck
from compresskit.base.errors import DataError, ModelError, SettingError, TrainingError
from compresskit.graph.capture import capture
from compresskit.prune import plan_channels, reestimate_batchnorm_, taylor
from compresskit.quant import prepare_qat, quantize_static
from compresskit.quant.passes.fold_batchnorm import fold_batchnorm_


class SharedHead(nn.Module):
    """One convolution without bias at two levels, a BatchNorm for each, as in RetinaNet."""

    def __init__(self):
        super().__init__()
        self.c, self.b1, self.b2 = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x):
        return self.b1(self.c(x)) + self.b2(self.c(x.flip(3)))


class TokenNorm(nn.Module):
    def __init__(self, tokens, width):
        super().__init__()
        self.l, self.b = nn.Linear(16, width), nn.BatchNorm1d(tokens)

    def forward(self, x):
        return self.b(self.l(x))


class NoStatistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.c, self.b = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, track_running_stats=False)

    def forward(self, x):
        return self.b(self.c(x))


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (SharedHead, (8, 3, 8, 8)),
        (partial(TokenNorm, 8, 8), (4, 8, 16)),
        (partial(TokenNorm, 6, 8), (4, 6, 16)),
        (NoStatistics, (8, 3, 8, 8)),
    ],
)
def test_folding_is_exact(model, x) -> None:
    model = model()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -1, 1)
    model.train()
    for _ in range(5):
        model(torch.randn(x) + 1)
    graph = capture(copy.deepcopy(model.eval()), (torch.randn(x),)).module
    fold_batchnorm_(graph)
    y = torch.randn(x)
    torch.testing.assert_close(graph(y), model(y), atol=1e-5, rtol=1e-4)


def test_frozen_layers_stay_frozen_in_qat() -> None:
    quantized = prepare_qat(build(networks.Twice), [image(16)])
    assert not quantized.body.get_parameter("stem.0.weight").requires_grad
    assert quantized.body.get_parameter("head.weight").requires_grad


@pytest.mark.parametrize(("freeze", "moves"), [(0, 0), (0.5, 4), (1, 8)])
def test_every_share_freezes(freeze, moves, monkeypatch) -> None:
    seen = []
    real = ck.quant.observers.MovingAverage.update

    def counted(self, values):
        seen.append(1)
        real(self, values)

    monkeypatch.setattr(ck.quant.observers.MovingAverage, "update", counted)
    task = images_task(ck, samples=64, batch=8)
    model = build(networks.Chain)
    ck.QAT(epochs=1, freeze=freeze)(model, task)
    points = len(quantize_static(model, [image(16)]).activation_quantizers())
    assert len(seen) == points * (moves + 1)  # once to take over the range


def test_channels_without_weights_keep_their_bias(tmp_path) -> None:
    model = build(networks.Chain)
    with torch.no_grad():
        model.b[1].weight[3], model.b[1].bias[3] = 1e-9, 1.0
    quantized = quantize_static(model, [image(16)])
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", image(2))
    assert ck.verify_onnx(path, quantized, [image(32)]).passed


def test_a_concat_of_clamped_and_plain_values(tmp_path) -> None:
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
def test_padding_by_name(kernel, tmp_path) -> None:
    first, second = nn.Conv2d(3, 16, kernel, padding="same"), nn.Conv2d(16, 16, 3, padding="valid")
    model = nn.Sequential(first, nn.ReLU(), second, nn.Flatten(), nn.Linear(16 * 14 * 14, 4)).eval()
    graph = capture(model, image(2)).module
    x = image(4)
    torch.testing.assert_close(graph(*x), model(*x))
    assert plan_channels(model, image(2), budget=ck.keep(macs=0.7), round_to=4).remove
    quantized = quantize_static(model, [image(16)])
    assert ck.audit(ck.export_onnx(quantized, tmp_path / "q.onnx", image(2))).share == 1.0


def test_depthwise_transposed_convolutions() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, 1, 1), nn.ReLU(), nn.ConvTranspose2d(32, 32, 4, 2, 1, groups=32), nn.ReLU(), nn.Conv2d(32, 4, 1)
    ).eval()
    ck.prune.apply_(model, plan_channels(model, image(2), budget=ck.keep(macs=0.6)))
    assert model[2].groups == model[2].in_channels == model[2].out_channels < 32


def test_whole_number_images_made_float_inside() -> None:
    class Bytes(networks.Chain):
        def forward(self, x):
            return super().forward(x.float() / 255)

    x = (torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8),)
    model = Bytes().eval()
    ck.prune.apply_(model, plan_channels(model, x, budget=ck.keep(macs=0.6)))
    model(*x)


def test_macs_see_into_fused_kernels() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    x = torch.randn(2, 10, 32)
    # q, k, v, out; two feed-forward layers; scores and their product with the values.
    want = 10 * (4 * 32 * 32 + 2 * 32 * 64) + 2 * 10 * 10 * 32
    assert ck.count_macs(layer, (x,)) == want
    assert ck.count_macs(nn.LSTM(8, 16, batch_first=True), (torch.randn(2, 5, 8),)) == 5 * 4 * 16 * (8 + 16)


def test_taylor_with_a_second_head_and_dead_channels() -> None:
    class Heads(networks.Chain):
        def __init__(self):
            super().__init__()
            self.extra = nn.Linear(32, 3)

        def forward(self, x):
            z = self.b(self.a(x)).mean((2, 3))
            return self.head(z), self.extra(z)

    model = trained_like(Heads(), image(16))
    with torch.no_grad():
        model.a[1].weight.zero_()
        model.a[1].bias.fill_(-1)
    ck.Prune(budget=ck.keep(macs=0.6), criterion=taylor, round_to=4)(model, images_task(ck))


def test_names_that_match_nothing() -> None:
    with pytest.raises(SettingError, match=r"ignore=\['nosuch'\]: no layer"):
        plan_channels(build(networks.Chain), image(2), budget=ck.keep(macs=0.5), ignore=("nosuch",))
    with pytest.raises(SettingError, match=r"skip=\['nosuch'\]: no operator"):
        quantize_static(build(networks.Chain), [image(16)], skip=("nosuch",))


def test_kinds_of_settings() -> None:
    for make, message in (
        (lambda: ck.Train(epochs=1, precision="bf16"), "wanted a policy such as mixed.MASTER_BF16, got 'bf16'"),
        (lambda: ck.Prune(budget=ck.keep(macs=0.5), criterion="l2"), "wanted a function such as prune.l2, got 'l2'"),
        (lambda: ck.Prune(budget=ck.keep(macs="0.5")), "in \\(0, 1\\], got '0.5'"),
        (lambda: plan_channels(build(networks.Chain), image(2), budget=ck.keep(macs=0.5), criterion="l2"), "wanted a function"),
    ):
        with pytest.raises(SettingError, match=message):
            make()


def test_ignored_labels() -> None:
    assert ck.accuracy(torch.eye(4), torch.tensor([0, 1, -100, -100])) == 1.0
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    y[0] = 255
    task = ck.Task(train=[(x, y)], val=[(x, y)], loss=partial(F.cross_entropy, ignore_index=255))
    ck.Train(epochs=1)(nn.Linear(4, 3), task)


def test_the_last_step_of_an_epoch_counts_its_batches() -> None:
    x, y = torch.randn(24, 4), torch.arange(24) % 3
    batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 24, 8)]
    sgd = partial(torch.optim.SGD, lr=0.1)
    model = nn.Linear(4, 3)
    wanted = copy.deepcopy(model)
    ck.Train(epochs=1, optimizer=sgd, schedule=ck.lr.Constant(), accumulate=2)(model, ck.Task(train=batches, val=batches))
    plain = sgd(wanted.parameters())
    for part in ((x[:16], y[:16]), (x[16:], y[16:])):
        plain.zero_grad()
        F.cross_entropy(wanted(part[0]), part[1]).backward()
        plain.step()
    torch.testing.assert_close(model.weight, wanted.weight)


def test_batchnorm_without_batches() -> None:
    model = build(networks.Chain)
    before = copy.deepcopy(model.state_dict())
    for batches in ([], [image(1)]):
        with pytest.raises(DataError, match="no calibration batch of more than one row"):
            reestimate_batchnorm_(model, batches)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert reestimate_batchnorm_(model, [image(8), image(1)]) == 2


def test_masked_outputs_and_scalars_among_them(tmp_path) -> None:
    class Masked(networks.Chain):
        def forward(self, x):
            y = super().forward(x)
            return y.masked_fill(torch.arange(10) == 3, float("-inf")), y.square().mean()

    model = build(Masked)
    proof = ck.verify_onnx(ck.export_onnx(model, tmp_path / "f.onnx", image(2)), model, [image(8), image(8)])
    assert proof.passed, proof
    with pytest.raises(DataError, match="verification data: the model does not run on inputs of shape"):
        ck.verify_onnx(tmp_path / "f.onnx", model, [(torch.randn(2, 5, 8, 8),)])


def test_one_wrong_output_among_many(tmp_path) -> None:
    import onnx
    from onnx import numpy_helper

    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 32), nn.ReLU(), nn.Linear(32, 50)).eval()
    quantized = quantize_static(model, [image(64)])
    file = onnx.load(ck.export_onnx(quantized, tmp_path / "q.onnx", image(2)))
    tensor = [t for t in file.graph.initializer if "bias" in t.name and t.data_type == onnx.TensorProto.INT32][-1]
    values = numpy_helper.to_array(tensor).copy()
    values[7] += values.max() * 100 + 10**6
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    onnx.save(file, tmp_path / "bad.onnx")
    assert not ck.verify_onnx(tmp_path / "bad.onnx", quantized, [image(64)]).passed


def test_losses_and_metrics_that_do_not_fit(tmp_path) -> None:
    x = torch.randn(8, 3, 16, 16)
    task = ck.Task(train=[(x, torch.rand(8, 1, 1, 1))], val=[(x, torch.arange(8))])
    with pytest.raises(DataError, match=r"Task\(loss=\.\.\.\) fails on the first batch of train \(predictions \(8, 10\)"):
        ck.Recipe(ck.Train(epochs=1)).run(networks.Chain(), task, tmp_path / "run")
    with pytest.raises(TrainingError, match="no gradient of the loss"):
        ck.Train(epochs=1)(networks.Chain(), images_task(ck, predict=lambda o: o.detach()))
    with pytest.raises(DataError, match="the metric is inf"):
        ck.evaluate(build(networks.Chain), images_task(ck, metric=lambda p, t: float("inf")))


def test_any_number_of_inputs() -> None:
    class Many(nn.Module):
        def forward(self, *args):
            return sum(args)

    graph = capture(Many(), (torch.randn(2, 3), torch.randn(2, 3))).module
    x = torch.randn(5, 3), torch.randn(5, 3)
    torch.testing.assert_close(graph(*x), x[0] + x[1])


def test_one_channel_has_no_soft_targets() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 1))
    x = image(8)[0]
    task = ck.Task(train=[(x, torch.rand(8, 1))], val=[(x, torch.rand(8, 1))], loss=F.mse_loss, metric=F.mse_loss)
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(768, 1)).eval()
    with pytest.raises(ModelError, match="gives one channel, of which a softmax says nothing"):
        ck.Distill(epochs=1, teacher=teacher)(model, task)
    ck.Train(epochs=1, objective=ck.imitate(teacher, loss=F.mse_loss))(model, task)
