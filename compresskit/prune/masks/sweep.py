"""`sweep`: the metric of a network against the fraction that is removed, for several ways of training it again.

sweep(model, task, Train(epochs=30, ...), ratios=(0, 0.5, 0.8, 0.9, 0.95, 0.98), out="runs/sweep")

    none                      nothing is trained; BatchNorm statistics are measured anew
    fine-tuning               a training of the caller's, usually short and at a low learning rate
    learning-rate rewinding   the schedule goes back to a point of the training, the weights stay
    weight rewinding          schedule and weights go back (both: Renda et al., 2003.02389)
"""

from __future__ import annotations

import itertools
import json
import logging
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from html import escape
from numbers import Integral
from pathlib import Path
from statistics import mean
from typing import Any

from torch import Tensor, nn

from compresskit.base.budget import remove
from compresskit.base.errors import CheckpointError, ModelError, SettingError, first_line
from compresskit.base.files import FORMAT, read_json, read_tensors, unwritable, write_json, write_tensors
from compresskit.base.fingerprint import describe, describe_by_value, describe_task
from compresskit.base.randomness import generators_kept, seed_generators_
from compresskit.base.stage import Stage
from compresskit.base.task import Task, check_is_task
from compresskit.graph.surgery import check_is_module, copy_model
from compresskit.measure import evaluate
from compresskit.prune.channels.prune import Prune
from compresskit.prune.masks.rewind import Rewind
from compresskit.prune.masks.sparsify import Sparsify
from compresskit.train.modes import given_modes
from compresskit.train.snapshots import rewind_
from compresskit.train.train import Train

log = logging.getLogger(__name__)

RATIOS = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98)


