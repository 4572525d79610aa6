"""The page and the table of runs."""

from __future__ import annotations

import csv
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from compresskit.recipe.page.layers import named_times, time_rows
from compresskit.recipe.page.records import RunRecord, read_run
from compresskit.recipe.page.render import (
    LONGEST_RECIPE,
    csv_of_runs,
    page_of_runs,
    run_names,
    summary,
    training_charts,
    write_csv,
    write_page,
)
from compresskit.recipe.report import StageReport

EMPTY = {"meta", "link"}


class Page(HTMLParser):
    """The elements of a page; asserts that each is closed, and that what a browser would fetch is not there."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.texts = [], [], {}
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        assert tag != "script"
        assert not {"src", "srcset", "onload"} & dict(attrs).keys()
        assert dict(attrs).get("href", "data:,") == "data:,"
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)

    def all(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]


def row(stage, **figures):
    given = {"metric": 0.5, "parameters": 1000, "nonzero": 900, "macs": 5000, "seconds": 1.0, "executed": True, "verified": True}
    return StageReport(**({"stage": stage} | given | figures))


def a_run(folder="runs/first", **entries):
    rows = [row("1-train", bytes=4096, latency_ms=1.0), row("2-qat", metric=0.75, bytes=1024, latency_ms=0.5)]
    return RunRecord(folder=Path(folder), rows=rows, stages=["1-train", "2-qat"], metric="accuracy", **entries)


def test_the_page_of_a_run_shows_what_it_did(finished_run) -> None:
    out, _, result = finished_run
    text = (out / "report.html").read_text()
    page = Page(text)
    assert len(text) < 100_000
    assert "url(" not in text
    assert "http" not in text.replace("https://", "http")
    assert page.texts["h1"] == ["first"]
    cells = page.texts["td"]
    for report in result.rows:
        assert report.stage in page.texts["th"]
        assert f"{report.parameters:,}" in cells
        assert f"{report.nonzero:,}" in cells
        assert f"{report.macs:,}" in cells
        assert f"{report.bytes:,} B" in cells
        assert f"{report.latency_ms:.3f} ms" in cells
    assert [cell.get("class") for cell in page.all("td")].count("yes") == 3  # verified
    titles = [chart["aria-label"] for chart in page.all("svg") if "aria-label" in chart]
    assert titles == [
        *("Accuracy against size of the file", "Accuracy against latency", "Channels by layer", "Quantization noise by layer"),
        *("Milliseconds by layer", "Loss", "Accuracy during training", "Learning rate"),
    ]
    described = {attrs["id"] for attrs in page.all("desc")}
    assert described == {chart["aria-describedby"] for chart in page.all("svg") if "aria-label" in chart}
    assert len(described) == 8
    assert "1-train: train" in "".join(page.texts["li"])
    assert "onnxruntime" in "".join(page.texts["dd"])
    assert '"kind": "Prune"' in "".join(page.texts["pre"])


def test_a_run_reads_the_same_from_its_folder(finished_run) -> None:
    out, _, result = finished_run
    run = read_run(out)
    assert tuple(run.rows) == result.rows
    assert run.missing == []
    assert (run.metric, run.higher_is_better) == ("accuracy", True)
    assert page_of_runs([run]) == (out / "report.html").read_text()
    assert (out / "report.csv").read_text() == csv_of_runs([run])
    epochs = run.history["1-train"][0]["epochs"]
    assert [entry["epoch"] for entry in epochs] == [1, 2]
    assert {len(run.history[name]) for name in ("2-prune", "3-qat")} == {0, 1}


def test_what_users_write_is_escaped() -> None:
    evil = "<script>alert(1)</script>\"'&"
    history = {evil: [{"label": evil, "epochs": [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}]}]}
    run = a_run(f"runs/{evil.replace('/', '')}", history=history, environment={evil: {evil: evil}}, recipe={evil: evil})
    run.rows[1] = row(evil, bytes=10)
    run.stages, run.metric, run.missing, run.reused = ["1-train", evil], evil, [evil], [evil]
    text = page_of_runs([run, a_run()])
    Page(text)
    assert "<script" not in text
    assert text.count("&lt;script&gt;") > 10


def test_runs_share_their_axes_and_one_is_told_from_another() -> None:
    other = a_run("elsewhere/first")
    other.rows = [row("1-train", metric=0.7, bytes=2048, latency_ms=2.0)]
    other.higher_is_better = True
    run = a_run(higher_is_better=True)
    assert run_names([run, other, a_run("x/y")]) == ["runs/first", "elsewhere/first", "y"]
    text = page_of_runs([run, other])
    page = Page(text)
    assert [chart["aria-label"] for chart in page.all("svg") if "aria-label" in chart] == [
        "Accuracy against size of the file",
        "Accuracy against latency",
    ]
    colours = {circle["fill"] for circle in page.all("circle")}
    assert colours == {"var(--c0)", "var(--c1)"}
    assert page.texts["desc"][0] == (
        "Horizontal: ONNX file, KiB. Vertical: accuracy. runs/first: 1-train 0.5 at 4; 2-qat 0.75 at 1."
        " elsewhere/first: 1-train 0.7 at 2."
    )
    assert page.texts["h2"] == ["runs/first", "elsewhere/first"]


def test_the_pareto_line_needs_to_know_which_metric_is_better() -> None:
    assert "No Pareto line: the runs do not say" in page_of_runs([a_run()])
    assert 'class="pareto"' not in page_of_runs([a_run()])
    two = a_run(higher_is_better=False)
    two.rows[1] = row("2-qat", metric=0.75, bytes=1024, latency_ms=0.5)
    assert 'class="pareto"' in page_of_runs([two])
    two.rows[1] = row("2-qat", metric=0.25, bytes=1024, latency_ms=0.5)  # better in all: no line to draw
    assert 'class="pareto"' not in page_of_runs([two])
    assert page_of_runs([two]).count("2-qat is better in both than all others.") == 2
    two.metric = "metric"  # of a lambda
    assert page_of_runs([two]).count("2-qat is better in both than all others.") == 2


def test_the_sentence_says_what_is_not_verified() -> None:
    run = a_run()
    assert summary(run) == (
        "From 1-train to 2-qat: accuracy 0.5000 to 0.7500, file 4.00x smaller, latency 2.00x faster;"
        " 2 of 2 files verified in ONNX Runtime."
    )
    run.rows[1] = row("2-qat", bytes=1024, verified=False)
    assert summary(run).endswith("file 4.00x smaller; not verified: 2-qat.")
    assert summary(RunRecord(folder=Path("x"))) == "No stage is finished."


def test_curves_of_a_training() -> None:
    epochs = [
        {"step": 4, "loss": 2.0, "rates": [0.1, 0.2], "scale": 65536.0, "skipped": 1},
        {"step": 8, "loss": None, "rates": [0.05]},
    ]
    run = a_run(history={"1-train": [{"label": "train", "epochs": epochs, "metrics": [[4, 0.25], [8, 0.5]]}, {"epochs": "x"}]})
    loss, metric, rate, scale = training_charts(run)
    assert (
        loss.description == "Horizontal: optimizer step. Vertical: mean loss of an epoch. 1-train: train: from 2 at 4 to 2 at 4."
    )
    assert (metric.title, len(metric.series[0].marks)) == ("Accuracy during training", 2)
    assert rate.description.endswith("from 0.1 at 4 to 0.05 at 8.")
    assert scale.remark == "Steps skipped because gradients overflowed: 1-train: train 1."
    many = a_run(history={"1-train": [{"label": str(i), "epochs": epochs} for i in range(15)]})
    assert len(training_charts(many)[0].series) == 12
    assert training_charts(many)[0].remark == "3 more trainings are in report.json."


def test_a_page_stays_small() -> None:
    epochs = [{"step": i, "loss": 1 / (i + 1), "rates": [0.1]} for i in range(20_000)]
    run = a_run(history={"1-train": [{"label": "t", "epochs": epochs}]}, recipe={"stages": ["x" * 10**6]})
    text = page_of_runs([run])
    assert len(text) < LONGEST_RECIPE + 60_000
    assert re.search(r"\.\.\. and 940,\d\d\d characters more; recipe.json holds all of them", text)


def test_the_table_has_a_line_for_each_stage() -> None:
    run = a_run()
    run.rows[1] = row('2,qat "x"')
    lines = list(csv.DictReader(io.StringIO(csv_of_runs([run]))))
    assert [line["run"] for line in lines] == ["first", "first"]
    assert (lines[0]["bytes"], lines[0]["latency_ms"], lines[1]["bytes"]) == ("4096", "1.0", "")
    assert lines[1]["stage"] == '2,qat "x"'


@pytest.mark.parametrize("metric", ["<lambda>", "f1"])
def test_axes_are_named_by_the_metric(metric) -> None:
    run = a_run(higher_is_better=True)
    run.metric = metric
    assert f">{'&lt;lambda&gt;' if '<' in metric else 'f1'}</text>" in page_of_runs([run])


def outcomes(right, samples):
    return {"correct": f"{right:0{-(-samples // 4)}x}", "samples": samples}


def test_a_difference_in_accuracy_carries_a_paired_test() -> None:
    run = a_run()
    run.rows = [row("1-train", metric=0.9), row("2-qat", metric=0.8)]
    run.details = {"1-train": outcomes(0b1111111110, 10), "2-qat": outcomes(0b1011111011, 10)}
    text = page_of_runs([run])
    assert "<td>0.5958 to 0.9821</td>" in text
    assert (
        "2-qat against 1-train, on the same 10 samples: 2 are no longer right, 1 became right; difference -0.1000"
        " (-0.2950 to +0.2434), p 1.000: no difference is shown."
    ) in text
    run.rows[1] = row("2-qat", metric=0.0)
    run.details["2-qat"] = outcomes(0, 10)
    assert "p 0.004: worse." in page_of_runs([run])
    for other in ({}, {"correct": "xyz", "samples": 10}, outcomes(0b1, 10), {"correct": 5, "samples": "3"}, outcomes(0, 12)):
        run.details["2-qat"] = other  # not recorded, damaged, of another measurement, of other samples
        assert "Is the difference real?" not in page_of_runs([run])


@pytest.mark.parametrize(("higher", "word"), [(True, "worse"), (False, "better"), (None, "different")])
def test_a_difference_in_another_metric_carries_a_bootstrap(higher, word) -> None:
    run = a_run(higher_is_better=higher)
    run.metric, run.rows = "rmse", [row("1-train", metric=0.9), row("2-qat", metric=0.8)]
    draws = [0.85 + i / 1000 for i in range(101)]
    first = {"correct": None, "samples": 1200, "targets": "ab", "resampled": draws}
    now = {**first, "resampled": [value - 0.1 for value in draws]}
    run.details = {"1-train": first, "2-qat": now}
    text = page_of_runs([run])
    assert "<td>0.8525 to 0.9475</td>" in text
    assert (
        f"2-qat against 1-train, on the same 1,200 samples: 101 times drawn again; difference -0.1000 (-0.1000 to -0.1000),"
        f" p 0.020: {word}."
    ) in text
    for other in ({"targets": "cd"}, {"resampled": draws[1:]}, {"resampled": ["x"]}, {"samples": "3"}):  # other samples, damaged
        run.details["2-qat"] = now | other
        assert "Is the difference real?" not in page_of_runs([run])


def test_a_loader_that_starves_the_steps_is_named() -> None:
    def training(share):
        return [{"label": "train", "epochs": [{"step": i, "loss": 1.0, "waiting": share} for i in (1, 2)]}]

    text = page_of_runs([a_run(history={"1-train": training(0.02), "2-qat": training(0.1)})])
    assert "Share of the time in which a training waited for data: 1-train: train 2%, 2-qat: train 10%.</p>" in text
    text = page_of_runs([a_run(history={"1-train": training(0.4)})])
    assert "1-train: train 40%. The loader is too slow for the steps: give it workers" in text
    for shares in (None, "much"):  # of an earlier version, damaged
        assert "waited for data" not in page_of_runs([a_run(history={"1-train": training(shares)})])


def test_layers_are_drawn_and_listed() -> None:
    run = a_run()
    first = [{"name": "a", "shape": [8, 3, 3, 3], "zeros": 0}, {"name": "b", "shape": [4, 8], "zeros": 0}]
    last = [{"name": "a", "shape": [6, 3, 3, 3], "zeros": 81}, {"name": "b", "shape": [4, 6], "zeros": 0}]
    noise = {"layers": [{"layer": "a", "runs": "integer", "sqnr": 31.25}, {"layer": "b", "runs": "float: <last>", "sqnr": None}]}
    run.details = {"1-train": {"layers": first, "noise": None}, "2-qat": {"layers": last, "noise": noise}}
    page = Page(page_of_runs([run]))
    titles = [chart["aria-label"] for chart in page.all("svg") if "aria-label" in chart]
    assert titles[2:] == ["Channels by layer", "Zeros by layer", "Quantization noise by layer"]
    described = page.texts["desc"][2]
    assert "1-train: from 8 at 1 to 4 at 2. 2-qat: from 6 at 1 to 4 at 2." in described
    assert "2-qat, a: 1, 0.5" in page.texts["title"]
    assert page.texts["td"][-7:-3] == ["6 x 3 x 3 x 3", "50.0%", "integer", "31.2"]
    assert "2-qat: b: float: <last>" in page.texts["li"]
    run.details["2-qat"] = {"layers": [{"name": "a", "shape": "x"}, 3], "noise": {"layers": 1}}  # damaged
    assert "Zeros by layer" not in page_of_runs([run])


def test_the_page_says_where_the_milliseconds_go() -> None:
    run = RunRecord(folder=Path("runs/a"), rows=[row("1-train"), row("2-qat")], stages=["1-train", "2-qat"])
    assert "Where the milliseconds go" not in page_of_runs([run])
    many = [{"name": f"l{i}", "milliseconds": 0.01, "conversions": 0.0, "in_integers": "no"} for i in range(20)]
    slow = {"name": "head", "milliseconds": 0.5, "conversions": 0.25, "in_integers": "partly"}
    run.times = {
        "1-train": {"milliseconds": 0.2, "outside": 0.0, "layers": many},
        "2-qat": {"milliseconds": 1.0, "outside": 0.3, "layers": [*many, slow]},
    }
    rows = time_rows(run.times)
    assert rows[0] == ["head", "0.500", "50%", "0.250", "partly"]
    assert rows[-2:] == [
        ["all other layers", "0.090", "9%", "", ""],
        ["outside of layers: calling the runtime", "0.300", "30%", "", ""],
    ]
    assert sum(float(milliseconds) for _, milliseconds, *_ in rows) == pytest.approx(1.0)  # all of the latency
    text = page_of_runs([run])
    assert "layer of 2-qat" in text
    assert "milliseconds for one sample" in text
    assert "2-qat, head" in text  # the tooltip of its point
    details = {"1-train": {"layers": [{"name": "layer1.0", "shape": [1, 1], "zeros": 0}]}}
    several = {"2-qat": {"milliseconds": 1.0, "layers": [{"name": "layer1_0", "milliseconds": 1.0}, {**slow}]}}
    assert [found[0] for found in time_rows(named_times(several, details))] == ["layer1.0", "head"]
    run.times["2-qat"] = {"milliseconds": "x", "layers": [{"name": "a"}, 3]}  # damaged
    assert time_rows(run.times) == []
    page_of_runs([run])


@pytest.mark.parametrize(("write", "name"), [(write_page, "report.html"), (write_csv, "report.csv")])
def test_a_folder_whose_name_the_locale_cannot_decode_is_written(write, name, tmp_path) -> None:
    run = a_run(folder="runs/\udcc3\udca4")  # what such a locale makes of "ä"
    write(tmp_path / name, [run, run])
    assert r"\udcc3\udca4" in (tmp_path / name).read_text(encoding="utf-8")
