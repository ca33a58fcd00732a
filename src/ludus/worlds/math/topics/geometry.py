"""Lengths, areas, volumes, angles and coordinates."""

from __future__ import annotations

import random
from fractions import Fraction

from ludus.worlds.math.problems import NamedQuantity, Phrase, ProblemDraft, ProblemKind, WorkedSteps

_TRIPLES = ((3, 4, 5), (5, 12, 13), (8, 15, 17), (7, 24, 25), (20, 21, 29), (9, 40, 41), (12, 35, 37))
CM, CM2, CM3, DEGREES = ({"cm": 1.0}, {"cm^2": 1.0, "cm²": 1.0}, {"cm^3": 1.0, "cm³": 1.0}, {"°": 1.0, "degrees": 1.0})


def rectangle_area(rng: random.Random, level: int, work: WorkedSteps) -> Phrase:
    """Area of a rectangle."""
    a, b = rng.randint(2, 30 * level), rng.randint(2, 30)
    text = f"the area in cm^2 of a rectangle with sides of {a} cm and {b} cm"
    return Phrase(text, work.do(f"{a} * {b}"), Fraction(sum([a] * b)), CM2)


def rectangle_rim(rng: random.Random, level: int, work: WorkedSteps) -> Phrase:
    """Perimeter of a rectangle."""
    a, b = rng.randint(2, 50 * level), rng.randint(2, 50)
    text = f"the perimeter in cm of a rectangle with sides of {a} cm and {b} cm"
    return Phrase(text, work.do(f"2 * ({a} + {b})"), Fraction(a + b + a + b), CM)


def triangle_area(rng: random.Random, level: int, work: WorkedSteps) -> Phrase:
    """Area of a triangle."""
    a, b = rng.randint(3, 30 * level), rng.randint(3, 30)
    text = f"the area in cm^2 of a triangle with base {a} cm and height {b} cm"
    return Phrase(text, work.do(f"{a} * {b} / 2"), Fraction(a, 2) * b, CM2)


