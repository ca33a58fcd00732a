"""Steps that parse texts in small languages: expressions, brackets, times, records."""

from __future__ import annotations

import random

from generators.code.steps.base import INT, INTS, TABLE, TEXT, WORDS, StepKind, step


def _expression(rng: random.Random, size: int) -> str:
    parts = [str(rng.randint(0, 9))]
    for _ in range(size):
        inner = str(rng.randint(0, 12))
        if rng.random() < 0.35:
            inner = f"({inner}{rng.choice('+-*')}{rng.randint(0, 9)})"
        parts += [rng.choice("+-*"), inner]
    return "".join(parts)


def _postfix(rng: random.Random, size: int) -> str:
    words, depth = list[str](), 0
    while len(words) < 2 * size + 1 or depth != 1:
        if depth < 2 or (rng.random() < 0.5 and len(words) < 2 * size + 1):
            words.append(str(rng.randint(0, 9)))
            depth += 1
        else:
            words.append(rng.choice(("+", "-", "*", "max")))
            depth -= 1
    return " ".join(words)


def _brackets(rng: random.Random, size: int) -> str:
    text, open_ = "", list[str]()
    for _ in range(2 * size):
        if open_ and rng.random() < 0.5:
            text += open_.pop() if rng.random() < 0.9 else rng.choice(")]}")
        else:
            kind = rng.choice(("()", "[]", "{}"))
            text += kind[0]
            open_.append(kind[1])
    return text + ("".join(open_[::-1]) if rng.random() < 0.5 else "")


def _log(rng: random.Random, size: int) -> str:
    minutes = sorted(rng.sample(range(1440), size))
    names = ("ann", "bob", "cy", "dee")
    lines = [f"{m // 60:02d}:{m % 60:02d} {rng.choice(names)} {rng.choice(('in', 'out'))}" for m in minutes]
    return ";".join(lines)


def _packed(rng: random.Random, size: int, depth: int = 0) -> str:
    text = ""
    for _ in range(max(size, 0)):
        if depth < 2 and rng.random() < 0.3:
            text += f"{rng.randint(2, 3)}[{_packed(rng, rng.randint(1, 2), depth + 1)}]"
        else:
            text += rng.choice("abcde")
    return text


def _nested(rng: random.Random, size: int, depth: int = 0) -> str:
    parts = []
    for _ in range(size):
        deeper = depth < 3 and rng.random() < 0.35
        parts.append(_nested(rng, rng.randint(0, 3), depth + 1) if deeper else str(rng.randint(0, 9)))
    return f"[{','.join(parts)}]"


def _settings(rng: random.Random, size: int) -> str:
    lines = []
    for _ in range(size):
        name = "".join(rng.choice("abc") for _ in range(2))
        value = (
            str(rng.randint(0, 40)) if rng.random() < 0.7 else "$" + "".join(rng.choice("abc") for _ in "xx")
        )
        lines.append(f"{name}={value}" if rng.random() < 0.9 else f"#{name}")
    return ";".join(lines)


EXPRESSION = StepKind(
    "expression",
    "str",
    "an arithmetic expression of whole numbers, +, -, * and brackets, without spaces, like 2+3*(4-1)",
    _expression,
    "text",
)
POSTFIX = StepKind(
    "postfix",
    "str",
    "an expression in postfix notation: numbers and the operators +, -, * and max, with spaces "
    "between them, each operator "
    "after its two operands, like 2 3 4 * +",
    _postfix,
    "text",
)
BRACKETS = StepKind(
    "brackets", "str", "a text of the brackets ( ) [ ] { }, possibly empty", _brackets, "text"
)
LOG = StepKind(
    "log",
    "str",
    "entries like 08:30 ann in, sorted by time, with ; between them; possibly empty",
    _log,
    "text",
)
PACKED = StepKind(
    "packed",
    "str",
    "a packed text: letters, and pieces like 3[ab] that stand for ababab and may hold others; possibly empty",
    _packed,
    "text",
)
NESTED = StepKind(
    "nested", "str", "a list of whole numbers and lists, like [1,[2,[]],3], as text", _nested, "text"
)
SETTINGS = StepKind(
    "settings",
    "str",
    "entries with ; between them: name=number, name=$other (the value of another name) or #comment; "
    "possibly empty",
    _settings,
    "text",
)


