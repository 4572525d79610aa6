"""One scale for joined values of very different ranges destroys the small ones: what then stays float, and what does not."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from networks import trained_like
from torch import Tensor, nn

import compresskit as ck
from compresskit.metrics import decibels
from compresskit.quant import Bits, prepare_qat, quantize_static
from compresskit.quant.effort.samples import OutputError
from compresskit.quant.passes.placement import JOINED

X = torch.randn(32, 3, 16, 16, generator=torch.Generator().manual_seed(1))


class Joining(nn.Module):
    """A detector: boxes in pixels and scores in 0..1, one tensor. The boxes come out of float operators, or of a convolution."""

    def __init__(self, *, last: bool = False, direct: bool = False, scales: int = 1, masked: bool = False) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU())
        self.levels = nn.ModuleList(nn.Sequential(nn.Conv2d(16, 16, 3, 1, 1), nn.ReLU()) for _ in range(scales))
        self.box = nn.ModuleList(nn.Conv2d(16, 4, 1) for _ in range(scales))
        self.cls = nn.ModuleList(nn.Conv2d(16, 3, 1) for _ in range(scales))
        self.mask = nn.Conv2d(16, 7, 1) if masked else None
        self.last, self.direct = last, direct
        for box in self.box if direct else ():
            nn.init.normal_(box.weight, std=50.0)

    def forward(self, x: Tensor) -> Tensor:
        x, boxes, scores = self.stem(x), [], []
        for level, box, cls in zip(self.levels, self.box, self.cls, strict=True):
            x = level(x)
            boxes.append((box(x) if self.direct else box(x) * 100 + 320).flatten(2))
            scores.append(cls(x).flatten(2))
        if len(boxes) > 1:
            joined = torch.cat([torch.cat(boxes, 2), torch.cat(scores, 2).sigmoid()], 1)
        else:
            joined = torch.cat([boxes[0], scores[0].sigmoid()], 1)
        if self.mask is not None:
            joined = joined * self.mask(x).flatten(2).sigmoid()
        return joined.transpose(1, 2) if self.last else joined


def made(**settings: bool | int) -> Joining:
    torch.manual_seed(0)
    return Joining(**settings).eval()


def errors_by_channel(model: nn.Module, quantized: nn.Module, x: Tensor = X, dim: int = 1) -> Tensor:
    """Relative error of each channel of the output."""
    with torch.no_grad():
        wanted, got = (m(x).movedim(dim, 0).flatten(1) for m in (model, quantized))
    return (wanted - got).norm(dim=1) / wanted.norm(dim=1)


def kept_apart(quantized) -> list[str]:
    return [name for name, why in quantized.placement.floating.items() if why.startswith(JOINED)]


FORMS = [{}, {"last": True}, {"direct": True}, {"scales": 3}, {"masked": True}, {"masked": True, "direct": True, "last": True}]


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("settings", FORMS, ids=str)
def test_scores_beside_boxes_in_pixels_are_kept(settings, tmp_path) -> None:
    model = made(**settings)
    quantized = quantize_static(model, [X])
    assert errors_by_channel(model, quantized, dim=2 if settings.get("last") else 1).max() < 0.05
    assert len(kept_apart(quantized)) == 1
    assert "would leave sigmoid 0." in quantized.placement.floating[kept_apart(quantized)[0]]
    layers, total = quantized.placement.coverage.layers
    assert layers == total  # nothing with weights is left float for it
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", X[:2])
    assert ck.verify_onnx(path, quantized, [X]).passed


def test_inner_concatenations_of_one_kind_stay_in_integers() -> None:
    placement = quantize_static(made(scales=3), [X]).placement
    assert sorted(name for name, kind in placement.carried.items() if kind == "concat") == ["cat", "cat_1"]


def test_two_outputs_and_alike_operands_are_left_as_they_are() -> None:
    class Heads(nn.Module):
        def __init__(self, *, joins: bool) -> None:
            super().__init__()
            self.stem, self.a, self.b, self.joins = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1), nn.Conv2d(8, 3, 1), joins

        def forward(self, x):
            x = self.stem(x).relu()
            return torch.cat([self.a(x), self.b(x)], 1) if self.joins else (self.a(x) * 100 + 320, self.b(x).sigmoid())

    for joins in (False, True):
        placement = quantize_static(trained_like(Heads(joins=joins), (X,)), [X]).placement
        assert "concat" in placement.carried.values() or not joins
        assert not any("joins" in why for why in placement.floating.values())


class Skips(nn.Module):
    """A layer makes its values so many times larger; the next one reads both, and weighs both alike where it is `fair`."""

    def __init__(self, times: float, *, fair: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.c, self.head = nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        with torch.no_grad():
            self.b.weight *= times
            self.b.bias *= times
            self.c.weight[:, 8:] /= times if fair else 1.0

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x).relu()
        return self.head(self.c(torch.cat([a, self.b(a).relu()], 1)).relu())


def skipping(times: float, *, fair: bool) -> Skips:
    torch.manual_seed(0)
    return Skips(times, fair=fair).eval()


def output_decibels(model: nn.Module, quantized: nn.Module, x: Tensor = X) -> float:
    with torch.no_grad():
        wanted, got = model(x), quantized(x)
    return decibels(float(wanted.square().sum()), float((wanted - got).square().sum()))


def test_a_skip_connection_that_keeps_enough_stays_in_integers() -> None:
    quantized = quantize_static(skipping(30.0, fair=True), [X])
    assert quantized.placement.carried == {"cat": "concat"}
    assert quantized.placement.floating == {}


def test_a_layer_beside_a_concatenation_is_not_given_its_scale() -> None:
    """What it reads comes to the concatenation, too, whose other operand is a thousand times larger."""
    model = skipping(1000.0, fair=False)
    quantized = quantize_static(model, [X])
    assert kept_apart(quantized) == list(quantized.placement.floating) == ["cat"]
    assert output_decibels(model, quantized) > 30


def test_a_layer_that_one_scale_would_starve_stays_float() -> None:
    model = skipping(1000.0, fair=True)
    quantized = quantize_static(model, [X])
    assert "leave relu 0." in quantized.placement.floating["conv2d_2"]
    assert output_decibels(model, quantized) > 35
    strict = quantize_static(model, [X], strict=True)  # the layer is asked for in integers
    assert strict.placement.coverage.layers == (4, 4)


class Table(nn.Module):
    """Features in thousands and an embedding, joined."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.a, self.b = nn.Embedding(10, 8), nn.Linear(12, 32), nn.Linear(32, 3)
        with torch.no_grad():
            self.a.weight[:, :4] /= 5000

    def forward(self, features: Tensor, category: Tensor) -> Tensor:
        return self.b(self.a(torch.cat([features, self.words(category)], 1)).relu())


