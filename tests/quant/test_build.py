"""Building a quantized model from a float one."""

from __future__ import annotations

import networks
import pytest
from networks import build, image, images_task

import compresskit as ck
from compresskit.base.errors import ModelError
from compresskit.quant import quantize_static


def test_strict_names_every_operator_that_no_rule_knows() -> None:
    class Two(networks.Unknown):
        def forward(self, x):
            return super().forward(x).cumsum(1)

    model = build(Two)
    assert any("sort" in reason for reason in quantize_static(model, [image(16)]).placement.floating.values())
    with pytest.raises(ModelError, match=r"strict=True: no rule knows 2 operators.*aten\.sort.*aten\.cumsum"):
        quantize_static(model, [image(16)], strict=True)
    with pytest.raises(ModelError, match="strict=True"):
        ck.StaticQuant(strict=True)(model, images_task(ck))
    quantize_static(build(networks.Chain), [image(16)], strict=True)
