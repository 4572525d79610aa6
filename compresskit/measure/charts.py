"""Charts: where the axes, ticks, lines and labels of a chart lie. The page of a run draws them; `svg` makes a picture of one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 420, 300  # of a chart, in its own units; close to the pixels of a phone
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 14, 46  # margins of the plot
COLOURS, DASHES = 8, ("", "6 3", "2 3")
PALETTE = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#bf3989", "#0a7d8c", "#7d5c00", "#57606a")  # as on the page of a run
MOST_POINTS = 400  # of a line; of more, every n-th is drawn
MOST_MARKED = 40  # points of a line that get a marker each
LETTER, LINE = 5.6, 12.0  # width of a letter and height of a line of a label
LONGEST_LABEL = 22


@dataclass(frozen=True)
class Series:
    """A line of a chart: its name, its points (x, y) and a label for each, or none. Labels of joined points are tooltips."""

    name: str
    points: Sequence[tuple[float, float]]
    labels: Sequence[str] = ()


@dataclass(frozen=True)
class Label:
    """A text at a place of a chart. anchor: "start", "middle" or "end" of the text lies there."""

    x: float
    y: float
    text: str
    anchor: str = "middle"


@dataclass(frozen=True)
class DrawnSeries:
    """A series in the units of the chart. path: of its line, "" for none. marks: (x, y, what it says)."""

    name: str
    colour: int
    dash: str
    path: str
    marks: list[tuple[float, float, str]]
    labels: list[Label]


@dataclass(frozen=True)
class Chart:
    """A chart, ready to be drawn.

    Attributes:
        title: what it shows.
        description: the same in words, with the figures, for those who do not see it.
        x_name, y_name: of the axes, with their units.
        x_ticks, y_ticks: labels with their places.
        series: the lines and points.
        pareto: path of the Pareto line; "" for none.
        remark: what a reader has to know beside it; "" for nothing.
    """

    title: str
    description: str
    x_name: str
    y_name: str
    x_ticks: list[Label]
    y_ticks: list[Label]
    series: list[DrawnSeries]
    pareto: str = ""
    remark: str = ""


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers that cover [low, high], in steps of 1, 2 or 5 times a power of ten.

    >>> ticks(0.0, 1.7)
    [0.0, 0.5, 1.0, 1.5, 2.0]
    """
    span = high - low or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / (most - 1)))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if span / (power * factor) <= most - 1)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.10g}") for i in range(first, max(last, first + 1) + 1)]


def pareto_points(points: Sequence[tuple[float, float]], *, higher_is_better: bool) -> list[tuple[float, float]]:
    """The points that no other beats in both: x, of which less is better, and y.

    >>> pareto_points([(1, 0.8), (2, 0.7), (3, 0.9)], higher_is_better=True)
    [(1, 0.8), (3, 0.9)]
    """
    sign = 1 if higher_is_better else -1
    best: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda point: (point[0], -sign * point[1])):
        if not best or sign * y > sign * best[-1][1]:
            best.append((x, y))
    return best


