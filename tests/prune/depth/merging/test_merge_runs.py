"""One convolution in the place of several equals them, padded before the first, whatever their sizes are."""

from __future__ import annotations

import copy
import importlib
import re

import pytest
import torch
import torch.nn.functional as F
from convolution_runs import BlockInCode, InCode, Narrow, merged_by_hand
from networks import build, image
from torch import nn

import compresskit as ck
from compresskit.graph.replacements import Merged, Unmerged
from compresskit.graph.surgery import restructure_, structure
from compresskit.prune.depth import merge_, plan_merges
from compresskit.prune.depth.merging import find_runs

plan_merges_module = importlib.import_module("compresskit.prune.depth.merging.plan_merges")


def equal_costs(model, example, runs):
    return dict.fromkeys(runs, 1.0)


def sequence(*sizes, rank=2, bias=False):
    """Convolutions with BatchNorm and a ReLU after each."""
    conv, norm = ((nn.Conv1d, nn.BatchNorm1d), (nn.Conv2d, nn.BatchNorm2d), (nn.Conv3d, nn.BatchNorm3d))[rank - 1]
    layers = []
    for inputs, outputs, settings in sizes:
        layers += [conv(inputs, outputs, bias=bias, **settings), norm(outputs), nn.ReLU()]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, norm):
                for values in (module.weight, module.bias, module.running_mean):
                    values.normal_(0.2)
                module.running_var.uniform_(0.5, 2)
    return model.eval()


SIZES = {
    "basic": [(4, 6, {"kernel_size": 3, "padding": 1}), (6, 5, {"kernel_size": 3, "padding": 1})],
    "strides": [(4, 6, {"kernel_size": 3, "padding": 1, "stride": 2}), (6, 5, {"kernel_size": 3, "padding": 1, "stride": 2})],
    "dilations": [
        (4, 6, {"kernel_size": 3, "padding": 2, "dilation": 2}),
        (6, 5, {"kernel_size": 3, "padding": 3, "dilation": 3}),
    ],
    "no padding": [(4, 6, {"kernel_size": 5}), (6, 5, {"kernel_size": 2})],
    "uneven": [(4, 6, {"kernel_size": (3, 1), "padding": (1, 0)}), (6, 5, {"kernel_size": (1, 5), "padding": (0, 3)})],
    "by name": [(4, 6, {"kernel_size": 3, "padding": "same"}), (6, 5, {"kernel_size": 3, "padding": "valid"})],
    "inverted": [
        (4, 12, {"kernel_size": 1}),
        (12, 12, {"kernel_size": 3, "padding": 1, "stride": 2, "groups": 12}),
        (12, 5, {"kernel_size": 1}),
    ],
    "groups": [(4, 8, {"kernel_size": 3, "padding": 1, "groups": 2}), (8, 6, {"kernel_size": 1, "groups": 2})],
    "groups of others": [(6, 12, {"kernel_size": 1, "groups": 2}), (12, 6, {"kernel_size": 3, "padding": 1, "groups": 3})],
}  # fmt: skip


def without_activations(model, x):
    """The network without its inner ReLUs, by plain loops, with one padding in front."""
    convolutions = [layer for layer in model if isinstance(layer, nn.modules.conv._ConvNd)]
    pads, step = [0] * (x.ndim - 2), [1] * (x.ndim - 2)
    for layer in convolutions:
        own = layer.padding if isinstance(layer.padding, tuple) else [layer.padding == "same"] * (x.ndim - 2)  # of three taps
        pads = [p + s * q for p, s, q in zip(pads, step, own, strict=True)]
        step = [s * t for s, t in zip(step, layer.stride, strict=True)]
    x = F.pad(x, [p for pad in reversed(pads) for p in (pad, pad)])
    function = (F.conv1d, F.conv2d, F.conv3d)[x.ndim - 3]
    for layer in model[:-1]:
        if isinstance(layer, nn.modules.conv._ConvNd):
            x = function(x, layer.weight, layer.bias, layer.stride, 0, layer.dilation, layer.groups)
        elif not isinstance(layer, nn.ReLU):
            x = layer(x)
    return torch.relu(x)


@pytest.mark.matrix
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_one_convolution_equals_several(sizes, bias) -> None:
    model = sequence(*sizes, bias=bias).double()
    x = torch.randn(3, 4 if sizes[0][0] == 4 else 6, 13, 14, dtype=torch.float64)
    wanted = without_activations(model, x)
    plan = plan_merges(model, x, runs=(" + ".join(str(3 * i) for i in range(len(sizes))),), cost=equal_costs)
    small = plan.apply_(copy.deepcopy(model))
    torch.testing.assert_close(small(x), wanted, rtol=1e-10, atol=1e-10)
    (layer,) = [m for m in small.modules() if isinstance(m, nn.modules.conv._ConvNd)]
    assert layer.kernel_size == plan.kernels[0]
    assert not torch.allclose(small(x), model(x))


