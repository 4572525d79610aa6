"""The weights of a run: half precision in the model, fp32 for the optimizer, and the copies between them.

MASTER_*             an fp32 master is kept beside every half weight
SPLIT, KAHAN, SR     fp32 masters exist only from `materialize_masters` to `write_back`, around the optimizer's step
PURE_*               no masters: the optimizer updates the half weights
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from compresskit.base.errors import CheckpointError, SettingError, TrainingError
from compresskit.mixed.formats import bf16_formats, bf16_in_pieces
from compresskit.mixed.formats.bf16_in_pieces import Draws
from compresskit.mixed.formats.casts import HasRemove, add_cast_hooks_, in_fp32, kept_fp32
from compresskit.mixed.formats.parallel import broadcast_from_zero_, full_tensor, reshard_
from compresskit.mixed.formats.policy import HALVES, Policy
from compresskit.mixed.step.buffers import HalfBuffers, widen_buffers_
from compresskit.mixed.step.owners import LOCK, GradientOwner
from compresskit.mixed.step.scaler import stored_values
from compresskit.mixed.step.watch import WeightWatch

#: The weights of the last run of a model, as long as there is one.
_OF_MODELS: WeakKeyDictionary[nn.Module, ref[MasterWeights]] = WeakKeyDictionary()

#: torch 2.11 and later let a half parameter take an fp32 gradient (pytorch#170648).
HAS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")


@dataclass(eq=False, kw_only=True)
class HalfWeight:
    """One half parameter and the fp32 master that the optimizer updates in its place.

    name: dotted name of the parameter in the model.
    remainder: what the half weight cannot hold (int16 for "split", bf16 for "kahan"), in the shape of the parameter.
    offset: index of the parameter's first value among all half weights, for stochastic rounding.
    before: memory in which a step in parts keeps the fp32 value that it read, where that spares reading it again.
    """

    name: str
    parameter: nn.Parameter
    master: Tensor
    remainder: Tensor | None = None
    offset: int = 0
    before: Tensor | None = None


class MasterWeights:
    """Casts a model to half under a policy and gives the optimizer fp32 masters in the place of the half parameters."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, policy: Policy, device: torch.device) -> None:
        self.model, self.optimizer, self.policy = model, optimizer, policy
        self.names: dict[nn.Parameter, str] = {}
        self.optimized: dict[nn.Parameter, str] = {}  # the parameters that the optimizer has, in the model's order
        self.owners: list[tuple[str, HalfWeight | None, nn.Parameter]] = []  # the same, ready for the loops of a step
        self.halves: list[HalfWeight] = []
        self.half_parameters: list[nn.Parameter] = []
        self.buffers, self.gradients = HalfBuffers(model, policy), GradientOwner(optimizer)
        self.hooked: set[nn.Module] = set()  # modules kept in fp32, with hooks that cast around them
        self.handles: list[HasRemove] = []
        self.next_offset, self.finished = 0, False
        self.steps = torch.zeros((), dtype=torch.int64, device=device)  # counter of the stochastic rounding
        self.masters_in_memory, self.fp32_gradients = policy.bf16_format is None, True
        self.step_gradients: list[tuple[str, Tensor]] = []  # of this step, by parameter name
        self.watch = WeightWatch()
        self.master_versions: list[int] = []  # of the masters that were in step with their half weights
        self.compared = False  # whether the half weights of this step were compared, and nobody may have written since
        self.first: dict[nn.Parameter, Tensor] | None = {}  # copies of half weights with remainders, until the first step
        parameters = {p for group in optimizer.param_groups for p in group["params"]}
        with LOCK:
            _OF_MODELS[model] = ref(self)
        if policy.param_dtype is not None:
            _check_no_hidden_parameters(optimizer, {parameter: name for name, parameter in model.named_parameters()})
            widen_(model, optimizer)
        self.cast_new_parameters()
        self.add_optimized(parameters)
        self.gradients.drop_earlier_()
        replace_parameters_(optimizer, {half.parameter: half.master for half in self.halves})

    def cast_new_parameters(self) -> None:
        """Cast the parameters and buffers that the model has now and did not have before, and make their masters."""
        self.names = {parameter: name for name, parameter in self.model.named_parameters()}
        self.halves = [half for half in self.halves if half.parameter in self.names]
        if self.policy.param_dtype is not None:
            kept = kept_fp32(self.model, self.policy)
            self.handles += add_cast_hooks_(self.model, self.policy, self.hooked)
            self._cast_model(self.policy.param_dtype, kept)
        places = [(m._parameters, leaf, p) for m in self.model.modules() for leaf, p in m.named_parameters(recurse=False)]
        halves = {half.parameter for half in self.halves}
        self.places = [(parameters, leaf, p) for parameters, leaf, p in places if p in halves]
        self.record_()

    def forget_removed_(self, *, flat: bool) -> list[str]:
        """Take parameters that the model no longer has out of the optimizer, and return their names.

        Raises:
            SettingError: for flat masters, which cannot let one of their own go.
        """
        present = set(self.model.parameters())
        gone = {parameter: name for parameter, name in self.optimized.items() if parameter not in present}
        if gone and flat:
            raise SettingError(
                f"add_group: {next(iter(gone.values()))} has left the model, and flat=True cannot let it go; use separate masters"
            )
        owned: set[Any] = {half.master for half in self.halves if half.parameter in gone} | set(gone)
        for group in self.optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p not in owned]
        for p in owned:
            self.optimizer.state.pop(p, None)
        return list(gone.values())

    def add_optimized(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note that the optimizer has these parameters too, whose gradients of before are of no step of this run."""
        for parameter in (parameters := list(parameters)):
            parameter.grad = None
        optimized = {*self.optimized, *parameters}
        self.optimized = {p: name for p, name in self.names.items() if p in optimized}
        halves = {half.parameter: half for half in self.halves}
        self.owners = [(name, halves.get(p), p) for p, name in self.optimized.items()]
        self.gradients.own(self.optimized, self.names)

    def _cast_model(self, dtype: torch.dtype, kept: set[Any]) -> None:
        # Masters and remainders are taken before the cast, so that nothing is lost; buffers are cast too.
        for module in self.model.modules():
            for parameter in module.parameters(recurse=False):
                if parameter.dtype != torch.float32 or parameter in kept or module in kept:
                    continue
                self._cast(parameter, dtype, self.next_offset)
                self.next_offset += parameter.numel()
            if isinstance(module, nn.RNNBase) and module not in kept:
                module.flatten_parameters()
        self.buffers.cast_(dtype, kept)

    def _cast(self, parameter: nn.Parameter, dtype: torch.dtype, offset: int) -> None:
        master = parameter.detach().clone()
        self.half_parameters.append(parameter)
        parameter.data = master.to(dtype)
        parameter.grad = None
        if self.policy.pure:
            return
        half = HalfWeight(name=self.names[parameter], parameter=parameter, master=master, offset=offset)
        self.halves.append(half)
        if self.policy.bf16_format == "split":
            values, half.remainder = bf16_formats.split(master)
            parameter.data.copy_(values)
        elif self.policy.bf16_format == "kahan":
            half.remainder = (master - parameter.data.float()).bfloat16()
        if not self.masters_in_memory:
            master.untyped_storage().resize_(0)

    def use_fp32_gradients_(self, *, enabled: bool) -> None:
        """Let half weights take fp32 gradients, which saves a copy and accumulates in fp32 (`Tensor.grad_dtype`)."""
        self.fp32_gradients = not self.half_parameters
        if not HAS_GRAD_DTYPE or self.policy.pure:
            return
        for half in self.halves:
            half.parameter.grad_dtype = torch.float32 if enabled else None
        self.fp32_gradients = enabled or not self.halves

    def gather_gradients(self, accumulated: dict[nn.Parameter, Tensor]) -> None:
        """Give every tensor of the optimizer its gradient, in fp32 for masters; none where the parameter has none.

        `accumulated` holds fp32 gradients by parameter, which replace `.grad`.
        """
        self.gradients.check_scale()
        self.first = None
        for parameter, total in accumulated.items():
            parameter.grad = total if self.fp32_gradients else total.to(parameter.dtype)
        self.step_gradients = []
        for name, half, parameter in self.owners:
            grad = accumulated.get(parameter, parameter.grad) if accumulated else parameter.grad
            if half is not None:
                grad = half.master.grad = grad if grad is None or grad.dtype is torch.float32 else grad.float()
            if grad is not None:
                self.step_gradients.append((name, grad))

    def raw_gradients(self, accumulated: dict[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        """Gradients by parameter, half or fp32 as they are, for a step that casts them itself."""
        self.gradients.check_scale()
        self.first = None
        every = {p: accumulated.get(p, p.grad) for p in self.optimized}
        grads = {p: grad for p, grad in every.items() if grad is not None}
        self.step_gradients = [(self.optimized[p], grad) for p, grad in grads.items()]
        return grads

    def nonfinite_gradients(self) -> tuple[list[str], Tensor]:
        """Names of the parameters with a gradient in this step, and a bool tensor of which are not finite, on the device."""
        norms = torch._foreach_norm(stored_values(grad for _, grad in self.step_gradients), float("inf"))
        norm = torch.stack([full_tensor(norm).to(self.steps.device) for norm in norms])
        return [name for name, _ in self.step_gradients], ~torch.isfinite(norm)

    def zero_grad_(self) -> None:
        """Drop the gradients, but for those of parameters that only another run's optimizer has."""
        self.step_gradients = []
        self.gradients.clear_()
        for half in self.halves:
            half.master.grad = None

    def fp32_value(self, half: HalfWeight) -> Tensor:
        """The fp32 value of one weight: its master, or a new tensor made of half weight and remainder."""
        if self.masters_in_memory:
            return half.master
        return bf16_formats.to_fp32(half.parameter.data, half.remainder, self.policy.bf16_format)

    def fp32_values(self) -> dict[nn.Parameter, Tensor]:
        """The fp32 value of every parameter."""
        values = {parameter: parameter.data for parameter in self.names}
        return values | {half.parameter: self.fp32_value(half) for half in self.halves}

    def materialize_masters(self) -> None:
        """Allocate and fill masters that exist only around the step; the optimizer may step after it."""
        if self.masters_in_memory:
            return
        for half in self.halves:
            half.master.untyped_storage().resize_(half.master.numel() * 4)
            self.read_(half)
        self.masters_in_memory = True

    def read_(self, half: HalfWeight) -> None:
        """Fill the memory of one master from its half weight and remainder."""
        bf16_in_pieces.fill_(half.master, half.parameter.data, half.remainder, self.policy.bf16_format, half.before)

    def draws(self) -> Draws:
        """The random bits of this step."""
        return Draws(self.policy.seed, self.steps)

    def store_(self, half: HalfWeight, draws: Draws) -> None:
        """Write one master to its half weight and remainder, in place, as a CUDA graph reads from this memory."""
        half_weight, bf16_format = half.parameter.data, self.policy.bf16_format
        bf16_in_pieces.store_(half.master, half_weight, half.remainder, bf16_format, draws, half.offset, half.before)

    def write_back(self, *, count: bool = True) -> None:
        """Copy masters to half weights and free those that exist only around the step; nothing where none is in memory.

        count: whether this ends a step; False for a second time in one step.
        """
        if not self.masters_in_memory:
            return  # a step in parts has written them
        self.steps += count
        if self.policy.bf16_format is None:
            if self.halves:
                torch._foreach_copy_([half.parameter.data for half in self.halves], [half.master for half in self.halves])
                self.record_(written=not self.compared)
            return
        draws = self.draws()
        for half in self.halves:
            self.store_(half, draws)
            half.master.untyped_storage().resize_(0)
        self.masters_in_memory = False
        self.record_(written=not self.compared)

    def wrapped_in_(self, model: nn.Module) -> None:
        """Note that the model is run in this wrapper from now on."""
        if isinstance(model, nn.parallel.DistributedDataParallel):
            # Its buckets have the dtype of the weights; fp32 gradients fail with "Expected BFloat16, got Float".
            self.use_fp32_gradients_(enabled=False)
            self.broadcast_(model.process_group)

    def broadcast_(self, group: Any) -> None:
        """Give all ranks what rank 0 has beside its half weights, as DistributedDataParallel does with the weights themselves."""
        for half in self.halves:
            beside = half.master if self.policy.bf16_format is None else half.remainder
            if beside is not None:
                values = beside.view(torch.uint8) if beside.dtype == torch.int16 else beside.detach()
                broadcast_from_zero_(values, group)
        self.record_()

    def record_(self, *, written: bool = True) -> None:
        """Note that half weights and masters are in step; what is written into the weights from here on is the user's.

        written: False where nobody but `write_back` can have written since `adopt_writes_`.
        """
        self.compared = False
        if written:
            self.watch.record([half.parameter for half in self.halves])
        else:
            self.watch.record_values()
        self.master_versions = [half.master._version for half in self.halves]
        if self.first is not None:
            self.first = {half.parameter: half.parameter.detach().clone() for half in self.halves if half.remainder is not None}

    @torch.no_grad()
    def adopt_writes_(self, *, compare: bool = False) -> None:
        """Take over into the masters what was written into half weights since the last step; to be called between steps.

        compare: also compare every value, which finds the writes through `.data` that `WeightWatch` does not.

        Raises:
            TrainingError: after the first step, for a policy with remainders; at any time, for weights that were replaced.
        """
        if not self.halves:
            return
        self._check_not_replaced()
        changed = set(self.watch.changed([half.parameter for half in self.halves]))
        self.compared = not changed
        if not changed and not compare:
            return
        if changed and self.policy.bf16_format in ("split", "kahan"):
            if self.first is None:
                name = next(half.name for half in self.halves if half.parameter in changed)
                raise TrainingError(
                    f"{name} ({len(changed)} weights in all) was changed outside run.step (load_state_dict, clamp_, a max_norm"
                    f" embedding, ...), and {self.policy.name} keeps remainders of the values before; change run.named_masters()"
                    " in a hook of run.after_update, load with run.load_state_dict, or train under MASTER_BF16, which adopts it"
                )
            self._take_as_written(self.first)
        if self.policy.bf16_format is not None:
            return
        for half, version in zip(self.halves, self.master_versions, strict=True):
            if half.parameter in changed or (compare and half.master._version == version):
                written = half.parameter.data
                same = written == half.master.to(written.dtype)
                if not bool(same.all()):
                    half.master.copy_(torch.where(same, half.master, written.float()))
        if changed:
            self.record_()

    def _take_as_written(self, first: dict[nn.Parameter, Tensor]) -> None:
        """Let what was written be exact, without the remainders of what was there; all others keep theirs."""
        self.check_dtypes()
        for half in self.halves:
            if (rest := half.remainder) is not None:
                rest.copy_(torch.where(half.parameter.data == first[half.parameter], rest, torch.zeros_like(rest)))
        self.record_()

    def check_dtypes(self) -> None:
        """Refuse a model that was cast by hand, of which one weight is enough to see."""
        parameter = next((half.parameter for half in self.halves), next(iter(self.half_parameters), None))
        if parameter is not None and parameter.dtype != self.policy.param_dtype:
            raise TrainingError(
                f"{self.names.get(parameter, 'a weight')} was cast to {parameter.dtype} by hand after prepare (model.float(),"
                f" model.half(), ...), and {self.policy.name} trains {self.policy.param_dtype}; leave the cast out, as"
                " run.finish() returns an fp32 model, or prepare under another policy"
            )

    def _check_not_replaced(self) -> None:
        moved = [parameter for parameters, leaf, parameter in self.places if parameters.get(leaf) is not parameter]
        if not moved:
            return
        present = set(self.model.parameters())
        for parameter in moved:
            if parameter not in present:
                raise TrainingError(
                    f"{self.names[parameter]}: another parameter was put in its place after prepare"
                    " (load_state_dict(assign=True), or an assignment), and the optimizer does not have it; write into the weight"
                    " in place, or call run.add_group with the new one"
                )

    def _assign(self, half: HalfWeight, value: Tensor) -> None:
        """Set one weight to an fp32 value, exactly where the policy can hold it."""
        half.parameter.data.copy_(value)
        if self.policy.bf16_format is None:
            half.master.copy_(value)
        elif half.remainder is not None:
            value = value.to(half.parameter.device)
            if self.policy.bf16_format == "split":
                values, remainder = bf16_formats.split(value)
                half.parameter.data.copy_(values)
            else:
                remainder = value - half.parameter.data.float()
            half.remainder.copy_(remainder)

    def state_dict(self, keep: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """Weights, compensations, buffers and the step counter, in fp32 and by name; `keep` detaches or copies a tensor."""
        kahan = self.policy.bf16_format == "kahan"
        return {
            "weights": {self.names[p]: keep(in_fp32(v)) for p, v in self.fp32_values().items()},
            "compensation": {half.name: keep(half.remainder) for half in self.halves if half.remainder is not None and kahan},
            "buffers": {name: keep(in_fp32(b)) for name, b in self.model.named_buffers()},
            "steps": keep(self.steps),
        }

    def check_state(self, state: dict[str, Any]) -> None:
        """Refuse the state of another model."""
        shapes = {name: p.shape for p, name in self.names.items()}
        buffers = {name: b.shape for name, b in self.model.named_buffers()}
        for kind, here, saved in (("parameter", shapes, state["weights"]), ("buffer", buffers, state["buffers"])):
            if different := sorted(set(here) ^ set(saved)):
                side = "is not in the state" if different[0] in here else "is only in the state"
                raise CheckpointError(f"load_state_dict: another model: {kind} {different[0]} {side}")
            for name, shape in here.items():
                if shape != saved[name].shape:
                    got = tuple(saved[name].shape)
                    raise CheckpointError(
                        f"load_state_dict: another model: {kind} {name} is {tuple(shape)} here, {got} in the state"
                    )

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, of another policy too; `check_state` comes first."""
        parameters = {name: p for p, name in self.names.items()}
        halves = {half.name: half for half in self.halves}
        kahan = state["compensation"] if self.policy.bf16_format == "kahan" else {}
        for name, value in state["weights"].items():
            half = halves.get(name)
            if half is None:
                parameters[name].data.copy_(value)
            elif half.remainder is not None and name in kahan:
                # The half weight as it was: rounding the sum again could fall on the other side of a tie.
                half.parameter.data.copy_(value - kahan[name].float().to(value.device))
                half.remainder.copy_(kahan[name])
            else:
                self._assign(half, value)
        for name, buffer in self.model.named_buffers():
            buffer.copy_(state["buffers"][name])
        self.steps.copy_(state["steps"])
        self.record_()

    def finish(self) -> None:
        """Restore an fp32 model whose optimizer has the model's own parameters."""
        self.finished = True
        reshard_(self.model)  # the last forward pass may have put shards together
        for half in self.halves:
            half.parameter.data = self.fp32_value(half)
        for parameter in self.half_parameters:
            parameter.data = parameter.data.float()
            parameter.grad = None
            if self.policy.pure:
                _cast_state_to_fp32_(self.optimizer.state.get(parameter, {}))
        self.buffers.restore_()
        self.gradients.retire()
        for handle in self.handles:
            handle.remove()
        for module in self.model.modules():
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()
        replace_parameters_(self.optimizer, {half.master: half.parameter for half in self.halves})
        self.halves, self.half_parameters, self.hooked, self.places = [], [], set(), []


def check_not_in_run(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Refuse a model with half weights that belong to a run that goes on: its masters hold the digits that they lack.

    The run may be of the model, of a part of it, of one that it is a part of, or of one that it shares weights with, of which
    either optimizer trains one: frozen ones get no update that masters would be needed for.

    optimizer: of the model; None for one over all that requires a gradient.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimized = set(names) if optimizer is None else {p for group in optimizer.param_groups for p in group["params"]}
    with LOCK:
        every = list(_OF_MODELS.values())
    for earlier in every:
        weights = earlier()
        if weights is None or weights.finished:
            continue
        whole = any(module is weights.model for module in model.modules())
        shared = [p for p in weights.half_parameters if p in names and p in weights.names]
        trained = (p for p in shared if whole or (p.requires_grad and (p in optimized or p in weights.optimized)))
        if taken := next((names[p] for p in trained), None):
            kind = type(weights.model).__name__
            what = kind if whole else f"{taken}, a weight of a {kind},"
            raise SettingError(
                f"prepare: {what} is in a run under {weights.policy.name} already, whose masters hold what its half weights do"
                " not; call finish() of that run first, or, for several optimizers at a time, prepare separate parts of the"
                " model, each with its own, or train under FP32 or AMP_BF16"
            )


def replace_parameters_(optimizer: torch.optim.Optimizer, new: dict[Any, Any]) -> None:
    """Give the optimizer `new[p]` in the place of each p, with p's state."""
    for group in optimizer.param_groups:
        group["params"] = [new.get(p, p) for p in group["params"]]
    for old, replacement in new.items():
        if old in optimizer.state:
            optimizer.state[replacement] = optimizer.state.pop(old)


def widen_(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Bring a half model and what its optimizer, if it has one, knows of it to fp32, so that masters are made of its weights."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.dtype in HALVES:
                parameter.data, parameter.grad = parameter.data.float(), None
                _cast_state_to_fp32_({} if optimizer is None else optimizer.state.get(parameter, {}))
    widen_buffers_(model)


def _cast_state_to_fp32_(state: dict[str, Any]) -> None:
    for key, value in state.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            state[key] = value.float()


def _check_no_hidden_parameters(optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str]) -> None:
    for attribute, value in vars(optimizer).items():
        if attribute in ("param_groups", "state", "defaults"):
            continue
        leaves = value if isinstance(value, list | tuple | set) else [value]
        if hidden := [leaf for leaf in leaves if isinstance(leaf, nn.Parameter) and leaf in names]:
            raise SettingError(
                f"prepare: {type(optimizer).__name__} holds {names[hidden[0]]} in its attribute {attribute}, outside its"
                " param_groups, and would go on updating the half weight; use FP32 or AMP_BF16 with this optimizer"
            )
