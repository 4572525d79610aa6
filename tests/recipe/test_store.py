"""Saving and loading models."""

from __future__ import annotations

import copy
import json
import shutil
from collections import OrderedDict

import checkout
import networks
import numpy as np
import pytest
import torch
from networks import image
from safetensors.torch import load_file
from torch import nn

import compresskit as ck
from compresskit import prune
from compresskit.base.errors import CheckpointError, ModelError, SettingError
from compresskit.graph.masks import masks_of
from compresskit.recipe import store
from compresskit.recipe.store import _outside


def test_models_load_from_the_folder_of_a_stage(finished_run) -> None:
    out, task, result = finished_run
    x = image(8)
    loaded = [ck.load(networks.Residual(), out / name).eval() for name in ("1-train", "2-prune", "3-qat")]
    assert type(loaded[1]) is networks.Residual
    assert loaded[1].inner[0].out_channels < 16
    with torch.no_grad():
        assert torch.equal(loaded[2](*x), result.model(*x))


def test_loading_in_another_process(finished_run, tmp_path) -> None:
    out, _, result = finished_run
    torch.save(image(4), tmp_path / "x.pt")
    code = (
        "import sys, torch, networks, compresskit as ck; x = torch.load(sys.argv[1])\n"
        "with torch.no_grad(): torch.save(ck.load(networks.Residual(), sys.argv[2])(*x), sys.argv[3])"
    )
    checkout.python("-c", code, tmp_path / "x.pt", out / "3-qat", tmp_path / "y.pt")
    with torch.no_grad():
        assert torch.equal(torch.load(tmp_path / "y.pt"), result.model(*torch.load(tmp_path / "x.pt")))


def test_files_of_newer_formats_and_of_other_models_are_refused(finished_run, tmp_path) -> None:
    out, _, _ = finished_run
    shutil.copytree(out / "2-prune", tmp_path / "stage")
    with pytest.raises(CheckpointError, match="made of another model"):
        ck.load(networks.Chain(), tmp_path / "stage")
    record = json.loads((tmp_path / "stage" / "structure.json").read_text())
    (tmp_path / "stage" / "structure.json").write_text(json.dumps(record | {"format": 99}))
    with pytest.raises(CheckpointError, match="written in format 99, this compresskit reads 1"):
        ck.load(networks.Residual(), tmp_path / "stage")
    shutil.rmtree(tmp_path / "stage")
    shutil.copytree(out / "3-qat", tmp_path / "stage")
    with pytest.raises(CheckpointError, match="made of another model|only in one"):
        ck.load(networks.Chain(), tmp_path / "stage")
    record = json.loads((tmp_path / "stage" / "structure.json").read_text())
    record["placement"]["integer"] = {}
    ck.base.files.write_json(tmp_path / "stage" / "structure.json", {k: v for k, v in record.items() if k != "sha256"})
    with pytest.raises(
        CheckpointError, match=r"compresskit, captures the model as another graph.*load it with those that saved it"
    ):
        ck.load(networks.Residual(), tmp_path / "stage")
    ck.base.files.write_json(tmp_path / "stage" / "structure.json", {"format": 1, "kind": "quantized"})
    with pytest.raises(CheckpointError, match="not the record of a quantized model"):
        ck.load(networks.Residual(), tmp_path / "stage")


