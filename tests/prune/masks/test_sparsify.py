"""Masks are held: on schedules, under every policy, through later stages, folding, export, kills and several processes."""

from __future__ import annotations

import copy
import itertools
import shutil
import subprocess
from dataclasses import fields, replace
from functools import partial

import checkout
import networks
import numpy as np
import onnx
import pytest
import torch
from networks import build, image, images_task
from torch import nn

import compresskit as ck
from compresskit import Densify, LotteryTicket, Sparsify, Train
from compresskit.base import files
from compresskit.base.errors import CheckpointError, ModelError, SettingError, StageOrderError
from compresskit.graph.masks import attach_masks_
from compresskit.mixed.formats import policy as policies
from compresskit.prune import Masks, enforce_masks_, masks_of, plan_mask, rewind, rewind_, schedules, shuffled
from compresskit.prune.allocations import erk_ratios
from compresskit.prune.criteria import movement, random_scores, snip, wanda
from compresskit.prune.patterns import NM, Block
from compresskit.recipe import store

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* loses all of its weights"),  # the networks are tiny
    pytest.mark.filterwarnings("ignore:fp16 on a CPU"),
    pytest.mark.filterwarnings("ignore:PURE_.* has no masters"),
]
ADAM = partial(torch.optim.Adam, lr=3e-3)
ONE, FOUR = Train(epochs=1, optimizer=ADAM), Train(epochs=4, optimizer=ADAM)
POLICIES = [p for p in vars(policies).values() if isinstance(p, policies.Policy) and p.name not in ("TF32", "FP8")]  # of GPUs


def int8_zeros(path):
    """Zeros among the int8 weights of a file, by onnx alone."""
    model = onnx.load(str(path))
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    read = {node.input[0] for node in model.graph.node if node.op_type == "DequantizeLinear"}
    weights = [stored[name] for name in read if name in stored and stored[name].dtype == np.int8]
    assert weights
    return sum(int((w == 0).sum()) for w in weights)


def sparse(ratio=0.9, kind=networks.Residual):
    model = build(kind)
    return plan_mask(model, ck.remove(weights=ratio)).apply_(model)


def nothing_moved(model, masks) -> None:
    assert masks.violations(model) == {}
    assert sum(int((model.get_parameter(n) == 0).sum()) for n in masks.masks) == masks.removed  # and no other weight is zero


# -- held while training


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
@pytest.mark.parametrize(
    "optimizer", [partial(torch.optim.SGD, lr=0.05, momentum=0.9), partial(ADAM, eps=1e-4)], ids=["sgd", "adam"]
)
def test_masks_are_held_under_every_policy(policy, optimizer) -> None:
    model, task = build(networks.Chain), images_task(ck, samples=32)
    run = ck.mixed.prepare(model.train(), optimizer(model.parameters()), policy)

    def step() -> None:
        for x, y in task.train:
            run.backward(task.loss(run(x), y))
            run.step()

    step()  # dense: momentum of weights that are going to be removed
    masks = plan_mask(copy.deepcopy(model).float(), ck.remove(weights=0.9))
    attach_masks_(model, masks)
    release = enforce_masks_(model, run)
    before = {n: v.float().clone() for n, v in run.named_masters().items()}
    for _ in range(3):
        step()
        masters = run.named_masters()
        assert all(not masters[n][~m].any() for n, m in masks.masks.items())
    assert any(not torch.equal(masters[n].float() * m, before[n] * m) for n, m in masks.masks.items())  # the rest learns
    release()
    assert not run.after_update
    assert masks.violations(run.finish()) == {}


