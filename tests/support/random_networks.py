"""Random networks: a hypothesis strategy that draws a `Spec`, and `build`, which makes the network of one.

A spec prints as the code that makes it: a counterexample is pasted into a test as it is printed.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from random_blocks import ACTIVATIONS, Shape, build_block
from torch import Tensor, nn

WORDS, CLASSES = 20, 5
WIDTHS = (8, 12, 16)
SHAPES = {"image": (2, 8), "signal": (1, 8), "vectors": (0, 6), "words": (0, 6)}

#: What the parts of a network are called: plain names, those that torch's modules or this library use themselves, and two that
#: are one where `.` is written as `_`.
NAMES = {
    "plain": ("body_0", "body_1", "body_2", "body_3"),
    "ours": ("quantizers", "weights", "model", "placement"),
    "of graphs": ("graph", "code", "module", "input"),
    "of operators": ("add", "relu", "linear", "conv2d"),
    "joined": ("a.0", "a_0", "a.1", "a_1"),
}


@dataclass(frozen=True)
class Spec:
    """A network, written down.

    data: what its inputs are: "image", "signal", "vectors" or "words", the last two in sequences.
    inputs: "one", "two" of the same kind that are added or "concat"enated, or an "optional" one, which is not given.
    blocks: the blocks of its body; see `random_blocks`. width: of its first layer.
    pool: how places become one: "mean", "max", "flatten" or "last", or "none" where each keeps its own outputs.
    outputs: a "tensor", a "tuple", a "dict", or an "auxiliary" head that runs in training alone.
    tied: whether the outputs are read by the table of the words. names: of the parts, see `NAMES`. seed: of the values.
    """

    data: str = "image"
    inputs: str = "one"
    width: int = 8
    blocks: tuple[tuple, ...] = ()
    pool: str = "mean"
    outputs: str = "tensor"
    tied: bool = False
    names: str = "plain"
    seed: int = 0


class Network(nn.Module):
    """What `build` makes: a stem, a body of named parts, a pool and a head of two layers."""

    def __init__(self, spec: Spec):
        super().__init__()
        self.spec, (dims, size) = spec, SHAPES[spec.data]
        shape = Shape(dims, spec.width, size)
        self.stem = stem(spec)
        self.other = stem(spec) if spec.inputs in ("two", "concat", "optional") else None
        if spec.inputs == "concat":
            shape = Shape(dims, 2 * spec.width, size)
        self.parts = []
        for name, block in zip(NAMES[spec.names], spec.blocks, strict=False):
            module, shape = build_block(shape, block)
            parent, _, leaf = name.rpartition(".")
            if parent and parent not in self._modules:
                self.add_module(parent, nn.Sequential(OrderedDict()))
            self.get_submodule(parent).add_module(leaf, module)
            self.parts.append(name)
        self.axis, self.places = shape.axis, shape.places
        width = shape.width * (shape.size ** max(shape.dims, 1) if spec.pool == "flatten" else 1)
        last = spec.width if spec.tied else 16
        self.head = nn.Linear(width, last)
        self.classes = None if spec.tied else nn.Linear(last, CLASSES)
        self.auxiliary = nn.Linear(shape.width, CLASSES) if spec.outputs == "auxiliary" else None

    def pooled(self, h: Tensor) -> Tensor:
        if self.spec.pool == "flatten":
            return h.flatten(1)
        if self.spec.pool == "none":
            return h.movedim(1, -1) if self.axis == 1 else h
        if self.spec.pool == "last" and self.axis == 2:
            return h[:, -1]
        return h.amax(self.places) if self.spec.pool == "max" else h.mean(self.places)

    def forward(self, x: Tensor, other: Tensor | None = None):
        h = self.stem(x)
        if other is not None:
            second = self.other(other)
            h = torch.cat([h, second], self.axis) if self.spec.inputs == "concat" else h + second
        for name in self.parts:
            h = self.get_submodule(name)(h)
        features = self.head(self.pooled(h)).relu()
        logits = F.linear(features, self.stem.weight) if self.classes is None else self.classes(features)
        if self.auxiliary is not None and self.training:
            return logits, self.auxiliary(h.mean(self.places))
        if self.spec.outputs == "dict":
            return {"logits": logits, "features": features}
        return (logits, features) if self.spec.outputs == "tuple" else logits


def stem(spec: Spec) -> nn.Module:
    if spec.data == "words":
        return nn.Embedding(WORDS, spec.width)
    if spec.data == "vectors":
        return nn.Linear(3, spec.width)
    return (nn.Conv2d if spec.data == "image" else nn.Conv1d)(3, spec.width, 3, 1, 1)


def build(spec: Spec) -> Network:
    """The network of a spec in eval mode, with values in every norm and bias that are not those of a fresh layer."""
    torch.manual_seed(spec.seed)
    model = Network(spec)
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("running_var") or (value.ndim == 1 and name.endswith("weight")):
                value.uniform_(0.5, 1.5)
            elif value.ndim == 1:
                value.normal_(0, 0.2)
    return model.eval()


def dynamic_dimensions(spec: Spec) -> tuple[int, ...]:
    """The dimensions of the inputs that a network lets vary: the batch, and the length of a sequence unless a part fixes it."""
    fixed = SHAPES[spec.data][0] or spec.pool == "flatten" or "'positions'" in repr(spec.blocks)
    return (0,) if fixed else (0, 1)


def inputs_of(spec: Spec, rows: int, seed: int = 0, *, optional: bool = False, length: int | None = None) -> tuple[Tensor, ...]:
    """Inputs of a batch of `rows`, with those that are `optional` or without; length: of sequences, where not the usual one."""
    generator = torch.Generator().manual_seed(seed)
    dims, size = SHAPES[spec.data]
    size, many = length or size, 2 if spec.inputs in ("two", "concat") or optional else 1
    if spec.data == "words":
        return tuple(torch.randint(0, WORDS, (rows, size), generator=generator) for _ in range(many))
    shape = (rows, 3, *[size] * dims) if dims else (rows, size, 3)
    return tuple(torch.randn(shape, generator=generator) for _ in range(many))


def _settings(*choices) -> st.SearchStrategy[tuple]:
    """A tuple with one of each of the choices; the first of each is the simplest."""
    return st.tuples(*(c if isinstance(c, st.SearchStrategy) else st.sampled_from(c) for c in choices))


def _block(name: str, *choices) -> st.SearchStrategy[tuple]:
    return _settings((name,), *choices)


_activation, _width, _either = tuple(ACTIVATIONS), WIDTHS, (False, True)
_simple = st.one_of(
    _block("dense", _width, (1, 3), ("none", "batch", "group", "layer", "instance", "rms"), _activation, (True, False)),
    _block("grouped", (0, 2, 4), (1, 2), ("zeros", "reflect", "replicate", "circular")),
    _block("down", ("conv", "max", "average", "unshuffle")),
    _block("up", ("nearest", "linear", "transposed", "transposed groups", "shuffle")),
    _block("pieces", ("chunk", "split", "narrow")),
    _block("excite", ("sigmoid", "hard")),
    _block("gated", _width, ("glu", "chunk")),
    _block("shuffled", (2, 4)),
    _block("twice", ("shared", "tied")),
    _block("functional", _width),
    _block("constants", ("parameter", "buffer")),
    _block("dropped", ("values", "channels")),
    _block("attention", (1, 2, 4), ("torch", "fused", "separate", "written out", "causal")),
    _block("encoder", (2, 4), _either),
    _block("recurrent", ("lstm", "gru"), (6, 8), (1, 2), _either),
    _block("positions", _either),
    _block("product", _width, ("matmul", "einsum")),
    _block("token"),
    _block("selective"),
    _block("cast", ("device", "float")),
)  # fmt: skip
_blocks = st.one_of(_simple, _block("residual", _simple), _block("joined", _simple, _width))


@st.composite
def specs(draw) -> Spec:
    """Networks of up to four blocks."""
    data = draw(st.sampled_from(tuple(SHAPES)))
    tied = data == "words" and draw(st.booleans())
    return Spec(
        data=data,
        inputs=draw(st.sampled_from(("one", "two", "concat", "optional"))),
        width=draw(st.sampled_from(_width)),
        blocks=tuple(draw(st.lists(_blocks, min_size=1, max_size=4))),
        pool=draw(st.sampled_from(("mean", "max", "flatten", "last", "none"))),
        outputs=draw(st.sampled_from(("tensor", "tuple", "dict", "auxiliary"))),
        tied=tied,
        names=draw(st.sampled_from(tuple(NAMES))),
        seed=draw(st.integers(0, 9)),
    )
