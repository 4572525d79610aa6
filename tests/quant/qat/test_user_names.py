"""In quantization-aware training names choose what they choose in float training: param groups, and what stays in fp32."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from mixed_runs import USER_WARNINGS
from torch import nn

import compresskit as ck
from compresskit.base.errors import ModelError, SettingError
from compresskit.graph.quantized import float_names
from compresskit.prune.low_rank import LowRank

pytestmark = USER_WARNINGS

X = torch.randn(48, 8, generator=torch.Generator().manual_seed(0))
BATCHES = [(x, torch.arange(16) % 4) for x in X.split(16)]
TASK = ck.Task(train=BATCHES, val=BATCHES)
INPUTS = [(x,) for x, _ in BATCHES]
SGD = partial(torch.optim.SGD, lr=0.1)
HEAD_IN_FP32 = replace(ck.mixed.MASTER_BF16, keep_fp32=(*ck.mixed.MASTER_BF16.keep_fp32, "head"))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU()
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.backbone(x))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def frozen_backbone(named):
    """Strict: each name belongs to one of the two parts."""
    parts = {part: [p for name, p in named if name.startswith(f"{part}.")] for part in ("backbone", "head")}
    return [{"params": parts["backbone"], "lr": 0.0}, {"params": parts["head"], "lr": 0.1}]


@pytest.mark.parametrize("inside", [None, "backbone", "head"])
def test_param_groups_by_name_are_those_of_the_float_model(inside: str | None) -> None:
    model = net()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    seen = []

    def groups(named):
        seen.extend(name for name, _ in named)
        return frozen_backbone(named)

    stage = ck.QAT(epochs=1, param_groups=groups, optimizer=SGD, inside=inside, freeze=1.0)
    whole = ck.quant.prepare_qat(model, INPUTS, inside=inside)
    known = float_names(whole)
    ck.fit_(whole, TASK, stage)
    assert sorted(seen) == sorted(before)
    after = {known[name]: p for name, p in whole.named_parameters()}
    for name, value in before.items():
        moved = not torch.equal(after[name], value)
        assert moved == name.startswith("head."), name


def test_learned_scales_are_named_after_what_they_scale() -> None:
    names = float_names(ck.quant.prepare_qat(net(), INPUTS, learned=True, offsets=True))
    scales = {there for here, there in names.items() if here.endswith((".ratio", ".offset"))}
    assert scales == {
        "x_scale", "x_offset",
        "backbone.0.weight_scale", "backbone.2.relu_scale", "backbone.2.relu_offset",
        "backbone.3.weight_scale", "backbone.5.relu_1_scale", "backbone.5.relu_1_offset",
        "head.weight_scale",
    } - ({"backbone.2.relu_offset", "backbone.5.relu_1_offset"} - set(names.values()))  # fmt: skip
    assert len(set(names.values())) == len(names)
    inside = float_names(ck.quant.prepare_qat(net(), INPUTS, learned=True, inside="head"))
    assert {"head.weight", "head.weight_scale", "backbone.0.weight"} <= set(inside.values())


def test_a_tied_weight_has_its_first_name() -> None:
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.out = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
            self.out.weight = self.words.weight

        def forward(self, x):
            return self.out(self.words(x))

    quantized = ck.quant.prepare_qat(Tied(), [torch.arange(10).reshape(2, 5)])
    known = float_names(quantized)
    assert [known[name] for name, _ in quantized.named_parameters()] == [name for name, _ in Tied().named_parameters()]


@pytest.mark.parametrize("name", ["backbone.4", "body.backbone.4"])
def test_a_module_is_found_by_its_name_in_the_graph_too(name: str) -> None:
    dtypes = train(ck.quant.prepare_qat(net(), INPUTS), replace(ck.mixed.MASTER_BF16, keep_fp32=(name,)))
    kept = {n for n, dtype in dtypes.items() if dtype == torch.float32 and not n.startswith("backbone.1.")}  # BatchNorm is, too
    assert kept == {"backbone.4.weight", "backbone.4.bias"}


def test_names_that_a_graph_has_for_itself_are_the_users_again() -> None:
    class Reserved(nn.Module):
        def __init__(self):
            super().__init__()
            self.graph, self.body = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.body(self.graph(x).relu())

    quantized = ck.quant.prepare_qat(Reserved(), INPUTS)
    known = float_names(quantized)
    assert {known[name] for name, _ in quantized.named_parameters()} == {n for n, _ in Reserved().named_parameters()}
    policy = replace(ck.mixed.MASTER_BF16, keep_fp32=("body",))  # the user's, not the graph
    run = ck.mixed.prepare(quantized, SGD(quantized.parameters()), policy)
    assert {known[n] for n, p in quantized.named_parameters() if p.dtype == torch.float32} == {"body.weight", "body.bias"}
    run.finish()


def train(model: nn.Module, policy: ck.mixed.Policy) -> dict[str, torch.dtype]:
    """Train a prepared model for some steps; the dtype that each parameter had meanwhile, by the user's name."""
    known = float_names(model)
    run = ck.mixed.prepare(model, SGD(model.parameters()), policy)
    dtypes = {known[name]: p.dtype for name, p in model.named_parameters()}
    for x, y in BATCHES:
        run.backward(F.cross_entropy(run(x), y))
        run.step()
    run.finish()
    return dtypes