def test_an_embedding_beside_features_in_thousands_still_counts(tmp_path) -> None:
    torch.manual_seed(0)
    model, inputs = Table().eval(), (torch.randn(128, 4) * 5000, torch.randint(0, 10, (128,)))
    quantized = quantize_static(model, [inputs])
    with torch.no_grad():
        assert (quantized(*inputs) - model(*inputs)).norm() < 0.03 * model(*inputs).norm()
    assert quantized.placement.coverage.layers == (1, 2)
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", inputs)
    assert ck.verify_onnx(path, quantized, [inputs]).passed


def test_a_model_keeps_a_layer_in_integers() -> None:
    class Only(Table):
        def forward(self, features: Tensor, category: Tensor) -> Tensor:
            return self.a(torch.cat([features, self.words(category)], 1))

    inputs = (torch.randn(32, 4) * 5000, torch.randint(0, 10, (32,)))
    assert list(quantize_static(Only().eval(), [inputs]).placement.integer) == ["linear"]


def test_ranges_come_from_more_than_the_first_batch() -> None:
    """The first sample is black: its boxes are one point, and hardly larger than the scores."""
    model = made()
    with torch.no_grad():
        model.box[0].bias.fill_(-3.2)
        model.stem[0].bias.zero_()
        model.levels[0][0].bias.zero_()
    quantized = quantize_static(model, [torch.zeros(1, 3, 16, 16), *X.split(8)])
    assert kept_apart(quantized) == ["cat"]


def test_more_bits_have_room_for_both() -> None:
    model = made(direct=True)
    with torch.no_grad():
        model.box[0].weight /= 50
    assert kept_apart(quantize_static(model, [X])) == []
    wide = quantize_static(made(direct=True), [X], bits=Bits(activations=16))
    assert kept_apart(wide) == []
    assert errors_by_channel(made(direct=True), wide).max() < 0.05


def test_a_model_is_rebuilt_as_its_batches_decided(tmp_path) -> None:
    for model in (made(), skipping(1000.0, fair=True)):
        quantized = quantize_static(model, [X])
        ck.save(quantized, tmp_path / model.__class__.__name__)
        again = ck.load(copy.deepcopy(model), tmp_path / model.__class__.__name__)
        assert again.placement == quantized.placement
        assert torch.equal(again(X), quantized(X))


def test_it_is_trained_so() -> None:
    model = made()
    prepared = prepare_qat(model, [X])
    assert kept_apart(prepared) == ["cat"]
    prepared(X).square().mean().backward()
    prepared.convert_()
    assert errors_by_channel(model, prepared.eval()).max() < 0.05


def test_the_effort_levels_and_inside_keep_it_so() -> None:
    model = made(direct=True)
    settings = {"choose": "rules", "float_macs": 0.0}
    assert kept_apart(quantize_static(model, [X], effort="balanced", **settings)) == ["cat"]
    whole = nn.Sequential(nn.Identity(), model)
    assert kept_apart(quantize_static(whole, [X], inside="1")[1]) == ["cat"]


def test_effort_sees_scores_that_are_lost_beside_boxes() -> None:
    """One part of the output for each kind of channels: the power of the boxes alone would hide all else."""
    model = made(last=True)

    class Blind(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([model(x)[..., :4], torch.zeros(len(x), 64, 3)], 2)

    error = OutputError(model, [(X,)], None)
    assert [part.shape[2] for part in error.outputs[0]] == [3, 4]
    assert error.of(Blind()) == pytest.approx([1.0, 0.0])
    alike = OutputError(nn.Sequential(model.stem, model.levels[0]), [(X,)], None)
    assert [part.shape[1] for part in alike.outputs[0]] == [16]


def test_where_nothing_may_be_float_the_loss_is_said() -> None:
    class Scaled(Skips):
        def forward(self, x: Tensor) -> Tensor:
            a = self.a(x).relu()
            return torch.cat([self.c(torch.cat([a, a], 1)), self.b(a)], 1)

    model = Scaled(3000.0, fair=False).eval()
    message = (
        r"quantize_static: nothing is left of 8 of 16 channels \(0, 1, 2, 3, 4, 5, 6, 7\) of the output: .* return small ones"
    )
    with pytest.warns(UserWarning, match=message):
        quantized = quantize_static(model, [X], strict="all")
    found = next(f for f in ck.quant.diagnose(quantized, [X]).findings if f.cause == "lost channels")
    assert found.layer == "output"
    assert found.text.startswith("8 of 16 channels (0, 1, 2, 3, 4, 5, 6, 7) keep less than 10 dB, 0.0 at worst, beside ")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert errors_by_channel(model, quantize_static(model, [X])).max() < 0.1
