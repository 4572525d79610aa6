"""Masks through later stages: folding, quantization, export, killed runs, several processes."""

from __future__ import annotations

import shutil
from functools import partial

import mask_ranks
import networks
import numpy as np
import onnx
import pytest
import rank_pairs
import torch
from networks import build, image, images_task
from torch import nn

import compresskit as ck
from compresskit import Densify, LotteryTicket, Sparsify, Train
from compresskit.base import files
from compresskit.base.errors import CheckpointError, ModelError, StageOrderError
from compresskit.prune import masks_of, plan_mask, rewind
from compresskit.prune.criteria import random_scores
from compresskit.recipe import store

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* loses all of its weights"),  # the networks are tiny
    pytest.mark.filterwarnings("ignore:fp16 on a CPU"),
    pytest.mark.filterwarnings("ignore:PURE_.* has no masters"),
]


ADAM = partial(torch.optim.Adam, lr=3e-3)


ONE, FOUR = Train(epochs=1, optimizer=ADAM), Train(epochs=4, optimizer=ADAM)


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


def test_dense_weights_under_masks_are_not_written_down(tmp_path) -> None:
    """A checkpoint of before the pruning, loaded by mistake; training, which sets the weights to zero again, may go on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    dense, x = {name: value.clone() for name, value in model.state_dict().items()}, torch.randn(16, 16)
    plan_mask(model, ck.remove(weights=0.5)).apply_(model)
    model.load_state_dict(dense)
    told = r"weights of 0.weight that its mask removes are not zero \(80 weights of 2 tensors in all\).*, or keep them"
    with pytest.raises(ModelError, match=f"^export_onnx: .*{told}"):
        ck.export_onnx(model, tmp_path / "dense.onnx", (x,))
    assert not any(tmp_path.iterdir())
    for quantize in (ck.quant.quantize_static, ck.quant.prepare_qat):
        with pytest.raises(ModelError, match=f"^Sequential: .*{told}"):
            quantize(model, [(x,)])
    with pytest.raises(ModelError, match=f"^Sequential: .*{told}"):
        ck.quant.quantize_weights(model, (x,))
    masks_of(model).zero_(model)
    quantized = ck.quant.quantize_static(model, [(x,)])
    ck.export_onnx(model, tmp_path / "sparse.onnx", (x,))
    ck.prune.detach_masks_(model)
    model.load_state_dict(dense)
    ck.quant.quantize_static(model, [(x,)])
    ck.export_onnx(quantized, tmp_path / "int8.onnx", (x,))
    assert int8_zeros(tmp_path / "int8.onnx") >= 80


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


def test_masks_for_other_shapes_are_refused() -> None:
    model, task = sparse(0.5, networks.Chain), images_task(ck, samples=32)
    model.a[0].weight = torch.nn.Parameter(model.a[0].weight.detach()[:8])  # pruned by hand; its mask is for 16 channels
    with pytest.raises(ModelError, match=r"the mask is for shape .*; plan masks anew after the shapes have changed"):
        ONE(model, task)


def test_two_processes_agree(tmp_path) -> None:
    rank_pairs.start(mask_ranks.main, tmp_path)
    for name in ("random", "snip"):
        a, b = (torch.load(tmp_path / f"{name}{rank}") for rank in (0, 1))
        assert all(torch.equal(a[n], b[n]) for n in a)
    (a, masks, broken), (b, others, _) = (torch.load(tmp_path / f"model{rank}") for rank in (0, 1))
    assert broken == {}
    assert all(torch.equal(masks[n], others[n]) for n in masks)
    assert all(torch.equal(v, b[n]) for n, v in a.items() if "running" not in n and "tracked" not in n)


class Halved(nn.Module):
    """Makes a constant in its code, which a captured graph has among its tensors and the model has not."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x) * torch.tensor([0.5]).sqrt()


@pytest.mark.parametrize("how", ["static", "dynamic", "weights", "qat"])
def test_masks_of_a_model_that_makes_constants_are_kept(how) -> None:
    torch.manual_seed(0)
    model, x = Halved().eval(), torch.randn(16, 8)
    plan_mask(model, ck.remove(weights=0.5)).apply_(model)
    quantize = {
        "static": lambda: ck.quant.quantize_static(model, [x]),
        "dynamic": lambda: ck.quant.quantize_dynamic(model, x),
        "weights": lambda: ck.quant.quantize_weights(model, x, scheme=ck.quant.BlockScheme(bits=4, block_size=None)),
        "qat": lambda: ck.quant.prepare_qat(model, [x]),
    }[how]
    masks = masks_of(quantize())
    assert masks is not None
    assert masks.removed == 32
