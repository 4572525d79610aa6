"""The Trainers of docs/loops.md take the steps of the Hugging Face Trainer, also where it accumulates and smooths labels."""

from __future__ import annotations

import ast
import re
from functools import partial

import checkout
import pytest
import torch
from torch import nn

import compresskit as ck

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]  # the extra `dev` has no transformers
ROWS = 40


@pytest.fixture(scope="module")
def page():
    """transformers, and the classes that the page defines on top of its Trainer."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    names = {"Trainer": transformers.Trainer, "nn": nn, "ck": ck}
    written = "\n".join(re.findall(r"```python\n(.*?)```", (checkout.ROOT / "docs" / "loops.md").read_text(), re.S))
    wanted = ("DistillTrainer", "InRun", "HalfTrainer")
    classes = [node for node in ast.parse(written).body if isinstance(node, ast.ClassDef) and node.name in wanted]
    exec(compile(ast.Module(classes, []), "loops.md", "exec"), names)
    return transformers, names


def network(transformers) -> nn.Module:
    """A causal language model, whose forward takes the number of labels of the whole step."""
    torch.manual_seed(1)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 37, "n_positions": 32}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


def texts(*, padded: bool) -> list:
    words = torch.randint(0, 37, (ROWS, 12), generator=torch.Generator().manual_seed(0))
    labels = words.clone()
    for row in range(ROWS) if padded else ():
        labels[row, : row % 9] = -100
    return [{"input_ids": x, "labels": y} for x, y in zip(words, labels, strict=True)]


def settings(transformers, folder, **given):
    quiet = {"save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no"}
    return transformers.TrainingArguments(str(folder), max_grad_norm=0, lr_scheduler_type="constant", **quiet, **given)


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("accumulated", [1, 2, 4])  # of ten batches: four leave two to the last step
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_half_trainer_steps_as_the_trainer(accumulated, smoothing, page, tmp_path) -> None:
    transformers, names = page
    given = {"num_train_epochs": 1, "per_device_train_batch_size": 4, "label_smoothing_factor": smoothing}
    arguments = settings(transformers, tmp_path, gradient_accumulation_steps=accumulated, **given)
    sgd = partial(torch.optim.SGD, lr=0.5)
    plain, model = network(transformers), network(transformers)
    data = texts(padded=True)
    transformers.Trainer(model=plain, optimizers=(sgd(plain.parameters()), None), train_dataset=data, args=arguments).train()
    run = ck.mixed.prepare(model, sgd(model.parameters()), ck.mixed.FP32)
    names["HalfTrainer"](run, train_dataset=data, args=arguments).train()
    assert not torch.equal(weights(plain), weights(network(transformers)))
    torch.testing.assert_close(weights(run.finish()), weights(plain), atol=1e-6, rtol=1e-5)


def test_distill_trainer_moves_as_far_by_parts_of_a_batch(page, tmp_path) -> None:
    transformers, names = page
    teacher = network(transformers).eval()
    for parameter in teacher.parameters():
        parameter.data.mul_(1.7)
    data, moved = texts(padded=False)[:8], []
    batch = {key: torch.stack([row[key] for row in data]) for key in data[0]}
    for rows, accumulated in ((8, 1), (4, 2), (2, 4)):
        model = network(transformers)
        start = weights(model)
        task = ck.Task(train=[batch], predict=lambda output: output["logits"])
        objective = ck.imitate(teacher, task_weight=0.0, dim=-1).bind(model, task)
        arguments = settings(
            transformers, tmp_path, max_steps=1, per_device_train_batch_size=rows, gradient_accumulation_steps=accumulated
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given = {"train_dataset": data, "args": arguments, "objective": objective, "optimizers": (optimizer, None)}
        names["DistillTrainer"](model=model, **given).train()
        objective.close()
        moved.append(weights(model) - start)
    assert moved[0].norm() > 0
    torch.testing.assert_close(moved[1], moved[0], atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(moved[2], moved[0], atol=1e-6, rtol=1e-4)
