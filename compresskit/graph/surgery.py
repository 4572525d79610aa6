"""Read, replace and resize tensors by dotted name; set train and eval mode; run a model and leave it as it was; the structure
of a model as plain data.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.prune import BasePruningMethod
from torch.utils import _pytree as pytree

from compresskit.base.errors import CheckpointError, ModelError, first_line
from compresskit.base.inputs import outside_inference
from compresskit.base.task import Inputs, call, copied_tensors
from compresskit.graph.replacements import replace_recorded_, replacements
from compresskit.graph.rewrites.gradient_hooks import copy_gradient_hooks_, hooked_as
from compresskit.graph.tracing import no_autocast, set_modes_

AnyModule = TypeVar("AnyModule", bound=nn.Module)
AS_SAVED = "give a model that was made as the saved one was"  # what to do where a record does not fit the model


def owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that owns a tensor, and its name there: `"layer1.0.weight"` -> (module `layer1.0`, `"weight"`)."""
    path, _, leaf = name.rpartition(".")
    module: nn.Module | None = model
    for part in path.split(".") if path else ():  # `get_submodule` takes five times as long, and this is called for every tensor
        module = module._modules.get(part) if module is not None else None
    if module is not None:
        return module, leaf
    try:
        return model.get_submodule(path), leaf
    except AttributeError:
        raise ModelError(f"{name}: {type(model).__name__} has no module {path!r}") from None


def get_tensor(model: nn.Module, name: str) -> Tensor:
    """Return the parameter or buffer of a dotted name. Raises ModelError for what is none, as a weight that is computed."""
    module, leaf = owner(model, name)
    value = module._parameters.get(leaf, module._buffers.get(leaf))
    if value is None:
        raise ModelError(f"{name}: {type(model).__name__} has no parameter or buffer of that name")
    return value


def check_is_module(model: Any, where: str) -> None:
    """Raise ModelError, which begins with `where`, for a function, or a class, in the place of a model."""
    if isinstance(model, type):
        raise ModelError(
            f"{where}: wanted a torch.nn.Module as the model, got the class {model.__name__}; make an instance of it"
        )
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"{where}: wanted a torch.nn.Module as the model, got {type(model).__name__}; put a function into the forward of one"
        )


def check_not_lazy(model: nn.Module, where: str) -> None:
    """Raise ModelError, which begins with `where`, for a lazy parameter, whose shape no data have told yet."""
    if name := next((name for name, p in model.named_parameters() if is_lazy(p)), ""):
        raise ModelError(f"{where}: {name} has no shape yet; run the model once on an example, which lazy layers take sizes from")


def free_name(model: nn.Module, name: str) -> str:
    """Return a dotted name, or the first of `name_2`, `name_3`, ..., that is no attribute of its owner yet."""
    module, leaf = owner(model, name)
    free = next(
        tried for tried in itertools.chain([leaf], (f"{leaf}_{i}" for i in itertools.count(2))) if not hasattr(module, tried)
    )
    return name.removesuffix(leaf) + free


def not_fp32(model: nn.Module) -> str:
    """`"0.weight is torch.float64"` for the first floating point parameter of another dtype than float32; "" where none is."""
    for name, value in model.named_parameters():
        if value.is_floating_point() and value.dtype != torch.float32:
            return f"{name} is {value.dtype}"
    return ""


def holds_nan(model: nn.Module) -> str:
    """Name of the first parameter with an entry that is nan; "" where none has."""
    return next((name for name, value in model.named_parameters() if bool(value.isnan().any())), "")


#: id of a parameter -> the modules that own it, with its name there.
ParameterOwners = dict[int, list[tuple[nn.Module, str]]]


def parameter_owners(model: nn.Module) -> ParameterOwners:
    """Return the modules that own each parameter; a tied parameter has several."""
    owners: ParameterOwners = {}
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((module, leaf))
    return owners


