"""Before and after a stage: try everything once, seed, and measure what came out."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compresskit.base.errors import CompressError, DataError, ExportError, ModelError
from compresskit.base.files import FORMAT, write_json
from compresskit.base.randomness import held_by, seed_
from compresskit.base.samples import ValidationInputs
from compresskit.base.stage import Stage
from compresskit.base.task import Inputs, Task, call, first_rows, shapes_of
from compresskit.export.check.verify import Verification, verify_onnx
from compresskit.export.files import annotate, file_bytes
from compresskit.export.onnx import export_onnx
from compresskit.export.rewrite.sparse import compressed_bytes
from compresskit.graph.capture import Dynamic, capture, check_runs
from compresskit.graph.masks import masks_of
from compresskit.graph.surgery import quantized_parts
from compresskit.measure import Row, count_macs, count_nonzero, count_parameters, evaluate, numpy_inputs, session
from compresskit.train.train import supervised_loss


def rehearse(model: nn.Module, task: Task) -> None:
    """Try everything once that would otherwise fail hours later: the model, its capture, the loss and the metric on one batch.

    Raises ModelError or DataError; the model is not changed.
    """
    for which in ("val", "train", "calibration"):
        if which != "val" and getattr(task, which) is None:
            continue
        task.length(which)
        inputs, target = task.split(next(iter(task.batches(which))))
        probe = copy.deepcopy(model).to(task.device)
        check_runs(probe, inputs)
        with torch.no_grad():
            predictions = task.predict(call(probe.eval(), inputs))
            try:
                if which == "train":
                    supervised_loss(task, predictions, target)
                elif which == "val" and not hasattr(task.metric, "update"):
                    task.metric(predictions, target)
            except CompressError:
                raise
            except Exception as error:
                what = "loss" if which == "train" else "metric"
                first = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise DataError(
                    f"Task({what}=...) fails on the first batch of {which} (predictions {tuple(predictions.shape)}, target"
                    f" {shapes_of(target) or type(target).__name__}): {first}"
                ) from error
    if not hasattr(model, "deployed"):
        capture(model, first_rows(task.example(), 2))


def seed_everything(seed: int, task: Task) -> None:
    """Seed the global generators of torch, numpy and random, and those of the loaders themselves."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  what data loaders of users draw from
    for loader in (task.train, task.val, task.calibration):
        for generator in held_by(loader):
            seed_(generator, seed)


def held(stage: Stage, model: nn.Module, task: Task) -> nn.Module:
    """What the stage makes of a model, after a look that it kept the masks that came in; `ModelError` where it did not.

    Weights of a quantized model that a mask keeps are kept from rounding to zero.
    """
    before = masks_of(model)
    counts = {} if before is None else {name: int((~mask).sum()) for name, mask in before.masks.items()}
    model = stage(model, task)
    if before is None or "dense" in stage.restores:
        return model
    kind, after = type(stage).__name__, masks_of(model)
    if after is None:
        raise ModelError(f"{kind} lost the masks of its model ({sum(counts.values())} weights at zero); a stage that is meant to"
                         " take them off says restores = frozenset({'dense'})")  # fmt: skip
    for part in model.modules():
        getattr(part, "keep_masked_", lambda: None)()
    for name, count in after.broken(model).items():
        raise ModelError(
            f"{kind}: {count} weights of {name} that its mask removes are no longer zero; train through fit_, or call"
            " masks_of(model).zero_(model) after every step"
        )
    for name, mask in after.masks.items():
        # A quantized model, or part, calls its tensors by the same names, in its body.
        known = counts.get(name, counts.get(name.replace("body.", "", 1), 0))
        if (now := int((~mask).sum())) < known:
            raise ModelError(f"{kind}: the mask of {name} removed {known} weights before it and {now} after it; masks only grow")
    return model


def measure(
    model: nn.Module, task: Task, folder: Path, *, stage: Any, seconds: float, wanted: bool, dynamic: Dynamic = (0,)
) -> Row:
    """Export, prove and evaluate a stage's model; a file that does not agree is kept as `model.rejected.onnx`.

    stage: its settings, which the file then holds with its metric and the proof. dynamic: dimensions of the inputs that vary in
    the file; a quantized model says its own.
    """
    path = folder / "model.onnx"
    proof: Verification | None = None
    executed = None
    if wanted:
        export_onnx(model, path, task.example(), dynamic=None if quantized_parts(model) else dynamic)
        proof = verify_onnx(path, model, ValidationInputs(task))
        write_json(folder / "verify.json", {"format": FORMAT, **proof.to_json()})
        if not proof.passed:
            path.replace(folder / "model.rejected.onnx")
            raise ExportError(f"{folder / 'model.rejected.onnx'}: {proof}")
        executed = session(path)
    masks = masks_of(model)
    run = model if executed is None else _runner(executed, model, task.example())
    metric = evaluate(run, task)
    if proof is not None:
        annotate(path, stage={"name": folder.name, "settings": stage}, metric=metric, verification=proof.to_json())
    return Row(
        stage=folder.name,
        metric=metric,
        parameters=count_parameters(model),
        nonzero=count_nonzero(model),
        macs=count_macs(model, task.example()),
        seconds=round(seconds, 2),
        bytes=file_bytes(path) if wanted else None,
        executed=executed is not None,
        verified=None if proof is None else proof.passed,
        removed=None if masks is None else masks.removed,
        masked=None if masks is None else masks.total,
        zipped=compressed_bytes(path)["zip"] if wanted and masks is not None else None,
    )


def _runner(executed: Any, model: nn.Module, example: Inputs) -> Callable[..., Any]:
    """The session as a function that gives what the model gives: a tensor, a tuple, a dict."""
    with torch.no_grad():
        leaves, spec = pytree.tree_flatten(call(model, first_rows(example, 2)))

    def run(*args: Any, **kwargs: Any) -> Any:
        outputs = iter(executed.run(None, numpy_inputs(executed, kwargs or args)))
        filled = [torch.from_numpy(np.asarray(next(outputs))) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return pytree.tree_unflatten(filled, spec)

    return run
