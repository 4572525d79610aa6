"""A model, an optimizer and a policy, run together: cast, scale, check, unscale, clip, update, copy back.

run = prepare(model, optimizer, MASTER_BF16, clip=1.0)
for x, y in loader:
run.backward(loss_fn(run(x), y))      # inputs cast, outputs fp32, loss scaled
run.step()                            # gradients to fp32, check, clip, update masters, copy back, zero
run.finish()                              # an fp32 model again, from its masters
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compresskit.errors import ModelError, SettingError
from compresskit.mixed.policy import FP32, Policy
from compresskit.mixed.scaler import LossScaler


def prepare(model: nn.Module, optimizer: torch.optim.Optimizer, policy: Policy = FP32, *, clip: float | None = None) -> Run:
    """Put a model and its optimizer under a policy.

    Args:
        model: an fp32 model, not yet wrapped in DistributedDataParallel.
        optimizer: any `torch.optim` optimizer over (some of) its parameters; param groups stay as they are.
        policy: the numbers to train in.
        clip: largest norm of all gradients together, measured on unscaled fp32 gradients.

    Raises ModelError for a wrapped or half model, SettingError for parameters that are not the model's.
    """
    return Run(model, optimizer, policy, clip=clip)


class Run:
    """See `prepare`. Called like the model; `step` is the optimizer step of the policy."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, policy: Policy, *, clip: float | None = None) -> None:
        if clip is not None and clip <= 0:
            raise SettingError(f"clip must be positive, got {clip}")
        _check_model(model, optimizer)
        self.model, self.optimizer, self.policy, self.clip = model, optimizer, policy, clip
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        if torch.float16 in (policy.param_dtype, policy.autocast_dtype) and self.device.type == "cpu":
            warnings.warn("fp16 on a CPU is for numerics only: it is many times slower than fp32", stacklevel=3)
        self.scaler = self._make_scaler()
        self.grad_norm: Tensor | None = None
        self.after_update: list[Callable[[], None]] = []
        self._masters: dict[nn.Parameter, Tensor] = {}
        if policy.param_dtype is not None:
            self._to_half(policy.param_dtype)

    def _make_scaler(self) -> LossScaler | None:
        scale = self.policy.loss_scale
        if scale is None:
            return None
        if scale == "dynamic":
            return LossScaler(device=self.device)
        fixed = float(scale)
        return LossScaler(fixed, dynamic=False, floor=fixed, ceiling=fixed, device=self.device)

    def _to_half(self, dtype: torch.dtype) -> None:
        # Buffers too, but for those of modules kept in fp32; masters are taken before the cast so that nothing is lost.
        self._fp32_buffers: list[tuple[nn.Module, str]] = []
        for module in self.model.modules():
            # A module can ask for it itself: the scales of a quantizer would lose their grid in half.
            if isinstance(module, self.policy.keep_fp32) or getattr(module, "keeps_fp32", False):
                continue
            for parameter in module.parameters(recurse=False):
                if parameter.dtype == torch.float32:
                    if self.policy.master:
                        self._masters[parameter] = parameter.detach().clone()
                    parameter.data = parameter.data.to(dtype)
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.dtype == torch.float32:
                    module._buffers[name] = buffer.to(dtype)
                    self._fp32_buffers.append((module, name))
        self._swap(self._masters)

    def _swap(self, new: dict[Any, Any]) -> None:
        """Let the optimizer own `new[p]` in the place of p, with p's state."""
        for group in self.optimizer.param_groups:
            group["params"] = [new.get(p, p) for p in group["params"]]
        for old, replacement in new.items():
            if old in self.optimizer.state:
                self.optimizer.state[replacement] = self.optimizer.state.pop(old)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output in fp32 for inputs in any floating dtype."""
        half = self.policy.param_dtype
        if half is not None:
            args, kwargs = _cast(args, half), _cast(kwargs, half)
        cast = self.policy.autocast_dtype
        context = torch.autocast(self.device.type, dtype=cast) if cast is not None else nullcontext()
        with context:
            output = self.model(*args, **kwargs)
        return output if half is None and cast is None else _cast(output, torch.float32)

    def backward(self, loss: Tensor) -> None:
        """Gradients of the scaled loss; may be called several times before `step` to accumulate."""
        loss = loss.float()
        (loss if self.scaler is None else loss * self.scaler.scale).backward()

    def step(self) -> None:
        """One optimizer step; skipped, and counted as such, where a gradient overflowed under a loss scale."""
        owned = [p for group in self.optimizer.param_groups for p in group["params"]]
        for parameter, master in self._masters.items():
            master.grad = None if parameter.grad is None else parameter.grad.float()
        grads: list[Tensor] = [p.grad for p in owned if p.grad is not None]
        if self.scaler is not None:
            self.scaler.unscale_(grads)
        if self.clip is not None:
            self._clip_(grads, self.clip)
        # Reading the flag back is the one host synchronisation of a step, and only under a loss scale.
        if self.scaler is None or not bool(self.scaler.found_inf.item()):
            self.optimizer.step()
            if self._masters:
                torch._foreach_copy_([p.data for p in self._masters], list(self._masters.values()))
            for hook in self.after_update:
                hook()
        if self.scaler is not None:
            self.scaler.update()
        self.model.zero_grad(set_to_none=True)
        for master in self._masters.values():
            master.grad = None

    def _clip_(self, grads: list[Tensor], limit: float) -> None:
        norms = torch._foreach_norm(grads, 2)
        self.grad_norm = torch.linalg.vector_norm(torch.stack([n.to(self.device) for n in norms]))
        factor = torch.clamp(limit / (self.grad_norm + 1e-6), max=1.0)
        torch._foreach_mul_(grads, factor)

    def masters(self) -> list[Tensor]:
        """What the optimizer updates: fp32 masters where there are any, else the parameters themselves."""
        return [self._masters.get(p, p) for p in self.model.parameters()]

    def stats(self) -> dict[str, float]:
        """Loss scale, skipped steps and last gradient norm; reads the device."""
        stats: dict[str, float] = {}
        if self.scaler is not None:
            stats |= {"scale": self.scaler.scale.item(), "skipped": self.scaler.skipped.item()}
        if self.grad_norm is not None:
            stats["grad_norm"] = self.grad_norm.item()
        return stats

    def finish(self) -> nn.Module:
        """Hand the fp32 model back: weights from the masters, the optimizer on the parameters again."""
        for parameter, master in self._masters.items():
            parameter.data = master
        if self.policy.param_dtype is not None:
            for parameter in self.model.parameters():
                parameter.data = parameter.data.float()
                parameter.grad = None
            for module, name in self._fp32_buffers:
                module._buffers[name] = module.get_buffer(name).float()
        self._swap({master: parameter for parameter, master in self._masters.items()})
        self._masters = {}
        return self.model


def _check_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ModelError("prepare: wrap the model in DistributedDataParallel after prepare, not before")
    if half := [n for n, p in model.named_parameters() if p.dtype in (torch.float16, torch.bfloat16)]:
        raise ModelError(f"prepare: {half[0]} is {model.get_parameter(half[0]).dtype}; give an fp32 model, the policy casts it")
    own = set(model.parameters())
    if any(p not in own for group in optimizer.param_groups for p in group["params"]):
        raise SettingError("prepare: the optimizer holds parameters that are not the model's; make it from model.parameters()")


def _cast(value: Any, dtype: torch.dtype) -> Any:
    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return pytree.tree_map(cast, value)
