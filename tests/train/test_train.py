"""The training loop: steps, accumulation, labels."""

from __future__ import annotations

import copy
from functools import partial

import networks
import pytest
import torch
import torch.nn.functional as F
from networks import images_task
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import compresskit as ck
from compresskit.base.errors import ModelError, SettingError, TrainingError


def test_a_label_that_the_loss_ignores_may_lie_outside_the_classes() -> None:
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    y[0] = 255
    model = nn.Linear(4, 3)
    without = copy.deepcopy(model)
    ck.Train(epochs=1)(model, ck.Task(train=[(x, y)], val=[(x, y)], loss=partial(F.cross_entropy, ignore_index=255)))
    ck.Train(epochs=1)(without, ck.Task(train=[(x[1:], y[1:])], val=[(x[1:], y[1:])]))
    torch.testing.assert_close(model.weight, without.weight)


def test_the_last_step_of_an_epoch_counts_its_batches() -> None:
    x, y = torch.randn(24, 4), torch.arange(24) % 3
    batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 24, 8)]
    sgd = partial(torch.optim.SGD, lr=0.1)
    model = nn.Linear(4, 3)
    wanted = copy.deepcopy(model)
    ck.Train(epochs=1, optimizer=sgd, schedule=ck.lr.Constant(), accumulate=2)(model, ck.Task(train=batches, val=batches))
    plain = sgd(wanted.parameters())
    for part in ((x[:16], y[:16]), (x[16:], y[16:])):
        plain.zero_grad()
        F.cross_entropy(wanted(part[0]), part[1]).backward()
        plain.step()
    torch.testing.assert_close(model.weight, wanted.weight)


def test_a_loss_without_a_gradient_is_refused() -> None:
    with pytest.raises(TrainingError, match="no gradient of the loss"):
        ck.Train(epochs=1)(networks.Chain(), images_task(ck, predict=lambda o: o.detach()))


def test_models_with_two_inputs_learn_from_dicts() -> None:
    y = torch.arange(32) % 4
    batches = [{"image": torch.randn(32, 3, 16, 16) + y.view(-1, 1, 1, 1), "numbers": torch.randn(32, 8), "labels": y}]
    task = ck.Task(train=batches, val=batches)
    model = ck.Train(epochs=80, optimizer=partial(torch.optim.Adam, lr=1e-2))(networks.TwoInputs(), task)
    assert ck.evaluate(model, task) > 0.9


def test_accumulation_is_a_larger_batch() -> None:
    x, y = torch.randn(32, 4), torch.arange(32) % 3
    sgd = partial(torch.optim.SGD, lr=0.1)
    models = [nn.Linear(4, 3) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    whole = ck.Task(train=[(x, y)], val=[(x, y)])
    parts = ck.Task(train=[(x[i : i + 8], y[i : i + 8]) for i in range(0, 32, 8)], val=[(x, y)])
    ck.Train(epochs=2, optimizer=sgd)(models[0], whole)
    ck.Train(epochs=2, optimizer=sgd, accumulate=4)(models[1], parts)
    torch.testing.assert_close(models[0].weight, models[1].weight)


def test_hooks_are_called_after_every_step_of_a_function_objective() -> None:
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    seen = []
    task = ck.Task(train=[(x, y)] * 3, val=[(x, y)])

    def half(model, batch):
        return {"a": F.cross_entropy(model(batch[0]), batch[1]) * 0.5, "b": model(batch[0]).square().mean()}

    ck.fit_(nn.Linear(4, 3), task, ck.Train(epochs=2, objective=half), after_step=[lambda i, n: seen.append((i, n))])
    assert seen == [(i, 6) for i in range(1, 7)]


def test_training_repeats_itself_from_a_seed() -> None:
    data = TensorDataset(torch.randn(64, 4), torch.arange(64) % 3)
    task = ck.Task(train=DataLoader(data, 16, shuffle=True), val=DataLoader(data, 16))
    weights = []
    for _ in range(2):
        torch.manual_seed(5)
        weights.append(ck.Train(epochs=2)(nn.Linear(4, 3), task).weight)
    assert torch.equal(*weights)


def test_training_settings_out_of_range_are_refused() -> None:
    for settings in (
        {"epochs": 0},
        {"epochs": 1.5},
        {"epochs": 1, "accumulate": 0},
        {"epochs": 1, "clip": -1},
        {"epochs": 1, "optimizer": 3},
    ):
        with pytest.raises(SettingError, match=r"Train\(.*wanted.*got"):
            ck.Train(**settings)
    model = nn.Linear(4, 3).requires_grad_(False)
    with pytest.raises(ModelError, match="nothing can be trained"):
        ck.Train(epochs=1)(model, images_task(ck))


def test_the_best_weights_come_with_a_buffer_of_their_size() -> None:
    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)
            self.register_buffer("seen", torch.zeros(1, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.seen = torch.cat([self.seen, x[:1].detach()])
            return self.layer(x)

    batch = torch.randn(32, 8), torch.arange(32) % 4
    model = Grows()
    still = partial(torch.optim.SGD, lr=0.0)
    ck.fit_(model, ck.Task(train=[batch] * 2, val=[batch]), ck.Train(epochs=3, keep_best=True, optimizer=still))
    assert model.seen.shape == (3, 8)  # of the first epoch, which no later one was better than


def test_gradients_that_a_loop_left_are_no_part_of_the_first_step() -> None:
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    model = nn.Linear(4, 3)
    clean = copy.deepcopy(model)
    F.cross_entropy(model(x), y).backward()
    settings = ck.Train(epochs=1, optimizer=partial(torch.optim.SGD, lr=0.1))
    for each in (model, clean):
        ck.fit_(each, ck.Task(train=[(x, y)]), settings)
    assert torch.equal(model.weight, clean.weight)


def test_a_training_inside_no_grad_trains_and_one_inside_inference_mode_is_refused() -> None:
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    model = nn.Linear(4, 3)
    outside, inside = copy.deepcopy(model), copy.deepcopy(model)
    ck.fit_(outside, ck.Task(train=[(x, y)]), ck.Train(epochs=1))
    with torch.no_grad():
        ck.fit_(inside, ck.Task(train=[(x, y)]), ck.Train(epochs=1))
        assert not torch.is_grad_enabled()
    assert torch.equal(outside.weight, inside.weight)
    with torch.inference_mode(), pytest.raises(SettingError, match=r"called inside torch.inference_mode\(\).*; call it outside"):
        ck.fit_(model, ck.Task(train=[(x, y)]), ck.Train(epochs=1))


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (torch.optim.LBFGS, "optimizer=LBFGS evaluates the loss itself, .*; give another"),
        (lambda params: torch.optim.LBFGS(params), "optimizer=LBFGS evaluates the loss itself, .*; give another"),
        (partial(torch.optim.SGD, rate=0.1), r"Train\(optimizer=...\): it cannot be made .*: TypeError: .*'rate'; param_groups="),
        (partial(torch.optim.Adam, lr=-1.0), r"Train\(optimizer=...\): it cannot be made .*: ValueError: Invalid learning rate"),
    ],
)
def test_an_optimizer_that_cannot_be_used_is_named_before_the_first_batch(optimizer, message) -> None:
    batches = [(torch.randn(8, 4), torch.arange(8) % 3)]
    with pytest.raises(SettingError, match=message):
        ck.fit_(nn.Linear(4, 3), ck.Task(train=batches), ck.Train(epochs=1, optimizer=optimizer))
