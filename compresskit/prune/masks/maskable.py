"""Which tensors of a model are masked: the weights of torch's layers, and what the user includes; what stays dense, and why."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping

from torch import nn

from compresskit.base.errors import ModelError, SettingError
from compresskit.base.settings import stands_in
from compresskit.graph.surgery import check_no_torch_masks, owner
from compresskit.prune.patterns import NM, Block, Pattern

#: Modules whose weights are masked, with the leaves that are weights.
MASKABLE_LAYERS = (nn.modules.conv._ConvNd, nn.Linear, nn.Embedding, nn.EmbeddingBag, nn.Bilinear)

#: Modules whose parameters scale and shift, whatever their shape: no matrices.
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)


def maskable(model: nn.Module, protect: tuple[str, ...] = (), include: tuple[str, ...] = ()) -> dict[str, nn.Parameter]:
    """Weights that may be masked, by sorted name: of convolutions, linear layers, embeddings, recurrent layers and attention.

    protect: dotted names of tensors, or of modules with all that is in them. include: the same, for matrices that are no weights
    of these layers. A tied weight is there once. Raises SettingError for a name that protects or includes nothing, and for a text
    in the place of a tuple of them, ModelError for a model that has masks of torch.nn.utils.prune.
    """
    check_no_torch_masks(model)
    others = matrices(model)
    for setting, names in (("protect", protect), ("include", include)):
        _check_names(model, setting, names)
    for name in include:
        if not any(is_inside(n, (name,)) for n in others):
            raise SettingError(f"include: {name!r} has no matrix of floating-point weights")
    every = list(model.named_parameters(remove_duplicate=False))
    shielded = {id(p) for n, p in every if is_inside(n, protect)}
    # A tied weight is one of a layer if any of its names is.
    wanted = {id(p) for n, p in every if _is_layer_weight(model, n) or (n in others and is_inside(n, include))}
    found = {}
    for name, parameter in model.named_parameters():
        if id(parameter) in wanted and parameter.ndim >= 2 and id(parameter) not in shielded:
            if not parameter.is_floating_point():
                raise ModelError(f"{name} is {parameter.dtype}; sparsify the float model, before quantizing")
            found[name] = parameter
    return dict(sorted(found.items()))


def _check_names(model: nn.Module, setting: str, names: tuple[str, ...]) -> None:
    if isinstance(names, str) or not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
        wanted = f"({names!r},)" if isinstance(names, str) else '("layer1", "head")'  # a text is a sequence of letters
        raise SettingError(f"{setting}=...: wanted dotted names of tensors or modules, such as {wanted}, got {names!r}")
    known = {path for path, _ in model.named_modules()} | {n for n, _ in model.named_parameters(remove_duplicate=False)}
    for name in names:
        if name not in known:
            raise SettingError(f"{setting}: {type(model).__name__} has no module or parameter {name!r}")


def _is_layer_weight(model: nn.Module, name: str) -> bool:
    module, leaf = owner(model, name)
    return (isinstance(module, MASKABLE_LAYERS) and leaf == "weight") or (
        isinstance(module, nn.RNNBase | nn.RNNCellBase | nn.MultiheadAttention) and "weight" in leaf
    )


def matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Floating-point parameters with two dimensions or more that are larger than 1, by every name they have; norms left out."""
    return {
        name: parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.is_floating_point()
        and not isinstance(owner(model, name)[0], NORMS)
        and sum(size > 1 for size in parameter.shape) >= 2
    }


def unmasked_weights(model: nn.Module, masked: Collection[str]) -> int:
    """Number of weights in the matrices of a model that are not among the masked tensors."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    known = {id(parameters[name]) for name in masked if name in parameters}
    return sum(size for key, size in {id(p): p.numel() for p in matrices(model).values()}.items() if key not in known)


def is_inside(name: str, names: tuple[str, ...]) -> bool:
    """Whether a tensor is one of the names, or in a module of such a name; the empty name is the whole model."""
    return "" in names or stands_in(name, names)


def fitting(
    model: nn.Module,
    pattern: Pattern,
    protect: tuple[str, ...],
    include: tuple[str, ...],
    given: Mapping[str, float] | None,
) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
    """Weights that can have the pattern, and why other matrices stay dense; it warns of them. ModelError where no weight can."""
    weights = {name: w for name, w in maskable(model, protect, include).items() if given is None or name in given}
    left = {name: why for name, w in weights.items() if (why := _turned(model, name, pattern) or pattern.fits(w.shape))}
    for name, why in left.items():
        warnings.warn(f"{name} is left dense: {why}", stacklevel=4)
    others = {} if given is not None else _no_layer_weights(model, protect, include)
    if len(left) == len(weights):
        hint = f"; its matrices, such as {next(iter(others))}, can be named in include=" if others else ""
        raise ModelError(f"{type(model).__name__} has no weight that {pattern} can be put on, protected ones left out{hint}")
    if others:
        (first, reason), more = next(iter(others.items())), len(others) - 1
        warnings.warn(f"{first} is left dense{f' (and {more} more)' if more else ''}: {reason}", stacklevel=4)
    return {name: w for name, w in weights.items() if name not in left}, left | others


def _turned(model: nn.Module, name: str, pattern: Pattern) -> str:
    """Why a pattern along the inputs of a layer cannot be that of a transposed convolution; empty for all other weights."""
    module, _ = owner(model, name)
    if not isinstance(module, nn.modules.conv._ConvTransposeNd):
        return ""
    if not isinstance(pattern, Block) and not (isinstance(pattern, NM) and pattern.axis in (1, 1 - module.weight.ndim)):
        return ""
    return f"the weight of a {type(module).__name__} is (inputs, outputs, ...), so that the pattern would run along its outputs"


def _no_layer_weights(model: nn.Module, protect: tuple[str, ...], include: tuple[str, ...]) -> dict[str, str]:
    """Matrices that are masked only where `include` names them, with the reason, by sorted name."""
    known = {id(w) for w in maskable(model, (), include).values()}
    every = model.named_parameters(remove_duplicate=False)
    known |= {id(p) for n, p in every if is_inside(n, protect)}
    found: dict[int, str] = {}
    for name, parameter in matrices(model).items():
        if id(parameter) not in known:
            found.setdefault(id(parameter), name)
    return {
        name: f"{type(owner(model, name)[0]).__name__} has it, no layer of torch; name it in include= to mask it, or in protect="
        for name in sorted(found.values())
    }


def by_tensor(model: nn.Module, ratios: Mapping[str, float], include: tuple[str, ...] = ()) -> dict[str, float]:
    """A ratio for each tensor from ratios for tensors or modules, the innermost if several hold it.

    SettingError for a name or ratio that is none.
    """
    found: dict[str, float] = {}
    for name, ratio in sorted(ratios.items(), key=lambda entry: len(entry[0])):  # the longest name has the last word
        tensors = [n for n in maskable(model, (), include) if is_inside(n, (name,))]
        if not tensors:
            more = "; name it in include= to mask it" if any(is_inside(n, (name,)) for n in matrices(model)) else ""
            raise SettingError(
                f"plan_mask(allocation=...): {type(model).__name__} has no layer {name!r} with maskable weights{more}"
            )
        if not 0 <= ratio < 1:
            raise SettingError(f"plan_mask(allocation=...): {name}: wanted a ratio in [0, 1), got {ratio}")
        found |= dict.fromkeys(tensors, float(ratio))
    return found
