"""Masks: which weights are held at zero. They travel with the model as buffers that no state dict has, through every stage.

masks = plan_mask(model, ck.remove(weights=0.9))  # compresskit.prune decides
masks.apply_(model)                   # weights to zero; the model carries its masks from now on
release = hold_(model, run)           # `fit_` does this: no gradient, and zero again after every optimizer step
masks_of(model)                       # what it carries; `detach_` takes it off
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from compresskit.base.errors import CheckpointError, ModelError
from compresskit.graph.surgery import get_tensor, owner

PREFIX = "mask_of_"  # of the buffer beside the parameter: not in state dicts, moved and copied with the module


@dataclass(frozen=True, eq=False)
class Masks:
    """A plan, and what a model carries: for each masked tensor, True where the weight stays.

    masks: name of a parameter -> bool tensor of its shape. left: what could not be masked as asked, name -> reason.
    """

    masks: Mapping[str, Tensor]
    left: Mapping[str, str] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Number of weights in all masked tensors."""
        return sum(mask.numel() for mask in self.masks.values())

    @property
    def removed(self) -> int:
        """Number of weights held at zero."""
        return sum(mask.numel() - int(mask.count_nonzero()) for mask in self.masks.values())

    @property
    def ratio(self) -> float:
        """Share of the masked tensors that is held at zero."""
        return self.removed / self.total if self.total else 0.0

    def ratios(self) -> dict[str, float]:
        """`ratio` of every tensor."""
        return {name: 1 - int(mask.count_nonzero()) / mask.numel() for name, mask in self.masks.items()}

    def __str__(self) -> str:
        head = f"{self.removed} of {self.total} weights removed ({self.ratio:.1%})"
        rows = [
            f"  {name} {tuple(mask.shape)}: keep {int(mask.count_nonzero())} of {mask.numel()}"
            for name, mask in self.masks.items()
        ]
        return "\n".join([head, *rows, *(f"  {name} left dense: {reason}" for name, reason in self.left.items())])

    def apply_(self, model: nn.Module) -> nn.Module:
        """Set to zero what is removed, and let the model carry the masks, in the place of those it had; it is returned.

        Raises ModelError, the model untouched, where a tensor is missing or of another shape.
        """
        attach_(model, self)
        self.zero_(model)
        return model

    def zero_(self, model: nn.Module) -> None:
        """Set to zero again what is removed: for loops of one's own, after every `optimizer.step()`."""
        self.check(model)
        with torch.no_grad():
            for name, mask in self.masks.items():
                values = get_tensor(model, name)
                values.masked_fill_(~mask.to(values.device), 0)

    def check(self, model: nn.Module) -> None:
        """Raise `ModelError` unless the model has all masked tensors, in the shapes of their masks."""
        for name, mask in self.masks.items():
            if get_tensor(model, name).shape != mask.shape:
                raise ModelError(
                    f"{name}: the mask is for shape {tuple(mask.shape)}, this {type(model).__name__} has"
                    f" {tuple(get_tensor(model, name).shape)}; plan masks anew after the shapes have changed"
                )

    def broken(self, model: nn.Module) -> dict[str, int]:
        """How many removed weights are not zero in a model, by tensor; empty where all are."""
        self.check(model)
        counts = {
            name: int(torch.count_nonzero(get_tensor(model, name).detach()[~mask.to(get_tensor(model, name).device)]))
            for name, mask in self.masks.items()
        }
        return {name: count for name, count in counts.items() if count}

    def state(self) -> dict[str, Tensor]:
        """Tensors to be stored: one bit for a weight, packed, eight to the uint8."""
        return {name: torch.from_numpy(np.packbits(mask.cpu().numpy().reshape(-1))) for name, mask in self.masks.items()}

    @staticmethod
    def from_state(state: Mapping[str, Tensor], model: nn.Module, where: Any = "masks") -> Masks:
        """Masks from what `state` gave, for a model of the same shapes; CheckpointError where they do not fit."""
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


def _carried(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        for leaf, buffer in module._buffers.items():
            if leaf.startswith(PREFIX) and buffer is not None:
                name = leaf.removeprefix(PREFIX)
                yield (f"{path}.{name}" if path else name), buffer


def masks_of(model: nn.Module) -> Masks | None:
    """The masks that a model carries; None where it has none. They are the buffers themselves: what is written in them holds."""
    found = dict(sorted(_carried(model)))
    return Masks(found) if found else None


def attach_(model: nn.Module, masks: Masks) -> None:
    """Let a model carry masks, in the place of those it had. Raises ModelError, the model untouched, where they do not fit."""
    masks.check(model)
    detach_(model)
    for name, mask in masks.masks.items():
        module, leaf = owner(model, name)
        module.register_buffer(f"{PREFIX}{leaf}", mask.detach().clone().to(get_tensor(model, name).device), persistent=False)


def detach_(model: nn.Module) -> None:
    """Take the masks off a model; its weights stay as they are, and may all move again."""
    for name, _ in list(_carried(model)):
        module, leaf = owner(model, name)
        delattr(module, f"{PREFIX}{leaf}")


def carry_(model: nn.Module, other: nn.Module, names: Mapping[str, str]) -> None:
    """Attach the masks of `model` to another module whose tensor `names[name]` is the model's tensor `name`."""
    masks = masks_of(model)
    if masks is None:
        return
    # A tied parameter has one mask, at one of its names.
    of = {id(get_tensor(model, name)): mask for name, mask in masks.masks.items()}
    found = {there: of.get(id(get_tensor(model, here))) for here, there in names.items()}
    attach_(other, Masks({name: mask for name, mask in found.items() if mask is not None}))


def copy_mask_(module: nn.Module, old: str, new: str) -> None:
    """Let the tensor `new` have the mask of `old`, if there is one: for passes that put a tensor in another's place."""
    (there, leaf), (here, other) = owner(module, old), owner(module, new)
    mask = there._buffers.get(f"{PREFIX}{leaf}")
    if mask is not None:
        here.register_buffer(f"{PREFIX}{other}", mask.clone(), persistent=False)


def reshape_mask_(module: nn.Module, name: str, shape: tuple[int, ...]) -> None:
    """Give the mask of a tensor, if there is one, another shape: for passes that do so with the tensor."""
    here, leaf = owner(module, name)
    mask = here._buffers.get(f"{PREFIX}{leaf}")
    if mask is not None:
        here.register_buffer(f"{PREFIX}{leaf}", mask.reshape(shape), persistent=False)


def hold_(model: nn.Module, run: Any) -> Callable[[], None]:
    """Keep the masks that a model carries while a `mixed.Run` trains it; call what is returned after the last step.

    Removed weights get no gradient, so that clipping by norm does not see them, and are set to zero again, in the tensors that
    the optimizer updates (fp32 masters, or what split, Kahan and rounded weights are made of), after every step. Under data
    parallelism this is the same on every rank.
    """
    masks = masks_of(model)
    if masks is None:
        return lambda: None
    masks.check(model)
    parameters = dict(model.named_parameters())
    pairs = {name: mask for name, mask in masks.masks.items() if name in parameters}
    handles = [p.register_hook(partial(_without, mask)) for n, mask in pairs.items() if (p := parameters[n]).requires_grad]

    def again() -> None:
        masters = run.named_masters()
        with torch.no_grad():
            for name, mask in pairs.items():
                masters[name].masked_fill_(~mask, 0)

    run.after_update.append(again)

    def release() -> None:
        run.after_update.remove(again)
        for handle in handles:
            handle.remove()

    return release


def _without(mask: Tensor, gradient: Tensor) -> Tensor:
    return gradient.masked_fill(~mask, 0)
