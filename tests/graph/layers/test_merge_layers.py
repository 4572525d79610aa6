"""Merging layers of captured graphs: the same function in float64, of fewer operators; and what must stay apart."""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from compresskit.graph.capture import capture
from compresskit.graph.layers.fold_batchnorm import FoldedBatchNorm, fold_batchnorm_
from compresskit.graph.layers.merge_layers import merge_layers_
from compresskit.graph.layers.merging import MergedLayer, MergeRules
from compresskit.graph.masks import Masks, attach_masks_, masks_of


def random_statistics_(model: nn.Module) -> nn.Module:
    """Give every BatchNorm statistics and parameters that matter; returns the model in eval mode."""
    for norm in model.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm) and norm.track_running_stats:
            nn.init.normal_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2)
            if norm.weight is not None:
                nn.init.uniform_(norm.weight, 0.5, 1.5)
                nn.init.normal_(norm.bias)
    return model.eval()


def operators(graph: torch.fx.Graph) -> Counter[str]:
    return Counter(str(n.target).split(".")[1] for n in graph.nodes if n.op == "call_function")


def merged(model: nn.Module, *x: torch.Tensor, rules: MergeRules | None = None, dynamic=(0,)):
    """Capture a model in float64, merge, and compare; returns (graph module, what was merged)."""
    model = random_statistics_(model).double()
    inputs = tuple(v.double() for v in x)
    module = capture(copy.deepcopy(model), inputs, dynamic=dynamic).module
    fold_batchnorm_(module)
    done = merge_layers_(module, rules)
    with torch.no_grad():
        for rows in (1, 7):
            given = [v[:1].repeat(rows, *[1] * (v.ndim - 1)) + torch.randn(rows, *v.shape[1:]).double() for v in inputs]
            torch.testing.assert_close(module(*given), model(*given), atol=1e-10, rtol=1e-10)
    return module, done


class Branches(nn.Module):
    """The sum of branches that read one value. identity: whether the value is one of them."""

    def __init__(self, *branches: nn.Module, identity: bool = False) -> None:
        super().__init__()
        self.branches, self.identity = nn.ModuleList(branches), identity

    def forward(self, x):
        y = self.branches[0](x)
        for branch in self.branches[1:]:
            y = y + branch(x)
        return F.relu(y + x if self.identity else y)