@pytest.mark.parametrize("rank", [1, 3])
def test_of_other_dimensions(rank) -> None:
    model = sequence(*SIZES["strides"], rank=rank)
    x = torch.randn(2, 4, *(12,) * rank)
    small = plan_merges(model, x, runs=1, cost=equal_costs).apply_(copy.deepcopy(model))
    torch.testing.assert_close(small(x), without_activations(model, x), rtol=1e-4, atol=1e-4)
    again = sequence(*SIZES["strides"], rank=rank)
    restructure_(again, structure(small))
    again.load_state_dict(small.state_dict())
    torch.testing.assert_close(again(x), small(x))


@pytest.mark.matrix
@pytest.mark.parametrize(("shared", "inplace"), [(False, False), (True, False), (True, True)])
def test_an_activation_in_code_stays_where_it_changes_nothing(shared, inplace, tmp_path) -> None:
    """Only one place of a shared ReLU goes: there it reads what the block reads, which another ReLU gave; the file has none."""

    def made():
        return InCode(shared, inplace)

    model = build(made)
    plan = plan_merges(model, image(2), runs=2, cost=equal_costs)
    assert [run.stays for run in plan.runs] == [("relu",)] * 2
    small = plan.apply_(copy.deepcopy(model))
    inputs = image(5)
    x = F.max_pool2d(torch.relu(model.stem(*inputs)), 2)
    for block in model.blocks:
        x = merged_by_hand(block, x)
    wanted = model.head(x.mean((2, 3)))
    torch.testing.assert_close(small(*inputs), wanted, rtol=1e-4, atol=1e-4)
    small.train()(*inputs).sum().backward()  # an in-place ReLU writes into a copy
    files = [ck.export_onnx(m.eval(), tmp_path / f"{i}.onnx", image(2)) for i, m in enumerate((model, small))]
    kinds = [operators(file) for file in files]
    assert kinds[0].count("Conv") == 6
    assert kinds[1].count("Conv") == 3  # the exporter joins the shortcut that is a convolution, too
    assert kinds[0].count("Relu") - kinds[1].count("Relu") == 2
    assert ck.verify_onnx(files[1], small, [image(1), image(7)])
    again = made()
    restructure_(again, structure(small))
    again.load_state_dict(small.state_dict())
    torch.testing.assert_close(again.train()(*inputs), small.train()(*inputs))


@pytest.mark.matrix
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("sizes", ["basic", "strides", "dilations"])
def test_a_shrunk_layer_keeps_the_kernel_small(sizes, which) -> None:
    """By hand: the sum of a kernel's taps, as a 1x1 that pads nothing."""
    model = sequence(*SIZES[sizes]).double()
    x = torch.randn(3, 4, 13, 14, dtype=torch.float64)
    name = ("0 (1x1) + 3", "0 + 3 (1x1)")[which]
    assert name not in find_runs(model, x).runs
    plan = plan_merges(model, x, runs=(name,), shrink=True, cost=equal_costs)
    small = plan.apply_(copy.deepcopy(model))
    layer, other = model[3 * which], model[3 - 3 * which]
    shrunk = nn.Conv2d(layer.in_channels, layer.out_channels, 1, layer.stride, bias=False).double()
    shrunk.weight = nn.Parameter(layer.weight.sum((2, 3), keepdim=True))
    parts = [other, shrunk] if which else [shrunk, other]
    wanted = without_activations(nn.Sequential(parts[0], *model[1:3], parts[1], *model[4:]), x)
    torch.testing.assert_close(small(x), wanted, rtol=1e-10, atol=1e-10)
    assert plan.kernels == ((3, 3),)


def test_a_shrunk_layer_trains_apart_and_is_made_again() -> None:
    model = build(InCode)
    plan = plan_merges(model, image(2), runs=("blocks.1.conv1 + blocks.1.conv2 (1x1)",), shrink=True, cost=equal_costs)
    apart = plan.apply_(copy.deepcopy(model), merge=False)
    again = InCode().eval()
    restructure_(again, structure(apart))
    again.load_state_dict(apart.state_dict())
    inputs = image(4)
    torch.testing.assert_close(again(*inputs), apart(*inputs))
    torch.testing.assert_close(merge_(again)(*inputs), apart(*inputs), rtol=1e-4, atol=1e-4)


def operators(file):
    import onnx

    return [node.op_type for node in onnx.load(file).graph.node]


