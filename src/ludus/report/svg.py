"""Charts of a report, drawn as SVG by `report.html`: curves with bands and marks, and histograms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

BOX: Final = {"width": 360, "height": 190, "left": 46, "right": 352, "top": 8, "bottom": 168}
"""Size of a chart, and the edges of its plot."""
POINTS: Final = 600
"""Maximum number of points of a curve."""
COLOURS: Final = 7
"""Number of colours in report.css (Okabe and Ito); further curves repeat them with dashes."""

Points = Sequence[tuple[float, float]]


def style(number: int) -> str:
    """Return the CSS class of a curve; curves beyond the number of colours are dashed."""
    return f"c{number % COLOURS}" + (" dashed" if number >= COLOURS else "")


@dataclass(frozen=True)
class Drawn:
    """A curve: its number in the legend, its points, thin single runs, the outline of a band, and bars of intervals."""

    number: int
    points: Points
    single: Sequence[Points] = ()
    band: Points = ()
    bars: Sequence[tuple[float, float, float]] = ()

    @property
    def style(self) -> str:
        return style(self.number)


def downsample(points: Points, most: int = POINTS) -> list[tuple[float, float]]:
    """Return at most `most` points: the minimum and the maximum of each of `most // 2` buckets, in their order."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / (most // 2))
    found: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        found += sorted({min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])})
    return found


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return round numbers within [low, high], at most `most + 1`."""
    if high <= low:
        return [low]
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True, slots=True)
class Axes:
    """The ranges of a chart, and their conversion to the coordinates of the drawing."""

    x: tuple[float, float]
    y: tuple[float, float]

    @classmethod
    def of(cls, points: Points) -> Axes:
        """Return axes that contain all points, with a margin above and below."""
        xs, ys = zip(*points, strict=True)
        left, right, low, high = min(xs), max(xs), min(ys), max(ys)
        gap = 0.05 * (high - low) or 0.1 * abs(high) or 1.0
        return cls((left, right) if left < right else (left - 1, right + 1), (low - gap, high + gap))

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return the coordinates of a point."""
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return BOX["left"] + across * (BOX["right"] - BOX["left"]), BOX["bottom"] - up * (BOX["bottom"] - BOX["top"])

    def path(self, points: Points) -> str:
        """Return the points as the attribute of a polyline."""
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in (self.at(*point) for point in points))

    @property
    def marks_x(self) -> list[float]:
        return [value for value in ticks(*self.x) if value == int(value)]

    @property
    def marks_y(self) -> list[float]:
        return ticks(*self.y, most=4)

    @property
    def range(self) -> str:
        """The ranges with which the script converts coordinates back."""
        return f"{self.x[0]:g} {self.x[1]:g} {self.y[0]:.9g} {self.y[1]:.9g}"


@dataclass(frozen=True)
class Chart:
    """A figure with curves by step and the steps of alarms by name, or with columns: class, left, right and height."""

    title: str
    axes: Axes
    curves: Sequence[Drawn] = ()
    alarms: Mapping[str, Sequence[int]] = field(default_factory=dict)
    columns: Sequence[tuple[str, float, float, float]] = ()


def line_chart(title: str, curves: Sequence[Drawn], alarms: Mapping[str, Sequence[int]] = {}) -> Chart | None:
    """Return a figure with curves by step; None without a point."""
    points = [p for one in curves for part in (one.points, one.band, *one.single) for p in part]
    points += [(x, end) for one in curves for x, *ends in one.bars for end in ends]
    return Chart(title, Axes.of(points), curves, alarms) if points else None


def histogram(title: str, first: Sequence[float], last: Sequence[float], number: int, bins: int = 20) -> Chart:
    """Return a figure with the distributions of the first steps (filled grey) and the last steps (outlined)."""
    values = [*first, *last]
    low, high = min(values), max(values)
    whole = all(value == int(value) for value in values) and high - low < bins
    width = 1.0 if whole else (high - low) / bins or 1.0
    count = int(high - low) + 1 if whole else bins
    low -= 0.5 * whole
    edges = np.linspace(low, max(low + count * width, high), count + 1)  # rounding must not lose the largest value
    columns: list[tuple[str, float, float, float]] = []
    for name, given in (("before", first), (f"after {style(number)}", last)):
        shares = np.histogram(given, edges)[0] / max(1, len(given))
        sides = zip(edges[:-1].tolist(), edges[1:].tolist(), shares.tolist(), strict=True)
        columns += [(name, *one) for one in sides]
    axes = Axes((low, low + count * width), (0.0, 1.05 * max(share for *_, share in columns)))
    return Chart(title, axes, columns=columns)