def conv_bn(conv: nn.Module) -> nn.Sequential:
    return nn.Sequential(conv, {3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[conv.weight.ndim](conv.out_channels))


def repvgg(channels: int = 8, groups: int = 1, stride: int = 1) -> nn.Module:
    """Ding et al., 2101.03697."""
    branches = [conv_bn(nn.Conv2d(channels, channels, k, stride, k // 2, groups=groups, bias=False)) for k in (3, 1)]
    return Branches(*branches, *([nn.BatchNorm2d(channels)] if stride == 1 else []))


def mobileone(channels: int = 8) -> nn.Module:
    """Vasu et al., 2206.04040: a depthwise block of four branches and its scale, then a pointwise one."""

    def block(kernel: int, groups: int, scale: bool) -> nn.Module:
        make = partial(nn.Conv2d, channels, channels, padding=kernel // 2, groups=groups, bias=False)
        convs = [conv_bn(make(kernel)) for _ in range(4)]
        convs += [conv_bn(nn.Conv2d(channels, channels, 1, groups=groups, bias=False))] if scale else []
        return Branches(*convs, nn.BatchNorm2d(channels))

    return nn.Sequential(block(3, channels, True), block(1, 1, False))


def acnet(stride: int = 1) -> nn.Module:
    """Ding et al., 1908.03930."""
    kernels = ((3, 3), (3, 1), (1, 3))
    return Branches(*[conv_bn(nn.Conv2d(4, 8, k, stride, (k[0] // 2, k[1] // 2), bias=False)) for k in kernels])


@pytest.mark.parametrize(
    ("make", "channels", "spatial", "convs"),
    [
        (repvgg, 8, 2, 1),
        (partial(repvgg, groups=2), 8, 2, 1),
        (partial(repvgg, groups=8), 8, 2, 1),
        (partial(repvgg, stride=2), 8, 2, 1),
        (mobileone, 8, 2, 2),
        (acnet, 4, 2, 1),
        (partial(acnet, stride=2), 4, 2, 1),
        (lambda: Branches(nn.Conv1d(4, 4, 5, padding=2), nn.Conv1d(4, 4, 3, padding=2, dilation=2), identity=True), 4, 1, 1),
        (lambda: Branches(nn.Conv3d(4, 4, 3, padding=1), nn.BatchNorm3d(4), identity=True), 4, 3, 1),
        (lambda: Branches(nn.Conv2d(4, 4, 3, padding="same"), identity=True), 4, 2, 1),
        (lambda: Branches(nn.Linear(6, 6), nn.Linear(6, 6, bias=False), identity=True), 6, 0, 0),
    ],
)
def test_branches_become_one_layer(make, channels: int, spatial: int, convs: int) -> None:
    x = torch.randn(2, channels, *[9] * spatial)
    module, done = merged(make(), x)
    found = operators(module.graph)
    assert sum(n for name, n in found.items() if name.startswith("conv")) == convs
    assert not {"add", "batch_norm"} & set(found)
    assert {merge.rule for merge in done} == {"branch"}
    assert sum(n for name, n in found.items() if name == "linear") == (spatial == 0)


class Signed(nn.Module):
    """Branches that are subtracted, beside another value, and one that is added twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.other = (nn.Conv2d(4, 4, k, padding=k // 2) for k in (3, 3, 1, 3))

    def forward(self, x):
        y = self.other(F.relu(x))
        return F.relu((y - self.a(x)) + (x - (self.b(x) - self.c(x))) - 0.5 * x)


def test_signs_and_other_summands_are_kept() -> None:
    module, _ = merged(Signed(), torch.randn(2, 4, 6, 6))
    assert operators(module.graph) == {"conv2d": 2, "add": 1, "relu": 2}


class ReadElsewhere(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        a = self.a(x)
        return F.relu(a + self.b(x)), a


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        y = self.a(x)
        return F.relu(y + y)


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return F.relu(self.a(x) + self.b(x)) + self.a(2 * F.relu(x))


class Tied(nn.Module):
    """Logits by the weight of the embedding, scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 4), nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(F.relu(x @ self.embedding.weight)) * 0.5


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (ReadElsewhere, (2, 4, 6, 6)),
        (Doubled, (2, 4, 6, 6)),
        (CalledTwice, (2, 4, 6, 6)),
        (Tied, (2, 11)),
        (lambda: Branches(nn.Conv2d(4, 8, (1, 3), padding=(0, 1)), nn.Conv2d(4, 8, (3, 1), padding=(1, 0))), (2, 4, 6, 6)),
        (lambda: Branches(nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8)), (2, 8, 6, 6)),
        (lambda: Branches(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1, stride=1, bias=False), nn.MaxPool2d(1)), (2, 4, 6, 6)),
        (lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)), (2, 4, 6, 6)),
        (lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)), (2, 4, 6, 6)),
        (lambda: nn.Sequential(nn.Conv2d(4, 2, 1), nn.Conv2d(2, 4, 3)), (2, 4, 6, 6)),
        (lambda: nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 1)), (2, 8, 6, 6)),
        (lambda: nn.Sequential(nn.Linear(16, 2), nn.Linear(2, 16)), (2, 16)),
    ],
)
def test_what_is_not_cheaper_or_not_alone_stays(model, x) -> None:
    model = model()
    before = operators(capture(copy.deepcopy(model), torch.randn(x)).module.graph)
    module, done = merged(model, torch.randn(x))
    if isinstance(model, Branches) and len(model.branches) == 3:
        assert [merge.rule for merge in done] == ["branch"]  # of the two convolutions; pooling is none
    else:
        left = operators(module.graph)
        assert {name: n for name, n in left.items() if name != "mul"} == {n: c for n, c in before.items() if n != "mul"}


