"""Number theory: divisors, remainders, primes and digits."""

from __future__ import annotations

import math
import random
from functools import cache

from ludus.worlds.math.problems import NamedQuantity, Phrase, ProblemDraft, ProblemKind, WorkedSteps, phrase

_PRIMES = (2, 3, 5, 7, 11, 13)
_MODULI = (7, 11, 13, 17, 19, 23)


def common_divisor(rng: random.Random, level: int, work: WorkedSteps) -> Phrase:
    """Of two numbers, from level 3 on of three."""
    shared = rng.randint(2, 12 * level)
    values = [shared * rng.randint(2, 20) for _ in range(2 if level < 3 else 3)]
    listed = ", ".join(map(str, values[:-1]))
    text = f"the greatest common divisor of {listed} and {values[-1]}"
    found = max(d for d in range(1, min(values) + 1) if all(v % d == 0 for v in values))
    return phrase(text, work.do(f"gcd({', '.join(map(str, values))})"), found)


def common_multiple(rng: random.Random, level: int, work: WorkedSteps) -> Phrase:
    """Of two numbers, from level 3 on of three."""
    values = [rng.randint(3, 12 * level) for _ in range(2 if level < 3 else 3)]
    listed = ", ".join(map(str, values[:-1]))
    found = values[0]
    while any(found % v for v in values):
        found += values[0]
    text = f"the least common multiple of {listed} and {values[-1]}"
    return phrase(text, work.do(f"lcm({', '.join(map(str, values))})"), found)


def remainder(rng: random.Random, level: int, work: WorkedSteps) -> Phrase:
    """What a division leaves."""
    divisor = rng.randint(3, 40)
    left, times = rng.randrange(divisor), rng.randint(2, 50 * level)
    value = divisor * times + left
    return phrase(f"the remainder of {value} divided by {divisor}", work.do(f"{value} % {divisor}"), left)


def digit_sum(rng: random.Random, level: int, work: WorkedSteps) -> Phrase:
    """The sum of the digits."""
    digits = [rng.randint(1, 9), *(rng.randint(0, 9) for _ in range(level + 1))]
    value = int("".join(map(str, digits)))
    return phrase(f"the sum of the digits of {value}", work.do(" + ".join(map(str, digits))), sum(digits))


def power_remainder(rng: random.Random, level: int, work: WorkedSteps) -> Phrase:
    """What the division of a power leaves."""
    base, exponent = rng.randint(2, 15 * level), rng.randint(4, 60 * level)
    divisor = rng.choice(_MODULI)
    found = 1
    for _ in range(exponent):
        found = found * base % divisor
    mark = work.do(f"{base} ** {exponent} % {divisor}")
    return phrase(f"the remainder of {base}^{exponent} divided by {divisor}", mark, found)


