"""Several runs, of one model or of models that one loss goes through: a step ends the gradients of its own parameters."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import warnings

import pytest
import torch
from mixed_runs import FP16_ON_CPU
from torch import nn

from compresskit.base.errors import SettingError, TrainingError
from compresskit.mixed import AMP_BF16, AMP_FP16, FP32, MASTER_BF16, MASTER_FP16, SPLIT_BF16, prepare
from compresskit.mixed.step import owners

POLICIES = pytest.mark.parametrize("policy", [FP32, AMP_BF16], ids=lambda policy: policy.name)
pytestmark = [FP16_ON_CPU, pytest.mark.filterwarnings("ignore:prepare. the optimizer does not have:UserWarning")]


def two_runs(policy, *, own_policy=None):
    """A model of two layers, and a run for each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    first = prepare(model, torch.optim.SGD(model[0].parameters(), lr=0.1), policy)
    return model, first, prepare(model, torch.optim.Adam(model[1].parameters(), lr=0.1), own_policy or policy)


def loss_of(run, factor=1.0):
    return (run(torch.linspace(-1, 1, 12).reshape(3, 4)) * factor).square().mean()


@POLICIES
def test_a_step_leaves_the_gradients_of_another_optimizer(policy) -> None:
    model, first, second = two_runs(policy)
    twin = copy.deepcopy(model)
    groups = torch.optim.SGD(twin[0].parameters(), lr=0.1), torch.optim.Adam(twin[1].parameters(), lr=0.1)
    for _ in range(4):
        first.backward(loss_of(first))
        first.step()
        assert all(p.grad is None for p in model[0].parameters())
        second.step()
        assert all(p.grad is None for p in model.parameters())
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=policy is AMP_BF16):
            out = twin(torch.linspace(-1, 1, 12).reshape(3, 4))
        out.float().square().mean().backward()
        for optimizer in groups:
            optimizer.step()
            optimizer.zero_grad()
    for got, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(got, wanted)


@POLICIES
def test_runs_that_take_turns_do_not_get_the_loss_of_the_other(policy) -> None:
    model, first, second = two_runs(policy)
    only = copy.deepcopy(model)
    for layer in model[1].parameters():
        assert layer.grad is None
    first.backward(loss_of(first, 100.0))
    first.step()
    only[0].load_state_dict(model[0].state_dict())
    alone = prepare(only, torch.optim.Adam(only[1].parameters(), lr=0.1), policy)
    for run in (second, alone):
        run.backward(loss_of(run))
    for got, wanted in zip(model[1].parameters(), only[1].parameters(), strict=True):
        assert torch.equal(got.grad, wanted.grad)


def test_gradients_of_both_losses_are_summed_where_both_wait_for_their_step() -> None:
    model, first, second = two_runs(FP32)
    twin = copy.deepcopy(model)
    first.backward(loss_of(first))
    second.backward(loss_of(second, 2.0))
    first.step()
    (loss_of(twin) + loss_of(twin, 2.0)).backward()
    torch.testing.assert_close(model[1].weight.grad, twin[1].weight.grad)
    first.backward(loss_of(first))  # the second run's own pass waits on
    assert not torch.equal(model[1].weight.grad, twin[1].weight.grad)
    second.zero_grad()
    assert all(p.grad is None for p in model[1].parameters())
    assert model[0].weight.grad is not None


def test_gradients_that_no_optimizer_has_are_dropped_and_a_state_may_be_taken() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    first = prepare(model, torch.optim.SGD(model[0].parameters(), lr=0.1), FP32)
    second = prepare(model, torch.optim.SGD(model[1].parameters(), lr=0.1), FP32)
    first.backward(loss_of(first))
    first.step()
    assert model[2].weight.grad is None
    assert model[1].weight.grad is not None
    first.state_dict()
    second.step()
    assert second.unscaled() == {}
    second.finish()
    first.backward(loss_of(first))
    first.step()
    assert all(p.grad is None for p in model.parameters())  # none is another run's any more