@pytest.mark.parametrize(
    ("layers", "x", "left"),
    [
        ([nn.Conv2d(4, 4, 1), nn.Conv2d(4, 8, 3)], (2, 4, 9, 9), {"conv2d": 1}),
        ([nn.Conv2d(4, 4, 1, bias=False), nn.Conv2d(4, 8, 3, 2, padding=1)], (2, 4, 9, 9), {"conv2d": 1}),
        ([nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 4, 1)], (2, 4, 9, 9), {"conv2d": 1}),
        ([nn.Conv2d(4, 16, 2, 2), nn.BatchNorm2d(16), nn.Conv2d(16, 4, 2, 2)], (2, 4, 8, 8), {"conv2d": 1}),
        ([nn.Conv2d(8, 8, 1, groups=4), nn.Conv2d(8, 8, 1, groups=2)], (2, 8, 5, 5), {"conv2d": 1}),
        ([nn.Conv2d(1, 8, 1, bias=False), nn.Conv2d(8, 8, 3, padding=1, groups=8)], (2, 1, 5, 5), {"conv2d": 1}),
        ([nn.Conv1d(4, 4, 1), nn.Conv1d(4, 4, 1), nn.Conv1d(4, 4, 1)], (2, 4, 9), {"conv1d": 1}),
        ([nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(3, 3)], (2, 5, 8), {"linear": 1}),
        ([nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 3, bias=False)], (2, 8), {"linear": 1}),
    ],
)
def test_consecutive_layers_become_one_where_that_is_cheaper(layers, x, left) -> None:
    module, done = merged(nn.Sequential(*layers), torch.randn(x))
    assert operators(module.graph) == left
    assert {merge.rule for merge in done} == {"sequence"}


class Constants(nn.Module):
    """What `compute(self, x)` computes with the layers conv (padded), bare (not padded) and linear, and constants."""

    def __init__(self, compute) -> None:
        super().__init__()
        self.conv, self.bare, self.linear = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 2, bias=False), nn.Linear(6, 6)
        self.up = nn.ConvTranspose2d(4, 6, 2, 2)
        self.depthwise = nn.Conv2d(4, 8, 3, groups=4)
        self.norm, self.norm1d = nn.BatchNorm2d(4), nn.BatchNorm1d(6)
        self.register_buffer("mean", torch.randn(1, 4, 1, 1))
        self.register_buffer("std", torch.rand(4, 1, 1) + 0.5)
        self.gamma = nn.Parameter(torch.randn(6))
        self.number = nn.Parameter(torch.tensor(0.7))
        self.compute = compute

    def forward(self, x):
        return self.compute(self, x)


IMAGE, ROWS = (2, 4, 6, 6), (2, 5, 6)


@pytest.mark.parametrize(
    ("compute", "x", "left"),
    [
        (lambda m, x: -(m.conv(x) * m.std - m.mean) / 3, IMAGE, {"conv2d": 1}),
        (lambda m, x: 2 - m.number * m.bare(x), IMAGE, {"conv2d": 1}),
        (lambda m, x: m.bare(x) * m.std.exp() + m.mean.neg(), IMAGE, {"conv2d": 1}),
        (lambda m, x: m.gamma * m.linear(x) + 1, ROWS, {"linear": 1}),
        (lambda m, x: m.linear(x).transpose(1, 2) * m.gamma[:, None], ROWS, {"linear": 1, "transpose": 1}),
        (lambda m, x: m.up(x) * m.gamma.view(6, 1, 1), IMAGE, {"conv_transpose2d": 1}),
        (lambda m, x: m.linear(x).reshape(-1, 2, 3) * 0.125, ROWS, {"linear": 1, "reshape": 1}),
        (lambda m, x: m.conv((x - m.mean) / m.std), IMAGE, {"add": 1, "conv2d": 1}),
        (lambda m, x: m.bare((x / 255 - m.mean) / m.std), IMAGE, {"conv2d": 1}),
        (lambda m, x: m.depthwise((x - m.mean) / m.std), IMAGE, {"conv2d": 1}),
        (lambda m, x: m.conv(m.std * x), IMAGE, {"conv2d": 1}),
        (lambda m, x: m.linear(x * m.gamma + 2), ROWS, {"linear": 1}),
        (lambda m, x: m.linear(m.norm1d(x)), (2, 6), {"linear": 1}),
        (lambda m, x: m.conv(m.norm(x)), IMAGE, {"batch_norm": 1, "conv2d": 1}),  # an addition in its place gains nothing
        (lambda m, x: m.conv(x + m.mean), IMAGE, {"add": 1, "conv2d": 1}),
        (lambda m, x: F.relu(((x - m.mean) / m.std) * 2 + m.mean), IMAGE, {"mul": 1, "add": 1, "relu": 1}),
        (lambda m, x: F.relu(x * 2 / m.std), IMAGE, {"mul": 1, "relu": 1}),
        (lambda m, x: F.relu(x * 2 * m.gamma), ROWS, {"mul": 2, "relu": 1}),  # gamma would learn no more
        (lambda m, x: F.relu(m.linear(x).mT * m.gamma), (2, 6, 6), {"linear": 1, "mT": 1, "mul": 1, "relu": 1}),  # other axis
        (lambda m, x: m.conv(x[:, :1] - m.mean), IMAGE, {"slice": 1, "sub": 1, "conv2d": 1}),  # it makes four channels of one
    ],
)  # fmt: skip
def test_constants_are_folded(compute, x, left) -> None:
    module, _ = merged(Constants(compute), torch.randn(x))
    assert operators(module.graph) == left


