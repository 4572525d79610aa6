"""Integer models of merged layers: fewer operators, saved and loaded, trained; and what stays apart for the sake of its grid."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import compresskit as ck
from compresskit.quant import OPENVINO, Bits, diagnose, prepare_qat, quantize_dynamic, quantize_static
from compresskit.quant.passes import prepare_graph
from compresskit.quant.passes.unfold_batchnorm import conv_bn_layers


class RepVGG(nn.Module):
    """Two blocks of Ding et al., 2101.03697, between a stem that normalizes images and a classifier."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.48, 0.45, 0.4]).view(3, 1, 1))
        self.register_buffer("std", torch.tensor([0.22, 0.23, 0.225]).view(3, 1, 1))
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 3, 2, 1, bias=False), nn.BatchNorm2d(channels))
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "dense": nn.Sequential(nn.Conv2d(channels, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels)),
                    "point": nn.Sequential(nn.Conv2d(channels, channels, 1, bias=False), nn.BatchNorm2d(channels)),
                    "identity": nn.BatchNorm2d(channels),
                }
            )
            for _ in range(2)
        )
        self.head = nn.Linear(channels, 4)

    def forward(self, x):
        x = F.relu(self.stem((x - self.mean) / self.std))
        for block in self.blocks:
            x = F.relu(block["dense"](x) + block["point"](x) + block["identity"](x))
        return self.head(x.mean((2, 3))) / 4


def trained(model: nn.Module, x: torch.Tensor) -> nn.Module:
    for _ in range(3):
        model(x)
    return model.eval()


@pytest.fixture
def images() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.rand(16, 3, 16, 16)


def test_a_repvgg_is_a_chain_of_integer_convolutions(tmp_path, images) -> None:
    model = trained(RepVGG(), images)
    quantized = quantize_static(model, [images])
    assert list(quantized.placement.integer.values()).count("conv") == 3
    assert str(quantized.placement.coverage).startswith("4 of 4 layers in integers")
    path = ck.export_onnx(quantized, tmp_path / "m.onnx", images)
    assert ck.verify_onnx(path, quantized, [images]).passed
    audit = ck.audit(path)
    assert audit.operators["Conv"] == (3, 3)
    assert audit.integer_fraction == 1
    noise = (quantized(images) - model(images)).square().mean() / model(images).square().mean()
    assert noise < 0.01


def test_an_identity_that_would_make_the_grid_of_a_kernel_coarse_is_not_merged(monkeypatch, images) -> None:
    model = trained(RepVGG(64), images)
    with torch.no_grad():
        for block in model.blocks:  # as trained ones: an identity that outweighs the kernels
            block["dense"][1].weight.mul_(0.1)
            block["point"][1].weight.mul_(0.1)

    def noise_of(quantized: nn.Module) -> float:
        return (quantized(images) - model(images)).square().mean().item()

    apart = quantize_static(model, [images])
    assert ("branch", "conv2d_1", "conv2d_2") in apart.origin.merges  # the two convolutions are one, the identity is not
    assert list(apart.placement.integer.values()).count("conv") > 3
    monkeypatch.setattr("compresskit.quant.passes.prepare_graph.LEAST_MERGED_DECIBELS", None)
    merged = quantize_static(model, [images])
    assert list(merged.placement.integer.values()).count("conv") == 3
    assert noise_of(merged) > 2 * noise_of(apart)


def test_a_merged_model_is_saved_and_loaded(tmp_path, images) -> None:
    model = trained(RepVGG(), images)
    model.blocks[1]["point"].requires_grad_(False)  # what is frozen is not in the file; what was merged is
    quantized = quantize_static(model, [images])
    ck.save(quantized, tmp_path / "saved")
    again = ck.load(RepVGG(), tmp_path / "saved")
    assert torch.equal(again(images), quantized(images))
    assert again.origin.merges == quantized.origin.merges
    merged = {merge.gone for merge in quantized.origin.merges}
    assert len([name for name in merged if name.startswith("conv")]) == 1
    assert not [finding for finding in diagnose(again, [images], model=model).rows if finding.layer == "blocks.0.point.0"]


