"""Files of tensors and of JSON."""

from __future__ import annotations

import pytest
import torch

from compresskit import cli
from compresskit.base.errors import CheckpointError
from compresskit.base.files import SAFETENSORS_DTYPES, read_json, read_tensors, write_json, write_tensors


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
