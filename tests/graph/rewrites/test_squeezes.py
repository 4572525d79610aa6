"""Squeezes of dimensions that are not 1 are taken out of graphs, so that files of them run."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.measure import session

SIZES = [(3, 8, 6), (2, 7, 6), (5, 12, 6)]


class Squeezed(nn.Module):
    def __init__(self, squeeze) -> None:
        super().__init__()
        self.squeeze, self.first, self.last = squeeze, nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.squeeze(self.first(x), self.last)


@pytest.mark.matrix(every=2)
@pytest.mark.filterwarnings("ignore:.*no size that varies is 1")
@pytest.mark.parametrize(
    "squeeze",
    [
        lambda y, last: last(y.relu().squeeze(-1)),
        lambda y, last: last(y).squeeze(1),
        lambda y, last: y.squeeze((1, 2)),
        lambda y, last: last(y[:, :, None].squeeze((2, 3))),
        lambda y, last: last(y.relu().squeeze_(2)),
        lambda y, last: last(y[:, :, None].relu().squeeze_(2)),
        lambda y, last: last(y.squeeze().mean().squeeze(0) + y),
    ],
    ids=["fixed", "varies", "several", "one of several", "in place", "one in place", "number"],
)
def test_squeezes_that_do_nothing(squeeze, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = Squeezed(squeeze).eval(), [torch.randn(size) for size in SIZES]
    quantized = ck.quant.quantize_static(model, [inputs[0]], dynamic=(0, 1))
    assert quantized.placement.integer
    for exported in (model, quantized):
        run = session(ck.export_onnx(exported, tmp_path / "f.onnx", inputs[0], dynamic=(0, 1)))
        for x in inputs:
            (got,) = run.run(None, {"x": x.numpy()})
            torch.testing.assert_close(torch.from_numpy(got), exported(x), rtol=1e-4, atol=1e-5)


def test_an_input_that_is_squeezed_and_returned(tmp_path: Path) -> None:
    class Returned(nn.Module):
        def forward(self, x):
            return x.squeeze(1), x * 2

    x = torch.randn(3, 5)
    run = session(ck.export_onnx(Returned(), tmp_path / "f.onnx", x))
    for got, wanted in zip(run.run(None, {"x": x.numpy()}), Returned()(x), strict=True):
        torch.testing.assert_close(torch.from_numpy(got), wanted)


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Linear(32, 3)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu().squeeze(1))


def test_layers_before_and_behind_a_squeeze_are_pruned_and_trained_in_integers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, labels = torch.randn(64, 6), torch.randint(0, 3, (64,))
    plan = ck.prune.plan_channels(Narrow().eval(), x, budget=ck.keep(macs=0.6), round_to=1)
    pruned = ck.prune.apply_(Narrow().eval(), plan)
    assert pruned.last.in_features < 32
    batches = list(zip(x.split(16), labels.split(16), strict=True))
    trained = ck.QAT(epochs=1)(pruned, ck.Task(train=batches, val=batches))
    assert {"linear", "linear_1"} <= set(trained.placement.integer)
    for model in (pruned.eval(), trained):
        assert ck.verify_onnx(ck.export_onnx(model, tmp_path / "f.onnx", x), model, [torch.randn(5, 6)]).passed
    ck.save(trained, tmp_path / "saved")
    assert torch.equal(ck.load(Narrow(), tmp_path / "saved").eval()(x), trained.eval()(x))


def test_a_batch_that_is_squeezed_is_warned_of(tmp_path: Path) -> None:
    """torch drops a batch of one there, and the file keeps it."""

    class Rows(nn.Module):
        def forward(self, x):
            return (x[:, None] * 2).squeeze(0)

    with pytest.warns(UserWarning, match=r"Rows decides by the sizes of its inputs: .* no size that varies is 1"):
        path = ck.export_onnx(Rows(), tmp_path / "f.onnx", torch.randn(3, 5))
    assert session(path).run(None, {"x": torch.randn(4, 5).numpy()})[0].shape == (4, 1, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = ck.export_onnx(Rows(), tmp_path / "f.onnx", torch.randn(1, 5), dynamic=())
    assert session(path).run(None, {"x": torch.randn(1, 5).numpy()})[0].shape == (1, 5)