class Retraining(StrEnum):
    """How a pruned network is trained again."""

    NONE = "none"
    FINETUNE = "fine-tuning"
    REWIND_LR = "learning-rate rewinding"
    REWIND_WEIGHTS = "weight rewinding"


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """One trained network. method: how it was trained again. ratio: fraction removed. metric: None where it cannot be reached.

    reason: why it cannot.
    """

    method: str
    ratio: float
    seed: int
    metric: float | None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What `sweep` measured; prints as a table of means over the seeds.

    Attributes:
        dense: the metric of the unpruned network of each seed.
        points: every network.
    """

    dense: dict[int, float]
    points: tuple[SweepPoint, ...]

    def curve(self, method: str) -> list[tuple[float, float]]:
        """(ratio, mean metric over the seeds) with rising ratios; ratios that no seed reached are left out."""
        found: dict[float, list[float]] = {}
        for point in self.points:
            if point.method == method and point.metric is not None:
                found.setdefault(point.ratio, []).append(point.metric)
        return [(ratio, mean(metrics)) for ratio, metrics in sorted(found.items())]

    @property
    def methods(self) -> list[str]:
        """The ways of training again, in the order in which they ran."""
        return list(dict.fromkeys(point.method for point in self.points))

    def __str__(self) -> str:
        ratios = sorted({point.ratio for point in self.points})
        curves = {method: dict(self.curve(method)) for method in self.methods}
        lines = [f"{mean(self.dense.values()):.4f} unpruned, mean of {len(self.dense)} seed{'s'[: len(self.dense) > 1]}"]
        lines.append(f"{'removed':<26}" + "".join(f"{ratio:>9.1%}" for ratio in ratios))
        for method, curve in curves.items():
            cells = (f"{curve[ratio]:>9.4f}" if ratio in curve else f"{'-':>9}" for ratio in ratios)
            lines.append(f"{method:<26}" + "".join(cells))
        reasons = {f"{point.ratio:.1%}: {point.reason}" for point in self.points if point.reason}
        return "\n".join([*lines, *sorted(reasons)])

    def svg(self) -> str:
        """A picture: the metric against the fraction removed, a line for each method; the dashed line is the unpruned network."""
        dense = mean(self.dense.values())
        curves = {method: curve for method in self.methods if (curve := self.curve(method))}
        xs = [x for curve in curves.values() for x, _ in curve]
        ys = [dense, *(y for curve in curves.values() for _, y in curve)]
        low, high, last = min(ys), max(ys), max(xs) or 1.0
        scale = (high - low) or 1.0

        def at(x: float, y: float) -> tuple[str, str]:
            return f"{60 + 500 * x / last:.1f}", f"{300 - 270 * (y - low) / scale:.1f}"

        parts = [f'<text x="{at(x, low)[0]}" y="318" text-anchor="middle">{x:.4g}</text>' for x in sorted(set(xs))]
        for tick in (low + scale * i / 5 for i in range(6)):
            height = at(0, tick)[1]
            parts.append(f'<path d="M60 {height} H560" stroke="#ddd"/>')
            parts.append(f'<text x="54" y="{height}" text-anchor="end">{tick:.4g}</text>')
        parts.append(f'<path d="M60 {at(0, dense)[1]} H560" stroke="#555" stroke-dasharray="5 4"/>')
        for i, (method, curve) in enumerate(curves.items()):
            colour = _COLOURS[i % len(_COLOURS)]
            places = [at(x, y) for x, y in curve]
            parts.append(f'<path d="M{" L".join(" ".join(p) for p in places)}" fill="none" stroke="{colour}" stroke-width="2"/>')
            parts += [
                f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}">'
                f"<title>{escape(method)}: {metric:.4f} at {ratio:.2%}</title></circle>"
                for (x, y), (ratio, metric) in zip(places, curve, strict=True)
            ]
            parts.append(f'<text x="575" y="{40 + 18 * i}" fill="{colour}">{escape(method)}</text>')
        parts.append('<text x="310" y="338" text-anchor="middle">fraction removed</text>')
        head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 740 350" font-family="sans-serif" font-size="11">'
        title = f"<title>Metric against the fraction removed, mean of {len(self.dense)} seeds; dashed: unpruned</title>"
        return "\n".join([head, title, '<rect width="740" height="350" fill="white"/>', *parts, "</svg>"])

    def to_json(self) -> dict[str, Any]:
        """JSON-ready record."""
        return {"format": FORMAT, "dense": {str(k): v for k, v in self.dense.items()}, "points": [asdict(p) for p in self.points]}


_COLOURS = ("#1f5fa8", "#c0392b", "#1e8449", "#8e44ad", "#b9770e")


def _single_weights(ratio: float) -> Stage:
    return Sparsify(budget=remove(weights=ratio))


@dataclass(frozen=True, kw_only=True)
class SweepSettings:
    """The settings of `sweep`, which check themselves."""

    train: Train
    ratios: tuple[float, ...]
    methods: tuple[Retraining, ...]
    at: Callable[[float], Stage]
    finetune: Train | None
    rewind: Rewind
    trained: bool
    seeds: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, value in (("train", self.train), ("finetune", self.finetune)):
            if not isinstance(value, Train) and not (name == "finetune" and value is None):
                raise SettingError(f"sweep({name}=...): wanted Train(...), got {type(value).__name__}")
        if not self.ratios or any(not 0 <= ratio < 1 for ratio in self.ratios) or len(set(self.ratios)) != len(self.ratios):
            raise SettingError(f"sweep(ratios=...): wanted different fractions in [0, 1), got {self.ratios}")
        if Retraining.FINETUNE in self.methods and self.finetune is None:
            raise SettingError(f"sweep(methods=...): {Retraining.FINETUNE.value!r} needs finetune=Train(...)")
        if Retraining.REWIND_WEIGHTS in self.methods and self.trained:
            raise SettingError(
                f"sweep(methods=...): {Retraining.REWIND_WEIGHTS.value!r} goes back to a point of a training that sweep makes"
                " itself; give an untrained model and trained=False, or leave this method out"
            )
        for ratio in self.ratios:
            stage = self.at(ratio) if ratio else None
            if stage is not None and not isinstance(stage, Sparsify | Prune):
                raise SettingError(
                    f"sweep(at=...): wanted a function from the fraction to Sparsify(...) or Prune(...), got {stage!r}"
                )

    @property
    def places(self) -> list[tuple[Retraining, float, int]]:
        """Method, fraction and seed of every point, in the order in which they are made."""
        every = itertools.product(self.seeds, self.methods, sorted(self.ratios))
        return [(method, ratio, seed) for seed, method, ratio in every]

    def stage(self, method: Retraining, ratio: float) -> Stage | None:
        """The stage that makes a point; None where nothing is to be done."""
        rewound = self.rewind.rest(self.train)
        train = {Retraining.NONE: None, Retraining.FINETUNE: self.finetune}.get(method, rewound)
        if not ratio:
            return train
        stage = self.at(ratio)
        assert isinstance(stage, Sparsify | Prune)
        if method is not Retraining.REWIND_WEIGHTS:
            return replace(stage, finetune=train)
        return replace(stage, finetune=self.train, rewind=self.rewind)  # it takes the rest of the schedule itself


def sweep(
    model: nn.Module,
    task: Task,
    train: Train,
    *,
    ratios: Sequence[float] = RATIOS,
    methods: Sequence[str] | None = None,
    at: Callable[[float], Stage] = _single_weights,
    finetune: Train | None = None,
    rewind_to: float = 0.33,
    trained: bool = False,
    seeds: Sequence[int] = (0,),
    out: str | Path | None = None,
) -> Sweep:
    """Prune a network by several fractions, train each result again in several ways, and measure the task's metric.

    At fraction 0 the unpruned network is trained again just as long, so that a gain by longer training is seen. The model and the
    global random numbers are not changed.

    Args:
        model: a float model, untrained unless `trained`.
        task: data, loss and metric; `val` is what the points are measured on. Trainings that imitate `Task.reference` imitate the
            one that is given; without one, those of the points imitate the dense network.
        train: the training of the dense network. Rewinding runs the rest of its schedule over as many epochs.
        ratios: the fractions to remove, in [0, 1).
        methods: of "none", "fine-tuning", "learning-rate rewinding" and "weight rewinding"; None for all that the other settings
            allow.
        at: from a fraction to the stage that removes it, `Sparsify` of single weights by default; of channels, for example
            `lambda ratio: ck.Prune(budget=ck.remove(parameters=ratio), round_to=1)`. Its `finetune` and `rewind` are replaced.
        finetune: the training of "fine-tuning".
        rewind_to: the fraction of the training to which rewinding goes back.
        trained: whether the model is trained already; then nothing trains it first.
        seeds: of the trainings; each makes all networks.
        out: a folder for finished points and trained networks. A sweep that is started again goes on there.

    Raises:
        SettingError: a setting is out of range.
        DataError: there is no validation batch, or their number is not known.
        CheckpointError: `out` cannot be written, or holds a sweep of other settings, task, model, or version of compresskit.
        ModelError: no fraction at all can be removed.
    """
    chosen = _methods(methods, finetune=finetune, trained=trained)
    settings = SweepSettings(
        train=train,
        ratios=tuple(map(float, ratios)),
        methods=chosen,
        at=at,
        finetune=finetune,
        rewind=Rewind(to=rewind_to),
        trained=trained,
        seeds=_seeds(seeds),
    )
    store = _open_store(out, model, task, settings)
    with generators_kept():
        for seed in settings.seeds:
            _fill_(store, model, task, settings, seed)
    points = tuple(point for place in settings.places if (point := store.find(*place)))
    if any(point.ratio for point in points) and all(point.metric is None for point in points if point.ratio):
        raise ModelError(f"sweep: no fraction can be removed: {next(p.reason for p in points if p.reason)}")
    return Sweep(dense={seed: store.dense[seed] for seed in settings.seeds}, points=points)


def _fill_(store: _Store, model: nn.Module, task: Task, settings: SweepSettings, seed: int) -> None:
    """Make the points of a seed that are not stored yet."""
    network, early = _dense_network(model, task, settings, seed, store)
    if seed not in store.dense:
        store.add_dense(seed, evaluate(network, task))
    for method, ratio in itertools.product(settings.methods, sorted(settings.ratios)):
        if store.find(method, ratio, seed) is None:
            store.add(_point(network, early, task, settings, method, ratio, seed))


def _methods(methods: Sequence[str] | None, *, finetune: Train | None, trained: bool) -> tuple[Retraining, ...]:
    if methods is None:
        return tuple(
            method
            for method in Retraining
            if (method is not Retraining.FINETUNE or finetune is not None)
            and (method is not Retraining.REWIND_WEIGHTS or not trained)
        )
    known = [method.value for method in Retraining]
    given = methods if isinstance(methods, str | Sequence) else tuple(methods)  # a generator is read once
    if isinstance(given, str) or not given or any(method not in known for method in given):
        raise SettingError(f"sweep(methods=...): wanted some of {', '.join(map(repr, known))}, got {given!r}")
    return tuple(Retraining(method) for method in given)


def _seeds(given: Any) -> tuple[int, ...]:
    """The seeds as Python's whole numbers, which the generators and JSON take; SettingError for what is none."""
    seeds = tuple(given) if isinstance(given, Iterable) else ()
    if not seeds or not all(isinstance(seed, Integral) for seed in seeds):
        raise SettingError(f"sweep(seeds=...): wanted at least one whole number, such as (0, 1), got {given!r}")
    return tuple(map(int, seeds))