@step(EXPRESSION, INT, 4)
def evaluate(text: str) -> int:
    """Work out the value of the expression; * binds before + and -, which go from left to right."""
    place = 0

    def factor() -> int:
        nonlocal place
        if text[place] == "(":
            place += 1
            value = total()
            place += 1
            return value
        start = place
        while place < len(text) and text[place].isdigit():
            place += 1
        return int(text[start:place])

    def product() -> int:
        nonlocal place
        value = factor()
        while text[place : place + 1] == "*":
            place += 1
            value *= factor()
        return value

    def total() -> int:
        nonlocal place
        value = product()
        while text[place : place + 1] in ("+", "-"):
            sign = 1 if text[place] == "+" else -1
            place += 1
            value += sign * product()
        return value

    return total()


@step(EXPRESSION, INT, 3)
def evaluate_plainly(text: str) -> int:
    """Remove all brackets from the expression and work it out strictly from left to right, * no stronger
    than + and -."""
    value, operator, digits = 0, "+", ""
    for c in [c for c in text if c not in "()"] + ["+"]:
        if c.isdigit():
            digits += c
            continue
        number = int(digits)
        value = value + number if operator == "+" else value - number if operator == "-" else value * number
        operator, digits = c, ""
    return value


@step(EXPRESSION, INTS, 2)
def operands(text: str) -> list[int]:
    """Take the numbers of the expression in order, each one negative that has a - directly before it."""
    found, digits, sign = list[int](), "", 1
    for c in text + " ":
        if c.isdigit():
            digits += c
        else:
            if digits:
                found.append(sign * int(digits))
            digits, sign = "", -1 if c == "-" else 1
    return found


@step(POSTFIX, INT, 3)
def evaluate_postfix(text: str) -> int:
    """Work out the value of the expression."""
    stack: list[int] = []
    for word in text.split():
        if word.isdigit():
            stack.append(int(word))
            continue
        b, a = stack.pop(), stack.pop()
        stack.append(a + b if word == "+" else a - b if word == "-" else a * b if word == "*" else max(a, b))
    return stack[0]


@step(POSTFIX, TEXT, 4)
def to_infix(text: str) -> str:
    """Write the expression with each operator between its operands and in brackets, as in (2+(3*4)); max
    is written as the sign ^."""
    stack: list[str] = []
    for word in text.split():
        if word.isdigit():
            stack.append(word)
            continue
        b, a = stack.pop(), stack.pop()
        stack.append(f"({a}{'^' if word == 'max' else word}{b})")
    return stack[0]


@step(BRACKETS, INT, 3)
def first_fault(text: str) -> int:
    """Take the place, counted from 1, of the first closing bracket that does not close the bracket that
    was opened last (or closes nothing); where there is none, take the number of brackets that stay open,
    times -1."""
    partner, stack = {")": "(", "]": "[", "}": "{"}, list[str]()
    for i, c in enumerate(text, 1):
        if c not in partner:
            stack.append(c)
        elif not stack or stack.pop() != partner[c]:
            return i
    return -len(stack)


@step(BRACKETS, INT, 4)
def longest_balanced(text: str) -> int:
    """Take the length of the longest piece of neighbouring characters in which every bracket is closed by
    one of its kind in the right order; 0 for none."""
    partner, best = {")": "(", "]": "[", "}": "{"}, 0
    for i in range(len(text)):
        stack: list[str] = []
        for j in range(i, len(text)):
            c = text[j]
            if c in partner and (not stack or stack.pop() != partner[c]):
                break
            if c not in partner:
                stack.append(c)
            if not stack:
                best = max(best, j - i + 1)
    return best


@step(BRACKETS, INTS, 2)
def depths(text: str) -> list[int]:
    """Take for each opening bracket how many brackets are open with it, all kinds alike; a closing
    bracket where none is open is passed over."""
    depth, found = 0, list[int]()
    for c in text:
        if c in "([{":
            depth += 1
            found.append(depth)
        else:
            depth = max(0, depth - 1)
    return found


