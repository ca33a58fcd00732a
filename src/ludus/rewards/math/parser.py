r"""Parse mathematical notation (LaTeX and plain text) into a tree, with one grammar for numbers and expressions.

The whole text must be an expression, a list, a set, an interval, a relation or a matrix (docs/use/rewards.md). Any
other text, such as words, unknown commands or a number after a product (`x 2`), raises `NotationError`. Length, depth
and the size of numbers are bounded, so that parsing takes milliseconds for any text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial

from ludus.rewards.math.notation import (
    FUNCTIONS,
    GREEK,
    MAX_DEPTH,
    MAX_POWER,
    ExpressionNode,
    NotationError,
    Token,
    plain_text,
    tokens_of,
)

_RELATIONS = frozenset("=<>≤≥≠∈≈")
_SET_SIGNS = {"∪": "union", "∩": "intersection", "∖": "difference"}
_CLOSING = {"(": ")", "[": "]", "{": "}", "\\{": "\\}"}
_FENCES = {"|": ("|", "abs", ""), "⌊": ("⌋", "call", "floor"), "⌈": ("⌉", "call", "ceil")}
_SEPARATORS = frozenset((",", ";", "or", "and"))
_INFIX_COMMANDS = {"over": ("div", "frac"), "choose": ("call", "binom")}
"""Commands between two operands: `{a \\over b}`."""


def read(text: str, letters: frozenset[str] | None = None) -> ExpressionNode:
    """Parse a whole text into a tree. Raises NotationError.

    A run of letters that is not a known word is a product if all its letters are among `letters`.
    """
    parser = _Parser(tokens_of(plain_text(text), letters))
    if not parser.tokens:
        raise NotationError("empty")
    found = parser.parse_over(None)
    if parser.at < len(parser.tokens):
        raise NotationError(f"unexpected {parser.tokens[parser.at].text[:40]!r}")
    return found


class _Cursor:
    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.at = 0
        self.depth = 0
        self.bars = 0

    def _peek(self, ahead: int = 0) -> Token:
        place = self.at + ahead
        return self.tokens[place] if place < len(self.tokens) else Token("end", "")

    def _accept(self, *texts: str) -> str:
        """Consume the next token if it is one of these signs, and return its text; otherwise return an empty string."""
        token = self._peek()
        if token.kind == "sign" and token.text in texts:
            self.at += 1
            return token.text
        return ""

    def _separated(self, parse: Callable[[], ExpressionNode], *separators: str) -> list[ExpressionNode]:
        items = [parse()]
        while self._accept(*separators):
            items.append(parse())
        return items

    def _expect(self, text: str) -> None:
        if not self._accept(text):
            raise NotationError(f"{text!r} is missing")

    def _nested(self, parse: Callable[[], ExpressionNode]) -> ExpressionNode:
        self.depth += 1
        if self.depth > 2 * MAX_DEPTH:
            raise NotationError("nested too deep")
        found = parse()
        self.depth -= 1
        return found


class _Parser(_Cursor):
    def _items(self, closing: str | None) -> ExpressionNode:
        """Parse relations between separators; return a single one unwrapped. The name of a list is its separator."""
        items, separator = [self._relation()], ""
        while sign := self._accept(*_SEPARATORS):
            if sign in (",", ";") and (word := self._accept("or", "and")):
                sign = word
            if closing is None and self._peek().kind == "end":
                raise NotationError("an item is missing")
            sign = "," if sign == ";" else sign
            separator = sign if separator in ("", ",") else separator
            if sign not in (separator, ","):
                raise NotationError("'or' and 'and' in one list")
            items.append(self._relation())
        return items[0] if len(items) == 1 else ExpressionNode("list", tuple(items), separator)

    def _relation(self) -> ExpressionNode:
        is_rounded = self._accept("≈")  # "≈ 3.5" is 3.5
        sides, signs = [self._sets()], ""
        if is_rounded and sides[0].name != "decimal":
            raise NotationError("≈ before a number that is not a decimal")
        while sign := self._accept(*_RELATIONS):
            signs += sign
            sides.append(self._sets())
        return sides[0] if not signs else ExpressionNode("relation", tuple(sides), signs)

    def _sets(self) -> ExpressionNode:
        found = self._sum()
        while sign := self._accept(*_SET_SIGNS):
            found = ExpressionNode(_SET_SIGNS[sign], (found, self._sum()))
        return found

    def _sum(self) -> ExpressionNode:
        terms = [self._term()]
        while sign := self._accept("+", "-", "±", "∓"):
            terms.append(_with_sign(sign, self._term()))
        return terms[0] if len(terms) == 1 else ExpressionNode("add", tuple(terms))

    def _term(self) -> ExpressionNode:
        if sign := self._accept("+", "-", "±", "∓"):
            return _with_sign(sign, self._nested(self._term))
        found = self._power()
        while True:
            if self._accept("*"):
                found = _product(found, self._signed())
            elif self._accept("/"):
                found = ExpressionNode("div", (found, self._signed()))
            elif self._starts_factor():
                found = self._adjacent(found)
            else:
                return found

    def _signed(self) -> ExpressionNode:
        """Parse a factor after `*` or `/`, with an optional sign."""
        if self._accept("-"):
            return ExpressionNode("neg", (self._nested(self._signed),))
        self._accept("+")
        return self._power()

    def _starts_factor(self) -> bool:
        token = self._peek()
        if token.kind == "number":  # a fraction such as `1/2` after a whole number and a blank
            wholes = (self._peek(-1), token, self._peek(2))
            return self._peek(1).text == "/" and token.spaced and all(map(_is_whole, wholes))
        if token.kind in ("letter", "command"):
            return token.text not in ("rangle", *_INFIX_COMMANDS) and not token.text.startswith("end{")
        return token.text in ("(", "[", "{", "⌊", "⌈") or (token.text == "|" and self.bars == 0)

    def _adjacent(self, found: ExpressionNode) -> ExpressionNode:
        before = self._peek(-1)
        if self._peek().kind == "number":
            numerator, denominator = self._peek().value, self._peek(2).value
            self.at += 3
            return _mixed(found, numerator, denominator)
        follows_number = _is_whole(before) and found.op == "number"
        applied = before.kind == "letter" and found.op == "name" and self._peek().text == "("
        factor = self._power()
        if applied:
            return ExpressionNode("mul", (found, factor), "applied")
        plain = all(arg.op == "number" and arg.name == "whole" for arg in factor.args)
        if follows_number and factor.op == "div" and factor.name == "frac" and plain:
            return _mixed(found, factor.args[0].value, factor.args[1].value)
        return _product(found, factor)

    def _power(self) -> ExpressionNode:
        base = self._postfix(self._atom())
        if not self._accept("^"):
            return base
        degrees = [self._peek(ahead).text for ahead in range(3)] == ["{", "°", "}"]
        self.at += 3 * degrees
        if degrees or self._accept("°"):
            return self._postfix(ExpressionNode("degree", (base,)))
        if base.op == "pow" and base.name == "raised":
            raise NotationError("two exponents")
        exponent = self._exponent()
        if base.op == "call" and base.name == "":
            raise NotationError("an exponent without a base")
        if base == _TEN and (power := _whole_value(exponent)) is not None:
            if abs(power) > MAX_POWER:
                raise NotationError("too large a power of ten")
            return ExpressionNode("number", (), "ten", Fraction(10) ** power)
        return self._postfix(ExpressionNode("pow", (base, exponent), "raised"))

    def _exponent(self) -> ExpressionNode:
        if self._accept("-"):
            return ExpressionNode("neg", (self._nested(self._exponent),))
        self._accept("+")
        return self._nested(self._power)

    def _postfix(self, node: ExpressionNode) -> ExpressionNode:
        while sign := self._accept("!", "%", "°"):
            node = ExpressionNode({"!": "factorial", "%": "percent", "°": "degree"}[sign], (node,))
        return node

    def _atom(self) -> ExpressionNode:
        token = self._peek()
        self.at += 1
        parsers = {"number": self._numeral, "letter": self._name, "command": self._command}
        return self._nested(partial(parsers.get(token.kind, self._bracket), token.text))

    def _numeral(self, name: str) -> ExpressionNode:
        found = ExpressionNode("number", (), name, self._peek(-1).value)
        if not self._accept("_"):
            return found
        return ExpressionNode("based", (replace(found, name="whole"), self._argument()))

    def _name(self, letter: str) -> ExpressionNode:
        name = letter
        if self._accept("_"):
            name += "_" + _subscript_text(self._argument())
        while self._accept("'"):
            name += "'"
        return ExpressionNode("constant" if name in ("e", "i") else "name", (), name)

    def _argument(self) -> ExpressionNode:
        """Parse an argument of a command: a group in braces, one digit, or one atom."""
        token = self._peek()
        if not _is_whole(token):
            return self._atom()
        digits = str(token.value)
        if len(digits) > 1:
            self.tokens[self.at] = Token("number", "whole", Fraction(digits[1:]))
        else:
            self.at += 1
        return ExpressionNode("number", (), "whole", Fraction(digits[0]))

    def _command(self, name: str) -> ExpressionNode:
        if name in ("frac", "binom"):
            args = (self._argument(), self._argument())
            return ExpressionNode({"frac": "div", "binom": "call"}[name], args, name)
        if name in ("sqrt", "cbrt"):
            return self._root(name)
        if name == "abs":
            return ExpressionNode("abs", (self._atom(),))
        if name in FUNCTIONS:
            return self._call(name)
        if name == "mathbb":
            return self._domain()
        if name == "langle":
            items = self._separated(self._sum, ",")
            self.at += 1
            if self._peek(-1).text != "rangle":
                raise NotationError("an unclosed bracket")
            return ExpressionNode("pair", tuple(items), name)
        if name.startswith("begin{"):
            return self._matrix(name.removeprefix("begin"))
        if name in ("pi", "infty"):
            return ExpressionNode("constant", (), name)
        if name in GREEK:
            return self._name(name)
        raise NotationError(f"the command {name[:40]!r}")

    def _domain(self) -> ExpressionNode:
        letter = self._argument()
        if letter.op != "name" or letter.name not in "RZNQC":
            raise NotationError("an unknown domain")
        return ExpressionNode("domain", (), letter.name)

    def _root(self, name: str) -> ExpressionNode:
        degree = ExpressionNode("number", (), "whole", Fraction(3 if name == "cbrt" else 2))
        if self._accept("["):
            degree = self._sum()
            self._expect("]")
        return ExpressionNode("root", (self._argument(), degree))

    def _call(self, name: str) -> ExpressionNode:
        """Parse a function: its base or exponent, then an argument in brackets or a product without signs."""
        base = (self._argument(),) if self._accept("_") else ()
        raised = self._exponent() if self._accept("^") else None
        if raised is not None and _whole_value(raised) == -1:
            if name not in ("sin", "cos", "tan"):
                raise NotationError("an inverse")
            name, raised = "arc" + name, None
        if self._peek().text in ("(", "{"):
            found = self._atom()
            args = found.args if found.op in ("pair", "list") else (found,)
        else:
            args = (self._bare_argument(),)
        node = ExpressionNode("call", (*args, *base), name + ("_" if base else ""))
        return node if raised is None else ExpressionNode("pow", (node, raised), "raised")

    def _bare_argument(self) -> ExpressionNode:
        r"""Parse the argument of `\sin 2x`: adjacent factors, up to a sign or another function."""
        if self._accept("-"):
            return ExpressionNode("neg", (self._bare_argument(),))
        found = self._power()
        while self._starts_factor() and self._peek().kind != "number":
            token = self._peek()
            if (token.kind == "command" and token.text in FUNCTIONS) or token.text in ("(", "["):
                break
            found = self._adjacent(found)
        return found

    def _bracket(self, opening: str) -> ExpressionNode:
        if opening == "∅":
            return ExpressionNode("set")
        if opening in _FENCES:
            closing, op, name = _FENCES[opening]
            self.bars += opening == "|"
            inner = self._sum()
            self._expect(closing)
            self.bars -= opening == "|"
            return ExpressionNode(op, (inner,), name)
        if opening not in _CLOSING:
            raise NotationError(f"{opening[:40]!r}")
        bars, self.bars = self.bars, 0
        found = self._inside(opening)
        self.bars = bars
        return found

    def _inside(self, opening: str) -> ExpressionNode:
        if opening == "\\{":
            if self._accept("\\}"):
                return ExpressionNode("set")
            found = self._condition("\\}") or ExpressionNode("set", tuple(self._separated(self._relation, ",", ";")))
            self._expect("\\}")
            return found
        if opening == "{":
            found = self._condition("}") or self.parse_over("}")
            self._expect("}")
            return found
        items = self._separated(self._relation, ",", ";")
        closing = self._accept(")", "]")
        if not closing:
            raise NotationError("an unclosed bracket")
        if len(items) > 1:
            return ExpressionNode("pair", tuple(items), opening + closing)
        if closing != _CLOSING[opening]:
            raise NotationError("mismatched brackets")
        return items[0]

    def _condition(self, closing: str) -> ExpressionNode | None:
        """Parse set-builder notation between braces, `x | x > 1` or `x ∈ R : x > 1`; return None for any other text."""
        start = self.at
        if self._peek().kind != "letter" or self._peek(1).text not in ("|", ":", "∈"):
            return None
        self.at += 1
        if self._accept("|", ":"):
            return self._items(closing)
        self.at, self.bars = start, self.bars + 1
        member = self._relation()
        self.bars -= 1
        if not self._accept("|", ":"):
            self.at = start
            return None
        return ExpressionNode("list", (member, self._relation()), "and")

    def parse_over(self, closing: str | None) -> ExpressionNode:
        r"""Parse items, or a fraction or binomial coefficient of two: `a \over b`, `n \choose k`."""
        found = self._items(closing)
        command = self._peek()
        if command.kind != "command" or command.text not in _INFIX_COMMANDS:
            return found
        self.at += 1
        op, name = _INFIX_COMMANDS[command.text]
        return ExpressionNode(op, (found, self._items(closing)), name)

    def _matrix(self, kind: str) -> ExpressionNode:
        rows = []
        while True:
            row = self._separated(self._sum, "&")
            rows.append(ExpressionNode("row", tuple(row)))
            if not self._accept("\\\\") or self._peek().text.startswith("end{"):
                break
        if self._peek().text != f"end{kind}" or not re.fullmatch(r"\{[pbv]?matrix\}", kind):
            raise NotationError("an unclosed matrix, or an unknown environment")
        self.at += 1
        if len({len(one.args) for one in rows}) != 1:
            raise NotationError("matrix rows of different lengths")
        return ExpressionNode("matrix", tuple(rows), "v" if kind == "{vmatrix}" else "")


_TEN = ExpressionNode("number", (), "whole", Fraction(10))


def _with_sign(sign: str, term: ExpressionNode) -> ExpressionNode:
    if sign == "+":
        return term
    return ExpressionNode("neg" if sign == "-" else "plusminus", (term,), sign.strip("-"))


def _is_whole(token: Token) -> bool:
    return token.kind == "number" and token.text == "whole"


def _whole_value(node: ExpressionNode) -> int | None:
    if node.op == "neg" and (inner := _whole_value(node.args[0])) is not None:
        return -inner
    return int(node.value) if node.op == "number" and node.name == "whole" and node.value is not None else None


def _mixed(whole: ExpressionNode, top: Fraction | None, bottom: Fraction | None) -> ExpressionNode:
    if whole.value is None or top is None or not bottom:
        raise NotationError("a mixed number without a denominator")
    reduced = top < bottom and math.gcd(int(top), int(bottom)) == 1
    return ExpressionNode("number", (), "mixed" if reduced else "unreduced", whole.value + top / bottom)


def _product(left: ExpressionNode, right: ExpressionNode) -> ExpressionNode:
    r"""Return the product; `5 \cdot 10^3` is a number."""
    is_power = (
        right.op == "number" and right.name == "ten" and left.op == "number" and left.name in ("whole", "decimal")
    )
    if is_power and left.value is not None and right.value is not None:
        return ExpressionNode("number", (), "scientific", left.value * right.value)
    return ExpressionNode("mul", (*(left.args if left.op == "mul" else (left,)), right))


def _subscript_text(node: ExpressionNode) -> str:
    if node.op in ("name", "constant"):
        return node.name
    if node.op == "number":
        return str(node.value)
    return node.op + "(" + ",".join(map(_subscript_text, node.args)) + ")"
