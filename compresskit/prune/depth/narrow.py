"""`narrow`: a smaller model of the same class, initialised from a trained one: a student for `Distill`."""

from __future__ import annotations

from torch import nn

from compresskit.base.budget import keep
from compresskit.base.errors import SettingError
from compresskit.base.inputs import AnyInputs
from compresskit.graph.surgery import copy_model
from compresskit.prune.channels.plan_channels import plan_channels
from compresskit.prune.criteria import Criterion, l2
from compresskit.prune.depth.costs import macs
from compresskit.prune.depth.importance import influence
from compresskit.prune.depth.plan_blocks import plan_blocks
from compresskit.prune.rankings import uniform
from compresskit.prune.structure.plan import apply_


def narrow(
    model: nn.Module,
    example: AnyInputs,
    *,
    width: float = 0.5,
    blocks: int = 0,
    criterion: Criterion = l2,
    round_to: int = 8,
    ignore: tuple[str, ...] = (),
) -> nn.Module:
    """Return a smaller model of the same class whose weights come from a trained one; it is still to be trained.

    `blocks` residual blocks go first, those whose output is nearest to their input; then every group of channels keeps the same
    fraction, its channels with the highest scores. BatchNorm statistics are those of the trained model.

    Args:
        model: the trained model; it is not changed.
        example: its inputs, a tensor or a tuple or mapping of inputs.
        width: fraction of all channels that can be removed that stays, in (0, 1].
        blocks: how many residual blocks to remove.
        criterion: scores channels; one that reads weights alone, see `prune.criteria`.
        round_to: widths stay multiples of this, but for narrow layers.
        ignore: dotted names of modules that stay as they are.

    Raises:
        SettingError: a setting is out of range, or would change nothing.
        ModelError: there are not so many blocks, or too few channels that can be removed.
    """
    if isinstance(width, bool) or not isinstance(width, int | float) or not 0 < width <= 1:
        raise SettingError(f"narrow(width=...): wanted the fraction of the channels that stays, in (0, 1], got {width!r}")
    if type(blocks) is not int or blocks < 0:
        raise SettingError(f"narrow(blocks=...): wanted a whole number >= 0, got {blocks!r}")
    if width == 1 and not blocks:
        raise SettingError(
            "narrow(): a width of 1 and no block to remove leave the model as it is; wanted width < 1 or blocks >= 1"
        )
    small = copy_model(model)
    if blocks:
        plan_blocks(small, example, blocks=blocks, importance=influence, cost=macs, ignore=ignore).apply_(small)
    if width < 1:
        budget = keep(channels=width)
        apply_(
            small, plan_channels(small, example, budget, criterion=criterion, ranking=uniform, round_to=round_to, ignore=ignore)
        )
    return small
