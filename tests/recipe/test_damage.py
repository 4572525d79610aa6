"""Files of a run that were cut off, changed, swapped or written by somebody else: one error, or the values as they were."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import chains
import pytest
import torch
from safetensors.torch import save_file

import compresskit as ck
from compresskit.base.errors import CheckpointError, CompressError
from compresskit.base.files import SAFETENSORS_DTYPES, read_json, read_tensors, write_json, write_tensors
from compresskit.base.progress import Progress
from compresskit.recipe import folder
from compresskit.recipe.report import read_stage_report
from compresskit.recipe.store import load_snapshots_


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder with stages that are done (float, masked, quantized) and one whose training was interrupted."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("run") / "out"
    torch.manual_seed(0)
    recipe = ck.Recipe(
        ck.Train(epochs=1, optimizer=chains.sgd),
        ck.Sparsify(
            budget=ck.remove(weights=0.5), rewind=ck.prune.rewind(to=0.3), finetune=ck.Train(epochs=1, optimizer=chains.sgd)
        ),
        ck.QAT(epochs=1, optimizer=chains.sgd, samples=32),
        export="last",
    )
    task = chains.task()
    recipe.run(chains.Net(), task, out)

    def stop(step, steps):
        if step == 5:
            raise KeyboardInterrupt

    progress = Progress(folder=out / "1-train" / "progress", key="interrupted", every=ck.Every(seconds=None, steps=2))
    waiting = ck.Task(train=task.train, val=task.val, progress=progress)
    ck.fit_(chains.Net(), waiting, ck.Train(epochs=1), label="first")
    with pytest.raises(KeyboardInterrupt):
        ck.fit_(chains.Net(), waiting, ck.Train(epochs=1), label="second", after_step=[stop])
    return out


def test_a_checkpoint_under_the_name_of_another_step_is_refused(run, tmp_path) -> None:
    shutil.copytree(run, tmp_path / "out")
    folder = tmp_path / "out" / "1-train" / "progress"
    shutil.copy(folder / "2-2.safetensors", folder / "2-4.safetensors")
    progress = Progress(folder=folder, key="interrupted", writes=False)
    progress.training("first")
    with pytest.raises(CheckpointError, match=r"2-4\.safetensors: a checkpoint of another step; delete it"):
        progress.training("second")._read(folder / "2-4.safetensors")


#: Files of a run that are written for people; the library does not read them.
NOT_READ = (".lock", "report.html", "report.csv")


def what_it_loads(path: Path, out: Path):
    """What the library makes of the file, as something that can be compared; it raises what the library raises."""
    name, stage = path.name, path.parent
    if stage.name == "progress":
        progress = Progress(folder=stage, key="interrupted", writes=False)
        first, second = progress.training("first"), progress.training("second")
        return first.finished() if name == "1-end.safetensors" else second._read(path)
    if name in ("model.safetensors", "structure.json", "masks.safetensors"):
        return ck.load(chains.Net(), stage).state_dict()
    if name == "snapshots.safetensors":
        load_snapshots_(found := {0.3: {}}, stage)
        return found
    if name == "row.json":
        return read_stage_report(read_json(path, "a row")["row"], path)
    if name == "report.json":
        return [read_stage_report(row, path) for row in read_json(path, "a report")["rows"]]
    if name == "recipe.json":
        return read_json(path, "a recipe")
    if stage != out:  # ONNX files and proofs: of a finished stage, by their digest
        return folder.check_files(stage, read_json(stage / "row.json", "a row"))
    return ck.export.read_metadata(path)


def changed(data: bytes, others: list[bytes], draw: random.Random) -> bytes:
    """The bytes after one of the accidents that befall files."""
    kind = draw.choice(["bit", "bit", "bytes", "cut", "more", "zeros", "swap", "empty", "middle", "length"])
    at = draw.randrange(len(data))
    some = draw.randint(1, 64)
    if kind == "bit":
        return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
    if kind == "bytes":
        return data[:at] + draw.randbytes(some) + data[at + some :]
    if kind == "zeros":
        return data[:at] + bytes(len(data) - at)
    if kind == "middle":
        return data[:at] + data[at + some :]
    if kind == "length":
        return draw.randbytes(8) + data[8:]
    return {"cut": data[:at], "more": data + draw.randbytes(some), "swap": draw.choice(others), "empty": b""}[kind]


def same(one, other) -> bool:
    mapped = torch.utils._pytree.tree_map(lambda v: v.tolist() if isinstance(v, torch.Tensor) else v, (one, other))
    return repr(mapped[0]) == repr(mapped[1])


def mutate(out: Path, count: int, seed: int) -> dict[str, int]:
    """Damage every file in turn; how often it was told, and how often what was loaded was right all the same."""
    draw = random.Random(seed)
    paths = [p for p in sorted(out.rglob("*")) if p.is_file() and p.name not in (*NOT_READ, "stage.json")]
    whole = {path: path.read_bytes() for path in paths}
    right = {path: what_it_loads(path, out) for path in paths}
    told = {"told": 0, "right": 0}
    for number in range(count):
        path = paths[number % len(paths)]
        data = changed(whole[path], [other for p, other in whole.items() if p.name != path.name], draw)
        path.write_bytes(data)
        try:
            got = what_it_loads(path, out)
        except CompressError as error:
            told["told"] += 1
            assert "\n" not in str(error)  # noqa: PT017
            assert str(path) in str(error) or path.parent.name in str(error), f"{path}: {error}"  # noqa: PT017
        else:
            told["right"] += 1
            assert path.suffix == ".onnx" or data == whole[path] or same(got, right[path]), f"{path}: a damaged file was loaded"
        finally:
            path.write_bytes(whole[path])
    return told


def test_damaged_files_are_refused_or_read_right(run) -> None:
    told = mutate(run, 200, seed=1)
    assert told["told"] > 150


@pytest.mark.slow
def test_two_thousand_damaged_files_are_refused_or_read_right(run) -> None:
    told = mutate(run, 2400, seed=2)
    assert sum(told.values()) == 2400


VALUES = [
    None,
    True,
    -1,
    0,
    10**30,
    1e308,
    "",
    "../../etc/passwd",
    "x" * 10**5,
    [],
    {},
    [[]],
    {"$tensor": "no"},
    [10**12, 10**12],
]


def altered(record, draw):
    """The record with one entry somewhere in it replaced or taken out, as somebody who knows the format could."""
    record = json.loads(json.dumps(record))
    here = record
    while True:
        keys = list(here) if isinstance(here, dict) else list(range(len(here)))
        key = draw.choice(keys)
        deeper = here[key]
        if isinstance(deeper, dict | list) and deeper and draw.random() < 0.8:
            here = deeper
            continue
        if draw.random() < 0.3 and isinstance(here, dict):
            del here[key]
        else:
            here[key] = draw.choice(VALUES)
        return record


@pytest.mark.parametrize("count", [60, pytest.param(600, marks=pytest.mark.slow)])
def test_forged_files_are_refused(run, count, tmp_path) -> None:
    draw = random.Random(count)
    names = ["1-train/row.json", "2-sparsify/structure.json", "3-qat/structure.json", "1-train/structure.json", "report.json"]
    for number in range(count):
        name = names[number % len(names)] if number % 10 == 2 or "3-qat" not in names[number % len(names)] else names[0]
        path = run / name
        before = path.read_bytes()
        write_json(path, altered({k: v for k, v in json.loads(before).items() if k != "sha256"}, draw))
        try:
            what_it_loads(path, run)
        except (CompressError, KeyError) as error:
            # A KeyError is this test's own: it reads a row that is not in the record, which `folder.whole` tells.
            assert isinstance(error, CompressError) or error.args in {("row",), ("rows",)}  # noqa: PT017
        finally:
            path.write_bytes(before)


def test_forged_checkpoints_are_refused(run, tmp_path) -> None:
    """A whole checkpoint whose state is another's: refused before anything of the model has changed."""
    where = run / "1-train" / "progress"
    newest = max(where.glob("2-*.safetensors"), key=lambda p: int(p.stem.partition("-")[2]))
    tensors, record = read_tensors(newest)
    draw = random.Random(0)
    for number in range(40):
        changes = dict(tensors)
        name = draw.choice(sorted(n for n in tensors if n.startswith("run/")))
        changes[name] = torch.zeros(
            draw.choice([(0,), (3, 3), (7,), (2, 2, 2, 2, 2)]), dtype=draw.choice(list(SAFETENSORS_DTYPES))
        )
        if number % 2:
            changes = {n: v for n, v in tensors.items() if n != name}
        shutil.rmtree(tmp_path / "p", ignore_errors=True)
        (tmp_path / "p").mkdir()
        write_json(tmp_path / "p" / "stage.json", {"key": "interrupted"})
        write_tensors(tmp_path / "p" / "1-4.safetensors", changes, record | {"number": 1})
        task = chains.task()
        progress = Progress(folder=tmp_path / "p", key="interrupted", every=ck.Every(seconds=None))
        task = ck.Task(train=task.train, val=task.val, progress=progress)
        with pytest.raises(CompressError):
            ck.fit_(chains.Net(), task, ck.Train(epochs=1), label="second")