def test_a_submodule_may_have_a_run_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    first = prepare(model, torch.optim.SGD(model[0].parameters(), lr=0.1), FP32)
    second = prepare(model[1], torch.optim.SGD(model[1].parameters(), lr=0.1), FP32)
    before = model[1].weight.detach().clone()
    first.backward(loss_of(first))
    first.step()
    second.state_dict()  # without the gradients that its step is made of
    second.step()
    assert not torch.equal(before, model[1].weight)


def test_an_optimizer_that_is_prepared_again_and_a_run_that_is_gone_own_nothing() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = prepare(model, optimizer, FP32), prepare(model, optimizer, FP32)
    assert not first._weights.gradients.others
    assert not second._weights.gradients.others
    del first, second, optimizer
    gc.collect()
    head = prepare(model, torch.optim.SGD([model.bias], lr=0.1), FP32)
    head.backward(loss_of(head))
    head.step()
    assert model.weight.grad is None


@pytest.mark.parametrize(("policy", "own"), [(AMP_FP16, AMP_FP16), (AMP_FP16, FP32), (FP32, AMP_FP16)])
def test_gradients_in_the_loss_scale_of_another_run_are_refused(policy, own) -> None:
    _, first, second = two_runs(policy, own_policy=own)
    first.backward(loss_of(first))
    first.step()
    if policy is FP32:
        second.backward(loss_of(second))  # the other's were dropped first
        second.step()
        first.backward(loss_of(first))
        second.backward(loss_of(second))
    with pytest.raises(TrainingError, match="gave 1.weight gradients in another loss scale.*both as groups, or.*AMP_BF16"):
        second.step()


def test_runs_with_loss_scales_may_take_turns() -> None:
    model, first, second = two_runs(AMP_FP16)
    before = copy.deepcopy(model)
    for _ in range(3):
        for run in (first, second):
            run.backward(loss_of(run))
            run.step()
    assert not torch.equal(before[0].weight, model[0].weight)
    assert not torch.equal(before[1].weight, model[1].weight)
    assert not first.skipped
    assert not second.skipped


