"""What candidates that begin with the same stages share."""

from __future__ import annotations

from dataclasses import replace

import networks
import pytest
import torch
from residual import ResNet

import compresskit as ck
from compresskit.prune import Prune
from compresskit.prune.depth import Depth
from compresskit.prune.low_rank import LowRank
from compresskit.search.candidate import Candidate, Removable
from compresskit.search.proxy import workshop as making
from compresskit.search.proxy.beginnings import Beginnings
from compresskit.search.proxy.workshop import Workshop

ORDER = Removable(blocks=("layer1.0",))
CUT = Candidate(blocks=1, macs=0.7, bits="float")
TRAIN = ck.Train(steps=2, optimizer=torch.optim.SGD, validate_every=0)


@pytest.fixture
def shop(task, tmp_path) -> Workshop:
    return Workshop(
        model=networks.build(ResNet), task=task, held=task, out=tmp_path, samples=32, batch=1, threads=1, seconds=0.02, seed=0,
        target=ck.quant.X86,
    )  # fmt: skip


@pytest.fixture
def ran(monkeypatch) -> list[str]:
    """The kinds of the stages that run, in their order."""
    kinds: list[str] = []
    run = making.run_stage

    def watched(stage, model, task):
        kinds.append(type(stage).__name__)
        return run(stage, model, task)

    monkeypatch.setattr(making, "run_stage", watched)
    return kinds


def state(model: torch.nn.Module) -> list[torch.Tensor]:
    return [*model.state_dict().values()]


def test_stages_that_candidates_begin_with_run_once(shop, ran) -> None:
    shop.compressed(CUT, ORDER, 32)
    found, _ = shop.compressed(replace(CUT, bits="int8"), ORDER, 32)
    assert ran == ["Depth", "Prune", "StaticQuant"]
    alone, _ = replace(shop).compressed(replace(CUT, bits="int8"), ORDER, 32)
    assert ran[3:] == ran[:3]
    assert all(torch.equal(one, other) for one, other in zip(state(found), state(alone), strict=True))


def test_what_was_begun_stays_as_it_was(shop, ran) -> None:
    first, _ = shop.compressed(CUT, ORDER, 32)
    before = [value.clone() for value in state(first)]
    for value in first.parameters():
        value.data.zero_()  # as a training changes it
    again, _ = shop.compressed(CUT, ORDER, 32)
    assert all(torch.equal(one, other) for one, other in zip(state(again), before, strict=True))
    assert ran == ["Depth", "Prune"]


def test_a_training_goes_on_from_the_candidate_and_is_not_kept(shop, ran) -> None:
    shop.compressed(replace(CUT, bits="int4"), ORDER, 32)
    for _ in range(2):
        shop.compressed(replace(CUT, bits="int4"), ORDER, 32, TRAIN)
    assert ran == ["Depth", "Prune", "StaticQuant", "QAT", "QAT"]
    shop.compressed(CUT, ORDER, 32, TRAIN)
    shop.compressed(CUT, ORDER, 32, TRAIN)
    assert ran[5:] == ["Prune", "Prune"]  # which train, and so run from the blocks on


def test_a_sketch_begins_with_what_was_made(shop, ran) -> None:
    made, _ = shop.compressed(CUT, ORDER, 32)
    sketch = shop.sketched(CUT, ORDER)
    assert all(torch.equal(one, other) for one, other in zip(state(sketch), state(made), strict=True))  # refitted, as it was made
    assert ran == ["Depth", "Prune"]
    shop.sketched(replace(CUT, macs=0.5), ORDER)
    assert ran[2:] == ["Prune"]


def test_other_samples_are_another_beginning(shop, ran) -> None:
    shop.compressed(CUT, ORDER, 32)
    shop.compressed(CUT, ORDER, 16)
    assert ran == ["Depth", "Prune"] * 2


def test_the_ones_used_last_are_kept_as_far_as_memory_goes() -> None:
    model = torch.nn.Linear(10, 10, bias=False)  # 400 bytes
    kept = Beginnings(most=900)
    one, two, three = ((Prune(budget=ck.keep(macs=share)),) for share in (0.3, 0.5, 0.7))
    kept.keep(one, model)
    kept.keep(two, model)
    assert kept.of(one) is not None
    kept.keep(three, model)
    assert [kept.of(stages) is not None for stages in (one, two, three)] == [True, False, True]
    kept.keep(two, torch.nn.Linear(100, 100))
    assert kept.of(two) is None
    assert kept.of(one) is not None  # what is too large takes nobody's place


def test_the_longest_beginning_is_taken() -> None:
    depth, cut, factor = Depth(blocks=("a",)), Prune(budget=ck.keep(macs=0.5)), LowRank(budget=ck.keep(macs=0.5))
    kept = Beginnings()
    kept.keep((depth,), torch.nn.Linear(1, 1))
    kept.keep((depth, cut), torch.nn.Linear(2, 2))
    model, count = kept.of((depth, cut, factor))
    assert (model.in_features, count) == (2, 2)
    assert kept.of((cut, factor)) is None
    assert kept.of((depth, factor))[1] == 1
    quantized = (depth, ck.StaticQuant())
    kept.keep(quantized, torch.nn.Linear(3, 3))
    assert kept.of(quantized)[1] == 1
