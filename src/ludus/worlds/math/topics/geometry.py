"""Right triangles and coordinates."""

from __future__ import annotations

from ludus.worlds.math.problems import Draft, listed

_TRIPLES = ((3, 4, 5), (5, 12, 13), (8, 15, 17), (7, 24, 25), (20, 21, 29), (9, 40, 41), (12, 35, 37))


def right_triangle(d: Draft) -> str:
    """The hypotenuse or a leg; from level 4 on the perimeter or the area."""
    scale = d.randint(1, 6)
    a, b, c = (scale * side for side in d.choice(_TRIPLES))
    a, b = d.rng.sample((a, b), 2)
    if d.coin():
        side = d.do(f"sqrt({a} ** 2 + {b} ** 2)")
        question, asked = f"The legs of a right triangle are {a} cm and {b} cm.", "hypotenuse"
        perimeter, legs = f"{a} + {b} + {side}", f"{a} * {b}"
    else:
        side = d.do(f"sqrt({c} ** 2 - {a} ** 2)")
        question, asked = f"A right triangle has a leg of {a} cm and a hypotenuse of {c} cm.", "other leg"
        perimeter, legs = f"{a} + {side} + {c}", f"{a} * {side}"
    d.unit = "cm"
    if d.level < 4:
        return f"{question} How many cm is the {asked}?"
    if d.coin():
        d.do(perimeter)
        return f"{question} How many cm is its perimeter?"
    d.do(f"{legs} / 2")
    d.unit = "cm^2"
    return f"{question} How many cm^2 is its area?"


def polygon(d: Draft) -> str:
    """The area of a triangle (level 4) or quadrilateral from its vertices."""
    quadrants = ((-1, -1), (1, -1), (1, 1), (-1, 1))[: 4 if d.level > 4 else 3]
    corners = [(_coordinate(d, x), _coordinate(d, y)) for x, y in quadrants]
    parts = [
        d.do(f"{x} * {_operand(v)} - {_operand(u)} * {_operand(y)}")
        for (x, y), (u, v) in zip(corners, [*corners[1:], corners[0]], strict=True)
    ]
    total = d.do(" + ".join(parts))
    d.do(f"abs({total}) / 2")
    return f"What is the area of the {'quadrangle' if d.level > 4 else 'triangle'} with corners {listed(corners)}?"


def _coordinate(d: Draft, sign: int) -> int:
    return d.randint(1, 4 * d.level) if sign > 0 else d.randint(-4 * d.level, -1)


def _operand(value: int) -> str:
    return f"({value})" if value < 0 else str(value)


def distance(d: Draft) -> str:
    """The distance of two points; at level 5 in three dimensions."""
    scale = d.randint(1, 5)
    gaps = [scale * side for side in d.rng.sample(d.choice(_TRIPLES)[:2], 2)]
    if d.level > 4:
        gaps = [2 * scale, 3 * scale, 6 * scale]
        d.rng.shuffle(gaps)
    start = [d.randint(-9, 9) for _ in gaps]
    end = [a + d.choice((-1, 1)) * gap for a, gap in zip(start, gaps, strict=True)]
    squares = [d.do(f"({b} - {_operand(a)}) ** 2") for a, b in zip(start, end, strict=True)]
    d.do(f"sqrt({' + '.join(squares)})")
    return f"What is the distance between {tuple(start)} and {tuple(end)}?"
