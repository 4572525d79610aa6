"""Reach into a module by dotted name: read, replace, resize; modes that are put back; the structure as plain data."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from compresskit.base.errors import CheckpointError, ModelError

#: Attributes of torch's own layers that repeat a size of their parameters, as (attribute, tensor, dimension).
MIRRORS: dict[type[nn.Module], tuple[tuple[str, str, int], ...]] = {
    nn.Linear: (("out_features", "weight", 0), ("in_features", "weight", 1)),
    nn.modules.batchnorm._NormBase: (("num_features", "weight", 0), ("num_features", "running_mean", 0)),
    nn.GroupNorm: (("num_channels", "weight", 0),),
    nn.PReLU: (("num_parameters", "weight", 0),),
    nn.Embedding: (("num_embeddings", "weight", 0), ("embedding_dim", "weight", 1)),
}


def owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """`"layer1.0.conv1.weight"` to (the module `layer1.0.conv1`, `"weight"`)."""
    path, _, leaf = name.rpartition(".")
    try:
        return model.get_submodule(path), leaf
    except AttributeError:
        raise ModelError(f"{name}: {type(model).__name__} has no module {path!r}") from None


def get_tensor(model: nn.Module, name: str) -> Tensor:
    """The parameter or buffer of that dotted name."""
    module, leaf = owner(model, name)
    value = getattr(module, leaf, None)
    if not isinstance(value, Tensor):
        raise ModelError(f"{name}: {type(model).__name__} has no parameter or buffer of that name")
    return value


#: id of a parameter -> the modules that hold it, and the name that it has there.
Holders = dict[int, list[tuple[nn.Module, str]]]


def holders(model: nn.Module) -> Holders:
    """Where every parameter is held; a tied one is held in several places."""
    found: Holders = {}
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), []).append((module, leaf))
    return found


def set_tensor_(model: nn.Module, name: str, values: Tensor, known: Holders | None = None) -> None:
    """Put new values, of any shape, where a parameter or buffer is.

    A tied parameter changes in every place that holds it; requires_grad stays; a gradient is dropped with its shape.
    known: `holders(model)`, where many tensors are set one after the other.
    """
    old = get_tensor(model, name)
    if not isinstance(old, nn.Parameter):
        module, leaf = owner(model, name)
        module._buffers[leaf] = values
        return
    new = nn.Parameter(values.detach(), requires_grad=old.requires_grad)
    known = holders(model) if known is None else known
    for module, leaf in known[id(old)]:
        module._parameters[leaf] = new
    known[id(new)] = known.pop(id(old))


def select_(model: nn.Module, name: str, keep: dict[int, Tensor], known: Holders | None = None) -> None:
    """Keep only the given indices of each dimension of one parameter or buffer."""
    values = get_tensor(model, name).detach()
    for dim, indices in keep.items():
        values = values.index_select(dim, indices.to(values.device))
    set_tensor_(model, name, values.clone(memory_format=torch.preserve_format), known)


def sync_attributes_(module: nn.Module) -> None:
    """Make `in_channels`, `groups`, `num_features`, ... agree with the shapes of the parameters again."""
    if isinstance(module, nn.modules.conv._ConvNd):
        _sync_conv_(module)
    if isinstance(module, nn.LayerNorm | nn.RMSNorm) and module.weight is not None:
        module.normalized_shape = tuple(module.weight.shape)
    if isinstance(module, nn.MultiheadAttention):
        _sync_attention_(module)
    if isinstance(module, nn.RNNBase):
        module.hidden_size = get_tensor(module, "weight_hh_l0").shape[1]
        module.input_size = get_tensor(module, "weight_ih_l0").shape[1]
        module._init_flat_weights()  # it keeps a list of its parameters beside them
    if isinstance(module, nn.RNNCellBase):
        module.hidden_size, module.input_size = module.weight_hh.shape[1], module.weight_ih.shape[1]
    for kind, mirrors in MIRRORS.items():
        if not isinstance(module, kind):
            continue
        for attribute, leaf, dim in mirrors:
            values = getattr(module, leaf, None)
            # A PReLU with one shared slope has num_parameters == 1 whatever the channels are.
            if isinstance(values, Tensor) and values.ndim > dim:
                setattr(module, attribute, values.shape[dim])


def _sync_attention_(attention: nn.MultiheadAttention) -> None:
    packed = attention.in_proj_weight
    attention.embed_dim = (packed if packed is not None else attention.q_proj_weight).shape[1]
    attention.kdim = attention.embed_dim if packed is not None else attention.k_proj_weight.shape[1]
    attention.vdim = attention.embed_dim if packed is not None else attention.v_proj_weight.shape[1]
    attention.head_dim = attention.embed_dim // attention.num_heads


def _sync_conv_(conv: nn.modules.conv._ConvNd) -> None:
    first, second = conv.weight.shape[:2]
    outputs, inputs = (second, first) if conv.transposed else (first, second)
    if conv.transposed and conv.groups == conv.in_channels > 1:
        conv.groups = first
    elif not conv.transposed and conv.groups == conv.in_channels and second == 1 and conv.groups > 1:
        # Depthwise: a group is a channel, so groups shrink with the channels; the multiplier stays.
        conv.groups = outputs // max(1, conv.out_channels // conv.groups)
    if conv.transposed:
        conv.in_channels, conv.out_channels = inputs, outputs * conv.groups
    else:
        conv.in_channels, conv.out_channels = inputs * conv.groups, outputs


def frozen_copy(model: nn.Module) -> nn.Module:
    """A copy in eval mode whose parameters take no gradient."""
    return copy.deepcopy(model).eval().requires_grad_(False)


@contextmanager
def mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Train or eval mode inside the block; every submodule's own mode is put back after it."""
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, was in before:
            module.training = was