def test_removed_weights_do_not_count_in_the_norm() -> None:
    """Clipping sees the gradients of what is left."""
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8, bias=False), torch.randn(16, 8)
    plan_mask(model, ck.remove(weights=0.5)).apply_(model)
    run = ck.mixed.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), clip=1e-9)
    release = enforce_masks_(model, run)
    run.backward(model(x).square().mean())
    run.step()
    release()
    with torch.no_grad():
        gradient = 2 * (x @ model.weight.T).T @ x / 128
    kept = masks_of(model).masks["weight"]
    assert float(run.grad_norm) == pytest.approx(gradient[kept].norm().item(), rel=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"budget": ck.remove(weights=0.9)},
        {"budget": ck.remove(weights=0.9), "schedule": schedules.Cubic()},
        {"budget": ck.remove(weights=0.8), "schedule": schedules.Constant(), "regrow": 0.3, "allocation": erk_ratios},
        {"budget": ck.remove(weights=0.8), "schedule": schedules.Cyclic()},
        {"budget": ck.remove(weights=0.9), "schedule": schedules.Linear(start=0.3), "until": 1.0, "updates": 100},
        {"budget": ck.remove(weights=0.9), "criterion": movement, "schedule": schedules.Cubic()},
        {"budget": ck.remove(weights=0.9), "criterion": snip},
        {"budget": ck.remove(weights=0.9), "criterion": wanda},
        {
            "budget": ck.remove(weights=0.75),
            "pattern": Block(outputs=1, inputs=2),
            "schedule": schedules.Cubic(),
            "protect": ("stem",),
        },
        {"pattern": NM(), "schedule": schedules.Linear(), "protect": ("stem",)},
        {"allocation": {"inner": 0.5, "out": 0.25}, "schedule": schedules.Cubic()},
    ],
    ids="-".join,  # of their names: functions print with their addresses
)
def test_the_ratio_is_reached_and_held(settings) -> None:
    ratio_is_reached(Sparsify(finetune=FOUR, **{"updates": 5, **settings}))


@pytest.mark.parametrize("precision", [ck.mixed.SPLIT_BF16, ck.mixed.MASTER_FP16], ids=lambda p: p.name)
@pytest.mark.parametrize("criterion", [ck.prune.criteria.l2, movement])
def test_schedules_see_the_fp32_weights(precision, criterion) -> None:
    """Transient masters, and steps that are skipped while a loss scale is found."""
    how = replace(FOUR, precision=precision, clip=1.0)
    ratio_is_reached(
        Sparsify(
            budget=ck.remove(weights=0.8),
            schedule=schedules.Cubic(),
            criterion=criterion,
            regrow=0.2,
            until=1.0,
            updates=5,
            finetune=how,
        )
    )


def ratio_is_reached(stage) -> None:
    task = images_task(ck, samples=96)
    model = stage(build(networks.Residual), task)
    masks = masks_of(model)
    assert masks.violations(model) == {}
    if isinstance(stage.allocation, dict):
        assert masks.ratios() == {"inner.0.weight": 0.5, "out.weight": 0.25}
    else:
        wanted = 0.5 if stage.pattern == NM() else stage.budget.removed
        assert masks.ratio == pytest.approx(wanted, abs=2 / masks.total)
    again = Train(epochs=1, optimizer=ADAM)(model, task)
    assert masks.violations(again) == {}
    assert not any(p._backward_hooks for p in model.parameters())


def test_a_schedule_goes_through_its_ratios(monkeypatch) -> None:
    """The masks after every step are those of the formula, and removed weights stay removed."""
    seen = []
    model, task = build(networks.Residual), images_task(ck, samples=96)  # 3 steps an epoch
    stage = Sparsify(budget=ck.remove(weights=0.9), schedule=schedules.Cubic(), until=0.5, updates=100, finetune=FOUR)
    real = stage._gradual

    def watched(model):
        gradual = real(model)
        count = gradual.count

        def look(step, steps):
            seen.append(Masks({n: m.clone() for n, m in masks_of(model).masks.items()}))
            count(step, steps)

        gradual.count = look
        return gradual

    object.__setattr__(stage, "_gradual", watched)
    stage(model, task)
    total = seen[0].total
    expected = [round((0.9 - 0.9 * (1 - min(1, s / 6)) ** 3) * total) for s in range(1, 13)]
    assert [m.removed for m in seen] == expected
    for early, late in itertools.pairwise(seen):
        assert all(not (late.masks[n] & ~early.masks[n]).any() for n in late.masks)