def test_layers_train_apart_before_they_are_merged() -> None:
    model = build(Narrow)
    plan = plan_merges(model, image(2), runs=1, cost=equal_costs)
    apart = plan.apply_(copy.deepcopy(model), merge=False)
    inputs = image(4)
    torch.testing.assert_close(apart(*inputs), plan.apply_(copy.deepcopy(model))(*inputs), rtol=1e-4, atol=1e-4)
    optimizer = torch.optim.SGD(apart.parameters(), lr=0.05)
    apart.train()(*inputs).square().sum().backward()
    optimizer.step()
    apart.eval()
    again = Narrow().eval()
    restructure_(again, structure(apart))
    again.load_state_dict(apart.state_dict())
    wanted = apart(*inputs)
    torch.testing.assert_close(again(*inputs), wanted)
    assert any(isinstance(module, Unmerged) for module in again.modules())
    merged = merge_(apart)
    torch.testing.assert_close(merged(*inputs), wanted, rtol=1e-4, atol=1e-4)
    assert not any(isinstance(module, Unmerged) for module in merged.modules())


def test_modes_and_frozen_weights_stay() -> None:
    model = build(Narrow).train()
    model.blocks[1].requires_grad_(False)
    plan = plan_merges(model, image(2), runs=3, cost=equal_costs)
    small = plan.apply_(model)
    assert model.training
    made = [module for module in small.modules() if isinstance(module, Merged)]
    assert all(module.training for module in made)
    assert [module.weight.requires_grad for module in made] == [True, False, True]


def tied(model):
    model.blocks[1][3].weight = model.blocks[0][3].weight


def shared_norm(model):
    model.blocks[1][1] = model.blocks[0][1]


def hooked(model):
    model.blocks[0][2].register_forward_hook(lambda *_: None)


def hooked_around(model):
    model.blocks[0] = nn.Sequential(nn.Sequential(*model.blocks[0][:3]), *model.blocks[0][3:])
    model.blocks[0][0].register_forward_hook(lambda *_: None)


def parametrized(model):
    nn.utils.parametrizations.weight_norm(model.blocks[0][3])


def reflecting(model):
    model.blocks[0][3].padding_mode = "reflect"
    model.blocks[0][3]._reversed_padding_repeated_twice = [1] * 4


def uneven(model):
    old = model.blocks[0][3]
    model.blocks[0][3] = nn.Conv2d(old.in_channels, old.out_channels, 2, padding="same", groups=old.groups, bias=False)


def own_class(model):
    class Own(nn.Conv2d):
        def forward(self, x):
            return 2 * super().forward(x)

    own = Own(4, 24, 1, bias=False)
    model.blocks[0][0] = own


REASONS = {
    tied: ("blocks.1.0 + blocks.1.3", "weight is tied to another parameter|is called 2 times"),
    shared_norm: ("blocks.0.0 + blocks.0.3", "is one module under 2 names"),
    hooked: ("blocks.0.0 + blocks.0.3", "blocks.0.2 has hooks; remove them first"),
    hooked_around: ("blocks.0.0.0 + blocks.0.1", "blocks.0.0 has hooks; remove them first"),
    parametrized: ("blocks.0.0 + blocks.0.3", "blocks.0.3 has parametrizations|is of the class"),
    reflecting: ("blocks.0.3 + blocks.0.6", "pads with padding_mode='reflect', not with zeros"),
    uneven: ("blocks.0.0 + blocks.0.3", "blocks.0.3 pads one side more than the other"),
    own_class: ("stem + blocks.0.0", "is of the class Own, no plain convolution"),
}


@pytest.mark.parametrize("change", REASONS, ids=lambda change: change.__name__)
def test_what_cannot_be_merged_is_named_with_its_reason(change) -> None:
    model, (name, reason) = build(Narrow), REASONS[change]
    change(model)
    found = find_runs(model, image(2))
    if change is not parametrized:  # then no layer is seen at all: its weight is computed
        assert name in found.locked
    assert name not in found.runs
    assert change is parametrized or re.search(reason, found.locked[name])
    assert "blocks.2.0 + blocks.2.3" in found.runs


class NormAndActivation(nn.BatchNorm2d):
    """A BatchNorm that computes the activation behind it, too, as those of timm do."""

    def __init__(self, channels: int, inside: bool, twice: float = 1.0) -> None:
        super().__init__(channels)
        self.act, self.twice = nn.ReLU6() if inside else F.silu, twice

    def forward(self, x):
        y = self.act(super().forward(x))
        return y if self.twice == 1 else self.twice * y


