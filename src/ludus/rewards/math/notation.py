"""Tokenize mathematical notation: numbers, letters, commands and signs, in LaTeX or plain text.

Length, depth and the size of numbers are bounded. `ludus.rewards.math.parser` parses the tokens into trees.
"""

from __future__ import annotations

import re
import tomllib
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial
from importlib import resources

from ludus.rewards.extract import plain_signs

MAX_CHARACTERS = 1_000
"""Maximum characters of an expression."""
MAX_DEPTH = 30
"""Maximum nesting depth of brackets, arguments and exponents."""
MAX_POWER = 400
"""Maximum exponent of ten in a number."""

_FUNCTIONS = "arcsin arccos arctan sinh cosh tanh sin cos tan cot sec csc log ln lg exp max min gcd lcm"
_GREEK = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma "
    "tau phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega"
)
FUNCTIONS = frozenset(_FUNCTIONS.split())
GREEK = frozenset(_GREEK.split())
_SPACING = re.compile(
    r"(?<!\\)\\(?:left|right|big|Big|bigg|Bigg|bigl|bigr|displaystyle|limits|quad|qquad)(?![a-zA-Z])"
    r"|(?<!\\)\\[ ,;:!()]|~|&nbsp;"
)
_PHRASES = (
    (r"(?:all|any|every|the set of(?: all)?)? ?(?:real numbers?|reals)(?= except\b|$)", r"\mathbb{R}"),
    (r"no (?:real )?solutions?\b|(?:the )?empty set\b", r"\emptyset"),
    (r"^(?:for )?(?:all|every) (?:real )?(?=[a-z] ?[^a-z ])", ""),
    (r"except(?: for)?\b", r"\setminus"),
    (r"degrees?\b(?! *(?:[CFK]\b|celsius|fahrenheit))", "°"),
)
"""Phrases, each with its replacement."""
_PHRASE_PATTERNS = tuple((re.compile(rf"(?i)(?<![\\\w])(?:{words})"), sign) for words, sign in _PHRASES)
_ARRAY = re.compile(r"\\(begin|end)\{(?:array\}(?:\s*\{[clr| ]*\})?|smallmatrix\})")
_TEXT_LEFT = re.compile(r"\\(?:text[a-z]*|mathrm|mathbf|mathit|mathsf|mbox|hbox|operatorname\*?)(?![a-z])")
_TEXT = re.compile(_TEXT_LEFT.pattern + r"\s*\{([^{}]*)\}")
_SUPERSCRIPTS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ⁄]+")
_SUBSCRIPTS = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_VULGAR = re.compile("[¼-¾⅐-⅞↉]")
_NUMBER = re.compile(
    r"(?P<grouped>[1-9]\d{0,2}(?:(?:,|\{,\}|[ ])\d{3})+(?![\d]|,\d|\{,\}|[ ]\d))(?:\.(?P<cents>\d+))?"
    r"|(?P<plain>\d+(?:\.\d+|\.(?=\s*\\bar|\(|\s*\\overline|\s*\\dot(?![a-z])))?|\d+\.(?!\.)|\.\d+)",
    re.ASCII,
)
_POWER_OF_TEN = re.compile(r"[eE]([+-]?\d{1,4})(?![\w.])", re.ASCII)
_REPEATED = re.compile(r"\s*(?:\\(?:overline|bar|dot)\s*(?:\{(\d{1,50})\}|(\d))|\((\d{1,50})\))", re.ASCII)
_ELLIPSIS = re.compile(r"\s*(?:\.\.\.|…|\\[lc]?dots(?![a-z]))")
_TOKEN = re.compile(
    r"\s*(?:(?P<command>\\(?:(?:begin|end)\{[a-z]*\}|[a-zA-Z]+|[{}%$|\\&]))|(?P<word>[a-zA-Z]+)|(?P<sign>\*\*|<=|>=|!=|==|\.\.\.|\S))"
)


@cache
def spellings(table: str) -> dict[str, str]:
    """Return the meaning of each spelling in a table of `notation.toml`; of units, also of names and plurals."""
    tables = tomllib.loads(resources.files(__package__).joinpath("notation.toml").read_text("utf-8"))
    found = {spelling: meaning for meaning, others in tables[table].items() for spelling in others.split()}
    if table == "units":
        found |= {unit: unit for unit in tables[table]}
        found = {spelling + end: unit for end in ("s", "") for spelling, unit in found.items()}
    return found


class NotationError(ValueError):
    """The text is outside the grammar or exceeds its bounds."""