def test_parameters_of_another_run_are_not_said_to_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    kept = [prepare(model, torch.optim.SGD(model[0].parameters(), lr=0.1), FP32)]
    with pytest.warns(UserWarning, match=r"does not have 2.weight \(2 parameters in all\).*or prepare their own optimizer too"):
        kept.append(prepare(model, torch.optim.SGD(model[1].parameters(), lr=0.1), FP32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept.append(prepare(model, torch.optim.SGD(model[2].parameters(), lr=0.1), FP32))
    for run in kept:
        run.finish()
    alone = nn.Linear(2, 2)
    run = prepare(alone, torch.optim.SGD(alone.parameters(), lr=0.1), MASTER_BF16)
    assert run.finish() is alone


def test_where_a_second_run_is_refused_no_message_advises_one() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    make = torch.optim.SGD
    with pytest.warns(
        UserWarning, match="hand them over with run.add_group, or prepare separate parts of the model in its place"
    ):
        run = prepare(model, make(model[0].parameters(), lr=0.1), MASTER_BF16)
    with pytest.raises(SettingError, match="Sequential is in a run under .*several optimizers at a time, prepare separate parts"):
        prepare(model, make(model[1].parameters(), lr=0.1), MASTER_BF16)
    for part in (model[1], nn.Sequential(nn.Linear(2, 4), model[1])):  # its masters would be made of rounded weights
        with pytest.raises(SettingError, match="weight, a weight of a Sequential, is in a run under .*call finish"):
            prepare(part, make(part.parameters(), lr=0.1), MASTER_BF16)
    run.finish()
    parts = [prepare(part, make(part.parameters(), lr=0.1), MASTER_BF16) for part in model]
    parts[0].backward(parts[1](parts[0](torch.ones(3, 4))).square().mean())
    for part in parts:
        part.step()
        part.finish()


def pair():
    """A generator and a discriminator, and their optimizers."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(4, 16), nn.Softplus(), nn.Linear(16, 8))
    second = nn.Sequential(nn.Linear(8, 16), nn.Softplus(), nn.Linear(16, 1))
    return (first, second), [torch.optim.Adam(part.parameters(), lr=1e-3) for part in (first, second)]


def adversarial(generate, judge, make_step, *, critic=1, penalty=False, detached=True, steps=6) -> None:
    """The loop of a generative adversarial network; `make_step(number, loss)` steps one of the two optimizers."""
    torch.manual_seed(3)
    softplus = nn.functional.softplus
    for _ in range(steps):
        fake = generate(torch.randn(16, 4))
        for _ in range(critic):
            x = torch.randn(16, 8)
            loss = softplus(-judge(x)).mean() + softplus(judge(fake.detach() if detached else fake)).mean()
            if penalty:
                x.requires_grad_()
                slope = torch.autograd.grad(judge(x).sum(), x, create_graph=True)[0]
                loss = loss + (slope.norm(dim=1) - 1).square().mean()
            make_step(1, loss)
        make_step(0, softplus(-judge(generate(torch.randn(16, 4)))).mean())


SHAPES = pytest.mark.parametrize(
    "shape",
    [{}, {"critic": 5, "steps": 3}, {"penalty": True}, {"detached": False}],
    ids=["plain", "five of the critic", "gradient penalty", "generator not detached"],
)


@pytest.mark.matrix
@SHAPES
@pytest.mark.parametrize("policy", [FP32, AMP_BF16, MASTER_BF16, SPLIT_BF16, MASTER_FP16, AMP_FP16], ids=lambda p: p.name)
def test_two_models_that_train_against_each_other(policy, shape) -> None:
    """As torch's loop, in which the user empties the gradients before each pass."""

    def trained(*, by_hand: bool) -> list:
        models, optimizers = pair()
        runs = [prepare(model, optimizer, policy) for model, optimizer in zip(models, optimizers, strict=True)]

        def make_step(number, loss) -> None:
            if by_hand:
                optimizers[number].zero_grad()
            runs[number].backward(loss)
            runs[number].step()

        adversarial(*runs, make_step, **shape)
        assert not any(int(run.skipped) for run in runs)
        for run in runs:
            run.state_dict()  # what the other's pass left waits for no step
        return [p for run in runs for p in run.finish().parameters()]

    models, optimizers = pair()

    def make_step(number, loss) -> None:
        optimizers[number].zero_grad()
        loss.backward()
        optimizers[number].step()

    adversarial(*models, make_step, **shape)
    got = trained(by_hand=False)
    for mine, by_hand, plain in zip(got, trained(by_hand=True), [p for m in models for p in m.parameters()], strict=True):
        assert torch.equal(mine, by_hand)
        if policy is FP32:
            assert torch.equal(mine, plain)
        torch.testing.assert_close(mine, plain, rtol=0, atol=2.5e-3)


def through_both(first, second, factor=1.0):
    """A loss that goes through two models, each with a run of its own."""
    return loss_of(lambda x: second(first(x)), factor)


def parts(policy):
    """Two models of a layer each, and a run for each."""
    torch.manual_seed(0)
    models = nn.Linear(4, 4), nn.Linear(4, 2)
    return models, [prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy) for model in models]


@pytest.mark.parametrize("policy", [FP32, MASTER_BF16], ids=lambda policy: policy.name)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["own first", "other first"])
@pytest.mark.parametrize("passes", [1, 2])
def test_one_pass_through_two_models_makes_a_step_of_both(policy, order, passes) -> None:
    models, runs = parts(policy)
    twins = [copy.deepcopy(model).float() for model in models]
    bystander = nn.Linear(4, 2)
    other = prepare(bystander, torch.optim.SGD(bystander.parameters(), lr=0.1), FP32)
    optimizers = [torch.optim.SGD(twin.parameters(), lr=0.1) for twin in twins]
    for _ in range(3):
        with runs[0].accumulate(passes):
            for factor in range(passes):
                runs[0].backward(through_both(*runs, factor + 1.0))
        for factor in range(passes):
            (through_both(*twins, factor + 1.0) / passes).backward()
        for each in order:
            runs[each].step()
            other.backward(loss_of(other))  # of a model that has nothing to do with these
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    exact = {"rtol": 0, "atol": 1e-6 if policy is FP32 else 4e-3}
    for run, twin in zip(runs, twins, strict=True):
        for got, wanted in zip(run.finish().parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(got, wanted, **exact)


@pytest.mark.parametrize("end", ["step", "finish", "gone", "zero_grad"])
def test_what_a_run_left_is_dropped_when_it_has_ended_too(end) -> None:
    (_, second), runs = parts(FP32)
    alone = copy.deepcopy(second)
    runs[0].backward(through_both(*runs))
    if end == "gone":
        del runs[0]
        gc.collect()
    else:
        getattr(runs[0], end)()
    assert second.weight.grad is not None
    runs[-1].backward(loss_of(runs[-1]))
    loss_of(alone).backward()
    assert torch.equal(second.weight.grad, alone.weight.grad)


def test_accumulated_gradients_stay_through_the_turns_of_another_run() -> None:
    models, (first, second) = parts(FP32)
    twins = [copy.deepcopy(model) for model in models]
    for own_pass in (second.backward, torch.Tensor.backward):  # the user's own counts as the run's
        for factor in (1.0, 2.0):
            own_pass(loss_of(second, factor))
            first.backward(through_both(models[0], models[1].requires_grad_(requires_grad=False)))
            models[1].requires_grad_()
            first.step()
        (loss_of(twins[1], 1.0) + loss_of(twins[1], 2.0)).backward()
        torch.testing.assert_close(models[1].weight.grad, twins[1].weight.grad)
        for gradients in (second, twins[1]):
            gradients.zero_grad()
    twins[0].load_state_dict(models[0].state_dict())
    loss_of(models[1]).backward()
    for _ in range(2):
        first.backward(through_both(*models))
        first.step()
        through_both(*twins).backward()
        twins[0].load_state_dict(models[0].state_dict())
    loss_of(twins[1]).backward()
    torch.testing.assert_close(models[1].weight.grad, twins[1].weight.grad)  # summed with what reaches them, as by torch


@pytest.mark.parametrize("policy", [AMP_FP16, MASTER_FP16], ids=lambda policy: policy.name)
def test_a_step_in_the_loss_scale_of_a_run_of_another_model_is_refused(policy) -> None:
    _, runs = parts(policy)
    runs[0].backward(through_both(*runs))
    runs[0].step()
    with pytest.raises(TrainingError, match=r"another run gave weight gradients in another loss scale.*its zero_grad\(\) first"):
        runs[1].step()
    runs[1].backward(loss_of(runs[1]))  # drops them
    runs[1].step()


def in_thread(function) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_a_training_in_another_thread_is_no_business_of_a_run() -> None:
    _, (here, there) = parts(AMP_FP16)

    in_thread(lambda: (there.backward(loss_of(there)), there.step()))
    with here._weights.gradients.backward(scaled=True):
        in_thread(lambda: there.backward(loss_of(there)))
    here.step()
    here.backward(loss_of(here))
    before = there.named_masters()["weight"].clone()
    in_thread(there.step)
    assert not torch.equal(before, there.named_masters()["weight"])


@pytest.mark.parametrize("added", ["run", "run that shares a weight", "group"])
def test_a_run_that_is_made_or_grows_in_another_thread_stops_no_pass(added) -> None:
    (model, _), (here, _) = parts(FP32)
    growing = nn.Sequential(nn.Linear(4, 2))
    there = [prepare(growing, torch.optim.SGD(growing.parameters(), lr=0.1), FP32)]

    def grow() -> None:
        growing.append(nn.Linear(2, 2))
        if added == "group":
            there[0].add_group({"params": list(growing[1].parameters())})
        else:
            new = growing[1] if added == "run" else nn.Sequential(model, growing[1])
            there.append(prepare(new, torch.optim.SGD(growing[1].parameters(), lr=0.1), FP32))

    out = here(torch.ones(3, 4))
    out.register_hook(lambda _: in_thread(grow))
    before = model.weight.detach().clone()
    here.backward(out.square().mean())
    here.step()
    assert not torch.equal(before, model.weight)
    assert len(there) == 1 if added == "group" else len(there) == 2


def test_the_first_pass_of_a_run_in_another_thread_is_its_own() -> None:
    _, (here, there) = parts(AMP_FP16)
    before = there.named_masters()["weight"].clone()
    out = here(torch.ones(3, 4))
    out.register_hook(lambda _: in_thread(lambda: there.backward(loss_of(there))))
    here.backward(out.float().square().mean())
    here.step()
    there.step()
    assert not torch.equal(before, there.named_masters()["weight"])


@pytest.mark.parametrize("stepped", [False, True], ids=["at once", "after a step"])
def test_runs_that_were_prepared_together_know_one_another_in_another_thread(stepped) -> None:
    _, runs = parts(AMP_FP16)

    def train() -> None:
        for _ in range(1 + stepped):
            runs[1].zero_grad()
            runs[0].backward(through_both(*runs))
            runs[0].step()

    in_thread(train)
    with pytest.raises(TrainingError, match="another loss scale"):
        runs[1].step()


def test_trainings_in_threads_while_others_are_prepared() -> None:
    shared = nn.Linear(4, 4).requires_grad_(False)
    errors, stop = [], threading.Event()

    def new_run():
        model = nn.Sequential(shared, nn.Linear(4, 2))
        return prepare(model, torch.optim.SGD(model[1].parameters(), lr=0.1), FP32)

    def repeat(function) -> None:
        try:
            while not stop.is_set():
                function()
        except Exception as error:  # told by the test below
            errors.append(error)
            stop.set()

    def make() -> None:
        for run in [new_run() for _ in range(20)]:
            run.finish()

    run, interval = new_run(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=repeat, args=(make,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(100):
            run.backward(loss_of(run))
            run.step()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert not errors


def test_an_idle_run_is_not_marked(monkeypatch) -> None:
    _, runs = parts(FP32)
    marked = []
    monkeypatch.setattr(owners, "_mark", marked.append)
    runs[0].backward(loss_of(runs[0]))
    assert all(isinstance(gradient, torch.Tensor) for gradient in marked)


def heads(*, frozen=True):
    """Two models that share an encoder, and the optimizers of their heads."""
    torch.manual_seed(0)
    encoder = nn.Linear(4, 4).requires_grad_(not frozen)
    models = nn.Sequential(encoder, nn.Linear(4, 2)), nn.Sequential(encoder, nn.Linear(4, 3))
    return encoder, models, [torch.optim.SGD(model[1].parameters(), lr=0.1) for model in models]


@pytest.mark.parametrize("policy", [MASTER_BF16, MASTER_FP16], ids=lambda policy: policy.name)
@pytest.mark.parametrize("given", ["heads", "all"])
def test_half_runs_may_share_frozen_weights(policy, given) -> None:
    encoder, models, optimizers = heads()
    before = [encoder.weight.clone(), *(model[1].weight.detach().clone() for model in models)]
    if given == "all":
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    runs = [prepare(model, optimizer, policy) for model, optimizer in zip(models, optimizers, strict=True)]
    for run in runs * 2:
        run.backward(loss_of(run))
        run.step()
    for run in runs:
        run.finish()
    assert torch.equal(encoder.weight, before[0])
    assert not any(torch.equal(model[1].weight, old) for model, old in zip(models, before[1:], strict=True))


@pytest.mark.parametrize("trains", ["first", "second"])
def test_half_runs_that_share_a_weight_that_either_trains_are_refused(trains) -> None:
    encoder, models, optimizers = heads(frozen=False)
    optimizers[trains == "second"].add_param_group({"params": list(encoder.parameters())})
    run = prepare(models[0], optimizers[0], MASTER_BF16)
    with pytest.raises(SettingError, match="0.weight, a weight of a Sequential, is in a run under"):
        prepare(models[1], optimizers[1], MASTER_BF16)
    run.finish()
    prepare(models[1], optimizers[1], MASTER_BF16)