def test_masks_that_kept_layers_apart_keep_them_apart_in_a_file(tmp_path) -> None:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval(), torch.randn(32, 16)
    ck.prune.plan_mask(model, ck.remove(weights=0.5)).apply_(model)
    quantized = quantize_static(model, [x])
    assert quantized.origin.merges == ()
    ck.save(quantized, tmp_path / "saved")
    plain = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    assert torch.equal(ck.load(plain, tmp_path / "saved")(x), quantized(x))
    assert len(quantize_static(plain, [x]).origin.merges) == 1


def test_qat_trains_merged_layers_and_unfolds_the_batchnorm_of_others(tmp_path, images) -> None:
    model = trained(RepVGG(), images)
    prepared = prepare_qat(model, [images])
    (stem,) = conv_bn_layers(prepared.body)  # its weight is as in the model, and it holds the scale of the images
    assert torch.equal(prepared.body.get_parameter("stem.0.weight"), model.stem[0].weight)
    torch.testing.assert_close(stem.inward, 1 / model.std.flatten())
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.05)
    losses = []
    for _ in range(12):
        loss = F.cross_entropy(prepared(images), torch.arange(16) % 4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    prepared.convert_()
    prepared.eval()
    path = ck.export_onnx(prepared, tmp_path / "m.onnx", images)
    assert ck.verify_onnx(path, prepared, [images]).passed
    assert ck.audit(path).operators["Conv"] == (3, 3)
    ck.save(prepared, tmp_path / "saved")
    assert torch.equal(ck.load(RepVGG(), tmp_path / "saved")(images), prepared(images))


def test_layers_that_the_user_names_stay(images) -> None:
    model = trained(RepVGG(), images)
    skipped = quantize_static(model, [images], skip=("blocks.0.point",))
    assert "blocks.0.point.0" in [skipped.placement.layers[name] for name in skipped.placement.floating]
    chosen = quantize_static(model, [images], bits={"blocks.0.point": Bits(weights=4)})
    assert "blocks.0.point.0" in chosen.placement.layers.values()
    of_the_first = quantize_static(model, [images], bits={"blocks.0.dense": Bits(weights=4)})
    assert "blocks.0.point.0" not in of_the_first.placement.layers.values()


class Scaled(nn.Module):
    """Features, normalized by stored constants, and two layers."""

    def __init__(self, std: torch.Tensor, mean: float = 0.0) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full_like(std, mean))
        self.register_buffer("std", std)
        self.layers = nn.Sequential(nn.Linear(len(std), 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x):
        return self.layers((x - self.mean) / self.std)


@pytest.mark.parametrize("quantize", [quantize_static, quantize_dynamic])
def test_scales_that_make_features_alike_stay_before_a_layer(quantize) -> None:
    """One grid for all features has to be as fine as the smallest of them needs."""
    torch.manual_seed(0)
    units = torch.tensor([1.0, 1000.0, 10.0, 0.1, 1.0, 1.0])
    for std, mean, merges in ((units, 0.0, 0), (torch.ones(6), 100.0, 0), (torch.full((6,), 2.0), 1.0, 2)):
        model, x = Scaled(std, mean).eval(), torch.randn(64, 6) * std + mean
        quantized = quantize(model, [x])
        assert len(quantized.origin.merges) == merges
        noise = (quantized(x) - model(x)).square().mean() / model(x).square().mean()
        assert noise < 0.001


def test_an_identity_alone_stays_beside_an_integer_convolution(images) -> None:
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x):
            return F.relu(self.conv(x) + x)

    assert quantize_static(Residual().eval(), [images]).origin.merges == ()


class RepMixer(nn.Module):
    """The token mixer of FastViT as it is trained (Vasu et al., 2303.14189), linear in its input. size: of what it adds."""

    def __init__(self, channels: int = 16, size: float = 2.0) -> None:
        super().__init__()
        self.norm, self.identity = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.point = nn.Sequential(nn.Conv2d(channels, channels, 1, groups=channels, bias=False), nn.BatchNorm2d(channels))
        self.around = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False), nn.BatchNorm2d(channels)
        )
        self.scale = nn.Parameter(torch.full((channels, 1, 1), size))

    def forward(self, x):
        return x + self.scale * (self.identity(x) + self.point(x) + self.around(x) - (self.norm(x) + 0))


def mixers(images: torch.Tensor, size: float = 2.0) -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU())
    return trained(nn.Sequential(stem, RepMixer(size=size), RepMixer(size=size), nn.Conv2d(16, 8, 1)), images)