def set_tensor_(model: nn.Module, name: str, values: Tensor, owners: ParameterOwners | None = None) -> None:
    """Replace a parameter or buffer by values of any shape.

    A tied parameter is replaced in all modules that own it. Its class, `requires_grad`, hooks and what the user wrote on it, such
    as `no_weight_decay`, are kept, the gradient is not.

    Args:
        model: has the tensor.
        name: its dotted name.
        values: the new values.
        owners: `parameter_owners(model)`, to save time where many tensors are set; it is kept up to date.
    """
    with torch.inference_mode(False):
        old, values = get_tensor(model, name), outside_inference(values)
    if not isinstance(old, nn.Parameter):
        module, leaf = owner(model, name)
        module._buffers[leaf] = values
        return
    new: nn.Parameter = torch.Tensor._make_subclass(type(old), values.detach(), old.requires_grad)  # type: ignore[assignment]
    vars(new).update(vars(old))
    copy_gradient_hooks_(old, new, of_same_model=True)
    owners = parameter_owners(model) if owners is None else owners
    for module, leaf in owners[id(old)]:
        module._parameters[leaf] = new
    owners[id(new)] = owners.pop(id(old))


def select_(model: nn.Module, name: str, keep: dict[int, Tensor], owners: ParameterOwners | None = None) -> None:
    """Keep only some indices of the dimensions of a parameter or buffer.

    Args:
        model: has the tensor.
        name: its dotted name.
        keep: dimension -> (n,) indices that stay.
        owners: see `set_tensor_`.
    """
    whole = values = get_tensor(model, name).detach()
    for dim, indices in keep.items():
        values = values.index_select(dim, indices.to(values.device))
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(whole.ndim, torch.contiguous_format)
    if whole.is_contiguous() or not whole.is_contiguous(memory_format=layout):
        layout = torch.preserve_format
    set_tensor_(model, name, values.clone(memory_format=layout), owners)


def check_no_torch_masks(model: nn.Module, where: str = "") -> None:
    """Raise ModelError for a model that carries masks of torch.nn.utils.prune; `where` is what was asked for."""
    for path, module in model.named_modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, BasePruningMethod):
                raise ModelError(
                    f"{where}{': ' if where else ''}{type(model).__name__} has masks of torch.nn.utils.prune, in"
                    f" {path or 'the model itself'}; take them over with prune.Masks.from_torch_prune_(model), make them"
                    f" permanent with torch.nn.utils.prune.remove(module, {hook._tensor_name!r}), or pass the model that has none"
                )


def copy_model(model: AnyModule) -> AnyModule:
    """Return a deep copy of a user's model, with the gradient hooks (`register_hook`) of its parameters.

    Tensors that a module keeps from its last run (activations in an attribute, a weight that `torch.nn.utils.weight_norm`
    computes) are copied without the graph that they were computed by; `copy.deepcopy` refuses them.

    Raises:
        ModelError: the model has masks of torch.nn.utils.prune, or a module has an attribute that cannot be copied.
    """
    check_no_torch_masks(model)
    try:
        return hooked_as(model, copy.deepcopy(model))
    except Exception:  # whatever the classes of a user's attributes raise
        memo: dict[int, Any] = {id(v): v.detach().clone() for v in _computed_tensors(model)}
    kept = (v for module in model.modules() for v in vars(module).values() if isinstance(v, staticmethod))
    memo |= {id(v): v for v in kept}  # a function within, which copies share
    try:
        return hooked_as(model, copy.deepcopy(model, memo))
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} cannot be copied{_uncopyable(model)}: {first_line(error)}; delete the attribute, make it in"
            " forward, or give its class a __deepcopy__"
        ) from error


