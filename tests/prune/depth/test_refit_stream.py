"""Fitting the layers of the residual stream again after blocks are removed."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace

import pytest
import torch
from networks import build, image, images_task
from quick import make_quick
from residual import Basic, Mobile, Pair, ResNet, Transformer
from torch import nn

import compresskit as ck
from compresskit.base.errors import DataError, ModelError
from compresskit.prune.depth import Depth, costs, depth_stage, importance, plan_blocks, refit_stream, refit_stream_
from compresskit.prune.depth.find_blocks import find_blocks
from compresskit.prune.depth.stream_layers import cut_graph
from compresskit.train.batchnorm import reestimate_batchnorm_

UNTIMED = {"cost": costs.parameters}  # no file is made of a block


def data(count=512, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, 4, 4, generator=generator).repeat_interleave(4, 2).repeat_interleave(4, 3)
    x = x + 0.3 * torch.randn(count, 3, 16, 16, generator=generator)
    return [(x[i : i + 64],) for i in range(0, count, 64)]


def cut(model, *paths):
    """The model without these blocks, the names of all that are gone, and BatchNorm as it was."""
    plan = plan_blocks(model, image(2), blocks=paths, **UNTIMED)
    return plan.apply_(copy.deepcopy(model)), plan.paths


def normal(model):
    """Norms and factors that are none of 1 and 0, and statistics of the data."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.LayerNorm | nn.BatchNorm2d):
                module.weight.copy_(1 + 0.3 * torch.randn(module.weight.shape, generator=generator))
                module.bias.copy_(0.3 * torch.randn(module.bias.shape, generator=generator))
    reestimate_batchnorm_(model, data())
    return model.eval()


def error(model, dense):
    ((x,),) = data(64, seed=7)
    with torch.no_grad():
        return float((model(x) - dense(x)).square().mean() / dense(x).var())


@pytest.mark.parametrize(
    ("make", "paths"),
    [
        (ResNet, ("layer1.1", "layer2.2")),  # ReLU behind the sum
        (ResNet, ("layer1.0", "layer1.1")),  # the stem is fitted, too
        (ResNet, ("layer2.1", "layer2.2")),  # a layer beside a projection
        (Mobile, ("blocks.1",)),
        (Transformer, ("layers.1",)),
        (lambda: Transformer(before=False), ("layers.1", "layers.2")),  # a norm behind the sum
    ],
)
def test_outputs_come_nearer_than_with_batchnorm_alone(make, paths) -> None:
    dense = normal(build(make))
    before = copy.deepcopy(dense.state_dict())
    small, gone = cut(dense, *paths)
    shapes = {name: value.shape for name, value in small.state_dict().items()}
    alone = copy.deepcopy(small)
    reestimate_batchnorm_(alone, data())
    lost = refit_stream_(small, dense, gone, data())
    reestimate_batchnorm_(small, data())  # which hardly changes what was fitted to re-estimated statistics
    assert error(small, dense) < 0.8 * error(alone, dense)
    assert lost
    assert all(0 <= share <= 1 for share in lost.values())
    assert {name: value.shape for name, value in small.state_dict().items()} == shapes
    assert all(torch.equal(value, before[name]) for name, value in dense.state_dict().items())


class Constant(nn.Module):
    """A block whose branch is the same for all inputs."""

    def __init__(self, width):
        super().__init__()
        self.layer = nn.Conv2d(width, width, 1)
        with torch.no_grad():
            self.layer.weight.zero_()

    def forward(self, x):
        return x + self.layer(x)


class Plain(nn.Module):
    """A convolution, with or without a norm, before blocks that can be made up for exactly."""

    def __init__(self, norm):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=not norm), nn.BatchNorm2d(8) if norm else nn.Identity())
        self.blocks, self.head = nn.Sequential(Constant(8), Constant(8)), nn.Linear(8, 5)

    def forward(self, x):
        return self.head(torch.relu(self.blocks(self.stem(x))).mean((2, 3)))