@dataclass(frozen=True, slots=True)
class ExpressionNode:
    """A node of an expression tree.

    `op`: number (value), name, constant, add, neg, mul, div, pow, root (of, degree), call, abs, factorial,
    percent, degree, plusminus; list, set, pair (name: its brackets), relation (name: its signs), union,
    intersection, difference, domain, matrix, row, based. The `name` of a number is its notation.
    """

    op: str
    args: tuple[ExpressionNode, ...] = ()
    name: str = ""
    value: Fraction | None = None

    def names(self) -> frozenset[str]:
        """Return the names of all variables."""
        return frozenset(node.name for node in self.walk() if node.op == "name")

    def walk(self) -> Iterator[ExpressionNode]:
        """Iterate over the node and all nodes below it."""
        yield self
        for arg in self.args:
            yield from arg.walk()


@dataclass(frozen=True, slots=True)
class Token:
    """A token: number, letter, command or sign; `spaced` if a blank precedes it."""

    kind: str
    text: str
    value: Fraction | None = None
    spaced: bool = False


def plain_text(text: str) -> str:
    """Return LaTeX without spacing, text commands and dollar signs, and with ASCII spellings of other characters.

    Raises NotationError for a text that is too long, nested too deep, or still has text commands.
    """
    if len(text) > MAX_CHARACTERS:
        raise NotationError("too long")
    plain = _SPACING.sub(" ", _ascii(text))
    for _ in range(MAX_DEPTH):
        plain = _TEXT.sub(r" \1 ", plain)
    if _TEXT_LEFT.search(plain):
        raise NotationError("a text command inside another, or unclosed")
    plain = re.sub(r"\\\$|\$", " ", plain).replace("\\[", " ").replace("\\]", " ")
    plain = " ".join(_ARRAY.sub(r"\\\1{matrix}", plain).split())
    for words, sign in _PHRASE_PATTERNS:
        plain = words.sub(sign.replace("\\", "\\\\"), plain)
    depth = 0
    for character in plain:
        depth += (character in "([{") - (character in ")]}")
        if depth > MAX_DEPTH:
            raise NotationError("nested too deep")
    plain = " ".join(plain.split())
    return plain if plain.endswith("...") else plain.removesuffix(".").strip()


def _ascii(text: str) -> str:
    folded = partial(unicodedata.normalize, "NFKC")
    text = _VULGAR.sub(lambda m: "\\frac{" + folded(m[0]).replace("⁄", "}{") + "}", plain_signs(text))
    text = _SUPERSCRIPTS.sub(
        lambda m: "^{" + folded(m[0]).translate({0x2212: "-", ord("⁄"): "/"}) + "}" if m[0] != "⁄" else "/", text
    )
    text = _SUBSCRIPTS.sub(lambda m: "_{" + folded(m[0]) + "}", text)
    signs = spellings("characters")
    return "".join(signs.get(c) or (plain if (plain := folded(c)).isascii() else c) for c in text)