@pytest.mark.matrix
@pytest.mark.parametrize("inside", [None, "backbone", "head"])
@pytest.mark.parametrize("kept", ["head", "backbone.0", "backbone", nn.LayerNorm])
def test_modules_stay_in_fp32_by_the_users_names_and_classes(kept, inside: str | None) -> None:
    policy = replace(ck.mixed.MASTER_BF16, keep_fp32=(*ck.mixed.MASTER_BF16.keep_fp32, kept))
    wanted = train(net(), policy)
    whole = ck.quant.prepare_qat(net(), INPUTS, inside=inside)
    assert train(whole, policy) == wanted
    part = next(m for m in whole.modules() if isinstance(m, ck.quant.Quantized))
    assert "cast_floats" not in part.body.code  # the casts go with the run
    part.convert_()


def test_what_is_kept_computes_in_fp32() -> None:
    quantized = ck.quant.prepare_qat(net(), INPUTS)
    plain = ck.mixed.prepare(quantized, SGD(quantized.parameters()), ck.mixed.MASTER_BF16)
    half = plain(X)
    plain.finish()
    quantized = ck.quant.prepare_qat(net(), INPUTS)
    run = ck.mixed.prepare(quantized, SGD(quantized.parameters()), HEAD_IN_FP32)
    seen = {}
    run.model.body.get_submodule("quantizers.weight_head_weight").register_forward_hook(
        lambda _m, args, out: seen.update(weight=out.dtype)
    )
    kept = run(X)
    assert seen == {"weight": torch.float32}
    assert not torch.equal(kept, half)
    assert "cast_floats" not in quantized.converted().body.code
    run.finish()


def test_a_name_of_nothing_and_a_name_of_what_is_merged(caplog) -> None:
    quantized = ck.quant.prepare_qat(net(), INPUTS)
    with pytest.raises(ModelError, match=r"keep_fp32 names 'heads', which the model does not have"):
        ck.mixed.prepare(quantized, SGD(quantized.parameters()), replace(HEAD_IN_FP32, keep_fp32=("heads",)))
    merged = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    quantized = ck.quant.prepare_qat(merged, INPUTS)
    assert "0.weight" not in float_names(quantized).values()
    with caplog.at_level(logging.WARNING, "compresskit"):
        run = ck.mixed.prepare(quantized, SGD(quantized.parameters()), replace(ck.mixed.MASTER_BF16, keep_fp32=("0", "3")))
    assert "keep_fp32 names '0', whose weights are merged" in caplog.text
    assert "names '3'" not in caplog.text
    run(X)
    run.finish()


def test_after_low_rank_and_pruning_too() -> None:
    model = net()
    small = LowRank(budget=ck.keep(parameters=0.7), samples=16)(model, TASK)
    names = {name for name, _ in small.named_parameters()}
    assert names != {name for name, _ in net().named_parameters()}
    quantized = ck.quant.prepare_qat(small, INPUTS)
    known = float_names(quantized)
    assert {known[name] for name, _ in quantized.named_parameters()} <= names
    assert train(quantized, replace(HEAD_IN_FP32, keep_fp32=("backbone.3",)))
    sparse = ck.Sparsify(budget=ck.remove(weights=0.5), finetune=None)(net(), TASK)
    quantized = ck.quant.prepare_qat(sparse, INPUTS)
    assert {n for n, d in train(quantized, HEAD_IN_FP32).items() if d == torch.float32} >= {"head.weight", "head.bias"}


@pytest.mark.parametrize(
    ("second", "error", "match"),
    [
        (ck.QAT(epochs=1, precision=replace(HEAD_IN_FP32, keep_fp32=("heads",))), ModelError, r"stage 2, QAT: .*'heads'"),
        (
            ck.QAT(epochs=1, learned=True, param_groups=frozen_backbone),
            SettingError,
            r"stage 2, QAT: Train\(param_groups=...\): x_scale is in 0 groups",
        ),
        (ck.Train(epochs=1, param_groups=lambda named: [{"params": []}]), SettingError, r"stage 2, Train: .*in 0 groups"),
    ],
)
def test_a_recipe_finds_names_that_do_not_fit_before_it_trains(second, error, match, tmp_path) -> None:
    steps = []
    first = ck.Train(epochs=1, on_step=lambda report: steps.append(report))
    with pytest.raises(error, match=match):
        ck.Recipe(first, second).run(net(), TASK, out=tmp_path / "run")
    assert not steps


def test_a_recipe_takes_the_same_names_in_both_trainings(tmp_path) -> None:
    how = {"epochs": 1, "precision": HEAD_IN_FP32, "param_groups": frozen_backbone, "optimizer": SGD}
    report = ck.Recipe(ck.Train(**how), ck.QAT(**how)).run(net(), TASK, out=tmp_path / "run")
    assert len(report.rows) == 2


def test_a_group_without_parameters_is_logged(caplog) -> None:
    with caplog.at_level(logging.WARNING, "compresskit"):
        ck.Train(epochs=1, param_groups=lambda named: [{"params": [p for _, p in named]}, {"params": []}])(net(), TASK)
    assert "group 2 of 2 has no parameter" in caplog.text