@pytest.mark.parametrize("name", ["1-train", "2-prune", "3-qat"])
def test_load_does_not_change_its_argument(finished_run, name) -> None:
    model = networks.Residual()
    prune.plan_mask(model, budget=ck.remove(weights=0.5)).apply_(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    loaded = ck.load(model, finished_run[0] / name)
    assert loaded is not model
    assert masks_of(model) is not None
    assert masks_of(loaded) is None
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("quantized", [False, True], ids=["float", "quantized"])
@pytest.mark.parametrize("ran", [False, True], ids=["new", "ran before"])
def test_a_model_with_a_table_on_demand_is_loaded(quantized, ran, tmp_path) -> None:
    model, x = networks.TableOnDemand().eval(), torch.randn(4, 6, 8)
    model(x)
    saved = ck.quant.quantize_static(model, [x]) if quantized else model
    ck.save(saved, tmp_path)
    other = networks.TableOnDemand()
    if ran:
        other(torch.randn(1, 9, 8))
    loaded = ck.load(other, tmp_path)
    assert torch.equal(loaded(x), saved(x))
    if not quantized:
        longer = torch.randn(2, 8, 8)
        assert torch.equal(loaded(longer), saved(longer))


@pytest.mark.parametrize("quantized", [False, True], ids=["float", "quantized"])
def test_a_table_that_was_cut_is_saved(quantized, tmp_path) -> None:
    """No state dict of the class has it, and its constructor does not know which channels stay."""
    model, x = networks.TableOfConstants().eval(), torch.randn(4, 6, 4)
    fresh = copy.deepcopy(model)
    prune.apply_(model, prune.plan_channels(model, (x,), ck.keep(macs=0.6)))
    assert model.table.shape[1] < 32
    saved = ck.quant.quantize_static(model, [x]) if quantized else model
    ck.save(saved, tmp_path)
    for again in (fresh, networks.TableOfConstants()):
        assert torch.equal(ck.load(again, tmp_path)(x), saved(x))
        assert "table" not in again.state_dict()


def test_a_quantized_model_that_another_one_cannot_hold_is_no_damage(tmp_path) -> None:
    class Fails(networks.Tokens):
        def forward(self, x):
            raise ValueError("no")

    ck.save(ck.quant.quantize_static(networks.Tokens().eval(), [image(4)]), tmp_path)
    with pytest.raises(CheckpointError, match="cannot be built again from the model given: Fails does not run .* give a model"):
        ck.load(Fails(), tmp_path)


def test_masks_of_other_shapes_are_refused_before_a_file_is_written(tmp_path) -> None:
    model = torch.nn.Linear(8, 4)
    prune.plan_mask(model, ck.remove(weights=0.5)).apply_(model)
    model.weight = torch.nn.Parameter(torch.randn(4, 6))
    with pytest.raises(ModelError, match=r"weight: the mask is for shape \(4, 8\), this Linear has \(4, 6\)"):
        ck.save(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def broken_masks() -> nn.Module:
    """A masked model whose removed weights a loop without `enforce_masks_` has filled."""
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
    prune.plan_mask(model, ck.remove(weights=0.5)).apply_(model)
    with torch.no_grad():
        model[0].weight += 0.1
    return model


@pytest.mark.parametrize("kind", ["float", "in a model", "qat"])
def test_masks_that_are_not_in_force_are_refused_before_a_file_is_written(kind, tmp_path) -> None:
    model = broken_masks()
    if kind == "in a model":
        model = nn.Sequential(model, nn.Linear(4, 2))
    if kind == "qat":
        masks_of(model).zero_(model)
        model = ck.quant.prepare_qat(model, [torch.randn(4, 8)])
        with torch.no_grad():
            for name in masks_of(model).masks:
                model.get_parameter(name).add_(0.1)
    said = (
        r"^save: \d+ weights of .*weight that its mask removes are not zero.*, or steps without enforce_masks_; load the pruned"
    )
    with pytest.raises(ModelError, match=said):
        ck.save(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    masks_of(model).zero_(model)
    ck.save(model, tmp_path / "saved")
    fresh = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
    loaded = ck.load(nn.Sequential(fresh, nn.Linear(4, 2)) if kind == "in a model" else fresh, tmp_path / "saved")
    assert masks_of(loaded).removed == masks_of(model).removed


def test_a_folder_with_masks_that_were_not_in_force_can_be_repaired(tmp_path, monkeypatch) -> None:
    """Earlier versions wrote such folders; what the message says is done here."""
    model = broken_masks()
    with monkeypatch.context() as patch:
        patch.setattr(store, "check_removed_are_zero", lambda *_: None)
        ck.save(model, tmp_path)
    fresh = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
    said = (
        r"masks\.safetensors: \d+ weights of 0\.weight are not zero that it removes \(it is of another model, or an earlier"
        r" compresskit saved one .* model\.load_state_dict\(load_file\('model\.safetensors'\)\), and the masks,"
    )
    with pytest.raises(CheckpointError, match=said):
        ck.load(fresh, tmp_path)
    fresh.load_state_dict(load_file(tmp_path / "model.safetensors"))
    prune.Masks.from_state(load_file(tmp_path / "masks.safetensors"), fresh).apply_(fresh)
    ck.save(fresh, tmp_path)
    loaded = ck.load(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)), tmp_path)
    masks_of(model).zero_(model)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_file_where_the_folder_should_be_is_refused(tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file: no folder can be made there \(File exists\); choose another one"):
        ck.save(networks.Chain(), tmp_path / "file")


@pytest.mark.matrix
@pytest.mark.parametrize("prunes", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("kind", ["float", "static", "dynamic", "weights"])
def test_a_model_without_values_is_loaded(kind, prunes, tmp_path) -> None:
    """A model made on the device "meta" has nothing that values could be copied into."""
    x, made = torch.randint(0, 40, (4, 6)), {"static": lambda model, x: ck.quant.quantize_static(model, [x])}
    made |= {"float": lambda model, x: model, "dynamic": ck.quant.quantize_dynamic, "weights": ck.quant.quantize_weights}
    model = TiedWords().eval()
    if prunes:
        prune.apply_(model, prune.plan_channels(model, (x,), ck.keep(macs=0.7)))
    saved = made[kind](model, x)
    ck.save(saved, tmp_path)
    with torch.device("meta"):
        given = TiedWords()
    loaded = ck.load(given, tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(loaded(x), saved(x))
    assert kind != "float" or loaded.head.weight is loaded.words.weight
    assert given.head.weight.is_meta


class TiedWords(nn.Module):
    """An LSTM, BatchNorm, and a head that is the table of words."""

    def __init__(self):
        super().__init__()
        self.words, self.rnn, self.inner = nn.Embedding(40, 16), nn.LSTM(16, 24, batch_first=True), nn.Linear(24, 32)
        self.norm, self.outer, self.head = nn.BatchNorm1d(32), nn.Linear(32, 16), nn.Linear(16, 40, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        last = self.rnn(self.words(ids))[0][:, -1]
        return self.head(self.outer(self.norm(self.inner(last)).relu()))


def without_tables(folder) -> None:
    """Make of what was saved in a folder what an earlier version saved."""
    record = {k: v for k, v in json.loads((folder / "structure.json").read_text()).items() if k not in ("sha256", "tables")}
    ck.base.files.write_json(folder / "structure.json", record)
    (folder / "tables.safetensors").unlink()


def parts(model, x):
    whole = copy.deepcopy(model)
    whole.hidden = ck.quant.quantize_static(whole.hidden, [torch.randn(4, 6, 32)])
    return whole


QUANTIZED = {
    "float": lambda model, x: model,
    "static": lambda model, x: ck.quant.quantize_static(model, [x]),
    "dynamic": ck.quant.quantize_dynamic,
    "weights": ck.quant.quantize_weights,
    "a part": parts,
}


@pytest.mark.parametrize("kind", QUANTIZED)
def test_buffers_that_no_state_dict_has_are_restored(kind, tmp_path) -> None:
    """Such as random features: another instance has others."""
    model, x = networks.TableOfConstants().eval(), torch.randn(4, 6, 4)
    saved, other = QUANTIZED[kind](model, x), networks.TableOfConstants().eval()
    ck.save(saved, tmp_path)
    before = other.table.clone()
    with torch.no_grad():
        assert torch.equal(ck.load(other, tmp_path).eval()(x), saved(x))
        assert torch.equal(other.table, before)
        without_tables(tmp_path)
        assert not torch.equal(ck.load(other, tmp_path).eval()(x), saved(x)), "no file has them"
    ck.save(nn.Linear(2, 2), tmp_path)
    ck.load(nn.Linear(2, 2), tmp_path)


TABLES = {
    "complex": torch.randn(3, 2, dtype=torch.complex64),
    "conjugated": torch.randn(3, 2, dtype=torch.complex64).conj(),
    "without a sign": torch.tensor([65535, 3], dtype=torch.uint16),
    "expanded": torch.randn(1, 2).expand(3, 2),
    "transposed": torch.randn(2, 3).T,
    "a number": torch.tensor(3.0),
    "half": torch.randn(3).half(),
}


@pytest.mark.parametrize("kind", TABLES)
def test_buffers_of_any_dtype_and_layout_are_restored(kind, tmp_path) -> None:
    saved, fresh = nn.Linear(2, 2), nn.Linear(2, 2)
    saved.register_buffer("table", TABLES[kind], persistent=False)
    fresh.register_buffer("table", TABLES[kind].new_zeros(()).expand(TABLES[kind].shape), persistent=False)
    ck.save(saved, tmp_path)
    loaded = ck.load(fresh, tmp_path)
    assert loaded.table.dtype is saved.table.dtype
    assert loaded.table.resolve_conj().tolist() == saved.table.resolve_conj().tolist()
    assert not any(np.ravel(fresh.table.tolist()))
    assert "table" not in loaded.state_dict()


@pytest.mark.parametrize("here", [torch.ones(4, 2), torch.ones(3, 2).double(), None], ids=["shape", "dtype", "unset"])
def test_a_buffer_of_another_shape_or_dtype_stays(here, tmp_path) -> None:
    """A run may have made either, of the inputs that it had."""
    saved, fresh = nn.Linear(2, 2), nn.Linear(2, 2)
    saved.register_buffer("table", torch.randn(3, 2), persistent=False)
    fresh.register_buffer("table", here, persistent=False)
    ck.save(saved, tmp_path)
    table = ck.load(fresh, tmp_path).table
    assert table is None if here is None else torch.equal(table, here)


def test_damaged_buffers_that_no_state_dict_has_are_refused(tmp_path) -> None:
    ck.save(networks.TableOfConstants(), tmp_path)
    data = (tmp_path / "tables.safetensors").read_bytes()
    (tmp_path / "tables.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"tables\.safetensors: .*its digest is another"):
        ck.load(networks.TableOfConstants(), tmp_path)


def test_a_model_on_the_device_meta_with_a_table_that_no_file_holds_is_refused(tmp_path) -> None:
    saved, x = networks.TableOfConstants(), torch.randn(4, 6, 4)
    ck.save(saved, tmp_path)
    with torch.device("meta"):
        given = networks.TableOfConstants()
    assert torch.equal(ck.load(given, tmp_path)(x), saved(x))
    without_tables(tmp_path)
    message = r"TableOfConstants: its buffer table is on the device 'meta' and in no state dict \(persistent=False\), so that"
    with pytest.raises(ModelError, match=message):
        ck.load(given, tmp_path)


def test_a_stage_after_pruning_loads_from_its_folder(tmp_path) -> None:
    x, y = torch.randn(32, 16), torch.arange(32) % 4
    task = ck.Task(train=[(x, y)], val=[(x, y)])
    result = ck.Recipe(ck.Prune(budget=ck.keep(macs=0.6)), ck.DynamicQuant()).run(three_layers(), task, out=tmp_path / "run")
    loaded = ck.load(three_layers(), tmp_path / "run" / "2-dynamicquant")
    with torch.no_grad():
        assert torch.equal(loaded(x), result.model(x))


def three_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


class TwoParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.top = three_layers(), nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, x):
        return self.top(self.body(x).relu())


@pytest.mark.parametrize("meta", [False, True], ids=["values", "meta"])
def test_a_pruned_model_of_which_a_part_is_quantized_is_loaded(meta, tmp_path) -> None:
    x, model = torch.randn(8, 16), TwoParts().eval()
    prune.apply_(model, prune.plan_channels(model, (x,), ck.keep(macs=0.6)))
    assert model.body[0].out_features < 64
    model.top = ck.quant.quantize_dynamic(model.top, model.body(x).relu().detach())
    ck.save(model, tmp_path)
    with torch.device("meta" if meta else "cpu"):
        given = TwoParts()
    loaded = ck.load(given, tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))
    assert loaded.body[0].out_features == model.body[0].out_features


def test_a_file_of_an_earlier_version_with_a_quantized_part_is_loaded(tmp_path) -> None:
    """It says nothing of what is around the part."""
    x, model = torch.randn(8, 16), TwoParts().eval()
    model.top = ck.quant.quantize_dynamic(model.top, model.body(x).relu().detach())
    ck.save(model, tmp_path)
    record = json.loads((tmp_path / "structure.json").read_text())
    ck.base.files.write_json(tmp_path / "structure.json", {k: v for k, v in record.items() if k not in ("structure", "sha256")})
    with torch.no_grad():
        assert torch.equal(ck.load(TwoParts(), tmp_path).eval()(x), model(x))


@pytest.mark.parametrize(
    "failure",
    [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), ImportError("No module named 'onnxscript'")],
)
def test_what_is_no_fault_of_the_files_is_not_called_one(finished_run, failure, monkeypatch) -> None:
    def fail(*args):
        raise failure

    monkeypatch.setattr("compresskit.recipe.store.rebuild", fail)
    with pytest.raises(type(failure), match=str(failure)[:12]):
        ck.load(networks.Residual(), finished_run[0] / "3-qat")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            lambda: narrow(3),
            r"structure\.json: 3\.weight: the record says \[4, 6\], larger than the model's \(3, 6\); give a model",
        ),
        (
            lambda: narrow(4)[:-1],
            r"structure\.json: .* module '3' is only in one of the two \(Sequential here\); give a model that was",
        ),
        (
            lambda: narrow(4).half(),
            r"holds \d+ bytes, at most \d+ fit the model given: saved from another model, or in another dtype; make",
        ),
    ],
)
@pytest.mark.parametrize("kind", ["float", "pruned", "quantized"])
def test_a_whole_file_of_another_model_is_not_called_damaged(kind, given, message, tmp_path) -> None:
    """Who follows the advice to delete it loses the only copy."""
    model, x = narrow(4), torch.randn(8, 3, 8, 8)
    if kind == "pruned":
        model = prune.apply_(model, prune.plan_channels(model, x, ck.keep(macs=0.9), round_to=1))
        message = message.replace("6", r"\d", 1)
    if kind == "quantized":
        model = ck.quant.quantize_static(model, [x])
        message = message if "holds" not in message else "quantize model.float"
    ck.save(model, tmp_path)
    with pytest.raises(CheckpointError, match=message) as refusal:
        ck.load(given(), tmp_path)
    assert "delete" not in str(refusal.value).lower()
    assert str(tmp_path) in str(refusal.value)


