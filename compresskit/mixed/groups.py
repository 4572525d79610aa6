"""Param groups that are added while training: a head that is new, layers that are unfrozen late."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from compresskit.base.errors import SettingError

if TYPE_CHECKING:
    from compresskit.mixed.run import Run


def add_group_(run: Run, group: dict[str, Any]) -> None:
    """See `Run.add_group`."""
    given = group.get("params", ())
    parameters: list[Any] = [given] if isinstance(given, Tensor) else list(given)
    weights = run._weights
    known = {parameter: name for name, parameter in weights.model.named_parameters()}
    if not parameters or not all(isinstance(p, nn.Parameter) and p in known for p in parameters):
        raise SettingError(
            "add_group: wanted {'params': [...]} with parameters of the prepared model; add a new module to it first"
        )
    if twice := [known[p] for p in parameters if p in weights.owned]:
        raise SettingError(f"add_group: the optimizer has {twice[0]} already; leave it out")
    if run._passes:
        raise SettingError("add_group: gradients wait for their step; call it after step()")
    before = {slot.parameter for slot in weights.slots}
    weights.admit()
    weights.fp32_grads_(on=weights.fp32_grads if before else run._compiled is None)
    weights.own(parameters)
    masters: dict[Any, Tensor] = {slot.parameter: slot.master for slot in weights.slots}
    run.optimizer.add_param_group({**group, "params": [masters.get(p, p) for p in parameters]})
    if run._flat is not None:
        run._flat.add(run.optimizer.param_groups[-1])
    if run._compiled is not None:
        run._compiled.slots = {slot.master: slot for slot in weights.slots}
    for average in run._averages:
        average.admit(run.named_masters())