def _open_store(out: str | Path | None, model: nn.Module, task: Task, settings: SweepSettings) -> _Store:
    """The store of a sweep, after a look at what is measured and where it is kept."""
    check_is_module(model, "sweep")
    check_is_task(task, "sweep")
    task.length("val")  # raises where it is missing
    if out is None:
        return _Store(None, {})
    folder = Path(out).absolute()  # the data may change the working directory
    store = _Store(folder, _depends_on(model, task, settings))
    if any(store.find(*place) is None for place in settings.places):  # a finished one is only read
        _check_takes_files(folder)
    return store


def _check_takes_files(folder: Path) -> None:
    """Raise CheckpointError for a folder in which no file can be made, though it is there."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise CheckpointError(unwritable(folder, error)) from None


def _depends_on(model: nn.Module, task: Task, settings: SweepSettings) -> dict[str, Any]:
    """What the points of a folder depend on, besides their fraction, method and seed."""
    chosen = {"train": settings.train, "at": settings.at, "finetune": settings.finetune, "rewind": settings.rewind.to}
    chosen |= {"trained": settings.trained}
    parts = {f"Task({name}=...)": part.record for name, part in describe_task(task).items()}
    # By value, as a recipe's: a state dict has no buffer that is not persistent, and does not say which parameters are frozen.
    described = [describe_by_value(model, "model", modes=False).record, given_modes(model)]
    return {"model": described, **parts, **{name: describe(value) for name, value in chosen.items()}}


def _dense_network(
    model: nn.Module, task: Task, settings: SweepSettings, seed: int, store: _Store
) -> tuple[nn.Module, dict[str, Tensor]]:
    """The trained network of a seed, and its weights at the point to which rewinding goes; read back where they are stored."""
    network = copy_model(model).to(task.device)
    if settings.trained:
        return network.eval(), {}
    if (stored := store.read_network_(network, seed)) is not None:
        return network.eval(), stored
    seed_generators_(seed, task.train)
    early: dict[str, Tensor] = {}
    settings.train(network, replace(task, snapshots={settings.rewind.to: early}, progress=None))
    store.write_network(seed, network.state_dict(), early)
    return network, early


def _point(
    network: nn.Module,
    early: dict[str, Tensor],
    task: Task,
    settings: SweepSettings,
    method: Retraining,
    ratio: float,
    seed: int,
) -> SweepPoint:
    seed_generators_(seed, task.train)
    teacher = network if task.reference is None else task.reference
    own = replace(task, reference=teacher, progress=None, snapshots={settings.rewind.to: early} if early else None)
    stage = settings.stage(method, ratio)
    start = copy_model(network)
    if method is Retraining.REWIND_WEIGHTS and not ratio:
        rewind_(start, early)
    try:
        pruned = start if stage is None else stage(start, own)
    except ModelError as error:
        return SweepPoint(method=method.value, ratio=ratio, seed=seed, metric=None, reason=str(error))
    return SweepPoint(method=method.value, ratio=ratio, seed=seed, metric=evaluate(pruned, task))


class _Store:
    """The finished points of a sweep, written to a folder if there is one: sweep.json, and two tensor files for each seed."""

    def __init__(self, folder: Path | None, key: dict[str, Any]) -> None:
        self.folder, self.key = folder, key
        self.dense: dict[int, float] = {}
        self.points: dict[tuple[str, float, int], SweepPoint] = {}
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(unwritable(folder, error)) from None
        if not (folder / "sweep.json").exists():
            return
        record = read_json(folder / "sweep.json", "a sweep")
        stored, mine = record.get("key"), json.loads(json.dumps(key))
        if not isinstance(stored, dict) or stored.keys() != mine.keys():
            raise CheckpointError(
                f"{folder}: it holds a sweep of another version of compresskit, which does not say whether its settings and its"
                " task are these; choose another out=, or delete the folder"
            )
        if other := [name for name in mine if stored[name] != mine[name]]:
            raise CheckpointError(
                f"{folder}: it holds a sweep with other {', '.join(other)}; choose another out=, or delete the folder"
            )
        self.dense = {int(seed): metric for seed, metric in record["dense"].items()}
        for entry in record["points"]:
            point = SweepPoint(**entry)
            self.points[point.method, point.ratio, point.seed] = point

    def find(self, method: Retraining, ratio: float, seed: int) -> SweepPoint | None:
        return self.points.get((method.value, float(ratio), seed))

    def add(self, point: SweepPoint) -> None:
        log.info("%s", point)
        self.points[point.method, point.ratio, point.seed] = point
        self._write()

    def add_dense(self, seed: int, metric: float) -> None:
        self.dense[seed] = metric
        self._write()

    def _write(self) -> None:
        if self.folder is not None:
            found = Sweep(dense=self.dense, points=tuple(self.points.values()))
            write_json(self.folder / "sweep.json", found.to_json() | {"key": self.key})

    def read_network_(self, network: nn.Module, seed: int) -> dict[str, Tensor] | None:
        """Give a network the stored weights of a seed, and return those to which rewinding goes; None where there are none."""
        files = [] if self.folder is None else [self.folder / f"{name}-{seed}.safetensors" for name in ("dense", "early")]
        if not files or not all(file.exists() for file in files):
            return None
        dense, early = (read_tensors(file)[0] for file in files)
        try:
            network.load_state_dict(dense)  # not rewind_: a state dict has a tied weight under each of its names
        except RuntimeError as error:
            raise CheckpointError(
                f"{files[0]}: the weights are of another model ({first_line(error)}); delete the folder, or choose another out="
            ) from None
        return early

    def write_network(self, seed: int, dense: dict[str, Tensor], early: dict[str, Tensor]) -> None:
        if self.folder is not None:
            write_tensors(self.folder / f"early-{seed}.safetensors", early)
            write_tensors(self.folder / f"dense-{seed}.safetensors", dense)