def last_digits(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """The last digit or two of a power."""
    base, exponent, many = rng.randint(3, 99), rng.randint(5, 80 * level), rng.choice((1, 2))
    work.do(f"{base} ** {exponent} % {10**many}")
    what = "last digit" if many == 1 else "number formed by the last two digits"
    return ProblemDraft(f"What is the {what} of {base}^{exponent}?", pow(base, exponent, 10**many))


def num_multiples(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """How many numbers up to a bound are multiples of one number, of either of two, or of only one."""
    bound, a, b = rng.randint(40, 300 * level), *rng.sample(range(2, 16), 2)
    question = f"How many of the whole numbers from 1 to {bound} are "
    first = work.do(f"{bound} // {a}")
    if level < 4:
        return ProblemDraft(question + f"multiples of {a}?", sum(n % a == 0 for n in range(1, bound + 1)))
    second, both = work.do(f"{bound} // {b}"), work.do(f"{bound} // lcm({a}, {b})")
    exactly = rng.random() < 0.5
    work.do(f"{first} + {second} - {'2 * ' if exactly else ''}{both}")
    wanted = 1 if exactly else 2
    found = sum(0 < (n % a == 0) + (n % b == 0) <= wanted for n in range(1, bound + 1))
    words = "exactly one" if exactly else "at least one"
    return ProblemDraft(question + f"multiples of {words} of {a} and {b}?", found)


def num_divisors(rng: random.Random, level: int, work: WorkedSteps) -> Phrase:
    """How many divisors a number has, or (level 5) their sum, from its prime factors."""
    powers = {p: rng.randint(1, 2 + (p < 5)) for p in sorted(rng.sample(_PRIMES[: level + 1], 3 if level > 3 else 2))}
    value = math.prod(p**e for p, e in powers.items())
    small = [d for d in range(1, math.isqrt(value) + 1) if value % d == 0]
    divisors = {*small, *(value // d for d in small)}
    work.do(" * ".join(f"{p} ** {e}" for p, e in powers.items()))
    if level == 5:
        sums = [f"({p} ** {e + 1} - 1) / ({p} - 1)" for p, e in powers.items()]
        mark = work.do(" * ".join(f"({one})" for one in sums))
        return phrase(f"the sum of all positive divisors of {value}", mark, sum(divisors))
    mark = work.do(" * ".join(f"({e} + 1)" for e in powers.values()))
    return phrase(f"the number of positive divisors of {value}", mark, len(divisors))


def num_primes(rng: random.Random, level: int, work: WorkedSteps) -> Phrase:
    """How many primes lie between two numbers."""
    low, wide = rng.randint(2, 60 * level), rng.randint(20, 60 * level)
    high = low + wide
    upper, lower = work.do(f"primes({high})"), work.do(f"primes({low - 1})")
    found = [n for n in range(low, high + 1) if _is_prime(n)]
    return phrase(f"the number of primes from {low} to {high}", work.do(f"{upper} - {lower}"), len(found))


@cache
def _is_prime(n: int) -> bool:
    return all(n % d for d in range(2, n))


def in_base(rng: random.Random, level: int, work: WorkedSteps) -> Phrase:
    """The value of digits in another base."""
    base = rng.choice([b for b in range(2, 10) if b != 8] if level < 4 else range(3, 10))
    digits = [rng.randint(1, base - 1), *(rng.randrange(base) for _ in range(level))]
    text = "".join(map(str, digits))
    parts = [f"{d} * {base} ** {len(digits) - 1 - i}" for i, d in enumerate(digits)]
    return phrase(f"the decimal value of {text} in base {base}", work.do(" + ".join(parts)), int(text, base))


def two_remainders(rng: random.Random, level: int, work: WorkedSteps) -> ProblemDraft:
    """The Chinese remainder theorem for a prime modulus: n = r + a ((s - r) a^(p-2) mod p)."""
    a, p = rng.randint(4, 8 * level), rng.choice(_MODULI)
    if a % p == 0:
        return two_remainders(rng, level, work)
    r, s = rng.randrange(a), rng.randrange(p)
    inverse = work.do(f"{a} ** {p - 2} % {p}")
    times = work.do(f"({s} - {r}) * {inverse} % {p}")
    work.do(f"{r} + {a} * {times}")
    found = next(n for n in range(a * p) if n % a == r and n % p == s)
    question = f"What is the smallest whole number that leaves {r} when divided by {a} and {s} when divided by"
    return ProblemDraft(f"{question} {p}?", found)


KINDS: tuple[ProblemKind | NamedQuantity, ...] = (
    NamedQuantity("common_divisor", (1, 2, 3), common_divisor),
    NamedQuantity("common_multiple", (2, 3), common_multiple),
    NamedQuantity("remainder", (1, 2), remainder),
    NamedQuantity("digit_sum", (1, 2), digit_sum),
    ProblemKind("num_multiples", (2, 3, 4), num_multiples),
    NamedQuantity("in_base", (2, 3, 4), in_base),
    NamedQuantity("power_remainder", (3, 4), power_remainder),
    ProblemKind("last_digits", (3, 4), last_digits),
    NamedQuantity("num_primes", (3, 4), num_primes),
    NamedQuantity("num_divisors", (3, 4, 5), num_divisors),
    ProblemKind("two_remainders", (5,), two_remainders),
)