def test_files_of_two_saves_are_told_to_be_saved_again(tmp_path) -> None:
    for name, classes in (("one", 4), ("other", 400)):
        ck.save(narrow(classes), tmp_path / name)
    shutil.copy(tmp_path / "other" / "model.safetensors", tmp_path / "one")
    with pytest.raises(
        CheckpointError, match="fit the model given: .*, or, where the files are of two saves, save the model again"
    ):
        ck.load(narrow(4), tmp_path / "one")


def test_a_semicolon_in_a_name_leaves_the_advice(tmp_path) -> None:
    def named(name):
        return nn.Sequential(OrderedDict({name: nn.Linear(2, 2)}))

    ck.save(named("a;b"), tmp_path)
    with pytest.raises(
        CheckpointError, match=r"module 'a;b' is .* \(Sequential here\); give a model that was made as the saved one was$"
    ):
        ck.load(named("c"), tmp_path)


def narrow(classes):
    """A small network of so many classes."""
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, classes)).eval()


def test_what_is_damaged_of_a_saved_model_is_not_told_to_be_deleted(tmp_path) -> None:
    for name in ("structure.json", "model.safetensors"):
        ck.save(narrow(4), tmp_path)
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[:-9] + b"damaged. ")
        with pytest.raises(CheckpointError, match=rf"{name}: .*; save the model again, or take the files of a copy"):
            ck.load(narrow(4), tmp_path)