def test_a_second_stage_goes_on_from_the_first() -> None:
    task = images_task(ck, samples=96)
    model = Sparsify(budget=ck.remove(weights=0.5), protect=("head",))(build(networks.Residual), task)
    first = {n: m.clone() for n, m in masks_of(model).masks.items()}
    model = Sparsify(budget=ck.remove(weights=0.8), schedule=schedules.Cubic(), updates=4, finetune=FOUR)(model, task)
    second = masks_of(model)
    assert second.removed == round(0.8 * second.total)
    assert "head.weight" in second.masks
    assert all(not (second.masks[n] & ~m).any() for n, m in first.items())


def test_regrowth_changes_the_mask_and_keeps_the_ratio() -> None:
    task = images_task(ck, samples=96)
    torch.manual_seed(0)
    model = build(networks.Residual)
    first = plan_mask(model, ck.remove(weights=0.8)).masks
    masks = masks_of(
        Sparsify(budget=ck.remove(weights=0.8), schedule=schedules.Constant(), regrow=0.5, until=0.6, updates=4, finetune=FOUR)(
            model, task
        )
    )
    grown = sum(int((mask & ~first[n]).sum()) for n, mask in masks.masks.items())
    assert grown > 0.02 * masks.total
    assert masks.removed == round(0.8 * masks.total)


def test_growing_takes_the_largest_gradients() -> None:
    """One step by hand: of four inputs the two useless ones are dropped or never grow, the useful one that is masked does."""
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    y = x @ torch.tensor([[3.0, 0.0, 2.0, 0.0]]).T
    task = ck.Task(train=[(x, y)] * 8, val=[(x, y)], loss=nn.functional.mse_loss, metric=lambda p, t: 0.0)
    model = nn.Sequential(nn.Linear(4, 1, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[0.1, 1.0, 0.05, 0.9]]))
    how = Train(epochs=1, optimizer=partial(torch.optim.SGD, lr=0.05), schedule=ck.lr.Constant())
    stage = Sparsify(
        budget=ck.remove(weights=0.5), schedule=schedules.Constant(), regrow=0.99, until=1.0, updates=8, finetune=how
    )
    assert masks_of(stage(model, task)).masks["0.weight"].tolist() == [[True, False, True, False]]


def test_movement_removes_what_moves_to_zero() -> None:
    """Magnitude would keep the large weight; its target is zero, and it is on its way there."""
    torch.manual_seed(0)
    x = torch.randn(64, 2)
    y = x @ torch.tensor([[0.0, 1.0]]).T
    task = ck.Task(train=[(x, y)] * 6, val=[(x, y)], loss=nn.functional.mse_loss, metric=lambda p, t: 0.0)

    def kept(criterion, memory=1.0):
        model = nn.Sequential(nn.Linear(2, 1, bias=False))
        with torch.no_grad():
            model[0].weight.copy_(torch.tensor([[2.0, 0.3]]))
        how = Train(epochs=1, optimizer=partial(torch.optim.SGD, lr=0.02), schedule=ck.lr.Constant())
        stage = Sparsify(
            budget=ck.remove(weights=0.5),
            criterion=criterion,
            schedule=schedules.Linear(),
            until=1.0,
            updates=1,
            memory=memory,
            finetune=how,
        )
        return masks_of(stage(model, task)).masks["0.weight"].tolist()

    assert kept(ck.prune.criteria.l2) == [[True, False]]
    assert kept(movement) == [[False, True]]


def test_every_setting_matters() -> None:
    task = images_task(ck, samples=96)
    base = Sparsify(
        budget=ck.remove(weights=0.8), schedule=schedules.Cubic(), until=0.5, updates=3, criterion=snip, regrow=0.2, finetune=FOUR
    )
    other = {
        "budget": ck.remove(weights=0.5), "pattern": Block(outputs=2, inputs=1), "criterion": movement, "allocation": erk_ratios,
        "protect": ("stem",), "finetune": ONE, "schedule": schedules.Linear(), "until": 1.0, "updates": 9, "regrow": 0.7,
        "memory": 0.0,
    }  # fmt: skip

    def weights(stage):
        torch.manual_seed(0)
        return torch.cat([p.flatten() for p in stage(build(networks.Residual), task).parameters()])

    plain = weights(base)
    assert torch.equal(plain, weights(base))
    assert set(other) == {f.name for f in fields(Sparsify)} - {"rewind", "samples"}
    for name, value in other.items():
        assert not torch.equal(plain, weights(replace(base, **{name: value}))), name