def _computed_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Tensors with a gradient function that modules hold as attributes or buffers, in lists, tuples and dictionaries too."""
    for module in model.modules():
        for value in pytree.tree_leaves({k: v for k, v in vars(module).items() if k != "_modules"}):
            if isinstance(value, Tensor) and not value.is_leaf:
                yield value


def _uncopyable(model: nn.Module) -> str:
    """Where the first attribute is that cannot be copied: ` (its attribute 'body.lock', a lock)`."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name == "_modules":
                continue
            try:
                copy.deepcopy(value, {id(v): v for v in _computed_tensors(module)})
            except Exception:
                return f" (its attribute {f'{path}.{name}'.lstrip('.')!r}, of type {type(value).__name__})"
    return ""


def frozen_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model in eval mode whose parameters require no gradient."""
    return copy_model(model).eval().requires_grad_(False)


@contextmanager
def mode(model: nn.Module, *, training: bool, tells: bool = True) -> Iterator[None]:
    """Set a model to train or eval mode inside the block, and restore the mode of every submodule after it. tells: `set_modes_`.

    Attention computes the same in both modes and in a captured graph, see `no_attention_fastpath`; autocast of the caller is off.
    """
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        with no_attention_fastpath(), no_autocast():
            yield
    finally:
        set_modes_(before, tells=tells)


@contextmanager
def no_attention_fastpath() -> Iterator[None]:
    """Turn off torch's fast path of attention inside the block.

    In eval mode `nn.TransformerEncoder` takes it: one opaque operator in the place of the inner layers, on nested tensors where
    there are padded positions, at which it writes zeros. Training and captured graphs compute values there.
    """
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


class _HeldBuffers:
    """The buffers of a model, as they are when this is made."""

    def __init__(self, model: nn.Module) -> None:
        self._held = {
            f"{path}.{leaf}".lstrip("."): (module, leaf, buffer, _writes(buffer), buffer.detach().clone())
            for path, module in model.named_modules()
            for leaf, buffer in module._buffers.items()
            if buffer is not None
        }

    def written(self) -> list[str]:
        """Names of the buffers that were replaced or written to since."""
        return [
            name
            for name, (module, leaf, buffer, writes, _) in self._held.items()
            if module._buffers.get(leaf) is not buffer or _writes(buffer) != writes
        ]

    def put_back_(self, names: Sequence[str]) -> None:
        for name in names:
            module, leaf, buffer, writes, values = self._held[name]
            module._buffers[leaf] = buffer
            _write_back_(buffer, writes, values)


def _writes(buffer: Tensor) -> int:
    return -1 if buffer.is_inference() else buffer._version  # torch counts no writes to tensors of the inference mode


def _write_back_(tensor: Tensor, writes: int, values: Tensor) -> None:
    """Give a tensor the values that it had after as many writes, if there were more."""
    if _writes(tensor) != writes:
        with torch.no_grad():
            tensor.copy_(values)


LARGEST_STATE = 10_000  # entries of a container that are compared one by one
#: Attributes that torch gives every module, such as its hooks.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class _HeldAttributes:
    """The plain attributes of the modules of a model, as they are when this is made.

    Of lists, tuples and dictionaries what is in them is held, of tensors their values, but those of parameters. What changes
    inside of an object of another class is not noticed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._held = {name: _Held(module, leaf, value) for name, module, leaf, value in _attributes(model)}

    def written(self) -> list[str]:
        """Names of the attributes that were made, set or written to since, or removed."""
        now = {name: value for name, _, _, value in _attributes(self._model)}
        gone = [name for name in self._held if name not in now]
        return gone + [name for name, value in now.items() if name not in self._held or self._held[name].differs(value)]

    def put_back_(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self._held:
                self._held[name].put_back_()
            else:
                module, leaf = owner(self._model, name)
                del vars(module)[leaf]


class _Held:
    """An attribute of a module: its value, and what is in it."""

    def __init__(self, module: nn.Module, name: str, value: Any) -> None:
        self.module, self.name, self.value = module, name, value
        self.leaves, self.spec = pytree.tree_flatten(value, is_leaf=_is_large)
        self.tensors = {  # place -> (writes, values)
            place: (_writes(leaf), leaf.detach().clone())
            for place, leaf in enumerate(self.leaves)
            if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter)
        }

    def differs(self, value: Any) -> bool:
        leaves, spec = pytree.tree_flatten(value, is_leaf=_is_large)
        if spec != self.spec:
            return True
        if not all(map(_is_same, leaves, self.leaves)):
            return True
        return any(_writes(self.leaves[place]) != writes for place, (writes, _) in self.tensors.items())

    def put_back_(self) -> None:
        for place, (writes, values) in self.tensors.items():
            _write_back_(self.leaves[place], writes, values)
        inside = pytree.tree_unflatten(self.leaves, self.spec)
        if inside is self.value:
            pass
        elif isinstance(self.value, list):  # in place, since other modules may hold it, too
            self.value[:] = inside
        elif isinstance(self.value, dict):
            self.value.clear()
            self.value.update(inside)
        vars(self.module)[self.name] = self.value