def test_a_file_in_the_place_of_a_saved_model_is_refused(tmp_path) -> None:
    (tmp_path / "model").write_text("of the user")
    with pytest.raises(CheckpointError, match=r"model: wanted the folder that save\(\) wrote, got a file$"):
        ck.load(narrow(4), tmp_path / "model")


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (lambda: "model", ModelError, r"save: wanted a torch\.nn\.Module as the model, got str"),
        (lambda: narrow(4).state_dict(), ModelError, r"save: wanted a torch\.nn\.Module as the model, got OrderedDict"),
        (
            lambda: nn.Sequential(nn.LazyLinear(4)),
            ModelError,
            "save: 0.weight has no shape yet; run the model once on an example",
        ),
        (lambda: narrow(4).to("meta"), ModelError, "save: 0.weight is on the device 'meta', where it has no values"),
        (
            lambda: nn.ParameterDict({"weight": nn.Parameter(torch.zeros(2, dtype=torch.uint16), requires_grad=False)}),
            CheckpointError,
            r"save: weight: tensors of torch\.uint16, .* cannot be",
        ),
    ],
    ids=["text", "state dict", "lazy", "meta", "unsigned"],
)
def test_what_cannot_be_saved_leaves_no_folder(tmp_path, model, error, message) -> None:
    with pytest.raises(error, match=message):
        ck.save(model(), tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_swapped_arguments_are_refused(tmp_path) -> None:
    ck.save(narrow(4), tmp_path / "model")
    with pytest.raises(SettingError, match=r"save\(folder=...\): wanted a path, got Sequential; write save\(model, folder\)"):
        ck.save(tmp_path / "model", narrow(4))
    with pytest.raises(SettingError, match=r"load\(folder=...\): wanted a path, got Sequential; write load\(model, folder\)"):
        ck.load(tmp_path / "model", narrow(4))
    with pytest.raises(ModelError, match=r"load: wanted a torch\.nn\.Module as the model, got NoneType"):
        ck.load(None, tmp_path / "model")


def test_a_module_whose_name_begins_as_that_of_a_part_is_not_in_it() -> None:
    tensors = {"head.weight": 1, "header.weight": 2, "head": 3, "ahead.head": 4}
    assert _outside(tensors, ["head"]) == {"header.weight": 2, "ahead.head": 4}