class FrozenNorm(nn.Module):
    """As torchvision's `FrozenBatchNorm2d`, whose scale and shift are computed in every forward pass."""

    def __init__(self, channels: int, learned: bool = False) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("var", torch.rand(channels) + 0.5)
        self.shift = nn.Parameter(torch.ones(channels)) if learned else None

    def forward(self, x):
        scale = (self.var + 1e-5).rsqrt().reshape(1, -1, 1, 1)
        y = x * scale - self.mean.reshape(1, -1, 1, 1) * scale
        return y if self.shift is None else y + (2 * self.shift).reshape(1, -1, 1, 1)


@pytest.mark.parametrize("learned", [False, True])
def test_frozen_norms_are_folded_into_the_layer_before_them(learned: bool) -> None:
    layers = [nn.Conv2d(3, 8, 1, bias=False), FrozenNorm(8, learned), nn.ReLU(), nn.Conv2d(8, 4, 1), FrozenNorm(4)]
    module, _ = merged(nn.Sequential(*layers), torch.randn(2, 3, 5, 5))
    assert operators(module.graph) == {"conv2d": 2, "relu": 1}
    module, done = merged(nn.Sequential(nn.ReLU(), FrozenNorm(3)), torch.randn(2, 3, 5, 5))
    assert done == []