def _attributes(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any]]:
    """Name, module, name there and value of each plain attribute."""
    for path, module in model.named_modules():
        for leaf, value in list(vars(module).items()):
            if leaf not in _OF_EVERY_MODULE:
                yield f"{path}.{leaf}".lstrip("."), module, leaf, value


def _is_large(value: Any) -> bool:
    """Whether a container has more in it than a state has, such as a vocabulary, which takes long to look through."""
    return isinstance(value, list | tuple | dict) and len(value) > LARGEST_STATE


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, int | float | complex | str | bytes) and bool(a == b))


def call_unmoved(model: nn.Module, inputs: Inputs) -> tuple[Any, list[str]]:
    """Call a model on copies of inputs, and put back the buffers and plain attributes that each of its runs writes.

    Those that only the first run writes stay as it left them: tables that a model makes when it needs them. A model that wrote is
    run twice, which shows the difference.

    Returns the output, and the names of what was put back: buffers, and attributes where both runs gave other outputs.
    """
    before, attributes = _HeldBuffers(model), _HeldAttributes(model)
    output = call(model, copied_tensors(inputs))
    written, set_ = before.written(), attributes.written()
    if not written and not set_:
        return output, []
    again, attributes_again = _HeldBuffers(model), _HeldAttributes(model)
    second = call(model, copied_tensors(inputs))
    written, set_ = again.written(), attributes_again.written()
    moves = set_ and not _are_equal(output, second)
    before.put_back_(written)
    attributes.put_back_(set_)
    return output, written + (set_ if moves else [])


def _are_equal(a: Any, b: Any) -> bool:
    """Whether two outputs have the same tensors."""
    pairs = zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=False)
    return all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in pairs if isinstance(x, Tensor) and isinstance(y, Tensor))


@contextmanager
def state_kept(model: nn.Module, *, buffers: bool = True) -> Iterator[None]:
    """Put back the plain attributes that runs of a model in the block set and, unless told otherwise, the buffers they write."""
    held, attributes = _HeldBuffers(model), _HeldAttributes(model)
    with unset_buffers_kept(model) if buffers else nullcontext():
        try:
            yield
        finally:
            attributes.put_back_(attributes.written())
            if buffers:
                held.put_back_(held.written())


@contextmanager
def unset_buffers_kept(model: nn.Module) -> Iterator[None]:
    """Let buffers that are None be None after the block: a run in it may have begun a state, of the rows of its inputs."""
    unset = [(module, leaf) for module in model.modules() for leaf, buffer in module._buffers.items() if buffer is None]
    try:
        yield
    finally:
        for module, leaf in unset:
            module._buffers[leaf] = None


def _is_size(value: Any) -> bool:
    return type(value) is int or (isinstance(value, tuple | list) and all(type(v) is int for v in value))