def third_angle(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """The third angle of a triangle."""
    a = rng.randint(15, 100)
    b = rng.randint(15, 160 - a)
    work.do(f"180 - {a} - {b}")
    question = f"Two angles of a triangle are {a}° and {b}°. How many degrees is the third?"
    return ProblemDraft(question, 180 - (a + b), DEGREES)


def regular_angle(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """Angles of a polygon, together or each."""
    n = rng.randint(5, 30 * level)
    total = work.do(f"({n} - 2) * 180")
    if rng.random() < 0.5:
        return ProblemDraft(
            f"How many degrees are the angles of a polygon with {n} sides together?", 180 * n - 360, DEGREES
        )
    work.do(f"{total} / {n}")
    question = f"How many degrees is each angle of a regular polygon with {n} sides?"
    return ProblemDraft(question, 180 - Fraction(360, n), DEGREES)


def box(rng: random.Random, level: int, work: WorkedSteps) -> Phrase:
    """Volume or surface of a box."""
    a, b, c = (rng.randint(2, 10 * level) for _ in range(3))
    sides = f"of a box of {a} cm by {b} cm by {c} cm"
    if rng.random() < 0.5:
        return Phrase(f"the volume in cm^3 {sides}", work.do(f"{a} * {b} * {c}"), Fraction(a * b * c), CM3)
    faces = work.do(f"{a} * {b} + {b} * {c} + {a} * {c}")
    found = Fraction(sum(2 * x * y for x, y in ((a, b), (b, c), (c, a))))
    return Phrase(f"the surface area in cm^2 {sides}", work.do(f"2 * {faces}"), found, CM2)


def right_triangle(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """The hypotenuse or a leg; from level 4 on the perimeter."""
    scale = rng.randint(1, 6)
    a, b, c = (scale * side for side in rng.choice(_TRIPLES))
    a, b = rng.sample((a, b), 2)
    if rng.random() < 0.5:
        side = work.do(f"sqrt({a} ** 2 + {b} ** 2)")
        question, found = f"The legs of a right triangle are {a} cm and {b} cm. ", c
        what = "hypotenuse"
        rim = f"{a} + {b} + {side}"
    else:
        side = work.do(f"sqrt({c} ** 2 - {a} ** 2)")
        question, found = f"A right triangle has a leg of {a} cm and a hypotenuse of {c} cm. ", b
        what = "other leg"
        rim = f"{a} + {side} + {c}"
    if level < 4:
        return ProblemDraft(question + f"How many cm is the {what}?", found, CM)
    if rng.random() < 0.5:
        work.do(rim)
        return ProblemDraft(question + "How many cm is its perimeter?", a + b + c, CM)
    legs = f"{a} * {side}" if what == "other leg" else f"{a} * {b}"
    work.do(f"{legs} / 2")
    return ProblemDraft(question + "How many cm^2 is its area?", Fraction(a * b, 2), CM2)


def trapezoid(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """Area of a trapezoid."""
    a, b, h = (rng.randint(2, 12 * level) for _ in range(3))
    both = work.do(f"{a} + {b}")
    work.do(f"{both} * {h} / 2")
    question = f"A trapezoid has parallel sides of {a} cm and {b} cm and a height of {h} cm. "
    return ProblemDraft(question + "How many cm^2 is its area?", Fraction(a * h, 2) + Fraction(b * h, 2), CM2)


def similar(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """A side, or from level 4 on the area, of a similar triangle."""
    a, b, k = rng.randint(2, 10 * level), rng.randint(2, 10 * level), rng.randint(2, 9)
    times = work.do(f"{a * k} / {a}")
    question = f"Two triangles are similar. A side of {a} cm in one is {a * k} cm in the other. "
    if level < 4:
        work.do(f"{b} * {times}")
        return ProblemDraft(question + f"How many cm is a side of {b} cm there?", b * k, CM)
    work.do(f"{b} * {times} ** 2")
    return ProblemDraft(
        question + f"The area of the first is {b} cm^2. How many cm^2 is that of the other?", b * k * k, CM2
    )


def frame(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """Area of a frame around a rectangle."""
    a, b, w = rng.randint(10, 30 * level), rng.randint(10, 80), rng.randint(1, 6)
    inner = work.do(f"{a} * {b}")
    outer = work.do(f"({a} + 2 * {w}) * ({b} + 2 * {w})")
    work.do(f"{outer} - {inner}")
    question = f"A picture of {a} cm by {b} cm has a frame {w} cm wide on all sides. "
    return ProblemDraft(question + "How many cm^2 does the frame cover?", 2 * w * (a + b) + 4 * w * w, CM2)


def polygon(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """The area of a triangle (level 4) or quadrangle by its corners."""
    low, high = 1, 4 * level
    corners = [(rng.randint(-high, -low), rng.randint(-high, -low)), (rng.randint(low, high), rng.randint(-high, -low))]
    corners.append((rng.randint(low, high), rng.randint(low, high)))
    if level > 4:
        corners.append((rng.randint(-high, -low), rng.randint(low, high)))
    following = [*corners[1:], corners[0]]
    parts = [
        work.do(f"{x} * {_in(v)} - {_in(u)} * {_in(y)}") for (x, y), (u, v) in zip(corners, following, strict=True)
    ]
    total = work.do(" + ".join(parts))
    work.do(f"abs({total}) / 2")
    bounds = [(x - u) * (y + v) for (x, y), (u, v) in zip(corners, following, strict=True)]
    shown = ", ".join(map(str, corners[:-1])) + f" and {corners[-1]}"
    word = "quadrangle" if level > 4 else "triangle"
    return ProblemDraft(f"What is the area of the {word} with corners {shown}?", Fraction(abs(sum(bounds)), 2))


def _in(value: int) -> str:
    return f"({value})" if value < 0 else str(value)


def distance(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """Between points; at level 5 in space."""
    scale = rng.randint(1, 5)
    gaps = [scale * side for side in rng.sample(rng.choice(_TRIPLES)[:2], 2)]
    found = round(sum(gap * gap for gap in gaps) ** 0.5)
    if level > 4:
        gaps, found = [2 * scale, 3 * scale, 6 * scale], 7 * scale
        rng.shuffle(gaps)
    start = [rng.randint(-9, 9) for _ in gaps]
    end = [a + rng.choice((-1, 1)) * gap for a, gap in zip(start, gaps, strict=True)]
    squares = [work.do(f"({b} - {_in(a)}) ** 2") for a, b in zip(start, end, strict=True)]
    work.do(f"sqrt({' + '.join(squares)})")
    return ProblemDraft(f"What is the distance between {tuple(start)} and {tuple(end)}?", found)


KINDS: tuple[ProblemKind | NamedQuantity, ...] = (
    NamedQuantity("rectangle_area", (1,), rectangle_area),
    NamedQuantity("rectangle_rim", (1, 2), rectangle_rim),
    ProblemKind("third_angle", (1,), third_angle),
    NamedQuantity("triangle_area", (2,), triangle_area),
    ProblemKind("regular_angle", (2, 3), regular_angle),
    NamedQuantity("box", (2, 3), box),
    ProblemKind("right_triangle", (3, 4), right_triangle),
    ProblemKind("trapezoid", (3,), trapezoid),
    ProblemKind("similar", (3, 4), similar),
    ProblemKind("frame", (4,), frame),
    ProblemKind("polygon", (4, 5), polygon),
    ProblemKind("distance", (4, 5), distance),
)
