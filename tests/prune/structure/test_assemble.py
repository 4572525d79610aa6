"""What changes beside the tensors: attributes that repeat a width, and the scale of attention queries."""

from __future__ import annotations

import pytest
import special_networks as special
import torch
from pruned import cut
from torch import nn

import compresskit as ck
from compresskit.prune import apply_, plan_channels


def test_queries_are_rescaled_where_the_code_divides_by_a_width_that_shrinks() -> None:
    """The code divides by the root of a width that shrinks: the rows of the queries make up for it."""
    model, plan, pruned = cut(special.FusedAttention)
    width = pruned.qkv.out_features // 3 // 4
    factor, rows = plan.scales["qkv.weight"]
    assert factor == pytest.approx((width / 8) ** 0.5)
    assert set(rows) == set(range(32))
    kept = [i for i in range(32) if i not in plan.remove["qkv.weight"][0]]
    columns = [i for i in range(32) if i not in plan.remove["qkv.weight"][1]]
    assert torch.allclose(pruned.qkv.weight[: len(kept)], model.qkv.weight[kept][:, columns] * factor)


def test_attributes_of_the_users_modules_follow() -> None:
    _, plan, pruned = cut(special.StoredAttention)
    assert plan.attributes == {"head_dim": (8, pruned.head_dim)}
    assert pruned.head_dim < 8
    assert not plan.scales  # the scale is stored, so it stays what it was


def test_attributes_of_torchs_own_layers_follow() -> None:
    _, _, lstm = cut(special.Recurrent)
    assert lstm.rnn.hidden_size == lstm.rnn.weight_hh_l0.shape[1] < 24
    assert lstm.rnn.input_size == lstm.embed.embedding_dim
    _, _, attention = cut(special.Multihead)
    assert attention.attention.embed_dim == attention.head.in_features == 4 * attention.attention.head_dim < 32
    _, _, norm = cut(special.BareInstanceNorm)
    assert norm.norm.num_features == norm.a.out_channels < 16
    _, _, wide = cut(special.WideLayerNorm)
    assert wide.norm.normalized_shape == (wide.a.out_channels, 8, 8)


@pytest.mark.parametrize("sizes", [(64, 4, 4), [64, 4, 4], torch.Size([64, 4, 4]), (-1, 4, 4)], ids=str)
def test_the_sizes_of_unflatten_follow(sizes) -> None:
    """A decoder, or a generator: its first layer makes an image, of a size that nothing but the module `Unflatten` holds."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 1024), nn.Unflatten(1, sizes), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 3, 3))
    plan = plan_channels(model.eval(), (torch.randn(2, 16),), ck.keep(macs=0.6))
    width = apply_(model, plan)[2].num_features
    assert width < 64
    assert plan.attributes == ({} if sizes[0] == -1 else {"1.unflattened_size": ((64, 4, 4), (width, 4, 4))})
    assert model(torch.randn(3, 16)).shape == (3, 3, 2, 2)
