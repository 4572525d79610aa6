"""Sparsity masks: which weights of a model are zero and stay zero. They are buffers of the model that no state dict contains.

masks = plan_mask(model, ...)             # compresskit.prune decides
masks.apply_(model)                       # sets weights to zero and attaches the masks to the model
release = enforce_masks_(model, run)      # `fit_` does this: no gradient, and zero again after every optimizer step
masks_of(model)                           # the attached masks; `detach_masks_` removes them
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod, remove

from compresskit.base.errors import CheckpointError, ModelError
from compresskit.graph.surgery import get_tensor, owner

ZEROS_OF_MASKS = 0.2  # of a matrix's weights, above which zeros are no accident
MASK_PREFIX = "mask_of_"  # of the buffer beside the parameter: not in state dicts, moved and copied with the module


@dataclass(frozen=True, eq=False)
class Masks:
    """Masks of a model's parameters: planned, or attached to the model.

    Attributes:
        masks: name of a parameter -> bool tensor of its shape, True where the weight stays.
        unmasked: name of a matrix that could not be masked as requested, or was not asked for -> reason.
        unmasked_weights: number of weights in all matrices without a mask, protected ones included; 0 where nobody counted.
    """

    masks: Mapping[str, Tensor]
    unmasked: Mapping[str, str] = field(default_factory=dict)
    unmasked_weights: int = 0

    @property
    def total(self) -> int:
        """Number of weights in all masked tensors."""
        return sum(mask.numel() for mask in self.masks.values())

    @property
    def removed(self) -> int:
        """Number of weights that are zero."""
        return sum(mask.numel() - int(mask.count_nonzero()) for mask in self.masks.values())

    @property
    def ratio(self) -> float:
        """Fraction of the weights in masked tensors that are zero."""
        return self.removed / self.total if self.total else 0.0

    def ratios(self) -> dict[str, float]:
        """Return the fraction of zero weights of every masked tensor."""
        return {name: 1 - int(mask.count_nonzero()) / mask.numel() for name, mask in self.masks.items()}

    def __str__(self) -> str:
        head = f"{self.removed} of {self.total} weights removed ({self.ratio:.1%})"
        if self.unmasked_weights:
            every = self.total + self.unmasked_weights
            head += f"; with those that have no mask, {self.removed / every:.1%} of {every} weights"
        rows = [
            f"  {name} {tuple(mask.shape)}: keep {int(mask.count_nonzero())} of {mask.numel()}"
            for name, mask in self.masks.items()
        ]
        return "\n".join([head, *rows, *(f"  {name} left dense: {reason}" for name, reason in self.unmasked.items())])

    def apply_(self, model: nn.Module) -> nn.Module:
        """Set the removed weights to zero, attach the masks to the model in place of any it has, and return the model.

        `fit_` and every stage keep them in force; in a training loop of your own, `enforce_masks_(model, optimizer)` does, with
        all optimizers where several train the model. A tied weight has its mask at the first of its names, as in
        `named_parameters`; of masks at several of them, each removes what it says.

        Raises:
            ModelError: a tensor is missing, has another shape or is computed from others; the model is not changed.
        """
        self.check(model)
        attach_masks_(model, Masks(_by_first_names(model, self.masks)))
        self.zero_(model)
        return model

    def zero_(self, model: nn.Module) -> None:
        """Set the removed weights to zero again: in a training loop of your own, after every `optimizer.step()`."""
        self.check(model)
        with torch.no_grad():
            for name, mask in self.masks.items():
                values = get_tensor(model, name)
                values.masked_fill_(~mask.to(values.device), 0)

    def check(self, model: nn.Module) -> None:
        """Raise `ModelError` unless the model has all masked tensors as parameters or buffers, in the shapes of their masks."""
        for name, mask in self.masks.items():
            _check_not_computed(model, name)
            if get_tensor(model, name).shape != mask.shape:
                raise ModelError(
                    f"{name}: the mask is for shape {tuple(mask.shape)}, this {type(model).__name__} has"
                    f" {tuple(get_tensor(model, name).shape)}; plan masks anew after the shapes have changed"
                )

    def violations(self, model: nn.Module) -> dict[str, int]:
        """Return the number of removed weights that are not zero in a model, by tensor; empty where all are zero."""
        self.check(model)
        counts = {
            name: int(torch.count_nonzero(get_tensor(model, name).detach()[~mask.to(get_tensor(model, name).device)]))
            for name, mask in self.masks.items()
        }
        return {name: count for name, count in counts.items() if count}

    def state(self) -> dict[str, Tensor]:
        """Return the masks as tensors to be stored: one bit for each weight, eight packed in a uint8."""
        return {name: torch.from_numpy(np.packbits(mask.cpu().numpy().reshape(-1))) for name, mask in self.masks.items()}

    @staticmethod
    def from_state(state: Mapping[str, Tensor], model: nn.Module, where: str | Path = "masks") -> Masks:
        """Return the masks that `state` was called on.

        Args:
            state: what `state` returned.
            model: of the same shapes as the masked one.
            where: where the state was read from, for messages.

        Raises:
            CheckpointError: the masks do not fit the model.
        """
        masks = {}
        for name, bits in state.items():
            try:
                values = get_tensor(model, name)
            except ModelError as error:
                raise CheckpointError(f"{where}: it is of another model: {error}") from None
            count = values.numel()
            if bits.dtype != torch.uint8 or tuple(bits.shape) != (math.ceil(count / 8),):
                raise CheckpointError(
                    f"{where}: the mask of {name} has {bits.numel() * 8} bits, the tensor {count} values; it is of another model"
                )
            flat = torch.from_numpy(np.unpackbits(bits.numpy(), count=count).astype(bool))
            masks[name] = flat.view(values.shape).to(values.device)
        return Masks(masks)

    @staticmethod
    def from_torch_prune_(model: nn.Module) -> Masks:
        """Turn the masks of torch.nn.utils.prune into masks of this library, attached to the model, and return them.

        The weights that were masked are 0, and every later stage keeps them so.

        Raises:
            ModelError: the model has no such masks.
        """
        found: dict[str, Tensor] = {}
        for path, module in model.named_modules():
            for hook in [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, BasePruningMethod)]:
                name = hook._tensor_name
                found[f"{path}.{name}" if path else name] = module.get_buffer(f"{name}_mask").bool()
                remove(module, name)
        if not found:
            raise ModelError(f"from_torch_prune_: {type(model).__name__} has no masks of torch.nn.utils.prune")
        masks = Masks(dict(sorted(found.items())))
        masks.apply_(model)
        return masks


def _check_not_computed(model: nn.Module, name: str) -> None:
    """Refuse a tensor that a module computes from others in every run: zeros that are written into it are lost."""
    module, leaf = owner(model, name)
    parametrized = parametrize.is_parametrized(module, leaf)
    if not parametrized and not isinstance(vars(module).get(leaf), Tensor):  # where hooks put what they compute
        return
    parts = [n for n, _ in module.named_parameters() if n.startswith((f"parametrizations.{leaf}.", f"{leaf}_"))]
    if parametrized:
        remedy = f"torch.nn.utils.parametrize.remove_parametrizations(module, {leaf!r})"
    elif any(isinstance(hook, BasePruningMethod) for hook in module._forward_pre_hooks.values()):
        remedy = "ck.prune.Masks.from_torch_prune_(model)"
    else:
        remedy = "torch.nn.utils.remove_weight_norm(module) or remove_spectral_norm(module), as it was made"
    raise ModelError(
        f"{name}: a mask needs a parameter or buffer, and {type(module).__name__} computes this in every run from"
        f" {', '.join(name.removesuffix(leaf) + part for part in parts) or 'others'}, so that zeros in it are lost; make it a"
        f" parameter with {remedy}, or take the mask off with ck.prune.detach_masks_(model)"
    )


def _by_first_names(model: nn.Module, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Masks by the first name of their tensor, which `named_parameters` has; a tied one keeps what all of its masks keep."""
    first = {id(p): name for name, p in model.named_parameters()}
    joined: dict[str, Tensor] = {}
    for given, mask in masks.items():
        name = first.get(id(get_tensor(model, given)), given)
        joined[name] = mask & joined[name].to(mask.device) if name in joined else mask
    return joined


