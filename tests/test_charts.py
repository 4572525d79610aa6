"""Where axes, lines and labels of charts lie."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from compresskit.measure.charts import HEIGHT, LEFT, MOST_POINTS, RIGHT, WIDTH, Series, draw, pareto_points, svg, thinned, ticks


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [(0, 1.7, [0, 0.5, 1, 1.5, 2]), (0.84, 0.9, [0.84, 0.86, 0.88, 0.9]), (0, 0, [0, 0.2]), (-3, 12, [-5, 0, 5, 10, 15])],
)
def test_ticks_are_round_and_cover_the_range(low, high, wanted) -> None:
    assert ticks(low, high) == pytest.approx(wanted)


@pytest.mark.parametrize("at", [0.3, 7.0, -2.0, 65536.0, 1e-9])
def test_a_single_value_has_an_axis(at) -> None:
    found = ticks(at, at)
    assert found[0] <= at <= found[-1]
    assert found[0] < found[-1]


def test_the_pareto_line_goes_where_nothing_is_better_in_both() -> None:
    points = [(4.0, 0.9), (1.0, 0.7), (1.0, 0.8), (2.0, 0.75), (3.0, 0.85)]
    assert pareto_points(points, higher_is_better=True) == [(1.0, 0.8), (3.0, 0.85), (4.0, 0.9)]
    assert pareto_points(points, higher_is_better=False) == [(1.0, 0.7)]


def test_points_lie_at_their_place_and_labels_apart() -> None:
    series = Series("run", [(1.0, 0.5), (2.0, 1.0), (1.99, 1.0)], ["a", "b", "c" * 40])
    chart = draw("t", "ms", "accuracy", [series], lines=False, higher_is_better=True)
    assert [text.text for text in chart.x_ticks] == ["0", "0.5", "1", "1.5", "2"]
    marks = chart.series[0].marks
    assert marks[0][:2] == (LEFT + (WIDTH - LEFT - RIGHT) / 2, HEIGHT - 46)
    assert marks[1][:2] == (WIDTH - RIGHT, 14)
    assert marks[1][2] == "b: 2, 1"
    first, second, third = chart.series[0].labels
    assert abs(second.y - third.y) >= 12
    assert third.text == "c" * 19 + "..."
    assert first.x > marks[0][0]
    assert chart.pareto == f"M{marks[0][0]:g} 254 L{marks[2][0]:g} 14"
    assert chart.description == (
        "Horizontal: ms. Vertical: accuracy. run: a 0.5 at 1; b 1 at 2; cccccccccccccccccccccccccccccccccccccccc 1 at 1.99."
    )


def test_long_lines_are_thinned() -> None:
    points = [(float(i), float(i)) for i in range(10 * MOST_POINTS)]
    assert len(thinned(points)) <= MOST_POINTS + 1
    assert (thinned(points)[0], thinned(points)[-1]) == (points[0], points[-1])
    chart = draw("t", "step", "loss", [Series("s", points)], lines=True)
    assert chart.series[0].marks == []
    assert chart.series[0].path.count("L") <= MOST_POINTS
    assert chart.description.endswith("s: from 0 at 0 to 3999 at 3999.")


def test_a_chart_is_a_picture_that_stands_alone() -> None:
    chart = draw(
        "a < b", "ms", "accuracy & more", [Series("one", [(0.0, 0.5), (2.0, 1.0)]), Series("two", [(1.0, 0.7)])], lines=True
    )
    root = ET.fromstring(svg(chart))
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a < b", "ms", "accuracy & more", "one", "two"} <= set(texts)
    marks = [
        (float(node.get("cx")), float(node.get("cy"))) for node in root.iter("{http://www.w3.org/2000/svg}circle") if len(node)
    ]
    assert marks == [(x, y) for series in chart.series for x, y, _ in series.marks]
    assert len([node for node in root.iter("{http://www.w3.org/2000/svg}path") if node.get("fill") == "none"]) == 1