@pytest.mark.parametrize("norm", [False, True])
def test_what_a_constant_can_make_up_for_costs_nothing(norm) -> None:
    """The constants of two blocks go into the bias of the layer before them, or into its norm."""
    dense = build(lambda: Plain(norm)).eval()
    small, gone = cut(dense, "blocks.0", "blocks.1")
    assert error(small, dense) > 0.01
    lost = refit_stream_(small, dense, gone, data())
    assert list(lost) == ["stem.0"]
    assert error(small, dense) < (1e-3 if norm else 1e-6)  # the means over batches of a variance are not that of all rows
    if norm:  # the statistics are those of the data: in train mode it computes the same
        ((x,),) = data(64, seed=7)
        wanted = small(x)
        assert (small.train()(x) - wanted).abs().max() < 0.1 * wanted.std()


def test_layers_are_fitted_from_the_first_cut_on() -> None:
    dense = normal(build(ResNet))
    graphs = cut_graph(dense, ["layer1.1"], image(2))
    assert [layer.weight for layer in graphs.layers] == [
        "layer1.0.b.0.weight", "layer1.2.b.0.weight", "layer2.1.b.0.weight", "layer2.2.b.0.weight",
    ]  # fmt: skip
    names = {layer.weight: (layer.value.name, layer.target.name) for layer in graphs.layers}
    first, *others = names.values()
    assert first[0] != first[1]  # what the removed block gave
    assert all(mine == theirs for mine, theirs in others)


def test_the_cut_graph_computes_what_the_model_without_the_blocks_does() -> None:
    for make in (ResNet, Mobile, Transformer, lambda: Transformer(before=False)):
        dense = normal(build(make))
        paths = tuple(find_blocks(dense, image(2)).removable)[1:]
        small, gone = cut(dense, *paths)
        graphs = cut_graph(dense, gone, image(2))
        x = image(3)
        torch.testing.assert_close(graphs.cut(*x), small(*x))
        torch.testing.assert_close(graphs.whole.module(*x), dense(*x))


def test_what_is_no_block_cannot_be_cut() -> None:
    with pytest.raises(ModelError, match="head: the graph of the network has no single input and output of this block"):
        cut_graph(build(ResNet).eval(), ["head"], image(2))


class OneSize(ResNet):
    """Its code fixes the batch."""

    def forward(self, x):
        return super().forward(x.reshape(64, 3, 16, 16))


def test_a_network_whose_code_fixes_the_batch_is_refitted_on_batches_of_that_size() -> None:
    dense = normal(build(ResNet))
    fixed = OneSize().eval()
    fixed.load_state_dict(dense.state_dict())
    small, gone = cut(dense, "layer1.1")
    alone = copy.deepcopy(small)
    reestimate_batchnorm_(alone, data())
    cut_fixed = OneSize().eval()
    cut_fixed.layer1[1] = small.layer1[1]
    cut_fixed.load_state_dict(small.state_dict())
    assert refit_stream_(cut_fixed, fixed, gone, [*data(), (data()[0][0][:64].clone(),)])
    assert error(cut_fixed, fixed) < 0.8 * error(alone, dense)


def test_tied_layers_are_left_as_they_are() -> None:
    dense = normal(build(ResNet))
    dense.layer1[2].b[0].weight = dense.layer1[0].b[0].weight
    assert "layer1.0.b.0.weight" not in [layer.weight for layer in cut_graph(dense, ["layer1.1"], image(2)).layers]


def test_nothing_is_changed_where_outputs_come_no_nearer(caplog) -> None:
    """The layers are fitted on next to nothing: rows of noise around another mean than the last batch has."""
    dense = normal(build(Transformer))
    small, gone = cut(dense, "layers.1")
    before = copy.deepcopy(small.state_dict())
    *seen, (last,) = data(128)
    with caplog.at_level(logging.WARNING):
        assert refit_stream_(small, dense, gone, [*[(x[:2] * 1e-3 + 100,) for (x,) in seen], (last,)]) == {}
    assert "no nearer" in caplog.text
    assert all(torch.equal(value, before[name]) for name, value in small.state_dict().items())


