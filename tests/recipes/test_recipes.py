"""Recipes and the README run, in a tiny mode. One recipe starts in a process of its own, the others in this one."""

from __future__ import annotations

import json
import re
import runpy
import struct
import sys

import checkout
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import compresskit as ck

RECIPES = sorted(p.name for p in (checkout.ROOT / "recipes").glob("*.py") if p.name not in ("vision.py", "text.py"))


@pytest.fixture
def start(monkeypatch, capsys):
    """`start(NAME, *ARGUMENTS)` does in this process what `python recipes/NAME ARGUMENTS` does; its output, once it succeeded."""
    folder = checkout.ROOT / "recipes"
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        code: object = 0
        try:
            runpy.run_path(str(folder / name), run_name="__main__")
        except SystemExit as end:
            code = end.code
        output = capsys.readouterr()
        assert not code, output.err
        assert "%|" not in output.err  # no progress bars where there is no terminal
        return output.out

    return run


@pytest.fixture
def planned(start, monkeypatch):
    """`planned(NAME, *ARGUMENTS)` starts a recipe up to its run; returns what would run: the recipe, the model, the task."""

    def plan(name, *arguments):
        calls = []

        def run(recipe, model, task, out):
            calls.append((recipe, model, task))
            raise SystemExit

        with monkeypatch.context() as patch:
            patch.setattr(ck.Recipe, "run", run)
            start(name, *arguments)
        (call,) = calls
        return call

    return plan


def kinds(recipe) -> list[str]:
    return [type(stage).__name__ for stage in recipe.stages]


def check_weights(model, file) -> None:
    """A model has the weights of a file."""
    there = load_file(file)
    assert model.state_dict().keys() == there.keys()
    assert all(torch.equal(value, there[name]) for name, value in model.state_dict().items())


def check_run(output, out, stages):
    """A run printed its table and wrote its report, with a verified file for each stage."""
    assert output.splitlines()[0].startswith("stage")
    assert output.count(" yes") == stages
    assert f"model: {out / 'model.onnx'}" in output
    assert len(json.loads((out / "report.json").read_text())["rows"]) == stages


@pytest.mark.parametrize("name", RECIPES)
def test_every_option_has_help(name, start) -> None:
    options = re.findall(r"^  (--?\w.*)$", start(name, "--help"), re.M)
    assert len(options) >= 4
    source = (checkout.ROOT / "recipes" / name).read_text()
    assert source.count("add_argument(") == source.count("help=")


def test_digits_in_its_own_process(tmp_path) -> None:
    out = tmp_path / "run"
    process = checkout.python(checkout.SUPPORT / "quick.py", checkout.ROOT / "recipes" / "digits.py", "--epochs", 1, "--out", out)
    check_run(process.stdout, out, 4)
    assert "%|" not in process.stderr  # no progress bars where there is no terminal


@pytest.mark.slow
def test_mnist(tmp_path, start) -> None:
    """On files in MNIST's own format, made here."""
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for part, count in (("train", 256), ("t10k", 100)):
        labels = (np.arange(count) % 10).astype(np.uint8)
        images = (rng.random((count, 28, 28)) * 60 + labels[:, None, None] * 19).astype(np.uint8)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, count, 28, 28) + images.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels.tobytes())
    out = tmp_path / "run"
    check_run(start("mnist.py", "--data", tmp_path, "--epochs", 1, "--out", out), out, 3)


