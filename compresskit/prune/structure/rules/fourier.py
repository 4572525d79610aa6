"""Rules of Fourier transforms over positions, and of complex numbers: a channel stays a channel."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from compresskit.graph.normalize import aten
from compresskit.prune.structure.channel_sets import collapse, varying_dims
from compresskit.prune.structure.rules.base import OperatorCall, RuleResult, overloads, rule_for
from compresskit.prune.structure.rules.parameter_view import ParameterView

_TRANSFORMS = """fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_hfft2
 fft_ihfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_hfftn fft_ihfftn fft_fftshift fft_ifftshift _fft_r2c _fft_c2r _fft_c2c"""


@rule_for(*overloads(_TRANSFORMS))
def rule_transform(call: OperatorCall) -> RuleResult:
    """Mixes the positions along some dimensions, of which there may be more or fewer afterwards."""
    x = call.args[0]
    if not isinstance(x, Tensor):
        return call.lock_inputs(f"{call.where} works on a parameter")
    if {*varying_dims(x)} & {*_transformed_dims(call, x.ndim)}:
        return call.lock_inputs(f"{call.where} mixes the channels")
    return collapse(x).expand(call.shape)


def _transformed_dims(call: OperatorCall, rank: int) -> Collection[int]:
    """Without `dim`, as many of the last dimensions as there are sizes; all of them without these, too."""
    dims, sizes = call.argument("dim"), call.argument("s")
    if dims is None:
        return range(rank - len(sizes) if sizes else 0, rank)
    return [d % rank for d in ([dims] if isinstance(dims, int) else dims)]


@rule_for(*overloads("real imag _conj resolve_conj resolve_neg"))
def rule_part_of_complex(call: OperatorCall) -> RuleResult:
    """The same channels."""
    return call.args[0]


@rule_for(aten.view_as_complex.default)
def rule_view_as_complex(call: OperatorCall) -> RuleResult:
    """(..., 2) to complex (...): two channels that make one number go together, as where embeddings are rotated."""
    x = call.args[0]
    if isinstance(x, ParameterView):
        return x.map(lambda a: a.select(-1, 0))
    small = collapse(x)
    first, second = (small[..., part].flatten() for part in (0, -1))
    call.sets.join(first, second, f"{call.where} makes one number of two channels, one of which cannot be cut")
    call.state.imaginary |= {real: other for real, other in zip(first.tolist(), second.tolist(), strict=True) if real > 0}
    return small[..., 0].expand(call.shape)


@rule_for(aten.view_as_real.default)
def rule_view_as_real(call: OperatorCall) -> RuleResult:
    """Complex (...) to (..., 2): the channels that made the numbers."""
    x = call.args[0]
    if isinstance(x, ParameterView):
        return x.map(lambda a: torch.stack([a, a], -1))
    small = collapse(x)
    second = torch.tensor([call.state.imaginary.get(label, label) for label in small.flatten().tolist()]).view(small.shape)
    return torch.stack([small, second], -1).expand(call.shape)