def test_an_encoder_that_two_inputs_go_through_is_fitted_on_both() -> None:
    dense, pairs = normal(build(Pair)), [(x, -x.flip(0)) for (x,) in data()]
    plan = plan_blocks(dense, pairs[0], blocks=("encoder.layer1.1",), **UNTIMED)
    small = plan.apply_(copy.deepcopy(dense))
    alone = copy.deepcopy(small)
    reestimate_batchnorm_(alone, pairs)
    layers = refit_stream_(small, dense, plan.paths, pairs)
    assert "encoder.layer1.0.b.0" in layers
    ((a, b),) = [(x, -x.flip(0)) for (x,) in data(64, seed=1)]
    with torch.no_grad():
        wanted, got, without = (net.eval()(a, b) for net in (dense, small, alone))
    assert (got - wanted).square().mean() < 0.6 * (without - wanted).square().mean()
    encoder = copy.deepcopy(dense.encoder)
    encoder.layer1[1] = nn.Identity()
    refit_stream_(encoder, dense.encoder, ["layer1.1"], [(x,) for pair in pairs for x in pair])
    torch.testing.assert_close(small.encoder.layer1[0].b[0].weight, encoder.layer1[0].b[0].weight)


class Alternating(nn.Module):
    """Two blocks, each called twice, without a module around them that is."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = Basic(3, 3), Basic(3, 3), nn.Linear(3, 4)

    def forward(self, x):
        return self.head((self.second(self.first(x)) + self.second(self.first(-x))).mean((2, 3)))


class Choosing(ResNet):
    def forward(self, x):
        return super().forward(x if float(x.mean()) > -100 else -x)


CANNOT = {
    "captured": (Choosing, "layer1.1", "are not fitted again"),
    "separated": (Alternating, "second", "second: it is called 2 times, in no part of the model alone"),
}


@pytest.mark.parametrize("what", CANNOT)
def test_a_model_that_cannot_be_fitted_stays_as_it_was(what, caplog) -> None:
    make, path, message = CANNOT[what]
    dense = normal(build(make))
    small, gone = cut(dense, path)
    before = copy.deepcopy(small.state_dict())
    with caplog.at_level(logging.WARNING):
        assert refit_stream_(small, dense, gone, data()) == {}
    assert message in caplog.text
    assert all(torch.equal(value, before[name]) for name, value in small.state_dict().items())
    with pytest.raises(DataError, match="no batch of calibration data"):
        refit_stream_(small, dense, gone, [])


class Words(nn.Module):
    """A transformer that takes sequences."""

    def __init__(self):
        super().__init__()
        self.body = Transformer()
        self.body.patches = nn.Embedding(20, 16)

    def forward(self, tokens):
        hidden = self.body.patches(tokens)
        for layer in self.body.layers:
            hidden = layer(1.0, hidden=hidden)[0]
        return self.body.head(hidden.mean(1))


def test_sequences_of_other_lengths_and_a_short_last_batch_are_no_error() -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randint(20, (rows, length), generator=generator),) for rows, length in [(64, 9)] * 6 + [(64, 5), (3, 9)]]
    torch.manual_seed(0)
    dense = Words().eval()
    plan = plan_blocks(dense, batches[0], blocks=("body.layers.1",), **UNTIMED)
    small = plan.apply_(copy.deepcopy(dense))
    with torch.no_grad():
        wanted, before = dense(*batches[0]), small(*batches[0])
        assert refit_stream_(small, dense, plan.paths, batches)
        assert (small(*batches[0]) - wanted).square().mean() < 0.7 * (before - wanted).square().mean()


def test_one_batch_of_one_row_is_enough_to_run() -> None:
    dense = normal(build(ResNet))
    small, gone = cut(dense, "layer1.1")
    refit_stream_(small, dense, gone, [(data()[0][0][:1],)])
    assert torch.isfinite(small(*image(2))).all()


@pytest.mark.parametrize("make", [ResNet, Transformer])
def test_the_stage_fits_unless_it_is_told_not_to(make) -> None:
    make_quick()
    dense, task = normal(build(make)), images_task(ck, samples=64, classes=4)
    task = replace(task, calibration=[(x, torch.zeros(len(x))) for (x,) in data()])
    blocks = tuple(path for path in find_blocks(dense, image(2)).removable if path.count(".") == 1)[1:2]
    stage = Depth(blocks=blocks, importance=importance.influence, samples=32, **UNTIMED)
    fitted, alone = (replace(stage, reconstruct=on)(copy.deepcopy(dense), task) for on in (True, False))
    assert error(fitted, dense) < 0.8 * error(alone, dense)
    names = {n for n, value in alone.named_parameters() if not torch.equal(value, fitted.get_parameter(n))}
    assert names
    assert all(torch.equal(p, dense.get_parameter(n)) for n, p in alone.named_parameters())


@pytest.mark.parametrize(("repair", "read"), [(3072, 2048), (192, 192)])
def test_the_stage_fits_on_as_many_samples_as_its_docstring_says(repair, read, monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(depth_stage, "refit_stream_", lambda *args: seen.extend(len(x) for (x,) in args[-1]))
    task = replace(images_task(ck, samples=64, classes=4), calibration=[(x, torch.zeros(len(x))) for (x,) in data(3200)])
    stage = Depth(blocks=("layer1.1",), importance=importance.influence, samples=32, **UNTIMED, repair=repair)
    stage(normal(build(ResNet)), task)
    assert sum(seen) == read


def test_inputs_beyond_what_is_held_are_not_read(monkeypatch) -> None:
    """A loader of large images is not read to its end: the inputs are held in memory."""
    batches = data()
    monkeypatch.setattr(refit_stream, "MOST_HELD", 3 * batches[0][0].nbytes)
    asked = []
    dense = normal(build(ResNet))
    small, gone = cut(dense, "layer1.1")
    assert refit_stream_(small, dense, gone, (asked.append(1) or batch for batch in batches))
    assert len(asked) == 4  # the one after the last that is held
    monkeypatch.setattr(refit_stream, "MOST_HELD", 1)
    again, gone = cut(dense, "layer1.1")
    assert refit_stream_(again, dense, gone, iter(batches))  # one to fit, one to judge on


class Depthwise(nn.Module):
    """Blocks in which no layer can be fitted."""

    def __init__(self) -> None:
        super().__init__()
        branch = [nn.Sequential(nn.Conv2d(3, 3, 3, 1, 1, groups=3, bias=False), nn.BatchNorm2d(3)) for _ in range(3)]
        self.branches = nn.ModuleList(map(Added, branch))

    def forward(self, x):
        for branch in self.branches:
            x = branch(x)
        return x


class Added(nn.Module):
    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x):
        return x + self.branch(x)


class Siamese(nn.Module):
    """Compares what one encoder makes of two images."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Depthwise()

    def forward(self, a, b=None):
        return (self.encoder(a) - self.encoder(-a if b is None else b)).mean((2, 3))


