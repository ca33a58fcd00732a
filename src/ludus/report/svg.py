"""Charts as inline SVG: curves with bands and marks, points with intervals, and histograms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Final

WIDTH, HEIGHT = 360, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 8, 8, 22
POINTS: Final = 600
"""Maximum number of points of a curve."""
COLOURS: Final = 7
"""Number of colours in report.css (Okabe and Ito); further curves repeat them with dashes."""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Drawn:
    """A curve: its number in the legend, its points, thin single runs, and the band and bars of intervals."""

    number: int
    points: Points
    single: Sequence[Points] = ()
    band: Sequence[tuple[float, float, float]] = ()
    bars: Sequence[tuple[float, float, float]] = field(default=())


def downsample(points: Points, most: int = POINTS) -> list[tuple[float, float]]:
    """Return at most `most` points: the minimum and the maximum of each of `most // 2` buckets, in their order."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / (most // 2))
    found: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        ends = {min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])}
        found += sorted(ends)
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
    def of(cls, points: Points, zero: bool = False) -> Axes:
        """Return axes that contain all points, with a margin above and below."""
        xs, ys = [x for x, _ in points], [y for _, y in points]
        low, high = min([*ys, 0.0] if zero else ys), max(ys)
        gap = 0.05 * (high - low) or 0.1 * abs(high) or 1.0
        x0, x1 = min(xs), max(xs)
        return cls((x0, x1) if x0 < x1 else (x0 - 1, x1 + 1), (low if zero else low - gap, high + gap))

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return the coordinates of a point."""
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return _LEFT + across * (WIDTH - _LEFT - _RIGHT), HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM)

    def path(self, points: Points) -> str:
        """Return the points as the attribute of a polyline."""
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in (self.at(*point) for point in points))

    def frame(self, alarms: Mapping[str, Sequence[int]]) -> str:
        """Return grid, labels and the marks of alarms by name."""
        parts = []
        for value in ticks(*self.y, most=4):
            y = self.at(self.x[0], value)[1]
            parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
            parts.append(f'<text x="{_LEFT - 4}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>')
        for value in ticks(*self.x):
            x = self.at(value, self.y[0])[0]
            if value == int(value):
                anchor = "end" if x > WIDTH - 20 else "middle"
                parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{value:.0f}</text>')
        for name, steps in alarms.items():
            for x, y in (self.at(step, self.y[0]) for step in steps if self.x[0] <= step <= self.x[1]):
                mark = f"M{x:.1f} {y - 9:.1f}l5 9h-10z"
                parts.append(f'<path class="alarm" d="{mark}"><title>{escape(name)}</title></path>')
        return "".join(parts)

    @property
    def data(self) -> str:
        """Attributes with which the script converts coordinates back."""
        ranges = f"{self.x[0]:g} {self.x[1]:g} {self.y[0]:.9g} {self.y[1]:.9g}"
        return f'data-range="{ranges}" data-box="{_LEFT} {WIDTH - _RIGHT} {_TOP} {HEIGHT - _BOTTOM}"'


def style(number: int) -> str:
    """Return the class of a colour, with dashes after the last colour."""
    return f"c{number % COLOURS}" + (" dashed" if number >= COLOURS else "")


def line_chart(title: str, curves: Sequence[Drawn], alarms: Mapping[str, Sequence[int]] = {}) -> str:
    """Return a figure with curves by step; points that are not finite are left out."""
    everything = [p for one in curves for p in [*one.points, *(q for single in one.single for q in single)]]
    everything += [(x, y) for one in curves for x, *ends in [*one.band, *one.bars] for y in ends]
    finite = [p for p in everything if all(map(math.isfinite, p))]
    if not finite:
        return ""
    axes, parts = Axes.of(finite), []
    for one in curves:
        colour = style(one.number)
        thin = (axes.path(_finite(points)) for points in one.single)
        parts += [f'<polyline class="thin {colour}" points="{path}"/>' for path in thin]
        if one.band:
            upper = [(x, high) for x, _, high in one.band]
            lower = [(x, low) for x, low, _ in reversed(one.band)]
            parts.append(f'<polygon class="band {colour}" points="{axes.path([*upper, *lower])}"/>')
        points = _finite(one.points)
        parts.append(f'<polyline class="line {colour}" data-run="{one.number}" points="{axes.path(points)}"/>')
        for x, low, high in one.bars:
            (across, bottom), (_, top) = axes.at(x, low), axes.at(x, high)
            path = f"M{across + 2 * one.number:.1f} {bottom:.1f}V{top:.1f}"
            parts.append(f'<path class="bar {colour}" d="{path}"/>')
        if len(points) == 1 or one.bars:
            circles = (axes.at(*point) for point in points)
            parts += [f'<circle class="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in circles]
    return _figure(title, axes, axes.frame(alarms) + "".join(parts))


def _finite(points: Points) -> list[tuple[float, float]]:
    return [point for point in points if math.isfinite(point[1])]


def histogram(title: str, first: Sequence[float], last: Sequence[float], number: int, bins: int = 20) -> str:
    """Return a figure with the distributions of the first steps (filled grey) and the last steps (outlined)."""
    values = [*first, *last]
    low, high = min(values), max(values)
    whole = all(value == int(value) for value in values) and high - low < bins
    width = 1.0 if whole else (high - low) / bins or 1.0
    count = int(high - low) + 1 if whole else bins
    low -= 0.5 * whole

    def heights(given: Sequence[float]) -> list[float]:
        found = [0] * count
        for value in given:
            found[min(count - 1, int((value - low) / width))] += 1
        return [n / max(1, len(given)) for n in found]

    columns = heights(first), heights(last)
    axes = Axes((low, low + count * width), (0.0, 1.05 * max(map(max, columns))))
    parts = []
    for name, shares in zip(("before", f"after {style(number)}"), columns, strict=True):
        for i, share in enumerate(shares):
            (x, y), (right, bottom) = axes.at(low + i * width, share), axes.at(low + (i + 1) * width, 0.0)
            size = f'width="{right - x - 1:.1f}" height="{bottom - y:.1f}"'
            parts.append(f'<rect class="{name}" x="{x:.1f}" y="{y:.1f}" {size}/>' if share else "")
    return _figure(title, axes, axes.frame({}) + "".join(parts))


def _figure(title: str, axes: Axes, content: str) -> str:
    attributes = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" {axes.data}'
    return f"<figure><figcaption>{escape(title)}</figcaption><svg {attributes}>{content}</svg></figure>"
