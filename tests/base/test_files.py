"""Files of tensors and of JSON."""

from __future__ import annotations

import errno
import os
import stat

import pytest
import torch

from compresskit import cli
from compresskit.base.errors import CheckpointError
from compresskit.base.files import SAFETENSORS_DTYPES, read_json, read_tensors, write_json, write_tensors
from compresskit.export.onnx import export_onnx


def test_damaged_json_is_refused(tmp_path) -> None:
    path = tmp_path / "recipe.json"
    path.write_text("[" * 10**5)
    with pytest.raises(CheckpointError, match=r"recipe\.json: damaged, a recipe was expected"):
        read_json(path, "a recipe")
    with path.open("w") as file:
        file.truncate(2**26 + 1)
    with pytest.raises(CheckpointError, match="it has more than"):
        read_json(path, "a recipe")
    write_json(path, {"format": 1})
    assert read_json(path, "a recipe") == {"format": 1}
    path.write_text('{"format": 1}')
    with pytest.raises(CheckpointError, match="has no digest; a recipe was expected"):
        read_json(path, "a recipe")
    assert cli.main(["report", str(tmp_path)]) != 0


def test_a_file_that_cannot_be_read_is_not_called_damaged(tmp_path) -> None:
    (tmp_path / "a.json").mkdir()
    (tmp_path / "a.safetensors").mkdir()
    with pytest.raises(
        CheckpointError, match=r"a\.json: cannot be read \(Is a directory\), a recipe was expected; look at its rights"
    ):
        read_json(tmp_path / "a.json", "a recipe")
    with pytest.raises(CheckpointError, match=r"a\.safetensors: cannot be read \(Is a directory\); look at its rights"):
        read_tensors(tmp_path / "a.safetensors")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file: a file, wanted a folder with a recipe"):
        read_json(tmp_path / "file" / "a.json", "a recipe")


def test_more_tensors_than_a_model_has_are_no_damage(tmp_path) -> None:
    write_tensors(tmp_path / "a.safetensors", {"a": torch.ones(8)})
    assert read_tensors(tmp_path / "a.safetensors", 32)[0]["a"].numel() == 8
    with pytest.raises(CheckpointError, match=r"it holds 32 bytes, at most 31 fit the model given: saved from another"):
        read_tensors(tmp_path / "a.safetensors", 31)


def test_every_dtype_and_shape_comes_back(tmp_path) -> None:
    tensors = {}
    for i, dtype in enumerate(SAFETENSORS_DTYPES):
        raw = torch.randint(0, 2, (3, 5), dtype=torch.uint8)
        tensors[f"t{i}"] = raw.to(dtype)
        tensors[f"scalar{i}"], tensors[f"empty{i}"] = raw[0, 0].to(dtype), raw[:0].to(dtype)
    tensors["turned"] = torch.randn(4, 6, 2).permute(2, 0, 1)
    write_tensors(tmp_path / "t.safetensors", tensors, {"a": [1, None, "ü"]})
    got, record = read_tensors(tmp_path / "t.safetensors")
    assert record == {"a": [1, None, "ü"]}
    assert got.keys() == tensors.keys()
    for name, value in tensors.items():
        assert got[name].dtype == value.dtype
        assert got[name].shape == value.shape
        assert torch.equal(got[name].view(torch.uint8) if got[name].numel() and got[name].ndim else got[name].float(),
                           value.contiguous().view(torch.uint8) if value.numel() and value.ndim else value.float())  # fmt: skip


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_complex_tensors_and_views_come_back(tmp_path) -> None:
    """To the bit, beside tensors of other sizes: conjugated and negated views, and a single value with a stride."""
    grid = torch.randn(3, 5, dtype=torch.complex64)
    grid[0, 0] = complex(float("nan"), -0.0)
    tensors = {
        "plain": grid, "conjugated": grid.conj(), "turned": grid.T, "expanded": grid[:1].expand(7, 5), "scalar": grid[1, 1],
        "empty": grid[:0], "double": grid.to(torch.complex128), "half": grid.to(torch.complex32),
        "negated": grid.conj().imag, "negated value": grid[0, :1].conj().imag, "odd": torch.zeros(3, dtype=torch.uint8),
        "single": torch.randn(4)[1::3][:1],
    }  # fmt: skip
    write_tensors(tmp_path / "t.safetensors", tensors)
    got, _ = read_tensors(tmp_path / "t.safetensors", sum(v.numel() * v.element_size() for v in tensors.values()))
    assert got.keys() == tensors.keys()
    for name, value in tensors.items():
        assert (got[name].dtype, got[name].shape) == (value.dtype, value.shape), name
        assert str(got[name].tolist()) == str(value.tolist()), name
    write_tensors(tmp_path / "real.safetensors", {"single": tensors["single"]})
    assert b"complex" not in (tmp_path / "real.safetensors").read_bytes()  # it is as it was before there were complex ones


@pytest.fixture
def umask():
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_files_have_the_rights_of_the_umask_or_of_the_file_that_they_replace(tmp_path, umask) -> None:
    model, x = torch.nn.Linear(4, 2), (torch.ones(1, 4),)
    for number in (0o077, 0o027, 0o002):
        umask(number)
        folder = tmp_path / f"{number:o}"
        folder.mkdir()
        write_json(folder / "a.json", {})
        write_tensors(folder / "a.safetensors", {})
        export_onnx(model, folder / "a.onnx", x)
        assert {mode(path) for path in folder.iterdir()} == {0o666 & ~number}
    for path in folder.iterdir():
        path.chmod(0o600)
    write_json(folder / "a.json", {"b": 1})
    write_tensors(folder / "a.safetensors", {"b": torch.ones(1)})
    export_onnx(model, folder / "a.onnx", x)
    assert {mode(path) for path in folder.iterdir()} == {0o600}


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EFBIG, r"larger than a file may be here \(File too large\); raise the limit \(ulimit -f\), or choose another"),
        (errno.ENAMETOOLONG, r"cannot be written \(File name too long\); choose another out="),
        (errno.EACCES, r"cannot be written \(Permission denied\); look at its rights, or choose another out="),
    ],
)
def test_what_cannot_be_written_says_why(number, said, tmp_path, monkeypatch) -> None:
    def fsync(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CheckpointError, match=rf"a\.json: {said}"):
        write_json(tmp_path / "a.json", {})
    assert not list(tmp_path.iterdir())