@pytest.mark.parametrize("shared", [False, True])
def test_where_no_layer_can_be_fitted_no_statistics_change(shared) -> None:
    dense = build(Siamese if shared else Depthwise).eval()
    batches = [(x, x.flip(0)) if shared else (x,) for (x,) in data(128)]
    plan = plan_blocks(dense, batches[0], blocks=("encoder.branches.1" if shared else "branches.1",), **UNTIMED)
    small = plan.apply_(copy.deepcopy(dense))
    before = copy.deepcopy(small.state_dict())
    assert refit_stream_(small, dense, plan.paths, batches) == {}
    assert [name for name, value in small.state_dict().items() if not torch.equal(value, before[name])] == []


def test_data_that_are_not_finite_change_nothing() -> None:
    dense = normal(build(ResNet))
    small, gone = cut(dense, "layer1.1")
    before = copy.deepcopy(small.state_dict())
    *seen, (bad,), last = data(256)
    with pytest.raises(DataError, match="refitting layers of the stream: .*nan"):
        refit_stream_(small, dense, gone, [*seen, (bad * torch.nan,), last])
    assert all(torch.equal(value, before[name]) for name, value in small.state_dict().items())


def test_what_a_layer_without_a_constant_misses_is_measured_by_the_variance() -> None:
    """As that of all other layers: a mean that it cannot write counts, and makes what it should write no larger."""
    dense = build(lambda: Plain(False)).eval()
    dense.stem[0].bias = None
    with torch.no_grad():
        for block in dense.blocks:
            block.layer.bias.fill_(2.0)
    small, gone = cut(dense, "blocks.0", "blocks.1")
    lost = refit_stream_(small, dense, gone, data())
    x = torch.cat([x for (x,) in data()[:-1]])
    with torch.no_grad():
        wanted = dense.blocks(dense.stem(x))
        missing = (small.stem(x) - wanted).square().mean() / wanted.var((0, 2, 3)).mean()
    assert lost == {"stem.0": pytest.approx(float(missing), rel=0.05)}
    assert lost["stem.0"] > 1
