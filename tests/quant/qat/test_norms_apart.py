"""BatchNorm that no layer stands before normalizes batches in quantization-aware training, too, and follows them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.quant import prepare_qat

X = torch.randn(16, 3, 10, 10, generator=torch.Generator().manual_seed(0)) * 2 + 1


class Before(nn.Module):
    """A residual block with its norms before the convolutions, the second of which stands behind one."""

    def __init__(self) -> None:
        super().__init__()
        self.b1, self.c1 = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1)
        self.b2, self.c2 = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        return x + self.c2(self.b2(self.c1(self.b1(x).relu())).relu())


class Joined(nn.Module):
    """A norm of what was concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(16), nn.Conv2d(16, 8, 3, padding=1)

    def forward(self, x):
        return self.c(self.b(torch.cat([x, self.a(x)], 1)).relu())


def images(*layers: nn.Module) -> nn.Sequential:
    ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), *layers, *ends)


def behind_relu(norm: nn.Module) -> nn.Sequential:
    return images(norm, nn.Conv2d(8, 8, 3, padding=1))


def features(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(300, 8), nn.ReLU(), *layers, nn.Linear(8, 4))


class Twice(nn.Module):
    """One norm in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a = nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x):
        return self.norm(self.a(self.norm(x)).relu()).relu()


NETWORKS = {
    "behind a ReLU": lambda: behind_relu(nn.BatchNorm2d(8)),
    "without parameters": lambda: behind_relu(nn.BatchNorm2d(8, affine=False)),
    "of another momentum": lambda: behind_relu(nn.BatchNorm2d(8, momentum=0.0, eps=0.1)),
    "before convolutions": lambda: images(Before()),
    "of a concatenation": lambda: images(Joined()),
    "of the input": lambda: nn.Sequential(nn.BatchNorm2d(3), *images()),
    "of sequences": lambda: nn.Sequential(
        nn.Flatten(2), nn.Conv1d(3, 8, 3), nn.ReLU(), nn.BatchNorm1d(8), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 4)
    ),
    "before a layer that could take it in": lambda: images(nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)),
    "before a linear layer": lambda: features(nn.BatchNorm1d(8)),
    "of features": lambda: features(nn.BatchNorm1d(8, affine=False), nn.ReLU()),
    "called twice": lambda: features(Twice()),
}


def with_statistics(model: nn.Module) -> nn.Module:
    """The model in eval mode, with statistics of a few batches and with affine parameters that are not trivial."""
    with torch.no_grad():
        for norm in norms_of(model).values():
            if norm.weight is not None:
                norm.weight.uniform_(0.5, 1.5)
                norm.bias.uniform_(-0.5, 0.5)
        for _ in range(20):
            model(X + 0.1 * torch.randn_like(X))
    return model.eval()


def norms_of(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._NormBase)}


@pytest.mark.parametrize("kind", NETWORKS)
def test_it_trains_as_in_float(kind, tmp_path, caplog) -> None:
    model = with_statistics(NETWORKS[kind]())
    quantized = prepare_qat(model, [X])
    assert not caplog.records
    quantized.enable_(False)
    wanted, outputs = model.train()(X), quantized(X)
    torch.testing.assert_close(outputs, wanted, rtol=1e-4, atol=1e-4)
    (outputs**2).sum().backward()
    (wanted**2).sum().backward()
    names = quantized.float_names()
    here = {names[name]: value for name, value in quantized.named_parameters() if value.requires_grad}
    assert here.keys() == dict(model.named_parameters()).keys()
    for name, value in model.named_parameters():
        torch.testing.assert_close(here[name].grad, value.grad, rtol=1e-3, atol=1e-3)
    buffers = {names[name]: value for name, value in quantized.named_buffers()}
    for path, norm in norms_of(model).items():
        for leaf in ("running_mean", "running_var"):
            torch.testing.assert_close(buffers[f"{path}.{leaf}"], getattr(norm, leaf), rtol=1e-4, atol=1e-4)
    quantized.enable_()
    quantized.freeze_statistics_()
    before = quantized.eval()(X).detach()
    quantized.convert_()
    torch.testing.assert_close(quantized(X), before, rtol=0.1, atol=0.1 * float(before.std()))
    assert ck.verify_onnx(ck.export_onnx(quantized, tmp_path / "model.onnx", (X,)), quantized, [(X[:1],), (X,)]).passed
    ck.save(quantized, tmp_path / "saved")
    torch.testing.assert_close(ck.load(copy.deepcopy(model).eval(), tmp_path / "saved")(X), quantized(X), rtol=0, atol=0)


class WithPReLU(nn.BatchNorm2d):
    """A norm that holds its activation, as those of timm do."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.PReLU()

    def forward(self, x):
        return self.act(super().forward(x))


class InTwoPlaces(nn.Module):
    """One norm of maps behind two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x):
        return self.norm(self.b(self.norm(self.a(x).relu())).relu())


FROZEN = {
    "that holds a layer": lambda: behind_relu(WithPReLU(8)),
    "in two places": lambda: images(InTwoPlaces()),
    "of the input, taken in by a convolution": lambda: nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 8, 3), *images()[1:]),
    "of instances": lambda: behind_relu(nn.InstanceNorm2d(8, track_running_stats=True)),
}


@pytest.mark.parametrize("kind", FROZEN)
def test_one_whose_statistics_do_not_follow_is_named(kind, caplog) -> None:
    model = with_statistics(FROZEN[kind]())
    (name,) = norms_of(model)
    prepare_qat(model, [X])
    assert f"prepare_qat: the statistics of '{name}' stay as they are from the first step" in caplog.text


class InEvalMode(nn.BatchNorm2d):
    """A norm that is frozen by a `train` of its own."""

    def train(self, mode=True):
        return super().train(False)


class Backbone(nn.Sequential):
    """Layers whose norms are frozen by the `train` of the module around them."""

    def train(self, mode=True):
        super().train(mode)
        for norm in norms_of(self).values():
            norm.training = False
        return self


@pytest.mark.parametrize(
    "make",
    [
        lambda: behind_relu(InEvalMode(8)),
        lambda: images(nn.Conv2d(8, 8, 3), InEvalMode(8)),
        lambda: images(Backbone(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))),
    ],
    ids=["alone", "behind a layer", "by the module around it"],
)
def test_one_that_its_train_leaves_in_eval_mode_keeps_its_statistics(make) -> None:
    model = make()
    for norm in norms_of(model).values():
        norm.running_mean.uniform_(-0.2, 0.2)
    quantized = prepare_qat(model, [X])
    quantized.enable_(False)
    torch.testing.assert_close(quantized.train()(X), model.train()(X), rtol=1e-4, atol=1e-4)
    here = {quantized.float_names()[name]: value for name, value in quantized.named_buffers()}
    for name, norm in norms_of(model).items():
        torch.testing.assert_close(here[f"{name}.running_mean"], norm.running_mean)


def test_a_norm_behind_a_layer_may_hold_another() -> None:
    model = with_statistics(images(nn.Conv2d(8, 8, 3), WithPReLU(8)))
    quantized = prepare_qat(model, [X])
    quantized.enable_(False)
    torch.testing.assert_close(quantized(X), model.train()(X), rtol=1e-4, atol=1e-4)
    quantized.convert_()