def image_folder(folder):
    """An image folder with CIFAR-10's sizes."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 13), ("test", 6)):
        for label in range(10):
            place = folder / split / f"class{label}"
            place.mkdir(parents=True)
            for i in range(count):
                pixels = (rng.random((32, 32, 3)) * 60 + label * 19).astype(np.uint8)
                Image.fromarray(pixels).save(place / f"{i}.png")
    return folder


def test_cifar10(tmp_path, start, planned) -> None:
    """On an image folder made here; then from the weights of that run."""
    data, out = image_folder(tmp_path / "data"), tmp_path / "run"
    small = ("--data", data, "--epochs", 1, "--depth", 8)
    check_run(start("cifar10_resnet.py", *small, "--out", out), out, 3)
    weights = out / "1-train" / "model.safetensors"
    recipe, model, task = planned("cifar10_resnet.py", *small, "--from", weights)
    assert kinds(recipe) == ["Prune", "QAT"]
    check_weights(model, weights)
    assert ck.evaluate(model, task) == json.loads((out / "report.json").read_text())["rows"][0]["metric"]


def test_cifar10_distill(tmp_path, start, planned) -> None:
    """With every term at once; then from a trained teacher with one."""
    data, out = image_folder(tmp_path / "data"), tmp_path / "run"
    terms = re.findall(r'^    "(\w+)": \[kd', (checkout.ROOT / "recipes" / "cifar10_distill.py").read_text(), re.M)
    assert len(terms) >= 10
    small = ("--data", data, "--epochs", 1, "--depth", 8, "--teacher-depth", 8, "--limit", 64)
    check_run(start("cifar10_distill.py", *small, "--out", out, "--terms", *terms), out, 2)
    weights = out / "1-train" / "model.safetensors"
    recipe, teacher, _ = planned("cifar10_distill.py", *small, "--teacher", weights, "--soft", 0, "--terms", "at")
    assert kinds(recipe) == ["Distill"]
    assert (recipe.stages[0].weight, len(recipe.stages[0].terms)) == (0, 1)
    check_weights(teacher, weights)


@pytest.mark.parametrize("name", ["super_resolution.py", pytest.param("face_detector.py", marks=pytest.mark.slow)])
def test_small_networks(name, tmp_path, start, planned) -> None:
    """On drawn pictures; then from the weights of that run, on the pictures of a folder."""
    small = ("--epochs", 1, "--pictures", 32, "--batch-size", 8)
    check_run(start(name, *small, "--out", tmp_path / "run"), tmp_path / "run", 2)
    weights = tmp_path / "run" / "1-train" / "model.safetensors"
    again = ("--data", image_folder(tmp_path / "data"), "--from", weights, "--effort", "fast")
    recipe, model, task = planned(name, *small, *again)
    assert kinds(recipe) == ["StaticQuant"]
    assert recipe.stages[0].effort == "fast"
    check_weights(model, weights)
    assert np.isfinite(ck.evaluate(model, task))
    drawn = planned(name, *small)[2]
    assert not torch.equal(next(iter(task.val))[0], next(iter(drawn.val))[0])


@pytest.mark.slow
def test_runs_from_saved_weights(tmp_path, start) -> None:
    """What the tests above plan, run to its end."""
    data = image_folder(tmp_path / "data")
    small, pictures = ("--data", data, "--epochs", 1, "--depth", 8), ("--epochs", 1, "--pictures", 32, "--batch-size", 8)

    def run(name, *arguments, stages):
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        check_run(start(name, *arguments, "--out", out), out, stages)
        return out / "1-train" / "model.safetensors"

    weights = run("cifar10_resnet.py", *small, stages=3)
    run("cifar10_resnet.py", *small, "--from", weights, stages=3)
    taught = (*small, "--teacher-depth", 8, "--limit", 64, "--teacher", weights)
    run("cifar10_distill.py", *taught, "--soft", 0, "--terms", "at", stages=2)
    for name in ("super_resolution.py", "face_detector.py"):
        weights = run(name, *pictures, stages=2)
        run(name, *pictures, "--data", data, "--from", weights, "--effort", "fast", stages=2)


def test_a_folder_without_pictures_is_one_message(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(checkout.ROOT / "recipes"))
    from vision import pictures

    with pytest.raises(SystemExit, match=r"no \.png, \.jpg, \.jpeg or \.bmp picture in it"):
        pictures(2, 8, 0, str(tmp_path))


def sentences(folder) -> None:
    """Files of sentences made here, whose words tell the label."""
    words = [["dull", "bad", "boring"], ["fine", "good", "moving"]]
    rows = [(f"a {words[i % 2][i % 3]} film of {i}", i % 2) for i in range(96)]
    for name, part in (("train.tsv", rows[:64]), ("dev.tsv", rows[64:])):
        (folder / name).write_text("".join(f"{sentence}\t{label}\n" for sentence, label in part))


def test_sst2(tmp_path, start) -> None:
    sentences(tmp_path)
    out = tmp_path / "run"
    check_run(start("sst2_text.py", "--data", tmp_path, "--epochs", 2, "--batch-size", 8, "--out", out), out, 2)


@pytest.mark.parametrize("name", ["text_lstm.py", pytest.param("text_transformer.py", marks=pytest.mark.slow)])
def test_text(name, tmp_path, start) -> None:
    sentences(tmp_path)
    out = tmp_path / "run"
    check_run(start(name, "--data", tmp_path, "--epochs", 1, "--batch-size", 16, "--out", out), out, 3)


def test_sparse_digits(tmp_path, start, planned) -> None:
    out = tmp_path / "run"
    output = start("sparse_digits.py", "--epochs", 1, "--out", out)
    check_run(output, out, 4)
    rows = json.loads((out / "report.json").read_text())["rows"]
    assert [row["removed"] for row in rows] == [None, *[round(0.9 * rows[1]["masked"])] * 3]
    assert output.endswith(f"zeros held by masks: {rows[3]['removed']}\n")
    recipe, *_ = planned("sparse_digits.py", "--ratio", 0.5, "--dense-sparse-dense")
    assert kinds(recipe) == ["Train", "Sparsify", "Densify", "Train"]
    assert recipe.stages[1].budget == ck.remove(weights=0.5)


@pytest.mark.slow
def test_dense_sparse_dense_digits(tmp_path, start) -> None:
    out = tmp_path / "run"
    output = start("sparse_digits.py", "--epochs", 1, "--ratio", 0.5, "--dense-sparse-dense", "--out", out)
    check_run(output, out, 4)
    assert output.endswith("zeros held by masks: 0\n")


def test_lottery_ticket(start) -> None:
    output = start("lottery_ticket.py", "--epochs", 1, "--rounds", 1, "--seeds", 1, "--ratios", 0.5, 0.9)
    head, *rows = output.splitlines()[1:]
    assert head.split() == ["removed", "dense", "ticket", "shuffled", "random"]
    assert [row.split()[0] for row in rows] == ["50%", "90%"]
    assert rows[0].split()[1] == rows[1].split()[1]  # the dense network is the same


def test_readme_blocks_run(run_script) -> None:
    """Every Python block of the README, one after another, as one script in a folder of its own."""
    blocks = re.findall(r"```python\n(.*?)```", (checkout.ROOT / "README.md").read_text(), re.S)
    assert blocks
    run_script("\n".join(blocks))


def test_semi_supervised(start) -> None:
    small = ("--epochs", 1, "--steps", 2, "--teachers", 2, "--widths", 8, 8, "--seeds", 1, "--student", 16)
    macs, *rows = start("semi_supervised.py", *small).splitlines()
    assert macs.startswith("1,184 multiplications a student's image, ")
    assert [row[:24].strip() for row in rows] == ["labels alone", "labels alone, moved", "with unlabelled images", "a teacher"]
    assert all(0 <= float(row.split()[-1]) <= 1 for row in rows)


@pytest.mark.slow
def test_distillation_token(tmp_path, start) -> None:
    output = start("distillation_token.py", "--epochs", 1, "--out", tmp_path / "run")
    rows = output.splitlines()
    assert rows[0].startswith("teacher: 0.")
    assert rows[1].startswith("transformer with the labels alone: 0.")
    check_run("\n".join(rows[2:]), tmp_path / "run", 1)


def test_cifar10_fast(tmp_path, start) -> None:
    small = (
        "--depth",
        10,
        "--width",
        1,
        "--epochs",
        2,
        "--precision",
        "FP32",
        "--batch-size",
        64,
        "--device",
        "cpu",
        "--goal",
        0,
    )
    rows = start("cifar10_fast.py", "--data", image_folder(tmp_path), *small).splitlines()
    assert re.match(r"one cycle to 0.4  0% after \d+ s; last 0.\d+, best 0.\d+, \d+ s in all", rows[0])
    assert rows[1].startswith("constant 0.05 ")


def test_imagenette(tmp_path, start) -> None:
    small = ("--size", 32, "--widths", 8, 8, "--batch-size", 32, "--device", "cpu")
    rows = start("imagenette.py", "--data", image_folder(tmp_path), *small).splitlines()
    assert [row.split()[0] for row in rows[1:4]] == ["FP32", "AMP_BF16", "MASTER_BF16"]
    assert "live tensors" in rows[4]
    assert [row.split()[0] for row in rows[6:]] == ["FP32", "AMP_BF16", "MASTER_BF16"]


@pytest.mark.slow
def test_transfer(tmp_path, start) -> None:
    """Where no loss at all is allowed, quantization-aware training follows."""
    small = ("--weights", "none", "--size", 32, "--epochs", 1, "--batch-size", 64, "--tolerance", -1)
    output = start("transfer.py", "--data", image_folder(tmp_path / "data"), "--out", tmp_path / "run", *small)
    assert output.startswith("new head: 0.")
    assert "quantization-aware training follows" in output
    assert output.count("model.onnx") == 2


def test_an_image_folder_of_another_shape_is_one_message(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(checkout.ROOT / "recipes"))
    from vision import image_folder as read

    with pytest.raises(SystemExit, match=r"wanted train/CLASS/\* and val/CLASS/\* \(or test/CLASS/\*\); there is no train"):
        read(str(tmp_path), 32, None)
    (tmp_path / "train").mkdir()
    with pytest.raises(SystemExit, match="Couldn't find any class folder"):
        read(str(tmp_path), 32, None)
    image_folder(tmp_path)
    found = read(str(tmp_path), 16, 20)
    assert [tuple(x.shape) for x, _ in found.values()] == [(20, 3, 16, 16), (20, 3, 16, 16)]


@pytest.mark.slow
def test_pretrained_distillation(tmp_path, start) -> None:
    sentences(tmp_path)
    out = tmp_path / "run"
    small = ("--data", tmp_path, "--epochs", 1, "--pretrain", 1, "--imitate", 1, "--batch-size", 16, "--labels", 16)
    rows = start("pretrained_distillation.py", *small, "--out", out).splitlines()
    assert [row.rpartition(":")[0] for row in rows[:2]] == ["teacher", "compact model, fine-tuned alone"]
    check_run("\n".join(rows[2:]), out, 3)


@pytest.mark.slow
def test_paraphrase(tmp_path, start, planned) -> None:
    """On made pairs; then on those of files."""
    small = ("--pairs", 64, "--epochs", 1, "--width", 16, "--layers", 1)
    made = tmp_path / "made"
    check_run(start("paraphrase.py", *small, "--out", made), made, 2)
    assert json.loads((made / "report.json").read_text())["metric"]["name"] == "f1"
    for name in ("train.tsv", "dev.tsv"):
        (tmp_path / name).write_text("".join(f"it is {i % 7}\tit was {i % 5}\t{i % 2}\n" for i in range(64)))
    out = tmp_path / "read"
    check_run(start("paraphrase.py", *small, "--data", tmp_path, "--out", out), out, 2)
    assert json.loads((out / "report.json").read_text())["metric"]["name"] == "f1"
    _, model, task = planned("paraphrase.py", *small, "--data", tmp_path)
    assert 0 <= ck.evaluate(model, task) <= 1
    assert sum(len(targets) for *_, targets in task.batches("val")) == 64


def test_made_pairs_are_not_told_by_their_common_words(monkeypatch) -> None:
    """The pairs that say the same have no more words in common than the others."""
    monkeypatch.syspath_prepend(str(checkout.ROOT / "recipes"))
    from paraphrase import made

    common: dict[str, list[int]] = {"0": [], "1": []}
    for one, other, label in made(2000, 0):
        common[label].append(len(set(one.split()) & set(other.split()) - {"the", "was", "by"}))
    assert 0.6 < len(common["1"]) / 2000 < 0.73
    assert np.mean(common["1"]) - np.mean(common["0"]) < 1
    assert {3, 4} <= set(common["0"]) & set(common["1"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no such file; wanted a line for each sample, a sentence, a tab, and 0 or 1"),
        ("", "it is empty"),
        ("fine film\t1\nno label here\n", "line 2: wanted a line for each sample, .*; got 'no label here'"),
        ("fine film\tgood\n", "line 1: wanted a line for each sample"),
    ],
)
def test_sentences_of_another_shape_are_one_message(text, message, tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(checkout.ROOT / "recipes"))
    from text import read

    if text is not None:
        (tmp_path / "train.tsv").write_text(text)
    with pytest.raises(SystemExit, match=message):
        read(tmp_path / "train.tsv", None)


@pytest.mark.parametrize(
    ("reader", "made", "message"),
    [
        ("cifar10", (), "neither train/CLASS/.* nor torchvision's CIFAR-10 is there, and it cannot be downloaded .*no way out"),
        ("cifar10", ("train/cat",), "train.*Couldn't find any class|Found no valid file"),
        ("image_folder", (), "wanted train/CLASS/.*there is no train"),
        ("image_folder", ("train/cat",), "Found no valid file"),
    ],
)
def test_pictures_that_are_not_there_are_one_message(reader, made, message, tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(checkout.ROOT / "recipes"))
    import urllib.request

    import vision

    def no_way_out(*args, **settings):
        raise urllib.error.URLError("no way out")

    monkeypatch.setattr(urllib.request, "urlopen", no_way_out)
    for folder in made:
        (tmp_path / folder).mkdir(parents=True)
    read = {"cifar10": lambda: vision.cifar10(str(tmp_path), 8), "image_folder": lambda: vision.image_folder(str(tmp_path), 8, 8)}
    with pytest.raises(SystemExit, match=message):
        read[reader]()


def test_word_lm(tmp_path, start) -> None:
    sentences(tmp_path)
    out = tmp_path / "run"
    small = ("--data", tmp_path, "--epochs", 1, "--batch-size", 16, "--width", 16)
    check_run(start("word_lm.py", *small, "--out", out), out, 2)