class ConvNeXtBlock(nn.Module):
    """Liu et al., 2201.03545, as in torchvision: the layer scale meets the channels behind a permutation."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm, self.a, self.b = nn.LayerNorm(channels), nn.Linear(channels, 16), nn.Linear(16, channels)
        self.layer_scale = nn.Parameter(torch.rand(channels, 1, 1))

    def forward(self, x):
        y = self.b(F.gelu(self.a(self.norm(self.depthwise(x).permute(0, 2, 3, 1))))).permute(0, 3, 1, 2)
        return x + self.layer_scale * y


def test_a_layer_scale_is_folded() -> None:
    module, done = merged(ConvNeXtBlock(), torch.randn(2, 8, 9, 9), dynamic=(0, 2, 3))
    assert "mul" not in operators(module.graph)
    assert done == [MergedLayer("after", "linear_1", "mul")]


def test_half_precision_stays() -> None:
    model = repvgg().half()
    module = capture(model, torch.randn(2, 8, 6, 6).half()).module
    fold_batchnorm_(module)
    assert merge_layers_(module) == []


def test_names_that_the_user_gave_keep_layers_apart() -> None:
    x = torch.randn(2, 8, 9, 9)
    every = {"conv2d_1", "batch_norm_2"}
    for rules, gone in (
        (MergeRules(), every),
        (MergeRules(skip=("branches.1",)), {"batch_norm_2"}),
        (MergeRules(skip=("branches.0",)), {"batch_norm_2"}),  # a scale costs nothing there
        (MergeRules(skip=("branches",)), every),
        (MergeRules(named=("branches.0",)), every),  # the one layer takes what was chosen for the first
        (MergeRules(named=("branches.1",)), {"batch_norm_2"}),
        (MergeRules(skip=("add_1",)), set()),
        (MergeRules(recorded=frozenset()), set()),
        (MergeRules(recorded=frozenset({MergedLayer("branch", "conv2d", "batch_norm_2")})), {"batch_norm_2"}),
    ):
        _, done = merged(repvgg(), x, rules=rules)
        assert {merge.gone for merge in done} == gone, rules


def test_a_rule_says_whether_a_layer_takes_an_identity() -> None:
    asked = []
    rules = MergeRules(takes_identity=lambda layer, weight: asked.append(weight) is not None)
    conv, x = nn.Conv2d(8, 8, 3, padding=1, groups=8), torch.randn(2, 8, 9, 9)
    assert merged(Branches(conv, identity=True), x, rules=rules)[1] == []
    expected = conv.weight.detach().clone()
    expected[:, 0, 1, 1] += 1
    assert len(asked) == 1
    torch.testing.assert_close(asked[0], expected.to(asked[0]))
    several = Branches(conv, nn.Conv2d(8, 8, 1, groups=8), identity=True)
    assert len(merged(several, x, rules=rules)[1]) == 2  # that saves a layer, and is not asked
    assert len(asked) == 1


def test_weights_that_are_frozen_stay_apart_from_those_that_train() -> None:
    model = Branches(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1))
    model.branches[1].requires_grad_(False)
    assert merged(model, torch.randn(2, 4, 6, 6))[1] == []
    recorded = frozenset(
        {MergedLayer("branch", "conv2d", "conv2d_1")}
    )  # as a model that is built again, whose weights are not frozen
    assert len(merged(model, torch.randn(2, 4, 6, 6), rules=MergeRules(recorded=recorded))[1]) == 1
    scaled = Constants(lambda m, x: m.gamma * m.linear(x) * 2)
    scaled.linear.requires_grad_(False)
    assert operators(merged(scaled, torch.randn(ROWS))[0].graph)["mul"] == 2  # gamma trains, the layer does not


def masked(model: nn.Module, name: str) -> torch.fx.GraphModule:
    module = capture(model.eval(), torch.randn(2, 4, 6, 6)).module
    mask = torch.rand(module.get_parameter(name).shape) > 0.5
    attach_masks_(module, Masks({name: mask}))
    masks_of(module).zero_(module)
    return module


def test_masks_follow_the_weights() -> None:
    module = masked(Branches(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1), identity=True), "branches.0.weight")
    own = masks_of(module).masks["branches.0.weight"].clone()
    assert len(merge_layers_(module)) == 2
    union = own.clone()
    union[:, :, 1, 1] = True  # the convolution of size 1 has no mask
    assert torch.equal(masks_of(module).masks["branches.0.weight"], union)
    assert masks_of(module).violations(module) == {}
    module = masked(nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3)), "0.weight")
    assert merge_layers_(module) == []  # their product would have few zeros
    module = masked(Constants(lambda m, x: m.bare(3 * x) * m.std), "bare.weight")
    assert len(merge_layers_(module)) == 2
    assert masks_of(module).violations(module) == {}


@pytest.mark.parametrize("compute", [lambda m, x: m(x) * 3 - 1, lambda m, x: m(x * 2 + 1), lambda m, x: m((x - 1) / 2) * 3])
def test_a_folded_batchnorm_can_still_be_unfolded(compute) -> None:
    layers = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 8, 3, bias=False), nn.BatchNorm2d(8))

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            return compute(self.layers, x)

    model, x = random_statistics_(Around()).double(), torch.randn(2, 4, 6, 6).double()
    module = capture(copy.deepcopy(model), x).module
    folds: list[FoldedBatchNorm] = []
    fold_batchnorm_(module, folds)
    merge_layers_(module, None, folds)
    assert operators(module.graph) == {"conv2d": 1}
    (fold,) = folds
    (node,) = [n for n in module.graph.nodes if n.op == "call_function"]
    assert fold.layer is node
    t = fold.tensors
    y = F.conv2d(x, t["weight"], t["bias"])
    torch.testing.assert_close(F.batch_norm(y, t["mean"], t["var"], t["gamma"], t["beta"], eps=fold.eps), model(x))


def test_merging_is_found_again() -> None:
    model = nn.Sequential(repvgg(), Constants(lambda m, x: m.bare(2 * x)), nn.Conv2d(4, 4, 1), nn.ReLU())
    model = nn.Sequential(repvgg(4), *model[1:])
    _, done = merged(model, torch.randn(2, 4, 9, 9))
    module, again = merged(model, torch.randn(2, 4, 9, 9), rules=MergeRules(recorded=frozenset(done)))
    assert again == done
    assert len(done) == 4
    assert merge_layers_(module) == []
