"""Answers to the generated math problems, read from the question alone and found by another way than its steps:
by counting, by trying all candidates, or by following a text sentence by sentence."""

import itertools
import math
import re
from fractions import Fraction
from functools import cache


def answer(kind, question):
    """The answer to a question; the kind tells the forms of questions apart."""
    if kind == "stories":
        return story(question)
    if kind == "links":
        return link(question)
    if kind in WHOLE:
        return Fraction(WHOLE[kind](question, ints(question)))
    return number(re.sub(r"^(What is|Work out|Find) |[?.]$", "", question))


def ints(text):
    return [int(n) for n in re.findall(r"\d+", re.sub(r"cm\^\d", "", text))]


def number(text):
    """The value of a number in words."""
    for pattern, value in PARTS:
        if re.search(pattern, text):
            return Fraction(value(text, ints(text)))
    return expression(text)


def expression(text, **names):
    code = re.sub(r"(?<=\d)(?=[a-z(])", "*", text).replace("^", "**")
    return eval(re.sub(r"\d+", r"Fraction(\g<0>)", code), {"Fraction": Fraction, **names})


def of_number(test, numbers):
    return [n for n in numbers if test(n)]


@cache
def is_prime(n):
    return n > 1 and all(n % d for d in range(2, n))


def is_multiple(text, values):
    found = values[0]
    while any(found % v for v in values):
        found += values[0]
    return found


def divisors(text, values):
    found = of_number(lambda d: values[0] % d == 0, range(1, values[0] + 1))
    return sum(found) if "sum of" in text else len(found)


def num_primes(text, bounds):
    return sum(map(is_prime, range(bounds[0], bounds[1] + 1)))


def box(text, sides):
    a, b, c = sides
    return a * b * c if "volume" in text else sum(2 * x * y for x, y in ((a, b), (b, c), (c, a)))


def power_rest(text, n):
    found = 1
    for _ in range(n[1]):
        found = found * n[0] % n[2]
    return found