# -- through the chain


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    torch.manual_seed(0)
    out, task = tmp_path_factory.mktemp("runs") / "run", images_task(ck, samples=64)
    return out, task, run_chain(out, task, export="each")


def run_chain(out, task, *, export="last", **settings):
    recipe = ck.Recipe(
        Train(epochs=2, optimizer=ADAM),
        Sparsify(budget=ck.remove(weights=0.9), rewind=rewind(to=0.33), finetune=ONE, **settings),
        ck.Distill(epochs=1, optimizer=ADAM, precision=ck.mixed.SPLIT_BF16),
        ck.QAT(epochs=1),
        export=export,
    )
    torch.manual_seed(0)
    return recipe.run(networks.Residual(), task, out)


def test_the_zeros_of_the_int8_file_are_the_masks(chain) -> None:
    out, _, result = chain
    removed = round(0.9 * result.rows[1].masked)
    assert [row.removed for row in result.rows] == [None, removed, removed, removed]
    assert int8_zeros(result.onnx) == removed
    assert masks_of(result.model).removed == removed
    assert result.rows[1].zipped < 0.5 * result.rows[1].bytes
    head, _, first, *rest = str(result).splitlines()
    assert head.split()[-2:] == ["zeros", "zipped"]
    assert first.split()[-2:] == ["-", "-"]
    assert all("90.0%" in line for line in rest[:3])
    assert (out / "2-sparsify" / "masks.safetensors").stat().st_size < result.rows[1].masked / 4
    assert not (out / "1-train" / "masks.safetensors").exists()


@pytest.mark.parametrize("lost", ["2-sparsify", "3-distill", "4-qat"])
def test_a_killed_run_ends_with_the_same_bits(chain, tmp_path, lost) -> None:
    out, task, result = chain
    shutil.copytree(out, tmp_path / "run")
    for name in ("2-sparsify", "3-distill", "4-qat"):
        if name >= lost:
            (tmp_path / "run" / name / "row.json").unlink()
    again = run_chain(tmp_path / "run", task)
    assert (tmp_path / "run" / "model.onnx").read_bytes() == result.onnx.read_bytes()
    mine, theirs = masks_of(again.model).masks, masks_of(result.model).masks
    assert all(torch.equal(mine[n], theirs[n]) for n in theirs)


def test_a_finished_run_is_read_with_its_masks(chain, monkeypatch) -> None:
    out, task, result = chain
    monkeypatch.setattr(Train, "__call__", None)
    monkeypatch.setattr(Sparsify, "__call__", None)
    monkeypatch.setattr(ck.QAT, "__call__", None)
    again = run_chain(out, task)
    assert masks_of(again.model).removed == result.rows[-1].removed
    assert [r.removed for r in again.rows] == [r.removed for r in result.rows]
    for name in ("2-sparsify", "4-qat"):
        loaded = ck.load(sparse(0.3), out / name)  # masks of the incoming model are not those of the file
        assert masks_of(loaded).removed == result.rows[1].removed
    assert masks_of(ck.load(sparse(0.3), out / "1-train")) is None


