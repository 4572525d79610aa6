"""What an optimizer is given, and what it refuses.

Its param groups by the names and shapes of the parameters, `Train(param_groups=no_decay_on_vectors)`; gradients of several
processes; sparse gradients.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from compresskit import mixed
from compresskit.base.distributed import all_reduce_mean_, is_peer_failure
from compresskit.base.errors import CompressError, SettingError, TrainingError, first_line
from compresskit.graph.quantized import float_names
from compresskit.graph.surgery import parameter_owners
from compresskit.mixed.formats.casts import in_fp32
from compresskit.train.cursor import raise_if_worker_died

log = logging.getLogger(__name__)

NamedParameters = list[tuple[str, nn.Parameter]]
#: (named parameters that require gradients) -> param groups as torch's optimizers take them. In quantization-aware training the
#: names are those of the float model, and `float_names` of the quantized model says how learned scales are called.
ParamGroups = Callable[[NamedParameters], list[dict[str, Any]]]

#: Optimizers of torch that refuse sparse gradients.
DENSE_ALONE = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adadelta", "ASGD", "Rprop", "Adafactor")
REMEDY = "set sparse=False in the embeddings, or give torch.optim.SGD or Adagrad, which take both"


def no_decay_on_vectors(named: NamedParameters) -> list[dict[str, Any]]:
    """Leave biases and the weights of norms, which have one dimension, without weight decay."""
    vectors = [parameter for _, parameter in named if parameter.ndim <= 1]
    others = [parameter for _, parameter in named if parameter.ndim > 1]
    groups: list[dict[str, Any]] = [{"params": others}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def groups_of(model: nn.Module, make: ParamGroups | None, *, quiet: bool = False) -> list[Any]:
    """Return what the optimizer is made of: the parameters that require gradients, or the groups that `make` puts them in.

    A group without parameters is logged as a warning, unless `quiet`: names may not fit the model.

    Raises:
        SettingError: the groups lack one of these parameters, hold one twice, or hold something else.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if make is None:
        return [parameter for _, parameter in named]
    known = float_names(model)
    named = [(known[name], parameter) for name, parameter in named]
    groups = make(list(named))
    try:
        groups = [{**group, "params": list(group["params"])} for group in groups]
        held = Counter(id(parameter) for group in groups for parameter in group["params"])
    except (TypeError, KeyError) as error:
        raise SettingError(
            f"Train(param_groups=...): wanted a list of dicts with an entry 'params' from its function, got {groups!r:.80}"
        ) from error
    if left := [name for name, parameter in named if held[id(parameter)] != 1]:
        often = held[id(dict(named)[left[0]])]
        raise SettingError(
            f"Train(param_groups=...): {left[0]} is in {often} groups; each parameter with a gradient belongs into one"
            " (freeze it with requires_grad_(False) to leave it out)"
        )
    if len(held) != len(named):
        raise SettingError("Train(param_groups=...): its groups hold tensors that it was not given")
    empty = [number for number, group in enumerate(groups, 1) if not group["params"]]
    if empty and not quiet:
        log.warning(
            "Train(param_groups=...): group %d of %d has no parameter; do the names fit the model?", empty[0], len(groups)
        )
    return groups


def average_gradients_(run: mixed.Run, names: Iterable[str], others: Sequence[Tensor], flag: float) -> float:
    """Average the gradients of a run over the processes in one message; return the sum of their flags.

    A process in which a parameter has no gradient (a layer was left out, an expert had no rows) counts with zeros, and gets the
    mean as well; a parameter that has none in any process keeps none.

    Args:
        run: has the gradients of this step.
        names: of the parameters that are trained, the same in every process.
        others: more tensors to average in place.
        flag: of this process.
    """
    parameters, grads = run.named_parameters(), run.unscaled()
    means = {name: grads[name] if name in grads else _zero_gradients(parameters[name]) for name in names}
    overflows = [scaler.found_inf for scaler in run.scalers.values()]
    has = [float(name in grads) for name in means]
    flags, *counts = all_reduce_mean_([*means.values(), *overflows, *others], [flag, *has])
    missing = [name for name, count in zip(means, counts, strict=True) if count and name not in grads]
    grads = run.unscaled(zeros=missing) if missing else grads
    for name in missing:
        grads[name].copy_(means[name])
    return flags


def _zero_gradients(parameter: nn.Parameter) -> Tensor:
    return in_fp32(torch.zeros_like(parameter))


def warn_of_sparse_gradients(model: nn.Module, optimizer: Callable[..., Any]) -> None:
    """Log a warning where an optimizer of torch may not take the gradients of the model: sparse ones, or dense ones.

    No error, since code that reads the weight of an embedding by itself gives it a dense gradient, and a parameter that nothing
    reads has none. `raise_failed_step` says it at the first step.

    optimizer: a class, or a partial of a class; nothing is known of other functions.
    """
    kind = optimizer.func if isinstance(optimizer, partial) else optimizer
    sparse = _sparse_embeddings(model)
    if sparse and any(kind is vars(torch.optim).get(name) for name in DENSE_ALONE):
        log.warning(
            "Train(optimizer=...): %s takes no sparse gradients, as %s has by sparse=True; %s", kind.__name__, sparse[0], REMEDY
        )
    dense = [n for n, p in model.named_parameters() if p.requires_grad and n.rpartition(".")[0] not in sparse]
    if kind is torch.optim.SparseAdam and dense:
        log.warning("Train(optimizer=...): SparseAdam takes no dense gradients, as %s has; %s", dense[0], REMEDY)


def _sparse_embeddings(model: nn.Module) -> list[str]:
    """Names of the embeddings with sparse gradients; a weight that another module reads, too, has a dense one."""
    owners = parameter_owners(model)
    embeddings = ((name, m) for name, m in model.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse)
    return [name for name, m in embeddings if m.weight.requires_grad and len(owners.get(id(m.weight), ())) == 1]


def raise_failed_step(error: BaseException, optimizer: torch.optim.Optimizer, where: str) -> NoReturn:
    """Raise TrainingError, which begins with `where`, for what an optimizer says of its step; other errors as they are."""
    raise_if_worker_died(error, where)
    if isinstance(error, CompressError) or is_peer_failure(error):
        raise error
    remedy = f"; {REMEDY}" if "sparse gradients" in str(error) or "dense gradients" in str(error) else ""
    raise TrainingError(f"{where}: {type(optimizer).__name__} cannot make its step: {first_line(error)}{remedy}") from error
