"""Save and load any model of the library: `save(model, folder)`, `load(fresh model of the same class, folder)`.

model.safetensors      the values
structure.json         the shapes (of a pruned model, or around quantized parts); how the model, or parts of it, were quantized
masks.safetensors      which weights are held at zero, one bit each, where the model carries masks
tables.safetensors     buffers that no state dict has (persistent=False), where the model has some
snapshots.safetensors  weights on the way through the training, where a later stage rewinds to them
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compresskit.base.errors import CheckpointError, ModelError, is_out_of_memory
from compresskit.base.files import (
    FORMAT,
    SAFETENSORS_DTYPES,
    absolute_path,
    can_be_stored,
    check_is_path,
    read_json,
    read_tensors,
    write_json,
    write_tensors,
)
from compresskit.base.settings import stands_in
from compresskit.graph.masks import MASK_PREFIX, Masks, attach_masks_, check_removed_are_zero, detach_masks_, masks_of
from compresskit.graph.surgery import check_is_module, check_not_lazy, copy_model, owner, restructure_, set_tensor_, structure
from compresskit.quant.model import Quantized
from compresskit.quant.numerics.quantizers import Quantizer
from compresskit.quant.serialize import rebuild
from compresskit.quant.serialize import record as quantization_record
from compresskit.train.loop import MISMATCH_ERRORS
from compresskit.train.snapshots import SNAPSHOTS, Snapshots

MODEL, STRUCTURE, MASKS, TABLES_FILE = "model.safetensors", "structure.json", "masks.safetensors", "tables.safetensors"
SAVE_AGAIN = "save the model again, or take the files of a copy"  # what to do where they are damaged
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes


def save(model: nn.Module, folder: str | Path) -> None:
    """Write a float, pruned or quantized model into a folder, which is made where it is missing. The model is not changed.

    Of the inputs that a quantized model was made with (two rows where the batch varies), the file has masks, lengths and offsets,
    without which models may not run where they are loaded. Images, and texts of more than 64 tokens, are not in it.

    Raises CheckpointError where the folder cannot be written, or for a tensor whose dtype cannot be stored; ModelError for what
    is no module, a tensor without values, a mask whose shape is not that of its tensor, and weights that a mask removes and that
    are not zero; SettingError for what is no path.
    """
    check_is_path(folder, "save(folder=...)", "; write save(model, folder)")
    folder = absolute_path(folder)
    check_is_module(model, "save")
    quantized = {name: part for name, part in model.named_modules() if isinstance(part, Quantized)}
    converted = {name: part.converted() for name, part in quantized.items()}
    if any(converted[name] is not part for name, part in quantized.items()):  # one is still in training: a copy is written
        model = converted[""] if "" in converted else _with_parts(model, converted)
    _check_has_values(model)
    check_removed_are_zero(model, "save")
    masks = masks_of(model)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder}: no folder can be made there ({error.strerror}); choose another one") from error
    record: dict[str, Any] = {"format": FORMAT}
    if not quantized:
        record["structure"] = structure(model)
    elif "" in converted:
        record |= quantization_record(converted[""])
    else:
        record |= {"kind": "parts", "parts": {name: quantization_record(part) for name, part in converted.items()}}
        record["structure"] = {what: _outside(named, converted) for what, named in structure(model).items()}
    if masks is not None:
        write_tensors(folder / MASKS, masks.state())
        record["masks"] = {"removed": masks.removed, "total": masks.total}
    if tables := _tables_of(model):
        write_tensors(folder / TABLES_FILE, {name: _storable(table) for name, table in tables.items()})
        record["tables"] = len(tables)
    write_tensors(folder / MODEL, model.state_dict())
    write_json(folder / STRUCTURE, record)


def _check_has_values(model: nn.Module) -> None:
    """Raise ModelError for a tensor that has no values, CheckpointError for what a state dict holds and no file can."""
    check_not_lazy(model, "save")
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor) or not can_be_stored(value.dtype) or value.layout is not torch.strided:
            kind = f"tensors of {value.dtype}, {value.layout}," if isinstance(value, Tensor) else f"{type(value).__name__} values"
            raise CheckpointError(f"save: {name}: {kind} cannot be stored; take it out of the state dict, or change its dtype")
        if value.is_meta:
            raise ModelError(f"save: {name} is on the device 'meta', where it has no values; load the weights first")


def _with_parts(model: nn.Module, parts: dict[str, Quantized]) -> nn.Module:
    copied = copy_model(model)
    for name, part in parts.items():
        copied.set_submodule(name, part)
    return copied


def load(model: nn.Module, folder: str | Path) -> nn.Module:
    """Load a saved model. Nothing in the files is executed.

    Args:
        model: a float model of the class that the saved one came from; its weights do not matter, and may be on the device
            "meta". It is not changed.
        folder: that `save` wrote.

    Returns:
        A new model, with the saved structure (pruned shapes, quantization), values and masks. Of buffers with
        `persistent=False` those are restored that have the saved shape and dtype in the model given: a run may have made the
        others, as long as its inputs were, and makes them again.

    Raises CheckpointError where a file is missing or damaged, or of another model; ModelError for what is no module, and for a
    model on the device "meta" with a tensor that no file holds; SettingError for what is no path.
    """
    check_is_path(folder, "load(folder=...)", "; write load(model, folder)")
    folder = absolute_path(folder)
    check_is_module(model, "load")
    check_not_lazy(model, "load")
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder}: wanted the folder that save() wrote, got a file")
    saved = read_json(folder / STRUCTURE, "a model's structure", SAVE_AGAIN)
    # Files of earlier versions have no tables.
    tables = read_tensors(folder / TABLES_FILE, advice=SAVE_AGAIN)[0] if saved.get("tables") else {}
    model = copy_model(model)
    _off_meta_(model, tables)
    detach_masks_(model)  # its masks were for other weights
    if saved.get("kind") in ("parts", "quantized"):
        # Read before the model is built again, which takes long.
        tensors, _ = read_tensors(folder / MODEL, _most_bytes(model), SAVE_AGAIN)
        loaded = _rebuilt(model, saved, folder / STRUCTURE)
    else:
        # Names and shapes are compared first: that says what differs, where the number of bytes does not.
        loaded = _resized_(model, saved.get("structure"), folder / STRUCTURE)
        tensors, _ = read_tensors(folder / MODEL, bytes_of(loaded), SAVE_AGAIN)
        if wrong := [k for k, v in tensors.items() if list(v.shape) != saved["structure"]["tensors"].get(k)]:
            raise CheckpointError(f"{folder}: {MODEL} and {STRUCTURE} disagree about {wrong[0]}")
    load_values_(loaded, tensors, folder / MODEL)
    _load_tables_(loaded, tables)
    if "masks" in saved:
        _load_masks_(loaded, folder / MASKS, saved["masks"])
    return loaded


def _tables_of(model: nn.Module) -> dict[str, Tensor]:
    """The buffers of a model that no state dict has (`persistent=False`), by name; neither masks nor what quantizers keep."""
    tables = {}
    for path, module in model.named_modules():
        for leaf in sorted(module._non_persistent_buffers_set):
            table = module._buffers.get(leaf)
            if table is None or leaf.startswith(MASK_PREFIX) or isinstance(module, Quantizer):
                continue
            if table.layout is torch.strided and not table.is_meta and not table.is_quantized:
                tables[f"{path}.{leaf}".lstrip(".")] = table
    return tables


def _storable(table: Tensor) -> Tensor:
    """The same memory in a dtype that files have: complex numbers as two, integers without a sign as others of their size."""
    if table.is_complex():
        return torch.view_as_real(table.detach().resolve_conj())
    return table.detach() if table.dtype in SAFETENSORS_DTYPES else table.detach().view(_INTEGERS[table.element_size()])


def _load_tables_(model: nn.Module, tables: dict[str, Tensor]) -> None:
    """Give buffers that no state dict has their saved values, where shape and dtype are the same."""
    for name, here in _tables_of(model).items():
        saved = tables.get(name)
        if saved is None or (saved.shape, saved.dtype) != (_storable(here).shape, _storable(here).dtype):
            continue
        if not here.is_contiguous() or here.is_conj():  # its values may share memory with one another
            set_tensor_(model, name, here := here.detach().resolve_conj().clone(memory_format=torch.contiguous_format))
        _storable(here).copy_(saved)


def _off_meta_(model: nn.Module, tables: dict[str, Tensor]) -> None:
    """Give tensors on the device "meta", which has no values to load into, zeros on the CPU, in place; tied ones stay tied.

    tables: of the file; ModelError for a buffer that neither a state dict nor they have.
    """
    unsaved = dict(model.named_buffers(remove_duplicate=False)).keys() - model.state_dict().keys()
    for name, value in [*model.named_parameters(), *model.named_buffers(remove_duplicate=False)]:
        if not value.is_meta:
            continue
        if name in unsaved and (name not in tables or tables[name].shape != _storable(value).shape):
            raise ModelError(
                f"{type(model).__name__}: its buffer {name} is on the device 'meta' and in no state dict (persistent=False), so"
                " that nothing tells its values; make the model without torch.device('meta')"
            )
        set_tensor_(model, name, torch.zeros_like(value, device="cpu"))


def _resized_(model: nn.Module, record: Any, where: Path) -> nn.Module:
    """Give a model the shapes of a record; its values are still to be loaded. CheckpointError where it is of another model."""
    if not isinstance(record, dict) or not all(isinstance(record.get(k), dict) for k in ("tensors", "modules")):
        raise CheckpointError(f"{where}: no structure of a float model in it; {SAVE_AGAIN}")
    try:
        restructure_(model, record)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{where}: not the structure of a model ({error!r}); {SAVE_AGAIN}") from None
    return model


def _rebuilt(model: nn.Module, saved: dict[str, Any], where: Path) -> nn.Module:
    """The quantized model of a record, its values still to be loaded; CheckpointError where it is not such a record."""
    try:
        if saved["kind"] == "quantized":
            return rebuild(model, saved)
        for name, part in saved["parts"].items():
            owner(model, f"{name}.weight")  # raises where there is no such module
            model.set_submodule(name, rebuild(model.get_submodule(name), part))
        if "structure" in saved:  # files of earlier versions lack it: the rest is then as it is in the model given
            _restructure_outside_(model, saved["structure"], saved["parts"])
        return model
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
    except ModelError as error:
        raise CheckpointError(
            f"{where}: what was saved cannot be built again from the model given: {error}; give a model that was made as the"
            " quantized one was"
        ) from error
    except MISMATCH_ERRORS as error:
        if is_out_of_memory(error):  # the files are whole
            raise
        raise CheckpointError(f"{where}: not the record of a quantized model ({error!r}); {SAVE_AGAIN}") from error


def _outside(named: dict[str, Any], parts: Collection[str]) -> dict[str, Any]:
    """What has a dotted name that is in none of some parts of a model."""
    return {name: value for name, value in named.items() if not stands_in(name, parts)}


def _restructure_outside_(model: nn.Module, record: dict[str, Any], parts: Collection[str]) -> None:
    """Give a model whose parts are quantized the recorded shapes and replaced modules in what is around them."""
    here = structure(model)
    inside = {what: here[what].keys() - _outside(here[what], parts).keys() for what in ("tensors", "modules")}
    whole = {what: record[what] | {name: here[what][name] for name in names} for what, names in inside.items()}
    restructure_(model, whole | {"replaced": record.get("replaced", {})})


def _load_masks_(model: nn.Module, path: Path, saved: Any) -> None:
    masks = Masks.from_state(read_tensors(path, 2 * bytes_of(model), SAVE_AGAIN)[0], model, path)
    if not isinstance(saved, dict) or (masks.removed, masks.total) != (saved.get("removed"), saved.get("total")):
        raise CheckpointError(f"{path}: removes {masks.removed} of {masks.total} weights, {STRUCTURE} says {saved}")
    if broken := masks.violations(model):
        name, count = next(iter(broken.items()))
        raise CheckpointError(
            f"{path}: {count} weights of {name} are not zero that it removes (it is of another model, or an earlier compresskit"
            " saved one after steps without enforce_masks_, or after load_state_dict of dense weights); save the model again"
            " after ck.prune.masks_of(model).zero_(model). Where it is gone, give one of the same shapes the values,"
            f" model.load_state_dict(load_file({MODEL!r})), and the masks, ck.prune.Masks.from_state(load_file({MASKS!r}),"
            " model).apply_(model), by load_file of safetensors.torch"
        )
    attach_masks_(model, masks)


def _most_bytes(model: nn.Module) -> int:
    """Of a quantized model, or one with layers that took the place of its own: a few numbers a channel besides the weights."""
    return 4 * bytes_of(model) + 2**20


def bytes_of(model: nn.Module) -> int:
    """Bytes of all parameters and buffers of a model, with the buffers that it only stores where pruning cut them."""
    values = model.state_dict() | dict(model.named_buffers(remove_duplicate=False))
    return sum(value.numel() * value.element_size() for value in values.values())


def load_values_(model: nn.Module, tensors: dict[str, Tensor], where: str | Path) -> None:
    """Load a state dict. Names, shapes and dtypes are compared first: CheckpointError, the model unchanged, if any differs."""
    expected = model.state_dict()
    if odd := sorted(set(expected) ^ set(tensors)):
        side = "the file lacks" if odd[0] in expected else "the model has no"
        raise CheckpointError(f"{where}: {side} {odd[0]!r} ({len(odd)} names differ); it is of another model")
    for name, value in tensors.items():
        if expected[name].shape != value.shape or expected[name].dtype != value.dtype:
            raise CheckpointError(
                f"{where}: {name} is {tuple(value.shape)} {value.dtype}, the model wants"
                f" {tuple(expected[name].shape)} {expected[name].dtype}"
            )
    model.load_state_dict(tensors)


def save_snapshots(snapshots: Snapshots, folder: Path) -> None:
    """Write the snapshots of a training (fraction of the training -> state) into its folder."""
    tensors = {f"{fraction}/{name}": value for fraction, state in snapshots.items() for name, value in state.items()}
    write_tensors(folder / SNAPSHOTS, tensors)


def load_snapshots_(snapshots: Snapshots, folder: Path) -> None:
    """Fill snapshots from the folder of a training; CheckpointError where one of them is not in it."""
    states = {str(fraction): state for fraction, state in snapshots.items()}
    for key, value in read_tensors(folder / SNAPSHOTS)[0].items():
        fraction, _, name = key.partition("/")
        if fraction in states:
            states[fraction][name] = value
    if missing := [fraction for fraction, state in snapshots.items() if not state]:
        raise CheckpointError(f"{folder / SNAPSHOTS}: no snapshot of {missing[0]} of the training in it; delete the folder")
