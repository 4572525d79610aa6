"""A transposed convolution as a plain one and depth to space: the same values as torch's own, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from compresskit.graph.layers.transposed_convolution import convolution_form

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
SETTINGS = {  # kernel, stride, padding, output padding, dilation, groups
    "doubles": ((4, 4), (2, 2), (1, 1), (0, 0), (1, 1), 1),
    "more on one side": ((3, 3), (2, 2), (1, 1), (1, 1), (1, 1), 1),
    "no overlap": ((2, 2), (2, 2), (0, 0), (0, 0), (1, 1), 1),
    "large kernel": ((9, 9), (3, 3), (4, 4), (2, 2), (1, 1), 1),
    "gaps between windows": ((2, 1), (3, 4), (0, 0), (2, 1), (1, 1), 1),
    "cut off": ((1, 2), (2, 2), (1, 2), (0, 1), (1, 1), 1),
    "stride 1": ((3, 5), (1, 1), (2, 1), (0, 0), (2, 1), 1),
    "dilated": ((3, 3), (2, 3), (1, 0), (1, 2), (2, 3), 1),
    "groups": ((4, 3), (2, 1), (1, 1), (0, 0), (1, 1), 2),
    "sequence": ((5,), (2,), (2,), (1,), (1,), 2),
    "volume": ((2, 3, 4), (2, 1, 3), (0, 1, 1), (1, 0, 2), (1, 2, 1), 1),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_form_gives_the_values_of_torch(name: str) -> None:
    torch.manual_seed(0)
    kernel, stride, padding, output_padding, dilation, groups = SETTINGS[name]
    spatial = len(kernel)
    x = torch.randn(2, 4, *[5, 6, 4][:spatial], dtype=torch.float64)
    weight = torch.randn(4, 3, *kernel, dtype=torch.float64)
    wanted = TRANSPOSED[spatial](x, weight, None, stride, padding, output_padding, groups, dilation)
    form = convolution_form(weight, stride, padding, output_padding, dilation, groups)
    ends = [size for pair in zip(reversed(form.low), reversed(form.high), strict=True) for size in pair]
    got = CONV[spatial](F.pad(x, ends), form.weight, None, 1, 0, form.dilation, groups)
    got = got.unflatten(1, (3 * groups, *form.phases)).permute(
        0, 1, *[d for i in range(spatial) for d in (2 + spatial + i, 2 + i)]
    )
    for i, surplus in enumerate(form.surplus):
        got = got.flatten(2 + i, 3 + i)
        got = got.narrow(2 + i, 0, got.shape[2 + i] - surplus)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_a_symmetric_kernel_needs_no_padding_of_its_own_and_no_cut() -> None:
    form = convolution_form(torch.ones(1, 1, 4, 9), (2, 2), (1, 4), (0, 1), (1, 1), 1)
    assert form.low == form.high == (1, 2)
    assert form.weight.shape == (4, 1, 3, 5)
    assert form.surplus == (0, 0)
    assert int(form.weight.sum()) == 36  # each tap once