def structure(model: nn.Module) -> dict[str, Any]:
    """Return the shapes of all tensors, the integer attributes of all modules and the modules that took the place of others.

    Of tables, which are buffers with `persistent=False`, it has the shapes beside the attributes. The result is JSON-ready. With
    it `restructure_` rebuilds a pruned model from a new instance of its class.
    """
    modules = {}
    for path, module in model.named_modules():
        attributes = {k: v for k, v in vars(module).items() if not k.startswith("_") and k != "training" and _is_size(v)}
        unsaved = {leaf: module._buffers.get(leaf) for leaf in sorted(module._non_persistent_buffers_set)}
        tables = {leaf: list(table.shape) for leaf, table in unsaved.items() if table is not None}
        modules[path] = {"class": type(module).__name__, "attributes": attributes} | ({"tables": tables} if tables else {})
    replaced = replacements(model)
    tensors = {k: list(v.shape) for k, v in model.state_dict().items()}
    return {"tensors": tensors, "modules": modules} | ({"replaced": replaced} if replaced else {})


def restructure_(model: nn.Module, record: dict[str, Any]) -> None:
    """Give a new model of the same class the shapes, attributes and replaced modules that `structure` recorded.

    Only attributes that the model already has, with a value of the same type, are set, and no code is executed. The values of
    resized tensors are undefined until a state dict is loaded. The length of a table that a run made stays as it is here, since
    the table is not in the record either.

    Args:
        model: is changed in place.
        record: what `structure` returned.

    Raises:
        CheckpointError: the record is of another model, or has larger shapes.
    """
    replace_recorded_(model, record.get("replaced", {}))
    _store_recorded_(model, record["tensors"])
    here = structure(model)
    for kind in ("modules", "tensors"):
        if missing := sorted(set(here[kind]) ^ set(record[kind])):
            raise CheckpointError(
                f"the record was made of another model: {kind[:-1]} {missing[0]!r} is only in one of the two"
                f" ({type(model).__name__} here); {AS_SAVED}"
            )
    for name, shape in record["tensors"].items():
        if here["tensors"][name] != shape:
            old = get_tensor(model, name)
            if old.ndim != len(shape):
                raise CheckpointError(f"{name}: the model has {old.ndim} dimensions, the record {len(shape)}; {AS_SAVED}")
            if not all(type(n) is int and n >= 0 for n in shape) or math.prod(shape) > old.numel():
                raise CheckpointError(
                    f"{name}: the record says {shape}, larger than the model's {tuple(old.shape)}; {AS_SAVED}, such as with as"
                    " many classes"
                )
            set_tensor_(model, name, torch.zeros(shape, dtype=old.dtype, device=old.device))
    for path, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()
        tables = record["modules"][path].get("tables", {})
        for key, value in record["modules"][path]["attributes"].items():
            current = getattr(module, key, None)
            value = tuple(value) if isinstance(value, list) and isinstance(current, tuple) else value
            if not _is_size(value) or type(current) is not type(value) or current == value:
                continue
            if not _is_length_of_table(module, current, value, tables):
                setattr(module, key, value)


def _store_recorded_(model: nn.Module, names: Collection[str]) -> None:
    """Let state dicts hold those buffers that a record has of them; they are in no state dict of a new model of the class."""
    for path, module in model.named_modules():
        for leaf in list(module._non_persistent_buffers_set):
            if f"{path}.{leaf}".lstrip(".") in names:
                module._non_persistent_buffers_set.discard(leaf)


def _is_length_of_table(module: nn.Module, here: Any, recorded: Any, tables: dict[str, Sequence[int]]) -> bool:
    """Whether an attribute tells how long a table is that grew in a run: pruning makes nothing larger. tables: those recorded."""
    before, after = (value if isinstance(value, tuple | list) else [value] for value in (here, recorded))
    if len(before) != len(after) or not any(new > old for old, new in zip(before, after, strict=True)):
        return False
    made = {leaf: module._buffers.get(leaf) for leaf, shape in tables.items() if set(after) <= set(shape)}
    return any(table is None or not table.numel() or set(before) <= set(table.shape) for table in made.values())