def decibels_left(quantized: nn.Module, model: nn.Module, x: torch.Tensor) -> float:
    with torch.no_grad():
        return float(10 * (model(x).square().mean() / (quantized(x) - model(x)).square().mean()).log10())


@pytest.mark.parametrize("seed", range(3))
def test_a_mixer_of_tokens_becomes_one_depthwise_convolution(tmp_path, monkeypatch, seed: int) -> None:
    torch.manual_seed(seed)
    images = torch.randn(16, 3, 16, 16)
    model = mixers(images)
    quantized = quantize_static(model, [images])
    assert list(quantized.placement.integer.values()) == ["conv"] * 4
    path = ck.export_onnx(quantized, tmp_path / "m.onnx", images)
    assert ck.verify_onnx(path, quantized, [images]).passed
    assert {"Add", "Mul", "Sub"}.isdisjoint(ck.audit(path).operators)
    monkeypatch.setattr(prepare_graph, "takes_identity", lambda *_: lambda *_: False)
    apart = quantize_static(model, [images])
    assert sorted(apart.placement.integer.values()) == ["add"] * 2 + ["conv"] * 4
    assert decibels_left(quantized, model, images) > decibels_left(apart, model, images) + 0.5


def test_an_identity_that_outweighs_a_depthwise_kernel_stays(monkeypatch, images) -> None:
    model = mixers(images, size=0.02)
    apart = quantize_static(model, [images])
    assert sorted(apart.placement.integer.values()) == ["add"] * 2 + ["conv"] * 4
    monkeypatch.setattr(prepare_graph, "takes_identity", lambda *_: None)
    merged = quantize_static(model, [images])
    assert list(merged.placement.integer.values()) == ["conv"] * 4
    assert decibels_left(apart, model, images) > decibels_left(merged, model, images) + 0.5


RULES = {
    "x86": {},
    "one of four bits": {"bits": {"1": Bits(weights=4)}},
    "openvino": {"target": OPENVINO},
}


def test_an_identity_is_merged_by_what_the_target_and_the_bits_round(images) -> None:
    """Four bits are too few for ones beside a kernel, and OpenVINO adds the result of a convolution unrounded."""
    model = mixers(images)
    merges = {rule: quantize_static(model, [images], **rule_of).origin.merges for rule, rule_of in RULES.items()}
    identities = {rule: sum(merge.gone in ("relu", "conv2d_2") for merge in found) for rule, found in merges.items()}
    assert identities == {"x86": 2, "one of four bits": 1, "openvino": 0}


def test_a_float_layer_takes_in_no_identity(images) -> None:
    merges = quantize_static(mixers(images), [images], skip=("2",)).origin.merges
    assert {merge.gone for merge in merges} & {"relu", "conv2d_2"} == {"relu"}


class Encoded(nn.Module):
    """A sum with a depthwise convolution whose mean over positions is what the output reads."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.around = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        x = F.relu(self.stem(x))
        return self.head(F.relu(x + self.around(x)).mean((2, 3)))


@pytest.mark.parametrize("seed", [0, 2])
def test_an_identity_that_moves_the_mean_over_positions_stays(monkeypatch, seed: int) -> None:
    """The error of one rounded weight is the same in all positions; that of rounding the convolution averages out."""
    torch.manual_seed(seed)
    model, images, fresh = Encoded().eval(), torch.randn(24, 3, 12, 12), torch.randn(64, 3, 12, 12)
    apart = quantize_static(model, [images])
    assert apart.origin.merges == ()
    monkeypatch.setattr(prepare_graph, "takes_identity", lambda *_: None)
    merged = quantize_static(model, [images])
    assert len(merged.origin.merges) == 1
    assert decibels_left(apart, model, fresh) > decibels_left(merged, model, fresh)


def test_a_merged_identity_is_saved_and_loaded(tmp_path, images) -> None:
    model = mixers(images)
    quantized = quantize_static(model, [images])
    ck.save(quantized, tmp_path / "saved")
    loaded = ck.load(mixers(images), tmp_path / "saved")
    assert loaded.origin.merges == quantized.origin.merges
    assert torch.equal(loaded(images), quantized(images))


def test_the_float_model_keeps_its_layers(images) -> None:
    model = trained(RepVGG(), images)
    before = copy.deepcopy(model.state_dict())
    quantize_static(model, [images])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