def test_training_resumes_from_the_checkpoint_before_a_damaged_one(run, caplog) -> None:
    where = run / "1-train" / "progress"
    newest, older = where / "2-4.safetensors", where / "2-2.safetensors"
    whole = newest.read_bytes(), older.read_bytes()

    def latest():
        progress = Progress(folder=where, key="interrupted", writes=False)
        progress.training("first")
        return progress.training("second").latest()

    assert latest()["step"] == 4
    newest.write_bytes(whole[0][:-1])
    assert latest()["step"] == 2
    assert f"{newest}: not a whole safetensors file" in caplog.text
    older.write_bytes(whole[1][:-1])
    with pytest.raises(CheckpointError, match="2-4.safetensors: not a whole safetensors file"):
        latest()
    newest.write_bytes(whole[0])
    older.write_bytes(whole[1])


def test_each_kind_of_damage_has_its_message(run, tmp_path) -> None:
    stage = tmp_path / "stage"
    shutil.copytree(run / "1-train", stage)
    model = stage / "model.safetensors"
    data = model.read_bytes()
    net = chains.Net()
    before = {name: value.clone() for name, value in net.state_dict().items()}

    def refused(message):
        with pytest.raises(CheckpointError, match=message) as told:
            ck.load(net, stage)
        assert str(model) in str(told.value)
        assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())

    model.write_bytes(data[:-100])
    refused("its digest is another")
    model.write_bytes(data[:5])
    refused("a header of")
    model.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    refused("some of it has changed since it was written")
    model.write_bytes((2**40).to_bytes(8, "little") + data[8:])
    refused("a header of 1099511627776 bytes in a file of")
    save_file({"x": torch.zeros(2)}, model)
    refused("not a whole safetensors file of this library")
    write_tensors(model, {"x": torch.zeros(10**6)})
    refused("it holds 4000000 bytes, at most")
    model.write_bytes(data.replace(b'"format": "1"', b'"format": "7"'))
    refused("written in format 7, this compresskit reads 1; update compresskit")
    with model.open("wb") as file:
        file.truncate(2**40)  # a terabyte of zeros that takes no room
    refused("not a whole safetensors file|its digest is another|it holds")
    model.unlink()
    refused("not there")