def with_activations(model: nn.Module, inside: bool, twice: float = 1.0) -> nn.Module:
    """The network with each BatchNorm before a ReLU6 and an activation of it as one module. inside: a module of its own."""
    for block in model.blocks:
        for place in (1, 4):
            made = NormAndActivation(block[place].num_features, inside, twice).eval()
            made.load_state_dict(block[place].state_dict(), strict=False)
            block[place], block[place + 1] = made, nn.Identity()
    return model


@pytest.mark.parametrize("inside", [True, False], ids=["a module inside", "in code"])
def test_a_norm_that_computes_its_activation(inside) -> None:
    plain, x = build(Narrow), image(2)
    model = with_activations(copy.deepcopy(plain), inside)
    merged = plan_merges(model, x, runs=("blocks.1.0 + blocks.1.3 + blocks.1.6",), cost=equal_costs).apply_(copy.deepcopy(model))
    alike = plan_merges(plain, x, runs=("blocks.1.0 + blocks.1.3 + blocks.1.6",), cost=equal_costs).apply_(copy.deepcopy(plain))
    values = torch.randn(2, 4, 16, 16)
    torch.testing.assert_close(merged.blocks[1](values), alike.blocks[1](values))
    apart = plan_merges(model, x, runs=("blocks.1.0 + blocks.1.3",), cost=equal_costs)
    gathered = apart.apply_(copy.deepcopy(model), merge=False)
    made = next(module for module in gathered.modules() if isinstance(module, Unmerged))
    assert [type(layer) for layer in made] == [nn.Conv2d, nn.BatchNorm2d, nn.Conv2d]
    assert not made[1].training
    restructure_(model, structure(gathered))
    model.load_state_dict(gathered.state_dict())
    torch.testing.assert_close(model(*x), gathered(*x))
    torch.testing.assert_close(merge_(gathered)(*x), model(*x))


def test_a_norm_that_computes_more_and_a_hook_inside_of_one() -> None:
    model = with_activations(build(Narrow), True, twice=2.0)
    assert "blocks.1.0 + blocks.1.3" not in find_runs(model, image(2)).runs
    model = with_activations(build(Narrow), True)
    model.blocks[1][1].act.register_forward_hook(lambda *_: None)
    assert find_runs(model, image(2)).locked["blocks.1.0 + blocks.1.3"] == "blocks.1.1.act has hooks; remove them first"


class NormTwice(nn.Module):
    """One norm behind two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(3, 3, 1) for _ in "abc")
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x):
        return self.c(self.norm(self.b(self.norm(self.a(x)).relu())).relu())


def test_a_norm_of_two_calls_is_locked_for_that() -> None:
    assert find_runs(NormTwice().eval(), image(2)).locked["a + b"] == "norm is called 2 times"


class Reading(nn.Module):
    """Code that reads an attribute of a layer of the run."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU6(), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        y = self.act(self.a(x))
        return self.b(y * 1 if y.shape[1] != self.a.out_channels else y)


def test_runs_whose_layers_the_code_reads_are_not_ranked(monkeypatch) -> None:
    model = nn.Sequential(Reading(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)).eval()
    task = ck.Task(train=[(*image(4), torch.zeros(4).long())], val=[(*image(4), torch.zeros(4).long())])
    plan = plan_merges(model, image(2), runs=1, cost=equal_costs)
    assert plan.locked["0.a + 0.b"].startswith("the model does not run without it: AttributeError")
    monkeypatch.setattr(plan_merges_module, "saved_macs", equal_costs)
    monkeypatch.setattr(plan_merges_module, "saved_milliseconds", equal_costs)
    assert plan_merges_module.rank_runs(model, task, samples=4) == ("2 + 4",)


def test_an_activation_in_code_that_would_change_its_new_input() -> None:
    class Negative(BlockInCode):
        def forward(self, x):
            return super().forward(x - 1)

    model = nn.Sequential(nn.Conv2d(3, 8, 1), Negative(8, 1, False, False))
    found = find_runs(model, image(2))
    assert "1.conv1 + 1.conv2" in found.locked
    assert "its relu is called in code, or by a module that serves other places too" in found.locked["1.conv1 + 1.conv2"]


def test_settings_of_the_search() -> None:
    model = build(Narrow)
    names = set(find_runs(model, image(2)).runs)
    assert max(name.count("+") for name in names) == 2
    assert max(name.count("+") for name in find_runs(model, image(2), longest=2).runs) == 1
    ignored = find_runs(model, image(2), ignore=("blocks.1",))
    assert not any("blocks.1" in name for name in ignored.runs)
    assert ignored.locked["blocks.1.0 + blocks.1.3"] == "ignore="
