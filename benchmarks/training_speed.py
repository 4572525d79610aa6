"""Training steps beside the plain ones: QAT beside float training, weights without fp32 masters beside AdamW; one thread.

Writes `training_speed.json` and `training_speed.md` beside this file. The steps of a group are taken in turn in one process, and
compared by CPU time, because others may use the machine: a ratio is the median over the rounds, each of which compares steps
that were taken one right after the other. `kept` is what autograd keeps for the backward pass, parameters and buffers left out;
`peak` is the most that all tensors take at once in a step. What the last line says of the machine is of the groups that were
measured last. `compiled`: the float model, as by `Train(compile=True)`;
`channels_last`: as by `Train(channels_last=True)`.

The last group is the chain of `chain_cifar.py`: a ResNet-56 cut to half of its MACs, under the one that was, in AMP_BF16 with
channels_last. What a loop of torch alone needs for it, with and without the teacher, bounds what a chain can take.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import mobilenet_v2

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "recipes"))

from vision import CifarResNet  # noqa: E402

import compresskit as ck  # noqa: E402
from compresskit.mixed.memory import StorageTracker  # noqa: E402
from compresskit.quant import prepare_qat  # noqa: E402

GROUPS = ("masters", "resnet20", "mobilenet_v2", "teacher", "chain")
POLICIES = (ck.mixed.MASTER_BF16, ck.mixed.SPLIT_BF16, ck.mixed.KAHAN_BF16, ck.mixed.SR_BF16)


def in_turn(steps: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each step in each round; every step is taken once before that."""
    for step in steps.values():
        step()
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            found[name].append(step())
    return found


def rows_of(
    group: str, found: dict[str, list[float]], kept: dict[str, int] | None = None, peak: dict[str, int] | None = None
) -> list[dict[str, Any]]:
    """One row for each step; the first is what the others are compared with."""
    first = next(iter(found))
    rows = []
    for name, seconds in found.items():
        ratios = [mine / other for mine, other in zip(seconds, found[first], strict=True)]
        row = {"group": group, "step": name, "ms": 1000 * statistics.median(seconds), "ratio": statistics.median(ratios)}
        for kind, bytes_of in (("kept", kept), ("peak", peak)):
            row[kind] = bytes_of[name] / bytes_of[first] if bytes_of and name in bytes_of else None
        rows.append(row)
    return rows


def kept_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes that autograd keeps of one forward pass."""
    own = {value.untyped_storage().data_ptr() for value in [*model.parameters(), *model.buffers()]}
    found: dict[int, torch.UntypedStorage] = {}

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        output = model(x)
    del output
    return sum(storage.nbytes() for storage in found.values())


def peak_bytes(step: Callable[[], float], model: nn.Module) -> int:
    """Bytes that all tensors take at the highest point of a step, the second of its kind."""
    with StorageTracker() as tracker:
        for value in [*model.parameters(), *model.buffers()]:
            tracker.add_(value)
        step()
    return tracker.peak


def qat(name: str, model: nn.Module, x: Tensor, rounds: int, *, compiled: bool) -> list[dict[str, Any]]:
    """A float step, QAT with ranges that follow and that are held, and the float step compiled."""
    y = torch.arange(len(x)) % 10
    with torch.no_grad():
        for _ in range(3):  # statistics of this network
            model.train()(x)
    following = prepare_qat(copy.deepcopy(model).eval(), [x])
    held = copy.deepcopy(following)
    held.freeze_statistics_()
    models = {"float": model, "QAT, ranges follow": following, "QAT, ranges held": held}
    kept = {kind: kept_bytes(each.train(), x) for kind, each in models.items()}

    def stepper(each: nn.Module, x: Tensor = x) -> Callable[[], float]:
        optimizer = torch.optim.SGD(each.parameters(), lr=1e-3, momentum=0.9)

        def step() -> float:
            begin = time.process_time()
            optimizer.zero_grad()
            F.cross_entropy(each(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return time.process_time() - begin

        return step

    steps = {kind: stepper(each) for kind, each in models.items()}
    for step in steps.values():
        step()
    peak = {kind: peak_bytes(step, models[kind]) for kind, step in steps.items()}
    last = {"float": copy.deepcopy(model), "QAT, ranges held": copy.deepcopy(held)}
    images = x.contiguous(memory_format=torch.channels_last)
    for kind, each in last.items():
        steps[f"{kind}, channels_last"] = stepper(each.to(memory_format=torch.channels_last), images)  # type: ignore[call-overload]
    if compiled:
        other = copy.deepcopy(model)
        other.compile(dynamic=False)
        steps["float, compiled"] = stepper(other)
    return rows_of(name, in_turn(steps, rounds), kept, peak)


def masters(width: int, layers: int, rounds: int) -> list[dict[str, Any]]:
    """The optimizer's step alone, under each policy."""
    x = torch.randn(2, width)

    def stepper(policy: ck.mixed.Policy) -> Callable[[], float]:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        run = None if policy is ck.mixed.FP32 else ck.mixed.prepare(model, optimizer, policy, backend="foreach")

        def step() -> float:
            optimizer.zero_grad()
            loss = (model if run is None else run)(x).float().square().sum()
            loss.backward() if run is None else run.backward(loss)
            begin = time.process_time()
            optimizer.step() if run is None else run.step()
            return time.process_time() - begin

        return step

    steps = {"AdamW of torch": stepper(ck.mixed.FP32)} | {policy.name: stepper(policy) for policy in POLICIES}
    return rows_of(f"step of {layers} x {width} x {width} weights", in_turn(steps, rounds))


