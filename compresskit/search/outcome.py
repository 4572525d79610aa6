"""`Search`: the result of `compress`, and how it prints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from compresskit.recipe.recipe import Recipe, Result
from compresskit.search.candidate import Candidate
from compresskit.search.ceilings import LARGEST_PLAUSIBLE_DROP, Ceilings
from compresskit.search.figures import Figures, pareto
from compresskit.search.latency.latency_model import PredictionError

DIGITS = ".12g"  # of a number in a budget that is proposed: with few, what was rounded up would be rounded down again
DROP_STEPS = 10_000  # a drop that is proposed is a multiple of one by so many
SEARCH_COLUMNS = (
    "candidate", "data", "metric", "drop", "short", "trained", "latency", "faster", "file", "smaller", "MACs", "seconds",
    "within",
)  # fmt: skip


@dataclass(kw_only=True)
class Tried:
    """A candidate and what was measured of it.

    Attributes:
        candidate: what it is.
        figures: of its file without training; None where it could not be made.
        failure: why it could not be made.
        short: what is lost after a short training, on the same data as in `figures`; None where there was none.
        short_seconds: that it took, of candidates that share one those of the first.
        trained: figures of its file after training, on all validation data.
        untrained: whether these are of the file without training, since that is better, or keeps ceilings that the other exceeds.
        discarded: figures of the trained file then, where there is one.
        stopped: fraction of the training after which it was given up.
        rejected: why the file of its run was not proved, where it was run; it is no finalist then.
        untrainable: why its training failed, likewise.
        training_seconds: that its training took.
        predicted: milliseconds for which it was not made, since they are far over the ceiling; None where it was made.
    """

    candidate: Candidate
    figures: Figures | None = None
    failure: str = ""
    short: float | None = None
    short_seconds: float = 0.0
    trained: Figures | None = None
    untrained: bool = False
    discarded: Figures | None = None
    stopped: float | None = None
    rejected: str = ""
    untrainable: str = ""
    training_seconds: float = 0.0
    predicted: float | None = None

    @property
    def failed(self) -> bool:
        """Whether it was run as a recipe in vain."""
        return bool(self.rejected or self.untrainable)

    @property
    def data(self) -> str:
        """Which validation data the metric and the drop of `best` are of; "" without any."""
        return "all" if self.trained is not None else "" if self.figures is None else "held out"

    @property
    def promise(self) -> float:
        """What is lost as far as is known before it is trained in full: after a short training, or without any."""
        assert self.figures is not None
        return self.figures.drop if self.short is None else min(self.short, self.figures.drop)

    @property
    def unsteadiness(self) -> float:
        """Relative difference of the latencies before and after it was run, of files of the same operators; 0 without two.

        Operators of a "balanced" one are placed by measurement each time, and may be others.
        """
        if self.figures is None or self.trained is None or self.candidate.effort != "fast":
            return 0.0
        two = self.figures.latency, self.trained.latency
        return max(two) / min(two) - 1

    @property
    def best(self) -> Figures | None:
        """Of the trained file where there is one, else of the untrained."""
        return self.trained or self.figures

    def __str__(self) -> str:
        if self.predicted is not None:
            return f"{self.candidate.name} is not made: {self.predicted:.3f} ms are predicted"
        if (figures := self.best) is None:
            return f"{self.candidate.name} cannot be made: {self.failure}"
        return f"{self.candidate.name}: metric {figures.metric:.4f}, {figures.latency:.3f} ms, {figures.bytes / 1000:.1f} kB"


@dataclass(frozen=True, kw_only=True)
class Search:
    """What a search found; prints as a table.

    Attributes:
        budget: what was asked for.
        dense: figures of the uncompressed model, on all validation data as `figures`.
        tried: all candidates.
        chosen: the one that was taken.
        reason: why it was.
        recipe: makes it; `code` is the same as Python that runs by itself.
        result: of the run of the recipe: its folder, report and rows.
        noise: relative difference of two latencies, the largest that was seen: of the uncompressed file, measured twice in turn,
            and of finalists, measured before and after they were run.
        ceilings: the budget in milliseconds, bytes, MACs and the unit of the metric.
        seconds: of this call; what an earlier one did is not in it.
        latency_error: what latencies that were predicted are worth; None where none could be.
        trains: whether finalists were trained.
        dense_held_out: figures of the uncompressed model on the held-out data, for those of candidates without training; None
            where these are all validation data.
    """

    budget: Ceilings
    dense: Figures
    tried: tuple[Tried, ...]
    chosen: Tried
    reason: str
    recipe: Recipe
    code: Path
    result: Result
    noise: float
    ceilings: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    latency_error: PredictionError | None = None
    trains: bool = True
    dense_held_out: Figures | None = None

    @property
    def model(self) -> nn.Module:
        """The compressed model, in eval mode."""
        return self.result.model

    @property
    def onnx(self) -> Path:
        """Its verified file."""
        assert self.result.onnx is not None
        return self.result.onnx

    @property
    def figures(self) -> Figures:
        """Of that file, on all validation data."""
        assert self.chosen.trained is not None
        return self.chosen.trained

    def curve(self, by: str = "latency") -> list[Tried]:
        """The Pareto curve of all candidates, from the least of `by` (latency, bytes or macs) to the best metric."""
        measured = [(tried, found) for tried in self.tried if (found := tried.best) is not None]
        points = [(figures.get(by), figures.drop) for _, figures in measured]
        return pareto([tried for tried, _ in measured], points)

    def to_json(self) -> dict[str, Any]:
        """What `print` shows, JSON-ready."""
        return {
            "budget": repr(self.budget),
            "chosen": self.chosen.candidate.name,
            "figures": asdict(self.figures),
            "uncompressed": asdict(self.dense),
            "uncompressed_held_out": asdict(self.dense_held_out or self.dense),
            "tried": [asdict(t) | self._about(t) for t in self.tried],
            "curve": [t.candidate.name for t in self.curve()],
            "reason": self.reason,
            "noise": self.noise,
            "onnx": str(self.onnx),
            "recipe": str(self.code),
        }

    def _about(self, tried: Tried) -> dict[str, Any]:
        """What the JSON says of a candidate besides its settings and figures."""
        within = tried.best is not None and not tried.best.excesses(self.ceilings)
        return {"candidate": tried.candidate.name, "within": within, "data": "all" if self._same_data else tried.data}

    @property
    def _same_data(self) -> bool:
        """Whether the held-out data are all validation data."""
        return self.dense_held_out is None

    def _table(self) -> list[str]:
        """The lines of the table; without the column of the data where these are the same for all."""
        on_curve = {id(tried) for tried in self.curve()}
        by_latency = sorted(self.tried, key=lambda t: t.best.latency if t.best else t.predicted or float("inf"))
        lines = [SEARCH_COLUMNS, ("uncompressed", "all", *_figure_cells(self.dense, self.dense, "", ""), "")]
        if self.dense_held_out is not None:
            lines.append(("uncompressed", "held out", *_figure_cells(self.dense_held_out, self.dense, "", ""), ""))
        lines += [self._line(tried, on_curve=id(tried) in on_curve) for tried in by_latency]
        shown = [i for i, name in enumerate(SEARCH_COLUMNS) if name != "data" or not self._same_data]
        widths = [max(len(line[i]) for line in lines) for i in range(len(SEARCH_COLUMNS))]
        return ["  ".join(line[i].ljust(widths[i]) if i == 0 else line[i].rjust(widths[i]) for i in shown) for line in lines]

    def _about_data(self) -> list[str]:
        """Which validation data the metrics and the drops are of, where that is not all of them."""
        if self._same_data:
            return []
        judged = "; the ceiling on the drop is kept on all" if "drop" in self.ceilings else ""
        return [
            "data: what was run as a recipe is measured on all validation data, the others on the held-out ones; a drop is the"
            f" difference to the uncompressed model on the same data{judged}"
        ]

    def __str__(self) -> str:
        text = self._table()
        failed = [str(t) for t in self.tried if t.failure]
        failed += [
            f"{t.candidate.name} {'is without training' if t.trained else 'is no finalist'}: {t.rejected or t.untrainable}"
            for t in self.tried
            if t.failed
        ]
        proxies = sum(t.figures.seconds for t in self.tried if t.figures)
        training = sum(t.training_seconds for t in self.tried)
        short = sum(t.short_seconds for t in self.tried)
        measured = sum(t.figures is not None for t in self.tried)
        trained = sum(t.training_seconds > 0 for t in self.tried)
        briefly = sum(t.short_seconds > 0 for t in self.tried)
        return "\n".join(
            [
                repr(self.budget),
                text[0],
                "-" * len(text[0]),
                *(line.rstrip() for line in text[1:]),
                "",
                "* on the Pareto curve of metric and latency; > chosen",
                "short: drop after a short training; trained: fraction of the training that was done",
                *self._about_data(),
                *failed,
                f"cost: {measured} candidates measured without training in {proxies:.0f} s, {briefly} trained for a short time in"
                f" {short:.0f} s, {trained} run as a recipe in {training:.0f} s; latencies are known to {self.noise:.1%}",
                *self._about_predictions(),
                self.reason,
                f"file: {self.onnx}",
                f"recipe: {self.code}",
            ]
        )

    def _about_predictions(self) -> list[str]:
        if self.latency_error is None:
            return []
        skipped = sum(t.predicted is not None for t in self.tried)
        return [
            f"latency model: {self.latency_error}; {skipped} candidates were not made, since it predicts far over the ceiling"
        ]

    def _line(self, tried: Tried, *, on_curve: bool) -> tuple[str, ...]:
        mark = "> " if tried is self.chosen else "* " if on_curve else "  "
        if tried.predicted is not None:
            cells = dict.fromkeys(SEARCH_COLUMNS, "-") | {
                "candidate": mark + tried.candidate.name,
                "latency": f"~{tried.predicted:.3f} ms",
                "faster": f"~{self.dense.latency / tried.predicted:.2f}x",
                "within": "no: latency, predicted",
            }
            return tuple(cells.values())
        if (figures := tried.best) is None:
            return (mark + tried.candidate.name, *["-"] * (len(SEARCH_COLUMNS) - 1))
        uncompressed = self.dense_held_out or self.dense if tried.data == "held out" else self.dense
        as_it_is = tried.untrained or not tried.candidate.can_be_trained
        done = "0" if as_it_is else "1" if tried.trained else "0" if tried.stopped is None else f"{tried.stopped:.2f}"
        done = done if self.trains else ""
        short = "" if tried.short is None else f"{tried.short:+.4f}"
        misses = figures.excesses(self.ceilings)
        failed = "" if tried.trained else "not proved" if tried.rejected else "not trained" if tried.untrainable else ""
        within = f"no: {failed}" if failed else "yes" if not misses else "no: " + ", ".join(misses)
        return (mark + tried.candidate.name, tried.data, *_figure_cells(figures, uncompressed, short, done), within)


def _figure_cells(figures: Figures, dense: Figures, short: str, trained: str) -> tuple[str, ...]:
    return (
        f"{figures.metric:.4f}",
        f"{figures.drop:+.4f}",
        short,
        trained,
        f"{figures.latency:.3f} ms",
        f"{dense.latency / figures.latency:.2f}x",
        f"{figures.bytes / 1000:.1f} kB",
        f"{dense.bytes / figures.bytes:.1f}x",
        f"{figures.macs / 1e6:.2f}M",
        f"{figures.seconds:.0f}",
    )


def nearest_budget(
    figures: Sequence[Figures],
    budget: Ceilings,
    ceilings: dict[str, float],
    *,
    asked: Mapping[str, float] | None = None,
    room: int = 0,
) -> str:
    """The budget, as Python, of the candidate that exceeds the ceilings least.

    asked: those of the ceilings that candidates have to keep; None for all. The others stay as they are.
    room: bytes by which its file may become larger when it is run.
    """
    asked = ceilings if asked is None else asked
    best = min(figures, key=lambda found: sum(found.excesses(asked).values()))
    best = replace(best, bytes=best.bytes + room)
    # What is exceeded becomes what the candidate has, rounded up so that it is met.
    values = {"latency": f'"{best.latency * 1.05:.4g}ms"', "bytes": best.bytes, "macs": best.macs}
    over = best.excesses(asked)
    drop = _rounded_up(best) if "drop" in over else ceilings.get("drop", 0.0)
    values["drop"] = f'"{drop:{DIGITS}}"' if drop > LARGEST_PLAUSIBLE_DROP else f"{drop:{DIGITS}}"
    given = [f"{name}={values[name] if name in over or name == 'drop' else f'{ceilings[name]:{DIGITS}}'}" for name in ceilings]
    given += [] if budget.minutes is None else [f"minutes={budget.minutes.value:{DIGITS}}"]
    given += [f"{name}={vars(budget)[name]}" for name in ("threads", "batch") if vars(budget)[name] != 1]
    return f"at_most({', '.join(given)})"


def _rounded_up(figures: Figures) -> float:
    """A drop with few digits that is no less than that of a file, as far as that is known."""
    steps = figures.drop * DROP_STEPS
    if abs(round(steps) - steps) <= min(figures.uncertainty * DROP_STEPS, 0.01):  # such as one of 100 samples, in float32
        return round(steps) / DROP_STEPS
    return math.ceil(steps) / DROP_STEPS
