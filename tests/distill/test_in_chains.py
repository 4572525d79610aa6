"""Distillation inside the other stages: fine-tuning after pruning, quantization-aware training, transformers."""

from __future__ import annotations

import copy
from functools import partial

import networks
import pytest
import torch
from networks import build, images_task
from torch import nn

import compresskit as ck
from compresskit import distill as kd
from compresskit.base.errors import ModelError
from compresskit.distill import Term
from compresskit.distill.objectives.terms import ADAPTERS

ADAM = partial(torch.optim.Adam, lr=3e-3)


MODULES = ("stem", "inner", "out", "down", "head", "stem:in", "inner:in", "head:in", "inner.0:in", "inner.1")


def quantized(model, task):
    return ck.quant.quantize_static(model, [task.split(batch)[0] for batch in task.train])


def test_taps_on_a_quantized_model_are_those_of_its_float_model() -> None:
    task = images_task(ck)
    model = build(networks.Residual)
    student, x = quantized(model, task), task.val[0][0]
    with torch.no_grad(), kd.tapped(model, MODULES) as wanted:
        plain = model(x)
    student.enable_(False)
    with torch.no_grad(), kd.tapped(student, MODULES) as got:
        output = student(x)
    torch.testing.assert_close(output, plain, rtol=1e-4, atol=1e-4)
    for name in MODULES:
        torch.testing.assert_close(got[name], wanted[name], rtol=1e-4, atol=1e-4, msg=name)
    student.enable_()
    rounded = {}
    handle = student.body.quantizers.relu_1.register_forward_hook(lambda m, a, out: rounded.update(out=out))
    with torch.no_grad(), kd.tapped(student, ["inner"]) as got:
        student(x)
    handle.remove()
    assert torch.equal(got["inner"], rounded["out"])
    assert "forward" not in vars(student.body)
    assert kd.find_taps(student, "inner.*") == ["inner.1", "inner.2"]  # the convolution has its BatchNorm folded in
    with pytest.raises(ModelError, match=r"tap 'inner.0': what it computes is merged with 'inner.1' behind it here"):
        kd.find_taps(student, "inner.0")
    with pytest.raises(ModelError, match=r"tap 'iner': Quantized has no such module; the nearest are \['inner'"):
        kd.find_taps(student, "iner")


def test_gradients_come_through_the_taps_of_a_quantized_model() -> None:
    task, model = images_task(ck), build(networks.Residual)
    student = quantized(model, task).train()
    goal = ck.imitate(model, terms=[Term(kd.losses.hint, "inner", adapt=kd.project)], weight=0, task_weight=0).bind(student, task)
    goal(student, task.train[0])["hint:inner"].backward()
    weights = dict(student.body.named_parameters())
    assert weights["inner.0.weight"].grad.any()
    assert weights["head.weight"].grad is None
    goal.close()


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = networks.Chain()

    def forward(self, image, scale):
        return self.inner(image * scale)


def test_taps_of_a_quantized_model_that_is_called_by_name() -> None:
    model = Named().eval()
    x = {"image": torch.randn(4, 3, 16, 16), "scale": torch.rand(4, 1, 1, 1)}
    student = ck.quant.quantize_static(model, [x])
    student.enable_(False)
    with torch.no_grad(), kd.tapped(student, ["inner.a"]) as got, kd.tapped(model, ["inner.a"]) as wanted:
        student(**x)
        model(**x)
    torch.testing.assert_close(got["inner.a"], wanted["inner.a"], rtol=1e-4, atol=1e-4)


def test_a_whole_chain_with_terms(tmp_path) -> None:
    """Assistant, student, pruned and quantized, each with features of its teacher; every file proved."""
    task = images_task(ck, samples=64)
    term = Term(kd.losses.hint, "a", adapt=kd.project, weight=kd.linear_warmup)
    dense = ck.imitate(
        terms=[Term(kd.losses.similarity_preserving, "b", "down"), Term(kd.losses.attention_transfer, "a", "stem")]
    )
    recipe = ck.Recipe(
        ck.Train(epochs=1, optimizer=ADAM),
        ck.Distill(epochs=1, optimizer=ADAM, student=networks.Chain, terms=[Term(kd.losses.rkd_distance, "b", "down")]),
        ck.Distill(epochs=1, optimizer=ADAM, student=networks.Chain, terms=[term]),
        ck.Prune(budget=ck.keep(macs=0.7), round_to=4, finetune=ck.Train(epochs=1, optimizer=ADAM, objective=dense)),
        ck.QAT(epochs=1, objective=dense),
        export="last",
    )
    result = recipe.run(networks.Residual(), task, tmp_path / "run")
    assert result.rows[-1].verified
    assert not hasattr(result.model, ADAPTERS)
    assert set(result.model.state_dict()) == set(
        quantized(ck.load(networks.Chain(), tmp_path / "run" / "4-prune"), task).state_dict()
    )


def test_a_teacher_in_a_chain_keeps_its_bits() -> None:
    task, teacher = images_task(ck), build(networks.Residual)
    before = copy.deepcopy(teacher.state_dict())
    goal = ck.imitate(teacher, terms=[Term(kd.losses.hint, "inner", adapt=kd.project)])
    ck.QAT(epochs=1, objective=goal)(copy.deepcopy(teacher), task)
    ck.Prune(budget=ck.keep(macs=0.8), round_to=4, finetune=ck.Train(epochs=1, objective=goal))(copy.deepcopy(teacher), task)
    assert all(torch.equal(v, before[k]) for k, v in teacher.state_dict().items())


class Encoder(nn.Module):
    """A small transformer over (N, 12) ids; it predicts the most frequent of four words."""

    def __init__(self, layers):
        super().__init__()
        self.embed = nn.Embedding(4, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(16, 4)

    def forward(self, ids):
        return self.head(self.encoder(self.embed(ids)).mean(1))


def text_task():
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 4, (256, 12), generator=g)
    y = nn.functional.one_hot(ids, 4).sum(1).argmax(1)
    batches = list(zip(ids.split(32), y.split(32), strict=True))
    return ck.Task(train=batches, val=batches)


def test_a_transformer_starts_from_its_teachers_layers_and_is_distilled() -> None:
    torch.manual_seed(0)
    task = text_task()
    teacher = ck.Train(epochs=12, optimizer=ADAM)(Encoder(4), task)
    assert ck.evaluate(teacher, task) > 0.9
    pairs = {f"encoder.layers.{s}": f"encoder.layers.{t}" for s, t in kd.layer_map(2, 4).items()}
    terms = [Term(kd.losses.cosine_distance, s, t) for s, t in pairs.items()]  # DistilBERT's
    goal = ck.imitate(teacher, terms=terms, temperature=2.0, weight=1.0, task_weight=0.0)
    scores = []
    for start in (True, False):
        torch.manual_seed(1)
        student = Encoder(2)
        if start:
            kd.init_from_(student, teacher, {"embed": "embed", "head": "head", **pairs})
        student = ck.Train(epochs=2, optimizer=ADAM, objective=goal)(student, task)
        scores.append(ck.evaluate(student, task))
    assert scores[0] > max(0.85, scores[1])