def draw(
    title: str,
    x_name: str,
    y_name: str,
    series: Sequence[Series],
    *,
    lines: bool,
    higher_is_better: bool | None = None,
    remark: str = "",
) -> Chart:
    """Lay out a chart of at least one point.

    Args:
        title, x_name, y_name: of the chart and its axes, with units.
        series: what is drawn.
        lines: whether the points of a series are joined. If not, x starts at 0 and the Pareto line of all points is drawn.
        higher_is_better: whether a larger y is better, for the Pareto line; None for none.
        remark: of the chart.
    """
    every = [point for one in series for point in one.points]
    xs, ys = [x for x, _ in every], [y for _, y in every]
    x_ticks = ticks(min(xs) if lines else 0.0, max(xs))
    y_ticks = ticks(min(ys), max(ys))

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x = LEFT + (point[0] - x_ticks[0]) / (x_ticks[-1] - x_ticks[0]) * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - (point[1] - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (HEIGHT - TOP - BOTTOM)
        return round(x, 1), round(y, 1)

    taken: list[tuple[float, float, float, float]] = []  # boxes of markers and labels that are there
    for point in every if not lines else []:
        x, y = place(point)
        taken.append((x - 5, y - 5, x + 5, y + 5))
    drawn = []
    for i, one in enumerate(series):
        shown = thinned(one.points) if lines else one.points
        points = [place(point) for point in shown]
        written = () if lines else one.labels
        labels = [_free_place(x, y, label, taken) for (x, y), label in zip(points, written, strict=True)] if written else []
        names = one.labels if len(one.labels) == len(shown) else [one.name] * len(shown)
        marks = [(*at, f"{name}: {x:.6g}, {y:.6g}") for at, name, (x, y) in zip(points, names, shown, strict=True)]
        path = _path(points) if lines and len(points) > 1 else ""
        marks = marks if len(marks) <= MOST_MARKED or not lines else []
        drawn.append(DrawnSeries(one.name, i % COLOURS, DASHES[i % len(DASHES)], path, marks, labels))
    best = [] if lines or higher_is_better is None else pareto_points(every, higher_is_better=higher_is_better)
    if len(best) == 1 < len(every):
        label = next(label for one in series for label, point in zip(one.labels, one.points, strict=True) if point == best[0])
        remark = f"{label} is better in both than all others. {remark}".strip()
    return Chart(
        title=title,
        description=_in_words(x_name, y_name, series, lines=lines),
        x_name=x_name,
        y_name=y_name,
        x_ticks=[Label(place((x, y_ticks[0]))[0], HEIGHT - BOTTOM + 16, f"{x:.6g}") for x in x_ticks],
        y_ticks=[Label(LEFT - 6, place((x_ticks[0], y))[1], f"{y:.6g}", "end") for y in y_ticks],
        series=drawn,
        pareto=_path([place(point) for point in best]) if len(best) > 1 else "",
        remark=remark,
    )


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `MOST_POINTS` points, with the first and the last."""
    every = math.ceil(len(points) / MOST_POINTS)
    return list(points) if every <= 1 else [*points[:-1:every], points[-1]]


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + " L".join(f"{x:g} {y:g}" for x, y in points)


def _free_place(x: float, y: float, label: str, taken: list[tuple[float, float, float, float]]) -> Label:
    """The label of a point where it covers no marker and no other label, if there is such a place around it."""
    text = label if len(label) <= LONGEST_LABEL else label[: LONGEST_LABEL - 3] + "..."
    width = len(text) * LETTER
    choices = []
    for dy in (-8.0, 16.0, 4.0, -20.0, 28.0, -32.0, 40.0):
        for anchor, dx in (("start", 8.0), ("end", -8.0)):
            left = x + dx - (width if anchor == "end" else 0.0)
            box = (left, y + dy - LINE + 2, left + width, y + dy + 2)
            if box[0] >= LEFT and box[2] <= WIDTH - 2 and box[1] >= TOP and box[3] <= HEIGHT - BOTTOM:
                choices.append((Label(round(x + dx, 1), round(y + dy, 1), text, anchor), box))
    free = [choice for choice in choices if not any(_overlap(choice[1], other) for other in taken)]
    label_at, box = (free or choices or [(Label(x, y - 8, text), (x, y, x, y))])[0]
    taken.append(box)
    return label_at


def _overlap(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _in_words(x_name: str, y_name: str, series: Sequence[Series], *, lines: bool) -> str:
    sentences = [f"Horizontal: {x_name}. Vertical: {y_name}."]
    for one in series:
        if lines:
            (x0, y0), (x1, y1) = one.points[0], one.points[-1]
            sentences.append(f"{one.name}: from {y0:.4g} at {x0:.6g} to {y1:.4g} at {x1:.6g}.")
        else:
            each = [f"{label} {y:.4g} at {x:.4g}" for label, (x, y) in zip(one.labels, one.points, strict=True)]
            sentences.append(f"{one.name}: {'; '.join(each)}.")
    return " ".join(sentences)


def svg(chart: Chart) -> str:
    """Draw a chart as an SVG picture that stands alone, with its title above and the names of its series below."""
    middle = (LEFT + WIDTH - RIGHT) / 2
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 -24 {WIDTH} {HEIGHT + 24 + 16 * len(chart.series)}" role="img"'
        ' font-family="system-ui, sans-serif" font-size="10.5">',
        f"<title>{escape(chart.title)}</title>",
        f"<desc>{escape(chart.description)}</desc>",
        '<rect y="-24" width="100%" height="100%" fill="white"/>',
        _label_as_svg(Label(middle, -8, chart.title)),
    ]
    for tick in chart.x_ticks:
        lines += [f'<path d="M{tick.x} {TOP} V{HEIGHT - BOTTOM}" stroke="#ddd"/>', _label_as_svg(tick)]
    for tick in chart.y_ticks:
        lines += [f'<path d="M{LEFT} {tick.y} H{WIDTH - RIGHT}" stroke="#ddd"/>', _label_as_svg(tick)]
    lines.append(_label_as_svg(Label(middle, HEIGHT - 8, chart.x_name)))
    lines.append(f'<text transform="translate(12 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">'
                 f"{escape(chart.y_name)}</text>")  # fmt: skip
    for i, one in enumerate(chart.series):
        colour = PALETTE[one.colour % len(PALETTE)]
        if one.path:
            lines.append(f'<path d="{one.path}" fill="none" stroke="{colour}" stroke-width="1.8" stroke-dasharray="{one.dash}"/>')
        for x, y, what in one.marks:
            lines.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"><title>{escape(what)}</title></circle>')
        lines += [_label_as_svg(label) for label in one.labels]
        lines.append(f'<circle cx="{LEFT + 4}" cy="{HEIGHT + 4 + 16 * i}" r="4" fill="{colour}"/>')
        lines.append(_label_as_svg(Label(LEFT + 14, HEIGHT + 8 + 16 * i, one.name, "start")))
    return "\n".join([*lines, "</svg>", ""])


def _label_as_svg(label: Label) -> str:
    return f'<text x="{label.x}" y="{label.y}" text-anchor="{label.anchor}">{escape(label.text)}</text>'
