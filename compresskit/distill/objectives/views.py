"""Views of a batch: other inputs of the same meaning, over which the predictions of a teacher are averaged."""

from __future__ import annotations

from torch import Tensor
from torch.utils import _pytree as pytree

from compresskit.base.errors import DataError
from compresskit.base.task import Inputs


def mirror(inputs: Inputs) -> Inputs:
    """Return the images of a batch mirrored from left to right: `imitate(teacher_views=[mirror])`.

    Args:
        inputs: a tuple or a dict of a model's inputs. Floating-point tensors (N, C, H, W) are mirrored; others stay as they are.

    Raises: DataError where there is no such tensor.
    """
    if not any(_is_image(leaf) for leaf in pytree.tree_leaves(inputs)):
        shapes = [f"{leaf.dtype} {tuple(leaf.shape)}" for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
        raise DataError(f"mirror: no images; wanted floating-point inputs (N, C, H, W), got {shapes}")
    return pytree.tree_map(lambda leaf: leaf.flip(-1) if _is_image(leaf) else leaf, inputs)  # type: ignore[no-any-return]


def _is_image(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim == 4 and leaf.is_floating_point()
