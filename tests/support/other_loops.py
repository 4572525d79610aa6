"""Stand-ins for training loops of other libraries: they call what those call, in their order, and nothing else."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn


class LightningModule(nn.Module):
    """Hooks that do nothing, and the optimizer of `configure_optimizers`."""

    automatic_optimization = True
    trainer: Any = None

    def optimizers(self, use_pl_optimizer: bool = True) -> torch.optim.Optimizer:
        return self.trainer.optimizer

    def on_train_start(self) -> None: ...

    def on_train_end(self) -> None: ...

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None: ...

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None: ...


class LightningTrainer:
    """Lightning's order: the optimizer, train mode, on_train_start, steps, a checkpoint after each epoch, on_train_end."""

    def __init__(self, max_epochs: int) -> None:
        self.max_epochs, self.global_step, self.checkpoint = max_epochs, 0, {}

    def fit(self, module: Any, loader: Any) -> None:
        object.__setattr__(module, "trainer", self)
        self.estimated_stepping_batches = self.max_epochs * len(loader)
        self.optimizer = module.configure_optimizers()
        module.train()
        module.on_train_start()
        for _ in range(self.max_epochs):
            for index, batch in enumerate(loader):
                loss = module.training_step(batch, index)
                if module.automatic_optimization:
                    self.optimizer.zero_grad()
                    loss.backward()
                    self.optimizer.step()
                    self.global_step += 1
            self.checkpoint = {"state_dict": module.state_dict()}
            module.on_save_checkpoint(self.checkpoint)
        module.on_train_end()


class HuggingFaceTrainer:
    """The Trainer's order: train mode, compute_loss, backward, step, zero_grad of the model."""

    def __init__(self, model: nn.Module, train_dataset: list[dict[str, torch.Tensor]]) -> None:
        self.model, self.data = model, train_dataset
        self.state = SimpleNamespace(global_step=0, max_steps=len(train_dataset) // 32)

    def train(self) -> None:
        optimizer = torch.optim.AdamW(self.model.parameters())
        self.model.train()
        for start in range(0, len(self.data), 32):
            rows = self.data[start : start + 32]
            inputs = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
            self.compute_loss(self.model, inputs, num_items_in_batch=None).backward()
            optimizer.step()
            self.model.zero_grad()
            self.state.global_step += 1

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        """The loss that the model itself returns, as the Trainer takes it where a user has not overridden this."""
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


class Accelerator:
    """One process on the CPU."""

    device = torch.device("cpu")

    def prepare(self, *things: Any) -> Any:
        return things[0] if len(things) == 1 else things


def install() -> None:
    """Put the stand-ins where `import lightning`, `transformers` and `accelerate` find them."""
    for name, contents in {
        "lightning": {"LightningModule": LightningModule, "Trainer": LightningTrainer},
        "transformers": {"Trainer": HuggingFaceTrainer},
        "accelerate": {"Accelerator": Accelerator},
    }.items():
        module = ModuleType(name)
        vars(module).update(contents)
        sys.modules[name] = module