def _plain(value: Any) -> bool:
    return type(value) is int or (isinstance(value, tuple) and all(type(v) is int for v in value))


def structure(model: nn.Module) -> dict[str, Any]:
    """Shapes of all tensors and the whole-number attributes of all modules, as JSON-ready data.

    Together with the class of the model this is all a pruned model needs to be rebuilt: see `restructure_`.
    """
    modules = {}
    for path, module in model.named_modules():
        attributes = {k: v for k, v in vars(module).items() if not k.startswith("_") and k != "training" and _plain(v)}
        modules[path] = {"class": type(module).__name__, "attributes": attributes}
    return {"tensors": {k: list(v.shape) for k, v in model.state_dict().items()}, "modules": modules}


def restructure_(model: nn.Module, wanted: dict[str, Any]) -> None:
    """Give a fresh model of the same class the shapes and attributes that `structure` recorded.

    Only attributes that the fresh model already has, with a value of the same type, are touched, and nothing is
    executed; the values of resized tensors are meaningless until a state dict is loaded. Raises `CheckpointError`
    where the two are not the same class of model.
    """
    here = structure(model)
    if missing := sorted(set(here["modules"]) ^ set(wanted["modules"])):
        raise CheckpointError(
            f"the record was made of another model: module {missing[0]!r} is only in one of the two"
            f" ({type(model).__name__} here); build the model that the run started from"
        )
    if missing := sorted(set(here["tensors"]) ^ set(wanted["tensors"])):
        raise CheckpointError(f"the record was made of another model: tensor {missing[0]!r} is only in one of the two")
    for name, shape in wanted["tensors"].items():
        if here["tensors"][name] != shape:
            old = get_tensor(model, name)
            if old.ndim != len(shape):
                raise CheckpointError(f"{name}: the model has {old.ndim} dimensions, the record {len(shape)}")
            if not all(type(n) is int and n >= 0 for n in shape) or math.prod(shape) > old.numel():
                raise CheckpointError(f"{name}: the record says {shape}, larger than the model's {tuple(old.shape)}")
            set_tensor_(model, name, torch.zeros(shape, dtype=old.dtype, device=old.device))
    for path, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()
        for key, value in wanted["modules"][path]["attributes"].items():
            value = tuple(value) if isinstance(value, list) else value
            current = getattr(module, key, None)
            if _plain(value) and type(current) is type(value) and current != value:
                setattr(module, key, value)
