"""A run as the optimizer of other loops: plain ones, and those of the real libraries, where they are installed."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

import compresskit as ck
from compresskit.base.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:fp16 on a CPU")  # it has a loss scale, which the loops must not touch
LABELS = torch.arange(64) % 4
IMAGES = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)) + LABELS.view(-1, 1)
LOADER = DataLoader(TensorDataset(IMAGES, LABELS), batch_size=16)
EPOCHS, STEPS = 4, 16
schedule = partial(OneCycleLR, max_lr=0.01, total_steps=STEPS)


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def prepared(model: nn.Module, policy=ck.mixed.MASTER_FP16) -> ck.mixed.Run:
    return ck.mixed.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), policy, clip=1.0)


def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


@pytest.fixture
def plain() -> nn.Module:
    """The weights after a loop of the run's own methods."""
    run = prepared(network())
    run.schedule(schedule(run.optimizer))
    for _ in range(EPOCHS):
        for x, y in LOADER:
            run.backward(loss_of(run, x, y))
            run.step()
    return run.finish()


def same(model: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("closure", [False, True])
def test_a_plain_loop_with_a_resume(plain, closure: bool) -> None:
    def epoch(run, optimizer, scheduler) -> None:
        for x, y in LOADER:

            def evaluate(x=x, y=y):
                optimizer.zero_grad()
                loss = loss_of(run, x, y)
                run.backward(loss)
                return loss

            if closure:
                assert optimizer.step(evaluate).requires_grad
            else:
                evaluate()
                optimizer.step()
            scheduler.step()

    run = prepared(network())
    optimizer = ck.mixed.RunOptimizer(run)
    scheduler = schedule(optimizer)
    epoch(run, optimizer, scheduler)
    states = optimizer.state_dict(), scheduler.state_dict()
    with pytest.raises(CheckpointError, match="wanted the state of a Run, version 1, got"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    run = prepared(network())
    optimizer = ck.mixed.RunOptimizer(run)
    scheduler = schedule(optimizer)
    optimizer.load_state_dict(states[0])
    scheduler.load_state_dict(states[1])
    assert optimizer.param_groups[0]["lr"] == run.optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0]
    for _ in range(EPOCHS - 1):
        epoch(run, optimizer, scheduler)
    assert same(run.finish(), plain)


@pytest.mark.parametrize("policy", [ck.mixed.FP32, ck.mixed.MASTER_FP16, ck.mixed.SPLIT_BF16], ids=lambda policy: policy.name)
def test_a_group_added_to_it_is_the_runs(policy) -> None:
    def unfrozen(add) -> nn.Module:
        model = network()
        model[0].requires_grad_(False)
        optimizer = torch.optim.AdamW(model[2].parameters(), lr=0.01)
        run = ck.mixed.prepare(model, optimizer, policy)
        wrapped = ck.mixed.RunOptimizer(run)
        model[0].requires_grad_(True)
        add(run, wrapped, {"params": list(model[0].parameters()), "lr": 1e-3})
        assert wrapped.param_groups is optimizer.param_groups
        assert [group["lr"] for group in wrapped.param_groups] == [0.01, 1e-3]
        for x, y in LOADER:
            run.backward(loss_of(run, x, y))
            wrapped.step()
        return run.finish()

    model = unfrozen(lambda run, wrapped, group: wrapped.add_param_group(group))
    assert same(model, unfrozen(lambda run, wrapped, group: run.add_group(group)))
    assert not torch.equal(model[0].weight, network()[0].weight)  # type: ignore[index]


@pytest.mark.filterwarnings("ignore")
def test_lightning_by_automatic_optimization(plain, tmp_path) -> None:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")

    class Half(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def configure_optimizers(self):
            self.run = prepared(self.net)
            optimizer = ck.mixed.RunOptimizer(self.run)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule(optimizer), "interval": "step"}}

        def training_step(self, batch, batch_idx):
            return loss_of(self.run, *batch)

        def backward(self, loss):
            self.run.backward(loss)

        def on_train_end(self):
            self.run.finish()

    class Keep(lightning.Callback):
        def on_train_epoch_end(self, trainer, module):
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    make = partial(lightning.Trainer, max_epochs=EPOCHS, accelerator="cpu", **quiet)
    whole, resumed = Half(), Half()
    trainer = make(callbacks=[Keep()])
    trainer.fit(whole, LOADER)
    assert trainer.global_step == STEPS
    assert same(whole.net, plain)
    make().fit(resumed, LOADER, ckpt_path=tmp_path / "half.ckpt")
    assert same(resumed.net, plain)


@pytest.mark.filterwarnings("ignore")
def test_the_hugging_face_trainer(tmp_path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x, labels=None):
            logits = self.net(x)
            return {"loss": nn.functional.cross_entropy(logits.float(), labels), "logits": logits}

    class InRun(nn.Module):
        def __init__(self, run) -> None:
            super().__init__()
            self.run, self.model = run, run.model

        def forward(self, **inputs):
            return self.run(**inputs)

    class HalfTrainer(transformers.Trainer):
        def __init__(self, run, **kwargs) -> None:
            super().__init__(model=run.model, optimizers=(ck.mixed.RunOptimizer(run), None), **kwargs)
            self.in_run = InRun(run)
            self.accelerator.backward = lambda loss, **kwargs: run.backward(loss)

        def training_step(self, model, *args, **kwargs):
            return super().training_step(self.in_run, *args, **kwargs)

    def train(resume=None) -> nn.Module:
        run = prepared(Named(), ck.mixed.MASTER_BF16)
        arguments = transformers.TrainingArguments(
            str(tmp_path), num_train_epochs=2, per_device_train_batch_size=16, max_grad_norm=0, report_to=[], use_cpu=True,
            save_strategy="no" if resume else "epoch", disable_tqdm=True, learning_rate=0.01,
        )  # fmt: skip
        data = [{"x": x, "labels": y} for x, y in zip(IMAGES, LABELS, strict=True)]
        HalfTrainer(run, train_dataset=data, args=arguments).train(resume_from_checkpoint=resume)
        return run.finish()

    whole = train()
    assert not same(whole, Named())
    assert same(train(str(tmp_path / "checkpoint-4")), whole)


@pytest.mark.filterwarnings("ignore")
def test_accelerate(plain, tmp_path) -> None:
    accelerator = pytest.importorskip("accelerate", reason="accelerate is not installed").Accelerator(cpu=True)
    run = prepared(network())
    optimizer = ck.mixed.RunOptimizer(run)
    loader, optimizer, scheduler = accelerator.prepare(LOADER, optimizer, schedule(optimizer))
    for epoch in range(EPOCHS):
        for x, y in loader:
            run.backward(loss_of(run, x, y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if epoch == 1:
            accelerator.save_state(str(tmp_path))
            accelerator.load_state(str(tmp_path))
    assert same(run.finish(), plain)


def test_a_closure_of_lbfgs_is_evaluated_as_often_as_it_wants() -> None:
    calls = []
    run = ck.mixed.prepare(model := nn.Linear(8, 4), torch.optim.LBFGS(model.parameters(), max_iter=4), ck.mixed.FP32)
    optimizer = ck.mixed.RunOptimizer(run)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(run, IMAGES, LABELS)
        run.backward(loss)
        calls.append(loss.item())
        return loss

    assert optimizer.step(closure).item() == calls[0]
    assert len(calls) > 2
    assert calls[-1] < calls[0]
