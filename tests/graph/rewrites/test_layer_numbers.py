"""The layers of a decoder with a KV cache, of which some are removed: word by word it gives what it gives at once."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compresskit.graph.surgery import restructure_, structure
from compresskit.prune.depth import costs, importance, plan_blocks
from compresskit.prune.depth.block_plan import BlockPlan


class Cache:
    """Keys of each layer, by its number; those of layers with a window keep its last steps."""

    def __init__(self, windows: list[int | None]) -> None:
        self.windows, self.keys, self.counts = windows, {}, {}

    def update(self, keys: Tensor, number: int) -> Tensor:
        seen = torch.cat([self.keys[number], keys], 1) if number in self.keys else keys
        self.counts[number] = self.counts.get(number, 0) + keys.shape[1]
        window = self.windows[number]
        self.keys[number] = seen if window is None else seen[:, 1 - window :]
        return seen

    def length(self) -> int:
        return self.counts.get(0, 0)


class Attention(nn.Module):
    """As those of Hugging Face: the number is an attribute of the attention, and so is what kind it is of."""

    def __init__(self, layer_idx: int, window: int | None) -> None:
        super().__init__()
        self.q, self.k, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.layer_idx, self.window, self.is_sliding = layer_idx, window, window is not None

    def forward(self, x: Tensor, cache: Cache | None) -> Tensor:
        keys = self.k(x) if cache is None else cache.update(self.k(x), self.layer_idx)
        behind = torch.arange(keys.shape[1] - x.shape[1], keys.shape[1])[:, None] - torch.arange(keys.shape[1])
        seen = behind >= 0 if self.window is None else (behind >= 0) & (behind < self.window)
        scores = (self.q(x) @ keys.transpose(1, 2)).masked_fill(~seen, -torch.inf)
        return self.out(scores.softmax(-1) @ keys)


class Layer(nn.Module):
    def __init__(self, layer_idx: int, window: int | None) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(layer_idx, window), nn.Linear(16, 16)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        x = x + self.attn(x, cache)
        return x + self.mlp(x).relu()


class Decoder(nn.Module):
    """Positions are counted on from what the cache has of its first layer."""

    def __init__(self, windows: list[int | None]) -> None:
        super().__init__()
        self.windows = windows
        self.words, self.places = nn.Embedding(30, 16), nn.Embedding(20, 16)
        self.layers = nn.ModuleList(Layer(i, window) for i, window in enumerate(windows))

    def forward(self, ids: Tensor, cache: Any = None) -> Tensor:
        start = 0 if cache is None else cache.length()
        x = self.words(ids) + self.places(torch.arange(start, start + ids.shape[1]))
        for layer in self.layers:
            x = layer(x, cache)
        return x


def word_by_word(model: Decoder, ids: Tensor) -> Tensor:
    cache = Cache(model.windows)
    return torch.cat([model(ids[:, :4], cache), *(model(ids[:, i : i + 1], cache) for i in range(4, ids.shape[1]))], 1)


MIXED = [3, 3, None, 3, 3, None]


@pytest.mark.parametrize(
    ("windows", "removed", "numbers"),
    [
        ([None] * 3, [], [0, 1, 2]),
        ([None] * 3, [0], [0, 1]),
        ([None] * 3, [0, 1], [0]),
        ([None] * 4, [2, 0], [0, 1]),
        (MIXED, [0], [0, 2, 1, 3, 5]),
        (MIXED, [2, 1, 0], [0, 1, 2]),
    ],
)
def test_a_cache_counts_the_layers_that_are_left(windows, removed, numbers) -> None:
    torch.manual_seed(0)
    model, ids = Decoder(windows).eval(), torch.randint(30, (2, 9))
    small = copy.deepcopy(model)
    if removed:
        paths = tuple(f"layers.{i}" for i in removed)
        plan_blocks(model, ids, blocks=paths, importance=importance.influence, cost=costs.parameters).apply_(small)
    assert [m.layer_idx for m in small.modules() if isinstance(m, Attention)] == numbers
    torch.testing.assert_close(word_by_word(small, ids), small(ids))
    again = copy.deepcopy(model)
    restructure_(again, structure(small))
    assert [m.layer_idx for m in again.modules() if isinstance(m, Attention)] == numbers
    assert [m.layer_idx for m in model.modules() if isinstance(m, Attention)] == [*range(len(windows))]


class Scaled(nn.Module):
    """Its scores are divided by the number of its layer, as in ImageGPT."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.qkv, self.out, self.layer_idx = nn.Linear(16, 48), nn.Linear(16, 16), layer_idx

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out((q @ k.mT / float(self.layer_idx + 1)).softmax(-1) @ v)


def test_numbers_that_outputs_depend_on_stay() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Sequential(*(Scaled(i) for i in range(4))), nn.Linear(16, 5)).eval(), torch.randn(4, 6, 16)
    small, wanted = copy.deepcopy(model), copy.deepcopy(model)
    plan = plan_blocks(model, x, blocks=("0.1",), importance=importance.influence, cost=costs.parameters)
    BlockPlan.from_json(json.loads(json.dumps(plan.to_json()))).apply_(small)
    wanted[0][1] = nn.Identity()
    again = copy.deepcopy(model)
    restructure_(again, structure(small))
    assert structure(again) == structure(small)
    for made in (small, again):
        torch.testing.assert_close(made(x), wanted(x))


def test_layers_of_other_lists_keep_their_numbers() -> None:
    """An encoder and a decoder have a cache each."""
    torch.manual_seed(0)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList([Decoder([None] * 3), Decoder([None] * 3)])

        def forward(self, ids: Tensor) -> Tensor:
            return torch.cat([stage(ids) for stage in self.stages], 2)

    model = Both().eval()
    plan = plan_blocks(model, torch.randint(30, (2, 9)), blocks=("stages.1.layers.0",), cost=costs.parameters)
    plan.apply_(model)
    assert [m.layer_idx for m in model.modules() if isinstance(m, Attention)] == [0, 1, 2, 0, 1]