def taught(depth: int, size: int, rounds: int) -> list[dict[str, Any]]:
    """A step of ResNet-20 under autocast: alone, and under a teacher in fp32, in the student's precision, and cached."""
    x, y = torch.randn(size, 3, 32, 32), torch.arange(size) % 10
    torch.manual_seed(0)
    teacher, student = CifarResNet(depth).eval(), CifarResNet(20)
    folder = tempfile.TemporaryDirectory()
    task = ck.Task(train=[(x, y)], val=[(x, y)])
    kinds: dict[str, Any] = {
        "alone": None,
        "teacher in fp32": ck.imitate(ck.distill.Teacher(teacher, dtype=torch.float32), task_weight=1.0),
        "teacher in the student's precision": ck.imitate(teacher, task_weight=1.0),
        "predictions on disk": ck.imitate(ck.distill.cache(teacher, task, folder.name), task_weight=1.0),
    }

    def stepper(objective: Any) -> Callable[[], float]:
        model = copy.deepcopy(student).train()
        bound = None if objective is None else objective.bind(model, task)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        run = ck.mixed.prepare(model, optimizer, ck.mixed.AMP_BF16)

        def step() -> float:
            begin = time.process_time()
            optimizer.zero_grad()
            run.backward(F.cross_entropy(run(x), y) if bound is None else sum(bound(run, (x, y)).values()))
            run.step()
            return time.process_time() - begin

        return step

    rows = rows_of(
        f"ResNet-20 under a ResNet-{depth}, AMP_BF16, batch {size}",
        in_turn({kind: stepper(objective) for kind, objective in kinds.items()}, rounds),
    )
    folder.cleanup()
    return rows


def chain(size: int, rounds: int) -> list[dict[str, Any]]:
    """A step of the chain: in loops of torch, the student alone and with its teacher, and in the stages' own."""
    x = torch.randn(size, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    y = torch.arange(size) % 10
    torch.manual_seed(0)
    teacher = CifarResNet(56).eval()
    student = copy.deepcopy(teacher)
    ck.prune.apply_(student, ck.prune.plan_channels(student, (x[:2],), ck.keep(macs=0.5)))
    rounding = prepare_qat(copy.deepcopy(student), [x])
    for model in (student, rounding):
        model.train().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    task = ck.Task(train=[(x, y)], val=[(x, y)])

    def by_torch(model: nn.Module, *, taught: bool) -> Callable[[], float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

        def step() -> float:
            begin = time.process_time()
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                predicted = model(x)
                with torch.no_grad():
                    wanted = teacher(x) if taught else torch.zeros_like(predicted)
            F.kl_div(predicted.float().log_softmax(1), wanted.float().softmax(1), reduction="batchmean").backward()
            optimizer.step()
            return time.process_time() - begin

        return step

    def by_stage(model: nn.Module) -> Callable[[], float]:
        bound = ck.imitate(teacher).bind(model, task)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        run = ck.mixed.prepare(model, optimizer, ck.mixed.AMP_BF16)

        def step() -> float:
            begin = time.process_time()
            run.backward(torch.stack([*bound(run, (x, y)).values()]).sum())
            run.step()
            return time.process_time() - begin

        return step

    steps = {
        "torch, the student alone": by_torch(copy.deepcopy(student), taught=False),
        "torch, with the teacher": by_torch(copy.deepcopy(student), taught=True),
        "fine-tuning": by_stage(student),
        "QAT": by_stage(rounding),
    }
    return rows_of(f"half of a ResNet-56 under the whole, AMP_BF16, channels_last, batch {size}", in_turn(steps, rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="steps of each kind that are timed")
    parser.add_argument("--batch-size", type=int, default=128, help="images a step of ResNet-20; a quarter for MobileNetV2")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=GROUPS, help="measured again; the others stay")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    load = os.getloadavg()[0]
    size = args.batch_size
    images, pictures = torch.randn(size, 3, 32, 32), torch.randn(size // 4, 3, 64, 64)
    mobile = f"MobileNetV2 at 64 px, batch {size // 4}"
    measures: list[Callable[[], list[dict[str, Any]]]] = [
        lambda: masters(512, 10, 2 * args.rounds),
        lambda: qat(f"ResNet-20, batch {size}", CifarResNet(20), images, args.rounds, compiled=True),
        lambda: qat(mobile, mobilenet_v2(num_classes=10), pictures, args.rounds, compiled=False),
        lambda: taught(56, size, args.rounds),
        lambda: chain(size, args.rounds),
    ]
    path = HERE / "training_speed.json"
    found = json.loads(path.read_text())["groups"] if path.exists() else {}
    found |= {name: measure() for name, measure in zip(GROUPS, measures, strict=True) if name in args.groups}
    rows = [row for name in GROUPS for row in found.get(name, [])]
    about = {"torch": torch.__version__, "python": platform.python_version(), "threads": 1, "rounds": args.rounds, "load": load}
    path.write_text(json.dumps({"about": about, "groups": found}, indent=1) + "\n")
    lines = ["| | step | CPU ms | ratio | kept for the backward pass | peak |", "|---|---|--:|--:|--:|--:|"]
    for row in rows:
        kept, peak = ("" if row[kind] is None else f"{row[kind]:.2f}" for kind in ("kept", "peak"))
        lines.append(f"| {row['group']} | {row['step']} | {row['ms']:.1f} | {row['ratio']:.2f} | {kept} | {peak} |")
    (HERE / "training_speed.md").write_text("\n".join([*lines, "", f"CPU time, steps in turn. {about}"]) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