def _attached(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        for leaf, buffer in module._buffers.items():
            if leaf.startswith(MASK_PREFIX) and buffer is not None:
                name = leaf.removeprefix(MASK_PREFIX)
                yield (f"{path}.{name}" if path else name), buffer


def masks_of(model: nn.Module) -> Masks | None:
    """Return the masks attached to a model, or None. They are the model's buffers: writing to them changes its masks."""
    masks = dict(sorted(_attached(model)))
    return Masks(masks) if masks else None


def check_removed_are_zero(model: nn.Module, where: str) -> None:
    """Raise ModelError, which begins with `where`, for a model in which weights that its masks remove are not zero.

    Training sets them to zero again. What makes files calls this: one that is meant to be sparse would be dense.
    """
    masks = masks_of(model)
    broken = {} if masks is None else masks.violations(model)
    if broken:
        name, count = next(iter(broken.items()))
        tensors = f" ({sum(broken.values())} weights of {len(broken)} tensors in all)" if len(broken) > 1 else ""
        raise ModelError(
            f"{where}: {count} weights of {name} that its mask removes are not zero{tensors}, as after load_state_dict of a model"
            " before its pruning, or steps without enforce_masks_; load the pruned weights, set them to zero again with"
            " ck.prune.masks_of(model).zero_(model), or keep them with ck.prune.detach_masks_(model)"
        )


def attach_masks_(model: nn.Module, masks: Masks) -> None:
    """Attach masks to a model, in place of those it has; its weights are not changed.

    Raises:
        ModelError: a mask does not fit its tensor; the model is not changed.
    """
    masks.check(model)
    detach_masks_(model)
    for name, mask in masks.masks.items():
        module, leaf = owner(model, name)
        module.register_buffer(f"{MASK_PREFIX}{leaf}", mask.detach().clone().to(get_tensor(model, name).device), persistent=False)


def detach_masks_(model: nn.Module) -> None:
    """Remove the masks from a model; its weights are not changed, and all of them can be trained again."""
    for name, _ in list(_attached(model)):
        module, leaf = owner(model, name)
        delattr(module, f"{MASK_PREFIX}{leaf}")


def transfer_masks_(model: nn.Module, other: nn.Module, names: Mapping[str, str]) -> None:
    """Attach the masks of a model to another module, such as its captured graph.

    Args:
        model: has the masks.
        other: gets them.
        names: name of a tensor in `model` -> name of the same tensor in `other`. Those that `model` has not, as constants that
            its code makes, are left out.
    """
    masks = masks_of(model)
    if masks is None:
        return
    # A tied parameter has one mask, whatever the name that it is asked for by.
    by_tensor = {id(get_tensor(model, name)): mask for name, mask in _by_first_names(model, masks.masks).items()}
    by_name = {name: by_tensor.get(id(value)) for name, value in model.named_parameters(remove_duplicate=False)}
    transferred = {there: by_name.get(here) for here, there in names.items()}
    attach_masks_(other, Masks({name: mask for name, mask in transferred.items() if mask is not None}))


def copy_mask_(module: nn.Module, old: str, new: str) -> None:
    """Give the tensor `new` the mask of the tensor `old`, if there is one: for passes that replace a tensor by another."""
    (there, leaf), (here, other) = owner(module, old), owner(module, new)
    mask = there._buffers.get(f"{MASK_PREFIX}{leaf}")
    if mask is not None:
        here.register_buffer(f"{MASK_PREFIX}{other}", mask.clone(), persistent=False)


def map_mask_(module: nn.Module, name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Replace the mask of a tensor, if there is one, by `change(mask)`: for passes that rearrange the tensor."""
    here, leaf = owner(module, name)
    mask = here._buffers.get(f"{MASK_PREFIX}{leaf}")
    if mask is not None:
        here.register_buffer(f"{MASK_PREFIX}{leaf}", change(mask), persistent=False)


class RunWithMasters(Protocol):
    """What `enforce_masks_` needs of a `mixed.Run`: its parameters, what the optimizer updates, and hooks after each update."""

    after_update: list[Callable[[], None]]

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by their names in the model that was prepared."""

    def named_masters(self) -> dict[str, Tensor]:
        """Return the tensors that the optimizer updates, by parameter name."""


def enforce_masks_(
    model: nn.Module,
    run: RunWithMasters | torch.optim.Optimizer,
    *others: RunWithMasters | torch.optim.Optimizer,
    quiet: bool = False,
) -> Callable[[], None]:
    """Keep the masks attached to a model in force while it is trained.

    Removed weights get no gradient, so that the norm of the gradients does not include them. After every optimizer step they are
    set to zero again, in the tensors that the optimizer updates: fp32 masters, or the parts of split, Kahan and stochastically
    rounded weights. With several processes all ranks do the same.

    Args:
        model: the model that is trained; nothing is done if it has no masks. A warning says so where it has zeros as of a mask.
        run: a `mixed.Run` of the model, or the plain optimizer that updates its parameters.
        others: the other runs or optimizers, where several train the model, such as Muon the matrices and AdamW the rest.
        quiet: whether a model without masks is meant to have none, so that nothing is warned of.

    Returns:
        A function that ends this; call it after the last step.

    Raises:
        ModelError: none of the optimizers updates a masked parameter, or they update masters in its place, or a run is of
            another model, or a masked weight is computed from others.
    """
    masks = masks_of(model)
    if masks is None:
        if not quiet:
            _warn_of_zeros(model)
        return lambda: None
    masks.check(model)
    parameters = dict(model.named_parameters())
    enforced = {name: mask for name, mask in _by_first_names(model, masks.masks).items() if name in parameters}
    _check_updates((run, *others), {name: parameters[name] for name in enforced})
    handles = [
        p.register_hook(partial(_masked_gradient, mask)) for n, mask in enforced.items() if (p := parameters[n]).requires_grad
    ]

    stops = [_after_steps(each, parameters, enforced) for each in (run, *others)]

    def release() -> None:
        for stop in stops:
            stop()
        for handle in handles:
            handle.remove()

    return release


def _warn_of_zeros(model: nn.Module) -> None:
    """Warn where a model without masks has matrices with many zeros, as one has that a state dict was loaded into."""
    shares = {name: float((p == 0).float().mean()) for name, p in model.named_parameters() if p.ndim > 1 and p.numel()}
    sparse = [name for name, share in shares.items() if ZEROS_OF_MASKS < share < 1]
    if sparse:
        warnings.warn(
            f"enforce_masks_: {type(model).__name__} has no masks, though {shares[sparse[0]]:.0%} of {sparse[0]} are zero"
            f" ({len(sparse)} such tensors). If these were pruned, training will fill them: a state dict holds no masks; read it"
            " with ck.load, or attach them, Masks({name: weight != 0 for each sparse weight}).apply_(model)",
            stacklevel=3,
        )


def _after_steps(
    run: RunWithMasters | torch.optim.Optimizer, parameters: Mapping[str, Tensor], masks: Mapping[str, Tensor]
) -> Callable[[], None]:
    """Set masked weights to zero after every step; returns a function that ends this."""

    def apply_masks(*_: Any) -> None:
        masters = parameters if isinstance(run, torch.optim.Optimizer) else run.named_masters()
        with torch.no_grad():
            for name, mask in masks.items():
                masters[name].masked_fill_(~mask, 0)

    if isinstance(run, torch.optim.Optimizer):
        return run.register_step_post_hook(apply_masks).remove
    run.after_update.append(apply_masks)
    return partial(run.after_update.remove, apply_masks)


def _check_updates(runs: Sequence[RunWithMasters | torch.optim.Optimizer], parameters: Mapping[str, Tensor]) -> None:
    """Refuse runs of other models, and optimizers that together lack a parameter that requires a gradient."""
    optimizers = [run for run in runs if isinstance(run, torch.optim.Optimizer)]
    updated = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    for run in runs:
        if isinstance(run, torch.optim.Optimizer):
            continue
        here = {id(p): name for name, p in run.named_parameters().items()}
        for name, p in parameters.items():
            known = here.get(id(p))
            if name != known:
                raise ModelError(
                    f"enforce_masks_: {name} has a mask and is {known or 'not'} in the model of the Run; give the model that was"
                    " prepared, and where each part has a Run of its own, call enforce_masks_(part, its Run) for each"
                )
        updated |= here.keys()
    if missing := [name for name, p in parameters.items() if p.requires_grad and id(p) not in updated]:
        kinds = " and the ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise ModelError(
            f"enforce_masks_: the {kinds} {'do' if len(optimizers) > 1 else 'does'} not update {missing[0]}; pass the one that"
            " does, or the Run of ck.mixed.prepare(...) where the model is trained in mixed precision; where several optimizers"
            " train it, pass all of them: enforce_masks_(model, a, b)"
        )


def _masked_gradient(mask: Tensor, gradient: Tensor) -> Tensor:
    return gradient.masked_fill(~mask, 0)