PARTS = (
    (r"the sum of \d+ and|plus", lambda text, n: sum(n)),
    (r"taking", lambda text, n: n[1] - n[0]),
    (r"minus", lambda text, n: n[0] - n[1]),
    (r"the product of|times", lambda text, n: sum([n[0]] * n[1])),
    (r"the mean of", lambda text, n: Fraction(sum(n), len(n))),
    (r"% of|percent of", lambda text, n: Fraction(n[0], 100) * n[1]),
    (r"^\d+/\d+ of", lambda text, n: Fraction(n[0], n[1]) * n[2]),
    (r"common divisor", lambda text, n: max(d for d in range(1, min(n) + 1) if all(v % d == 0 for v in n))),
    (r"common multiple", is_multiple),
    (r"remainder of \d+ div", lambda text, n: n[0] - n[1] * (n[0] // n[1])),
    (r"remainder of \d+\^", power_rest),
    (r"sum of the digits", lambda text, n: sum(map(int, str(n[0])))),
    (r"decimal value", lambda text, n: int(str(n[0]), n[1])),
    (r"number of primes", num_primes),
    (r"positive divisors", divisors),
    (r"ways to put \d+ different", lambda text, n: math.prod(range(1, n[0] + 1))),
    (r"ways to choose", lambda text, n: sum(1 for _ in itertools.combinations(range(n[1]), n[0]))),
    (r"ways to put \d+ of", lambda text, n: sum(1 for _ in itertools.permutations(range(n[1]), n[0]))),
    (r"area in cm\^2 of a rectangle", lambda text, n: sum([n[0]] * n[1])),
    (r"perimeter in cm of a rectangle", lambda text, n: n[0] + n[1] + n[0] + n[1]),
    (r"area in cm\^2 of a triangle", lambda text, n: Fraction(n[0], 2) * n[1]),
    (r"of a box", box),
)


def story(question):
    """Follow a story sentence by sentence."""
    sentences = re.findall(r"[^.?]+[.?]", question)
    have = Fraction(ints(sentences[0])[0])
    for sentence in sentences[1:-1]:
        n = ints(sentence)
        if "times as many" in sentence:
            have = sum([have] * n[0])
        elif "bags" in sentence:
            have += sum([n[1]] * n[0])
        elif "more" in sentence:
            have += n[0]
        elif "away" in sentence or "loses" in sentence:
            have -= n[0]
        elif "equally" in sentence:
            have /= n[0]
        elif "%" in sentence:
            have -= have * Fraction(n[0], 100)
        else:
            have *= 1 - Fraction(n[0], n[1])
    return have


def link(question):
    """Work the definitions out one after the other."""
    named = {}
    for name, text in re.findall(r"Let (\w) be ([^.]+)\.", question):
        built = re.fullmatch(r"(\d) times (\w) plus the following: (.*)", text)
        value = number(built[3] if built else text)
        named[name] = value + int(built[1]) * named[built[2]] if built else value
    asked = question.rsplit("What is ", 1)[1].rstrip("?")
    if asked.startswith("the greatest"):
        return Fraction(math.gcd(*map(int, named.values())))
    return max(named.values()) if asked.startswith("the larger") else Fraction(eval(asked, {}, named))


def equation(question, n):
    """The solution of a linear equation, from two values of the difference of its sides."""
    name, left, right = re.fullmatch(r"Solve for (\w): (.*) = (.*)", question).groups()
    at0, at1 = (expression(f"{left} - ({right})", **{name: Fraction(x)}) for x in (0, 1))
    return -at0 / (at1 - at0)


def polynomial_in(text):
    name = re.search(r"[a-z]", text)[0]
    return lambda x: expression(text, **{name: x})


def quadratic(question, n):
    f = polynomial_in(re.search(r"solution of (.*) = 0", question)[1])
    found = {Fraction(p, q) for q in range(1, 7) for p in range(-80, 81) if f(Fraction(p, q)) == 0}
    return max(found) if "larger" in question else min(found)


def discriminant(question, n):
    f = polynomial_in(re.search(r"of (.*)\?", question)[1])
    c = f(0)
    a, b = (f(1) + f(-1)) / 2 - c, (f(1) - f(-1)) / 2
    return b * b - 4 * a * c


def roots(question, n):
    f = polynomial_in(re.search(r"of (.*) = 0", question)[1])
    found = of_number(lambda x: f(x) == 0, range(-30, 31))
    assert len(found) == 2
    return sum(Fraction(1, x) for x in found) if "1/r" in question else sum(x * x for x in found)


def system(question, n):
    sides = re.findall(r"([^ ].*?) = (-?\d+)", question.replace(" and ", " ; ").replace("; ", ""))
    lines = []
    for left, right in sides:
        x, y = (expression(left, x=i, y=1 - i) for i in (1, 0))
        lines.append((x, y, int(right)))
    (found,) = [
        (x, y) for x, y in itertools.product(range(-20, 21), repeat=2) if all(a * x + b * y == c for a, b, c in lines)
    ]
    return eval(question.rsplit("What is ", 1)[1].rstrip("?"), {}, dict(zip("xy", found, strict=True)))


def three_unknowns(question, n):
    sums = re.findall(r"(\w) \+ (\w) = (\d+)", question)
    asked = question[-2]
    (first, second), (rest,) = ([int(s) for *names, s in sums if (asked in names) == has] for has in (True, False))
    (found,) = of_number(lambda v: first - v + second - v == rest, range(100))
    return found


def polynomial(question, n):
    text, place = re.fullmatch(r"What is the value of (.*) at x = (-?\d+)\?", question).groups()
    return expression(text, x=Fraction(place))


def nested(question, n):
    a, b, c, d = n[:4]
    return eval(question.rsplit("What is ", 1)[1].rstrip("?"), {"f": lambda x: a * x + b, "g": lambda x: c * x + d})


def nth_term(question, n):
    first, second, *_ = (int(x) for x in re.findall(r"-?\d+", question))
    value = Fraction(first)
    for _ in range(n[-1] - 1):
        value = value * second / first if "ratio" in question else value + second - first
    return value


def num_multiples(question, n):
    wanted = {"exactly": (1,), "at least": (1, 2)}
    counts = next((counts for words, counts in wanted.items() if words in question), (1,))
    return sum(sum(k % d == 0 for d in n[2:]) in counts for k in range(1, n[1] + 1))


def two_remainders(question, n):
    r, a, s, p = n
    return next(k for k in range(a * p) if k % a == r and k % p == s)


def several_changes(question, n):
    price = Fraction(n[0])
    for word, share in re.findall(r"(rises|falls) by (\d+)%", question):
        price += price * int(share) / 100 * (1 if word == "rises" else -1)
    return price


def share_in_ratio(question, n):
    total, *parts = n
    place = next(i for i, word in enumerate(("first", "second", "third", "fourth")) if word in question)
    return Fraction(total * parts[place], sum(parts))


def committee(question, n):
    if "takes" in question:
        return math.prod(len(list(itertools.combinations(range(n[i + 1]), n[i]))) for i in (0, 2))
    k, a, b = n
    return sum(min(group) < a for group in itertools.combinations(range(a + b), k))


@cache
def num_paths(right, up):
    return 1 if not right or not up else num_paths(right - 1, up) + num_paths(right, up - 1)


def paths(question, n):
    right, up, x, y = (*n[2:], 0, 0)[:4]
    return num_paths(x, y) * num_paths(right - x, up - y)


def letters(question, n):
    word = re.search(r"letters of (\w+)", question)[1]
    return len(set(itertools.permutations(word)))


def same_colour(question, n):
    balls = [colour for number, colour in re.findall(r"(\d+) (red|blue|green)", question) for _ in range(int(number))]
    pairs = list(itertools.combinations(balls, 2))
    tests = {"are red": lambda a, b: a == b == "red", "the same": lambda a, b: a == b}
    test = next((test for words, test in tests.items() if words in question), lambda a, b: a != b)
    return Fraction(sum(test(*pair) for pair in pairs), len(pairs))


@cache
def num_gifts(coins, people, least):
    if people == 1:
        return int(coins >= least)
    return sum(num_gifts(coins - first, people - 1, least) for first in range(least, coins + 1))


def right_triangle(question, n):
    if "legs" in question:
        (a, b), c = n, round(math.hypot(*n))
    else:
        (a, c), b = n, round((n[1] ** 2 - n[0] ** 2) ** 0.5)
    assert a * a + b * b == c * c
    asked = {"perimeter": a + b + c, "is its area": Fraction(a * b, 2), "the hypotenuse": c, "the other leg": b}
    return next(value for words, value in asked.items() if words in question)


def points(question):
    return [tuple(map(int, re.findall(r"-?\d+", point))) for point in re.findall(r"\([^)]*\)", question)]


def polygon(question, n):
    corners = points(question)
    bounds = [(x - u) * (y + v) for (x, y), (u, v) in zip(corners, corners[1:] + corners[:1], strict=True)]
    return Fraction(abs(sum(bounds)), 2)


def similar(question, n):
    times = Fraction(n[1], n[0])
    return n[2] * times * times if "area" in question else n[2] * times


WHOLE = {
    "difference_of_products": lambda question, n: sum([n[0]] * n[1]) - sum([n[2]] * n[3]),
    "missing_value": lambda question, n: n[0] * n[1] - sum(n[2:]),
    "series": lambda question, n: sum(n[0] + n[1] * i for i in range(n[2])),
    "what_percent": lambda question, n: Fraction(n[1], n[0]) * 100,
    "change": lambda question, n: Fraction(abs(n[1] - n[0]), n[0]) * 100,
    "before_change": lambda question, n: n[1] / (1 + Fraction(n[0], 100) * (1 if "rise" in question else -1)),
    "several_changes": several_changes,
    "share_in_ratio": share_in_ratio,
    **dict.fromkeys(("added", "multiplied", "linear"), equation),
    "nth_term": nth_term,
    "polynomial": polynomial,
    "discriminant": discriminant,
    "nested": nested,
    "system": system,
    "quadratic": quadratic,
    "three_unknowns": three_unknowns,
    "roots": roots,
    "num_multiples": num_multiples,
    "last_digits": lambda question, n: pow(n[0], n[1], 100 if "two" in question else 10),
    "two_remainders": two_remainders,
    "outfits": lambda question, n: math.prod(n),
    "handshakes": lambda question, n: sum(range(n[0])),
    "committee": committee,
    "paths": paths,
    "letters": letters,
    "same_colour": same_colour,
    "equal_things": lambda question, n: num_gifts(*n, int("at least" in question)),
    "third_angle": lambda question, n: 180 - sum(n),
    "regular_angle": lambda question, n: 180 * n[0] - 360 if "together" in question else 180 - Fraction(360, n[0]),
    "right_triangle": right_triangle,
    "trapezoid": lambda question, n: Fraction(n[0] * n[2], 2) + Fraction(n[1] * n[2], 2),
    "similar": similar,
    "frame": lambda question, n: 2 * n[2] * (n[0] + n[1]) + 4 * n[2] ** 2,
    "polygon": polygon,
    "distance": lambda question, n: round(math.dist(*points(question))),
}
