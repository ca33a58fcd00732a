"""Number theory (divisors, remainders, digits), combinatorics and small probabilities."""

from __future__ import annotations

import math
from collections import Counter

from ludus.worlds.math.problems import Draft, listed

_PRIMES = (2, 3, 5, 7, 11, 13)


def common_divisor(d: Draft) -> str:
    """The greatest common divisor of two numbers, from level 3 on of three."""
    shared = d.randint(2, 12 * d.level)
    values = [shared * d.randint(2, 20) for _ in range(2 if d.level < 3 else 3)]
    d.do(f"gcd({', '.join(map(str, values))})")
    return f"the greatest common divisor of {listed(values)}"


def common_multiple(d: Draft) -> str:
    """The least common multiple of two numbers, from level 3 on of three."""
    values = [d.randint(3, 12 * d.level) for _ in range(2 if d.level < 3 else 3)]
    d.do(f"lcm({', '.join(map(str, values))})")
    return f"the least common multiple of {listed(values)}"


def digit_sum(d: Draft) -> str:
    """The sum of the digits."""
    digits = [d.randint(1, 9), *(d.randint(0, 9) for _ in range(d.level + 1))]
    d.do(" + ".join(map(str, digits)))
    return f"the sum of the digits of {''.join(map(str, digits))}"


def num_multiples(d: Draft) -> str:
    """The number of multiples, up to a bound, of one number, of either of two, or of exactly one of two."""
    bound, a, b = d.randint(40, 300 * d.level), *d.rng.sample(range(2, 16), 2)
    question = f"How many of the whole numbers from 1 to {bound} are multiples of"
    first = d.do(f"{bound} // {a}")
    if d.level < 4:
        return f"{question} {a}?"
    second, both = d.do(f"{bound} // {b}"), d.do(f"{bound} // lcm({a}, {b})")
    exactly = d.coin()
    d.do(f"{first} + {second} - {'2 * ' if exactly else ''}{both}")
    return f"{question} {'exactly' if exactly else 'at least'} one of {a} and {b}?"


def num_divisors(d: Draft) -> str:
    """The number of divisors, or (level 5) their sum, from the prime factors."""
    primes = sorted(d.rng.sample(_PRIMES[: d.level + 1], 3 if d.level > 3 else 2))
    powers = {p: d.randint(1, 2 + (p < 5)) for p in primes}
    d.do(" * ".join(f"{p} ** {e}" for p, e in powers.items()))
    if d.level == 5:
        d.do(" * ".join(f"(({p} ** {e + 1} - 1) / ({p} - 1))" for p, e in powers.items()))
    else:
        d.do(" * ".join(f"({e} + 1)" for e in powers.values()))
    value = math.prod(p**e for p, e in powers.items())
    return f"the {'sum of all' if d.level == 5 else 'number of'} positive divisors of {value}"


def in_base(d: Draft) -> str:
    """The value of digits in another base."""
    base = d.choice([b for b in range(2, 10) if b != 8] if d.level < 4 else range(3, 10))
    digits = [d.randint(1, base - 1), *(d.rng.randrange(base) for _ in range(d.level))]
    d.do(" + ".join(f"{digit} * {base} ** {d.level - i}" for i, digit in enumerate(digits)))
    return f"the decimal value of {''.join(map(str, digits))} in base {base}"


def two_remainders(d: Draft) -> str:
    """The Chinese remainder theorem for a prime modulus: n = r + a ((s - r) a^(p-2) mod p)."""
    a, p = d.randint(4, 8 * d.level), int(d.word("moduli"))
    if a % p == 0:
        return two_remainders(d)
    r, s = d.rng.randrange(a), d.rng.randrange(p)
    inverse = d.do(f"{a} ** {p - 2} % {p}")
    times = d.do(f"({s} - {r}) * {inverse} % {p}")
    d.do(f"{r} + {a} * {times}")
    return f"What is the smallest whole number that leaves {r} when divided by {a} and {s} when divided by {p}?"


def outfits(d: Draft) -> str:
    """The number of combinations of one item of each kind of clothes."""
    numbers = [d.randint(2, 18 // d.level) for _ in range(2 + (d.level > 1))]
    d.do(" * ".join(map(str, numbers)))
    clothes = listed([f"{n} {word}" for n, word in zip(numbers, ("shirts", "hats", "scarves"), strict=False)])
    return f"Someone has {clothes}. How many outfits with one of each are there?"


def letters(d: Draft) -> str:
    """Arrangements of a word with repeated letters."""
    word = "".join(d.choice("AEILNRST") for _ in range(d.level + 2))
    counts = Counter(word).values()
    repeated = [f"factorial({n})" for n in counts if n > 1]
    if not repeated or len(counts) < 2:
        return letters(d)
    every = d.do(f"factorial({len(word)})")
    d.do(f"{every} / ({' * '.join(repeated)})")
    return f"In how many different orders can the letters of {word} be written?"


def same_colour(d: Draft) -> str:
    """Probability that two balls are both red (level 3), of the same or of different colours; no replacement."""
    numbers = {colour: d.randint(2, 9) for colour in ("red", "blue", "green")[: 3 if d.level > 4 else 2]}
    wanted = ["red"] if d.level < 4 else list(numbers)
    good = d.do(" + ".join(f"comb({numbers[colour]}, 2)" for colour in wanted))
    same = d.do(f"{good} / comb({sum(numbers.values())}, 2)")
    event = "both are red" if d.level < 4 else "both have the same colour"
    if d.level > 3 and d.coin():
        d.do(f"1 - {same}")
        event = "they have different colours"
    balls = " and ".join(f"{n} {colour}" for colour, n in numbers.items())
    return f"A bag holds {balls} balls. Two are taken without putting back. What is the probability that {event}?"