def test_names_that_lead_out_of_the_folder_are_refused(run, tmp_path) -> None:
    stage = tmp_path / "stage"
    shutil.copytree(run / "1-train", stage)
    record = read_json(stage / "row.json", "a row")
    with pytest.raises(CheckpointError, match="passwd: not there"):
        folder.check_files(stage, record | {"files": {"../../../../../../etc/passwd": "0" * 64}})
    tensors, _ = read_tensors(stage / "model.safetensors")
    write_tensors(stage / "model.safetensors", {f"../../{name}": value for name, value in tensors.items()})
    with pytest.raises(CheckpointError, match="disagree about|the file lacks"):
        ck.load(chains.Net(), stage)
    assert not [p for p in tmp_path.iterdir() if p != stage]


def test_nothing_in_a_file_is_executed(run, tmp_path) -> None:
    """Pickles, as torch.save writes them, in the place of every file; a pickle that runs would leave a mark."""

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    out = tmp_path / "out"
    shutil.copytree(run, out)
    torch.save({"x": Bomb()}, tmp_path / "bomb")
    shutil.rmtree(tmp_path / "executed", ignore_errors=True)
    bomb = (tmp_path / "bomb").read_bytes()
    for path in [p for p in out.rglob("*") if p.is_file() and p.name not in NOT_READ]:
        before = path.read_bytes()
        path.write_bytes(bomb)
        with pytest.raises(CompressError):
            what_it_loads(path, out)
        path.write_bytes(before)
    assert not (tmp_path / "executed").exists()
