"""Draw the pictures of `docs/guide/why.md`: `python docs/make_pictures.py`. They show arithmetic, not measurements."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).resolve().parent / "pictures"
GREY, BLUE, ORANGE, GREEN = "#7d8794", "#3f7fbf", "#c2703d", "#1f8f6b"  # seen on white and on black


def line(x1: float, y1: float, x2: float, y2: float, colour: str = GREY, width: float = 1.5) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width:g}"/>'


def dot(x: float, y: float, colour: str, radius: float = 5) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{colour}"/>'


def box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def text(x: float, y: float, words: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-family="sans-serif" font-size="13" fill="{GREY}">{words}</text>'


def svg(title: str, width: int, height: int, parts: Iterable[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"><title>{title}</title>'
    return "\n".join([head, *parts, "</svg>", ""])


def half() -> str:
    """The numbers of fp16 around 1, and where 1.0001 goes."""
    step = float(np.spacing(np.float16(1)))

    def at(value: float) -> float:
        return 60 + (value - (1 - step)) / (3.2 * step) * 600

    parts = [line(40, 70, 680, 70)]
    value = np.float16(1 - step)
    while value <= 1 + 2 * step:
        parts += [line(at(float(value)), 60, at(float(value)), 80, BLUE, 2), text(at(float(value)), 100, f"{float(value):.5f}")]
        value = np.nextafter(value, np.float16(2))
    parts += [dot(at(1.0001), 70, ORANGE), text(at(1.0001) + 4, 48, "1.0001", "start"), line(at(1.0001), 70, at(1.0), 58, ORANGE)]
    parts.append(text(360, 130, "fp16 numbers around 1: the next one is 1 + 1/1024, so that 1 + 0.0001 is rounded to 1"))
    return svg("The fp16 numbers around 1; 1.0001 is rounded to 1", 720, 145, parts)


def ranges() -> str:
    """The exponents that three formats can hold, and gradients before and after scaling."""

    def at(exponent: float) -> float:
        return 90 + (exponent + 150) / 280 * 600

    formats = (("fp32", -149, 128, GREY), ("bf16", -133, 128, BLUE), ("fp16", -24, 16, GREEN))
    parts = []
    for row, (name, low, high, colour) in enumerate(formats):
        y = 20 + 32 * row
        parts += [box(at(low), y, at(high) - at(low), 18, colour), text(80, y + 14, name, "end")]
    for row, (name, middle) in enumerate((("gradients", -30), ("times 2^16", -14))):
        y = 150 + 32 * row
        heights = [(e, 22 * math.exp(-(((e - middle) / 5) ** 2))) for e in range(middle - 11, middle + 12)]
        parts += [box(at(e), y - h, 1.8, h, ORANGE) for e, h in heights]
        parts += [text(80, y, name, "end"), line(90, y, 690, y, GREY, 0.6)]
    parts += [line(at(-24), 84, at(-24), 190, GREEN, 1), line(at(16), 84, at(16), 190, GREEN, 1)]
    parts += [text(at(e), 206, f"2^{e}") for e in (-149, -100, -50, -24, 16, 128)]
    return svg(
        "Exponents of fp32, bf16 and fp16; small gradients fall below fp16's range, scaled ones lie inside", 720, 215, parts
    )


def soft_labels() -> str:
    """A hard label, and a teacher's softmax at two temperatures."""
    logits, names = np.array([6.0, 4.0, 1.0, -1.0]), ("cat", "lynx", "dog", "truck")
    panels = [("label", np.array([1.0, 0, 0, 0]))]
    for temperature in (1, 4):
        weights = np.exp(logits / temperature)
        panels.append((f"teacher, temperature {temperature}", weights / weights.sum()))
    parts = []
    for panel, (title, values) in enumerate(panels):
        left = 20 + 235 * panel
        parts += [text(left + 105, 18, title), line(left, 130, left + 210, 130)]
        for i, (name, value) in enumerate(zip(names, values, strict=True)):
            x = left + 10 + 50 * i
            parts += [box(x, 130 - 90 * value, 36, 90 * value, BLUE), text(x + 18, 126 - 90 * value, f"{value:.2f}")]
            parts.append(text(x + 18, 146, name))
    return svg("A hard label beside a teacher's softened predictions at temperatures 1 and 4", 720, 156, parts)


def neuron() -> str:
    """1024-100-20: 104,400 weights, of which one hidden neuron has 1,044."""
    columns = ((110, 9, "1,024 inputs"), (360, 5, "100 hidden"), (610, 4, "20 outputs"))
    places = [[(x, 100 + 20 * (i - (n - 1) / 2)) for i in range(n)] for x, n, _ in columns]
    chosen = places[1][2]
    parts = []
    for before, after in pairwise(places):
        for start in before:
            for end in after:
                touched = chosen in (start, end)
                parts.append(line(*start, *end, ORANGE if touched else GREY, 1.2 if touched else 0.3))
    parts += [dot(x, y, ORANGE if (x, y) == chosen else BLUE) for column in places for x, y in column]
    parts += [text(x, 205, name) for x, _, name in columns]
    parts.append(text(360, 228, "1,024 x 100 + 100 x 20 = 104,400 weights; one hidden neuron: 1,024 + 20 = 1,044"))
    return svg("A network with 104,400 weights; removing one hidden neuron removes 1,044", 720, 240, parts)


def int8() -> str:
    """Values on a grid of scale and zero point."""
    low, high, levels = -0.8, 2.4, 16
    scale = (high - low) / (levels - 1)
    zero = round(-low / scale)

    def at(value: float) -> float:
        return 60 + (value - low) / (high - low) * 600

    parts = [line(40, 60, 680, 60)]
    for level in range(levels):
        x = at((level - zero) * scale)
        parts += [line(x, 52, x, 68, BLUE, 2), text(x, 86, f"{level}")]
    for value in (-0.61, 0.0, 0.37, 1.52, 2.19):
        rounded = round(value / scale) * scale
        parts += [dot(at(value), 34, ORANGE, 4), line(at(value), 38, at(rounded), 52, ORANGE), text(at(value), 22, f"{value:g}")]
    parts.append(
        text(
            360,
            110,
            f"value = scale x (integer - zero point), here scale {scale:.3f}, zero point {zero}, 16 levels; int8 has 256",
        )
    )
    return svg("Values rounded to a grid of integers", 720, 122, parts)


PICTURES: dict[str, Callable[[], str]] = {
    "half.svg": half,
    "ranges.svg": ranges,
    "soft_labels.svg": soft_labels,
    "neuron.svg": neuron,
    "int8.svg": int8,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw())