@step(LOG, TABLE, 4)
def minutes_inside(text: str) -> dict[str, int]:
    """Give for each name the minutes that it was inside: from each "in" to the next "out" of that name.
    An "in" of somebody who is inside and an "out" of somebody who is not change nothing; who is still
    inside at the end gets nothing for it; names without such a stay have 0."""
    since: dict[str, int] = {}
    spent: dict[str, int] = {}
    for entry in filter(None, text.split(";")):
        time, name, what = entry.split()
        now = int(time[:2]) * 60 + int(time[3:])
        spent.setdefault(name, 0)
        if what == "in":
            since.setdefault(name, now)
        elif name in since:
            spent[name] += now - since.pop(name)
    return spent


@step(LOG, INTS, 2)
def pauses(text: str) -> list[int]:
    """Take the minutes between each entry and the next one."""
    times = [60 * int(entry[:2]) + int(entry[3:5]) for entry in text.split(";") if entry]
    return [times[i] - times[i - 1] for i in range(1, len(times))]


@step(LOG, WORDS, 3)
def inside_at_end(text: str) -> list[str]:
    """Take the names whose last entry is "in", in the order of these last entries."""
    last: dict[str, str] = {}
    for entry in filter(None, text.split(";")):
        _, name, what = entry.split()
        last.pop(name, None)
        last[name] = what
    return [name for name, what in last.items() if what == "in"]


@step(PACKED, TEXT, 4)
def unpack(text: str) -> str:
    """Write the packed text out."""
    stack: list[tuple[str, int]] = []
    here, count = "", 0
    for c in text:
        if c.isdigit():
            count = 10 * count + int(c)
        elif c == "[":
            stack.append((here, count))
            here, count = "", 0
        elif c == "]":
            before, times = stack.pop()
            here = before + here * times
        else:
            here += c
    return here


@step(PACKED, INT, 3)
def unpacked_length(text: str) -> int:
    """Take the number of letters that the packed text stands for."""
    total, factor, factors = 0, 1, list[int]()
    for c in text:
        if c.isdigit():
            factors.append(int(c))
            factor *= int(c)
        elif c == "]":
            factor //= factors.pop()
        elif c.isalpha():
            total += factor
    return total


@step(NESTED, INT, 3)
def depth_sum(text: str) -> int:
    """Add up the numbers, each times the number of lists that it stands in."""
    total = depth = 0
    for c in text:
        depth += (c == "[") - (c == "]")
        total += int(c) * depth if c.isdigit() else 0
    return total


@step(NESTED, INTS, 2)
def flatten(text: str) -> list[int]:
    """Take all numbers of the list and of the lists in it, in order."""
    plain = text.replace("[", " ").replace("]", " ").replace(",", " ")
    return [int(word) for word in plain.split()]


@step(NESTED, INTS, 4)
def list_sums(text: str) -> list[int]:
    """Take for each list, in the order in which they begin, the sum of the numbers that stand directly in
    it, not in a list in it."""
    sums, open_ = list[int](), list[int]()
    for c in text:
        if c == "[":
            open_.append(len(sums))
            sums.append(0)
        elif c == "]":
            open_.pop()
        elif c.isdigit():
            sums[open_[-1]] += int(c)
    return sums


@step(SETTINGS, TABLE, 4)
def read_settings_text(text: str) -> dict[str, int]:
    """Read the entries in order: a comment is passed over, a name that comes again gets its new value,
    and $other stands for the value that the other name has at that point (an entry with an unknown one is
    passed over). Give the values in the end by name."""
    values: dict[str, int] = {}
    for entry in filter(None, text.split(";")):
        name, sign, value = entry.partition("=")
        if not sign:
            continue
        if not value.startswith("$"):
            values[name] = int(value)
        elif value[1:] in values:
            values[name] = values[value[1:]]
    return values


@step(SETTINGS, WORDS, 2)
def names_set_twice(text: str) -> list[str]:
    """Take the names that are given a value (a number or $other) more than once, in alphabetical order."""
    names = [entry.split("=")[0] for entry in text.split(";") if "=" in entry]
    return sorted({name for name in names if names.count(name) > 1})