def test_damaged_masks_and_snapshots(chain, tmp_path) -> None:
    out, task, _ = chain
    shutil.copytree(out, tmp_path / "run")
    file = tmp_path / "run" / "2-sparsify" / "masks.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-9])
    with pytest.raises(CheckpointError, match=r"masks\.safetensors: has changed since the stage wrote it"):
        run_chain(tmp_path / "run", task)
    tensors, _ = files.read_tensors(out / "2-sparsify" / "masks.safetensors")
    tensors["head.weight"] = tensors["head.weight"] ^ 255
    files.write_tensors(file, tensors)
    with pytest.raises(CheckpointError, match=r"removes \d+ of 5872 weights, structure.json says|are not zero that it removes"):
        ck.load(networks.Residual(), file.parent)
    files.write_tensors(tmp_path / "run" / "1-train" / "snapshots.safetensors", {"0.5/x": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"snapshots\.safetensors: has changed since the stage wrote it"):
        run_chain(tmp_path / "run", task)
    with pytest.raises(CheckpointError, match=r"no snapshot of 0\.33 of the training in it"):
        store.load_snapshots_({0.33: {}}, tmp_path / "run" / "1-train")


def test_another_share_to_rewind_to_runs_the_training_again(chain, tmp_path) -> None:
    out, task, result = chain
    shutil.copytree(out, tmp_path / "run")
    (tmp_path / "run" / "1-train" / "snapshots.safetensors").unlink()
    again = run_chain(tmp_path / "run", task)
    assert (tmp_path / "run" / "1-train" / "snapshots.safetensors").exists()
    assert [r.metric for r in again.rows] == [r.metric for r in result.rows]


def test_static_quantization_and_folding_keep_the_masks() -> None:
    model = sparse(0.8)
    masks = masks_of(model)
    quantized = ck.quant.quantize_static(model, [image(16)])
    carried = masks_of(quantized.body)
    assert {n: int(m.sum()) for n, m in carried.masks.items()} == {n: int(m.sum()) for n, m in masks.masks.items()}
    assert carried.violations(quantized.body) == {}
    assert masks_of(model) is not None


def test_what_a_mask_keeps_never_rounds_to_zero(tmp_path) -> None:
    """A weight next to zero would be a zero of the file that the mask does not know."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    masks = plan_mask(model, ck.remove(weights=0.5))
    masks.apply_(model)
    with torch.no_grad():
        row, column = masks.masks["0.weight"].nonzero()[0].tolist()
        model[0].weight[row, column] = -1e-6
    quantized = ck.quant.quantize_static(model, [(torch.randn(32, 16),)])
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", (torch.randn(4, 16),))
    assert int8_zeros(path) == masks.removed
    assert quantized.body.get_parameter("0.weight")[row, column] < 0


def test_a_layer_shared_under_two_norms_keeps_its_mask() -> None:
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.c, self.b1, self.b2 = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.BatchNorm2d(8)

        def forward(self, x):
            return self.b1(self.c(x)) + self.b2(self.c(x.flip(3)))

    model = networks.trained_like(Shared(), image(8))
    masks = plan_mask(model, ck.remove(weights=0.6))
    masks.apply_(model)
    body = ck.quant.quantize_static(model, [image(8)]).body
    carried = masks_of(body)
    assert len(carried.masks) == 2
    assert all(torch.equal(m, masks.masks["c.weight"]) for m in carried.masks.values())
    assert carried.violations(body) == {}


def test_orders() -> None:
    stage = Sparsify(budget=ck.remove(weights=0.5))
    with pytest.raises(
        StageOrderError, match=r"Prune, needs a dense model, but stage 1, Sparsify, put masks on .* order is Prune, Sparsify"
    ):
        ck.Recipe(stage, ck.Prune(budget=ck.keep(macs=0.5)))
    with pytest.raises(StageOrderError, match=r"Sparsify, needs a float model, but stage 1, QAT, quantized the model"):
        ck.Recipe(ck.QAT(epochs=1), stage)
    with pytest.raises(
        StageOrderError, match=r"puts a new student in the place of the model that stage 1, Sparsify, made sparse"
    ):
        ck.Recipe(stage, ck.Distill(epochs=1, student=networks.Chain))
    ck.Recipe(stage, Densify(), ck.Prune(budget=ck.keep(macs=0.5)))
    ck.Recipe(ck.Prune(budget=ck.keep(macs=0.5)), stage, ck.Distill(epochs=1), ck.QAT(epochs=1))
    back = Sparsify(budget=ck.remove(weights=0.5), rewind=rewind(to=0.5), finetune=ONE)
    with pytest.raises(StageOrderError, match="rewinds to 0.5 of a training, so it must come right after one; it is the first"):
        ck.Recipe(back)
    with pytest.raises(StageOrderError, match=r"right after one; stage 2, Prune, is none; put a Train or Distill before it"):
        ck.Recipe(ONE, ck.Prune(budget=ck.keep(macs=0.5)), back)
    ck.Recipe(ck.Distill(epochs=1), back)
    ck.Recipe(LotteryTicket(budget=ck.remove(weights=0.5), train=ONE, rewind=rewind(to=0.2)))


def test_models_that_come_with_masks(tmp_path) -> None:
    model, task = sparse(0.5), images_task(ck, samples=64)
    with pytest.raises(ModelError, match="the model carries masks, and Prune needs a dense model; put Densify before it"):
        ck.Recipe(ck.Prune(budget=ck.keep(macs=0.5))).run(model, task, tmp_path / "run")
    result = ck.Recipe(ck.StaticQuant(), export="last").run(model, task, tmp_path / "run")
    assert int8_zeros(result.onnx) == masks_of(model).removed


def test_a_stage_that_undoes_the_masks_fails(tmp_path) -> None:
    class Careless(Train):
        def __call__(self, model, task):
            with torch.no_grad():
                model.head.weight.add_(1)
            return model

    class Forgetful(Train):
        def __call__(self, model, task):
            ck.prune.detach_masks_(model)
            return model

    class Shrinking(Train):
        def __call__(self, model, task):
            ck.prune.detach_masks_(model)
            return plan_mask(model, ck.remove(weights=0.4), criterion=random_scores).apply_(model)

    task = images_task(ck, samples=64)
    for kind, message in (
        (Careless, r"Careless: \d+ weights of head.weight that its mask removes are no longer zero; train through fit_"),
        (Forgetful, r"Forgetful lost the masks of its model \(\d+ weights at zero\)"),
        (Shrinking, r"Shrinking: the mask of \S+ removed \d+ weights before it and \d+ after it; masks only grow"),
    ):
        with pytest.raises(ModelError, match=message):
            ck.Recipe(Sparsify(budget=ck.remove(weights=0.5)), kind(epochs=1), export="last").run(
                build(networks.Residual), task, tmp_path / kind.__name__
            )


def test_dense_sparse_dense(tmp_path) -> None:
    task = images_task(ck, samples=64)
    recipe = ck.Recipe(ONE, Sparsify(budget=ck.remove(weights=0.5), finetune=ONE), Densify(), ONE, export="last")
    result = recipe.run(networks.Residual(), task, tmp_path / "run")
    assert masks_of(result.model) is None
    assert [row.removed is None for row in result.rows] == [True, False, True, True]
    assert result.rows[1].nonzero < result.rows[3].nonzero == result.rows[3].parameters
    with pytest.warns(UserWarning, match="Densify: this Chain carries no masks; nothing was done"):
        Densify()(networks.Chain(), task)


# -- rewinding


def test_snapshots_are_the_weights_of_that_moment() -> None:
    task = images_task(ck, samples=96)  # 3 steps an epoch

    def trained(epochs, precision=ck.mixed.FP32, snapshots=None):
        torch.manual_seed(0)
        how = Train(epochs=epochs, optimizer=ADAM, schedule=ck.lr.Constant(), precision=precision)
        return how(networks.Residual(), replace(task, snapshots=snapshots))

    for precision in (ck.mixed.FP32, ck.mixed.SPLIT_BF16, ck.mixed.MASTER_BF16):
        torch.manual_seed(0)
        start = networks.Residual().state_dict()
        snapshots = {0.0: {}, 0.25: {}}
        model = trained(4, precision, snapshots)
        early = trained(1, precision)
        assert snapshots[0.25].keys() == model.state_dict().keys()
        assert all(torch.equal(v, snapshots[0.0][k]) for k, v in start.items())
        assert all(torch.equal(v, snapshots[0.25][k]) for k, v in early.state_dict().items())
        rewind_(model, snapshots[0.25])
        assert all(torch.equal(v, early.state_dict()[k]) for k, v in model.state_dict().items())


def test_rewinding_gives_survivors_their_early_weights() -> None:
    task = replace(images_task(ck, samples=96), snapshots={0.5: {}})
    model = FOUR(build(networks.Residual), task)
    planned = plan_mask(model, ck.remove(weights=0.8))
    rates = []

    class Slow(torch.optim.SGD):
        def step(self, closure=None):
            rates.append(self.param_groups[0]["lr"])
            return super().step(closure)

    how = Train(epochs=1, optimizer=partial(Slow, lr=1e-12), schedule=ck.lr.Cosine())
    model = Sparsify(budget=ck.remove(weights=0.8), rewind=rewind(to=0.5), finetune=how)(model, task)
    for name, mask in planned.masks.items():  # masks from the end of the training, values from its middle
        assert torch.equal(masks_of(model).masks[name], mask)
        torch.testing.assert_close(model.get_parameter(name).detach(), task.snapshots[0.5][name] * mask)
    assert rates[0] == pytest.approx(0.5e-12)  # the schedule from there on: half of a cosine is left
    assert rates == sorted(rates, reverse=True)


def test_lottery_tickets_start_from_the_beginning() -> None:
    task = images_task(ck, samples=96)
    model = build(networks.Residual)
    start = copy.deepcopy(model.state_dict())
    still = Train(epochs=1, optimizer=partial(torch.optim.SGD, lr=0.0))
    ticket = LotteryTicket(budget=ck.remove(weights=0.784), rounds=3, train=still)(model, task)
    masks = masks_of(ticket)
    assert masks.removed == round(0.784 * masks.total)
    for name, mask in masks.masks.items():
        assert torch.equal(ticket.get_parameter(name), start[name] * mask)
    torch.manual_seed(1)
    control = LotteryTicket(budget=ck.remove(weights=0.784), rounds=3, train=still, control=shuffled)(
        copy.deepcopy(build(networks.Residual)), task
    )
    assert masks_of(control).removed == masks.removed
    learned = LotteryTicket(budget=ck.remove(weights=0.5), rounds=2, train=FOUR, rewind=rewind(to=0.25))(
        build(networks.Residual), task
    )
    nothing_moved(learned, masks_of(learned))


def test_bad_settings() -> None:
    cases = [
        (dict(budget=ck.remove(weights=0.5), allocation={"head": 0.5}), "leaves no room for budget="),
        (
            dict(budget=ck.remove(weights=0.5), criterion=3),
            r"Sparsify\(criterion=...\): wanted a function such as prune.criteria.l2, got 3",
        ),
        (
            dict(budget=ck.remove(weights=0.5), schedule=0.5, finetune=ONE),
            r"Sparsify\(schedule=...\): wanted a ratio schedule such as .*, got 0.5",
        ),
        (
            dict(budget=ck.remove(weights=0.5), schedule=schedules.Cubic()),
            r"Sparsify\(schedule=...\): it is part of a training; pass finetune=",
        ),
        (dict(budget=ck.remove(weights=0.5), rewind=rewind()), r"Sparsify\(rewind=...\): it is part of a training"),
        (dict(budget=ck.remove(weights=0.5), rewind=0.3, finetune=ONE), r"wanted rewind\(to=...\) and no schedule, got 0.3"),
        (
            dict(budget=ck.remove(weights=0.5), rewind=rewind(), schedule=schedules.Cubic(), finetune=ONE),
            r"wanted rewind\(to=...\) and no schedule",
        ),
        (dict(budget=ck.remove(weights=0.5), until=0.0), r"until=...\): wanted a fraction of the training in \(0, 1\], got 0.0"),
        (dict(budget=ck.remove(weights=0.5), updates=0), "wanted at least 1, got 0 and 1024"),
        (dict(budget=ck.remove(weights=0.5), memory=2.0), r"wanted regrow in \[0, 1\), memory in \[0, 1\], got 0.0, 2.0"),
        (dict(budget=ck.remove(weights=0.5), regrow=0.2), "growing needs a schedule, such as schedules.Constant"),
    ]
    for settings, message in cases:
        with pytest.raises(SettingError, match=message):
            Sparsify(**settings)
    for settings, message in [
        (dict(budget=ck.remove(weights=0.5), train=3), r"LotteryTicket\(train=...\): wanted Train\(...\), got int"),
        (dict(budget=ck.remove(weights=0.5), train=ONE, rounds=0), r"rounds=...\): wanted a whole number >= 1, got 0"),
        (dict(pattern=NM(), train=ONE), "is reached in one round, got 5"),
        (dict(budget=ck.remove(weights=0.5), allocation={"a": 0.5}, train=ONE), "cannot be reached in several rounds"),
    ]:
        with pytest.raises(SettingError, match=message):
            LotteryTicket(**settings)
    with pytest.raises(SettingError, match=r"rewind\(to=...\): wanted a share of the training, in \[0, 1\), got 1.0"):
        rewind(to=1.0)
    task, model = images_task(ck, samples=32), build(networks.Chain)
    with pytest.raises(SettingError, match=r"no weights were kept there; .* Task\(snapshots=\{0.33: \{\}\}\)"):
        Sparsify(budget=ck.remove(weights=0.5), rewind=rewind(), finetune=ONE)(model, task)
    with pytest.raises(SettingError, match=r"Task\(snapshots=...\): wanted fractions of a training in \[0, 1\), got 1.5"):
        ONE(model, replace(task, snapshots={1.5: {}}))
    with pytest.raises(SettingError, match="a schedule cannot follow a criterion that reads activations"):
        Sparsify(budget=ck.remove(weights=0.5), criterion=wanda, schedule=schedules.Cubic(), finetune=ONE)(model, task)
    with pytest.raises(ModelError, match=r"rewind: a.0.weight was \(16, 3, 3, 3\), this Chain has \(8, 3, 3, 3\)"):
        state = {n: v.clone() for n, v in model.state_dict().items()}
        model.a[0] = nn.Conv2d(3, 8, 3, bias=False)
        rewind_(model, state)
    with pytest.raises(ModelError, match="rewind: .* is only in one of model and snapshot"):
        rewind_(networks.Residual(), state)


def test_pruned_under_masks_fails_clearly() -> None:
    model, task = sparse(0.5, networks.Chain), images_task(ck, samples=32)
    plan = ck.prune.plan_channels(model, image(2), budget=ck.keep(macs=0.6), round_to=4)
    ck.prune.apply_(model, plan)
    with pytest.raises(ModelError, match=r"the mask is for shape .*; plan masks anew after the shapes have changed"):
        ONE(model, task)


# -- several processes

WORKER = """
import sys, torch, networks
import torch.distributed as dist
import compresskit as ck
from compresskit.graph.masks import enforce_masks_
from compresskit.prune import plan_mask, masks_of
from compresskit.prune.criteria import random_scores, snip
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
torch.manual_seed(0)
model = networks.Residual()
torch.manual_seed(rank)  # other data, other random numbers
task = networks.images_task(ck, samples=32)
for name, criterion in (("random", random_scores), ("snip", snip)):
    masks = plan_mask(model, ck.remove(weights=0.7), criterion=criterion, task=task).masks
    torch.save(dict(masks), f"{folder}/{name}{rank}")
plan_mask(model, ck.remove(weights=0.9), criterion=snip, task=task).apply_(model)
run = ck.mixed.prepare(model.train(), torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), ck.mixed.MASTER_BF16)
release = enforce_masks_(model, run)
run.model = torch.nn.parallel.DistributedDataParallel(run.model)
for x, y in task.train:
    run.backward(task.loss(run(x), y))
    run.step()
release()
run.finish()
torch.save((model.state_dict(), masks_of(model).masks, masks_of(model).violations(model)), f"{folder}/model{rank}")
dist.destroy_process_group()
"""


def test_two_processes_agree(tmp_path) -> None:
    started = [checkout.start("-c", WORKER, rank, tmp_path, stderr=subprocess.PIPE) for rank in (0, 1)]
    for process in started:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors.decode()[-2000:]
    for name in ("random", "snip"):
        a, b = (torch.load(tmp_path / f"{name}{rank}") for rank in (0, 1))
        assert all(torch.equal(a[n], b[n]) for n in a)
    (a, masks, broken), (b, others, _) = (torch.load(tmp_path / f"model{rank}") for rank in (0, 1))
    assert broken == {}
    assert all(torch.equal(masks[n], others[n]) for n in masks)
    assert all(torch.equal(v, b[n]) for n, v in a.items() if "running" not in n and "tracked" not in n)