def letters_of(text: str) -> frozenset[str]:
    """Return the letters of a text outside its commands."""
    return frozenset(re.findall(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", " ", text)))


def text_words(text: str) -> frozenset[str]:
    """Return the words inside LaTeX text commands."""
    return frozenset(word for found in _TEXT.findall(_ascii(text)) for word in re.findall(r"[a-zA-Z]+", found))


def tokens_of(text: str, letters: frozenset[str] | None) -> list[Token]:
    """Tokenize a plain text. Raises NotationError.

    A run of letters that is not a known word is a product if all its letters are among `letters`.
    """
    found: list[Token] = []
    at = depth = 0
    while at < len(text):
        spaced = text[at] == " "
        at += spaced
        number = _NUMBER.match(text, at)
        if number is not None:
            token, at = _number(text, number, depth, spaced)
            found.append(token)
            continue
        match = _TOKEN.match(text, at)
        if match is None:
            break
        at = match.end()
        if match["word"] is not None:
            found += _letters(match["word"], letters, spaced)
        else:
            found.append(_sign(match["command"], match["sign"], spaced))
        depth += {"(": 1, "[": 1, "\\{": 1, ")": -1, "]": -1, "\\}": -1}.get(found[-1].text, 0)
    return [_interval_sign(found, place) for place in range(len(found))]


_BEFORE_ITEM = frozenset(("", "∪", "∩", "∖", "∈", "=", ",", ";", "or", "and", "(", "[", "{", "\\{"))
_AFTER_ITEM = frozenset(("", "∪", "∩", "∖", ",", ";", "or", "and", "U", ")", "]", "}", "\\}"))


def _interval_sign(tokens: list[Token], place: int) -> Token:
    """Return the token at `place`, with outward brackets (`]0, 1[`) made round, and a U between brackets as a union."""
    token = tokens[place]
    if token.text not in ("]", "[", "U"):
        return token
    before = tokens[place - 1].text if place else ""
    after = tokens[place + 1].text if place + 1 < len(tokens) else ""
    if token.text == "U":
        is_union = before in (")", "]", "[", "\\}") and after in ("(", "[", "]", "\\{")
        return Token("sign", "∪", spaced=token.spaced) if is_union else token
    if token.text == "]" and before in _BEFORE_ITEM | {"U"}:
        return Token("sign", "(", spaced=token.spaced)
    if token.text == "[" and before not in _BEFORE_ITEM and after in _AFTER_ITEM:
        return Token("sign", ")", spaced=token.spaced)
    return token


def _sign(command: str | None, sign: str | None, spaced: bool) -> Token:
    if command is None:
        signs = {"**": "^", "<=": "≤", ">=": "≥", "!=": "≠", "==": "=", "...": "…"}
        return Token("sign", signs.get(sign or "", sign or ""), spaced=spaced)
    name = command[1:]
    if name.startswith(("begin{", "end{")):
        return Token("command", name, spaced=spaced)
    if not name.isalpha():
        return Token("sign", {"%": "%", "|": "?", "\\": "\\\\"}.get(name, command), spaced=spaced)
    name = spellings("commands").get(name, name)
    return Token("command" if name.isalpha() and name not in ("or", "and") else "sign", name, spaced=spaced)


def _number(text: str, match: re.Match[str], depth: int, spaced: bool) -> tuple[Token, int]:
    end, grouped = match.end(), match["grouped"]
    if grouped is None:
        body = match["plain"]
    elif depth and "," in grouped and "{" not in grouped:
        body = grouped.partition(",")[0]  # inside brackets, a comma is a separator
        end = match.start() + len(body)
    else:
        body = re.sub(r"\D", "", grouped) + (f".{match['cents']}" if match["cents"] else "")
    value = Fraction(f"0{body}" if body.startswith(".") else body.removesuffix("."))
    if found := _repeating(text, end, body, value):
        kind, value, end = found
        return Token("number", kind, value, spaced), end
    if power := _POWER_OF_TEN.match(text, end):
        if abs(int(power[1])) > MAX_POWER:
            raise NotationError("too large a power of ten")
        return Token("number", "scientific", value * Fraction(10) ** int(power[1]), spaced), power.end()
    return Token("number", "decimal" if "." in body else "whole", value, spaced), end


def _repeating(text: str, end: int, body: str, value: Fraction) -> tuple[str, Fraction, int] | None:
    """Return a decimal with a repeating block of digits, and the offset after it."""
    if "." not in body:
        return None
    if repeated := _REPEATED.match(text, end):
        digits = repeated[1] or repeated[2] or repeated[3]
        decimals = len(body.partition(".")[2])
        value += Fraction(int(digits), (10 ** len(digits) - 1) * 10**decimals)
        return "repeating", value, repeated.end()
    dots = _ELLIPSIS.match(text, end)
    return ("repeating", _read_repeating(body), dots.end()) if dots else None


def _read_repeating(body: str) -> Fraction:
    """Return the value of `0.1666...`: the shortest block that ends three or more digits is repeated."""
    whole, _, digits = body.partition(".")
    for size in range(1, len(digits) // 2 + 1):
        block, times = digits[-size:], 1
        while digits.endswith(block * (times + 1)):
            times += 1
        if times >= 2 and times * size >= 3:
            prefix = digits[: len(digits) - size]
            repeating = Fraction(int(block), (10**size - 1) * 10 ** len(prefix))
            return Fraction(f"{whole or 0}.{prefix or 0}") + repeating
    raise NotationError("an ellipsis after digits that do not repeat")


def _letters(word: str, letters: frozenset[str] | None, spaced: bool) -> list[Token]:
    """Return the tokens of a run of letters: a known word, a function with its variable, or a product."""
    if len(word) == 1:
        return [Token("letter", word, spaced=spaced)]
    lower = word.lower()
    if word in FUNCTIONS | GREEK | {"pi", "sqrt", "cbrt", "abs"} or lower in ("pi", "sqrt"):
        return [Token("command", word if word in GREEK else lower, spaced=spaced)]
    if known := spellings("words").get(lower):
        command = known.isalpha() and known not in ("or", "and")
        return [Token("command" if command else "sign", known, spaced=spaced)]
    if word[:-1] in FUNCTIONS:
        return [Token("command", word[:-1], spaced=spaced), Token("letter", word[-1])]
    if letters is not None and not letters >= set(word):
        raise NotationError(f"the word {word[:40]!r}")
    return [Token("letter", letter, spaced=spaced and not n) for n, letter in enumerate(word)]
