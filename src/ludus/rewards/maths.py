"""Mathematics: an answer in LaTeX or plain signs against an expression, by math-verify (extra `math`).

The answer as a whole has to be the expression: words, a second candidate, a unit that is not meant, or an
equation that does not hold fail. What is compared is decided here; whether two expressions are equal is
decided in a process of its own with limits on time and memory (`ludus.rewards.math_worker`), as math-verify's
own limits are signals, which work in the main thread only.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import re
import select
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, lru_cache

from ludus.errors import UserError, WorldError
from ludus.rewards.answers import normalise
from ludus.rewards.base import truth_of
from ludus.rewards.final import candidates, plain_signs
from ludus.types import Task, Trajectory

MAX_CHARACTERS = 1_000
"""A longer expression is no answer."""
MAX_DEPTH = 30
"""Nor is one whose brackets are nested deeper."""
CPU_S = 4.0
"""Seconds of processor time for one comparison."""
WAIT_S = 120.0
"""Wall-clock seconds after which the comparing process counts as broken."""

_START = (
    "import json,sys;sys.path[:]=json.loads(sys.argv[1]);from ludus.rewards.math_worker import serve;serve()"
)
_FUNCTIONS = "arcsin arccos arctan sinh cosh tanh sin cos tan cot sec csc log ln exp max min gcd lcm det"
_NAMES = "pi infty cup cap alpha beta gamma theta lambda phi sqrt"
_PLAIN = {"inf": "infty", "oo": "infty", "infinity": "infty"} | {
    name: name for name in f"{_FUNCTIONS} {_NAMES}".split()
}
_SIGNS = {
    "π": r"\pi ",
    "∞": r"\infty ",
    "√": r"\sqrt ",
    "×": r"\times ",
    "·": r"\cdot ",
    "÷": "/",
    "≤": r"\le ",
    "≥": r"\ge ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∈": r"\in ",
    "±": r"\pm ",
    "∅": r"\emptyset ",
    "°": r"^\circ ",
    "²": "^{2}",
    "³": "^{3}",
    "½": r"\frac{1}{2}",
    "⁄": "/",
}
_SPACING = re.compile(
    r"(?<!\\)\\(?:left|right|big|Big|bigg|Bigg|displaystyle|,|;|:|!|quad|qquad)(?![a-zA-Z])|(?<!\\)\\ |~"
)
_TEXT_LEFT = re.compile(r"\\(?:text[a-z]*|mathrm|mathbf|mathit|mathsf|mbox|hbox|operatorname)(?![a-z])")
"""What is set as text. math-verify takes it for a unit and passes over it."""
_TEXT = re.compile(_TEXT_LEFT.pattern + r"\s*\{([^{}]*)\}")
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}")
_NUMERAL = re.compile(r"-?\d+(?:\.\d+)?|-?\.\d+", re.ASCII)
_EQUALS = re.compile(r"(?<![\\<>!:])=(?!=)")
_FRACTION = re.compile(r"(\d{1,400})\s*(?:/|\}\s*\{)\s*(\d{1,400})", re.ASCII)
_TEN = re.compile(r"(?:\d+(?:\.\d+)?\s*\\(?:cdot|times)\s*|(?<![\w.}]))10\s*\^\s*(?:\{-?\d+\}|\d)", re.ASCII)
"""A power of ten, with or without its number."""
_RELATION = re.compile(r"[<>]|\\(?:lt|gt|leq?|geq?|leqslant|geqslant)(?![a-zA-Z])")
_COMPARED = re.compile(r"(^|[<,])\s*[a-zA-Z]\s*(?=[<,]|$)")
"""The variable of an inequality, whose signs are `<` by then."""
_MEMBER = re.compile(r"^[a-zA-Z]\s*\\in(?![a-z])\s*")
_NOTHING = re.compile(r"\\(?:[dtc]?frac|cdot|times|left|right|[lr]?vert|circ)(?![a-zA-Z])|\\[{}]")
"""What is neither number nor letter."""
_UNFINISHED = tuple(map(re.compile, (r"!", r"\||\\[lr]?vert(?![a-zA-Z])", r"-\s*[({]*\s*-")))
"""Factorials, absolute values and double signs."""
_POLYNOMIAL = re.compile(
    r"(?:[\da-zA-Z.+\s-]|\^(?:\d|\{\d+\})|\\(?:cdot|times)(?![a-zA-Z])|\\frac\{\d+\}\{\d+\})+", re.ASCII
)
_SUM = re.compile(r"[\w}]\s*[+-]")
_PRODUCT = re.compile(
    r"(?:[\da-zA-Z)}]|\\cdot|\\times)\s*\([^()]*[+-][^()]*\)"
    r"|\([^()]*[+-][^()]*\)[\s}]*(?:\^|[\da-zA-Z(]|\\(?:cdot|times|frac))"
)
"""A sum in brackets that is multiplied or raised."""
_MIXED = re.compile(r"\(?\b\d+\s*\+?\s*(\\frac\{\d+\}\{\d+\})\)?", re.ASCII)
"""A mixed number; its fraction counts."""
_LEAF = re.compile(r"\d+(?:\.\d+)?|\.\d+|\\?[a-zA-Z]+?(?![a-z])|[a-zA-Z]", re.ASCII)
_PASSED_OVER = re.compile(r"(?<=\d)_\{?(\w+)\}?|('|\\[lc]?dots|\\[bp]?mod|\\prime)(?![a-zA-Z])")
"""The base of a numeral and other signs that math-verify passes over: they have to agree."""
_WITH_LETTER = re.compile(r"-?[\d.]+\s*[a-zA-Z]")
"""A number and a letter, which math-verify may take for a unit."""
_UNIT = re.compile(r"-?[\d.]+\s*([a-zA-Z]+(?:/[a-zA-Z]+)*(?:\^\{?\d\}?)?)")
"""A number and what may be its unit."""
_NAME = re.compile(r"\\?[a-zA-Z]+(?:_\{?\w+\}?)?(?:\([a-zA-Z](?:,\s*[a-zA-Z])*\))?|")


@dataclass(frozen=True, slots=True)
class Expression:
    """The truth of a question of mathematics: LaTeX or plain signs; `units` may stand behind an answer.

    With `evaluated` an answer that is equal but left to be worked out is wrong: it may have no more numbers
    and letters than the gold expression has, its fractions are in lowest terms, and it has factorials,
    absolute values, double signs and (where the gold one is a polynomial's sum) products of sums only where
    the gold one has them too. So the question's own formula is no answer to it.
    """

    gold: str
    units: tuple[str, ...] = ()
    evaluated: bool = False


def is_equal(answer: str, truth: Expression) -> bool:
    """Whether the answer (all boxes of one with several) is the expression.

    Raises UserError where math-verify is needed and not installed, WorldError where its process breaks.
    """
    gold = _latex(truth.gold, truth.units)
    if gold is None:
        raise ValueError(f"the gold answer {truth.gold[:80]!r} cannot be read")
    found = candidates(answer)
    if truth.evaluated and not all(is_evaluated(one, truth) for one in found):
        return False
    return bool(found) and all(_is_right(one, gold, truth) for one in found)


def is_evaluated(answer: str, truth: Expression) -> bool:
    """Whether an answer is as far worked out as the gold one: as few numbers and letters, reduced fractions.

    A power of ten, a mixed number and a percentage are one number each.
    """
    gold, units = truth.gold, truth.units
    room = 2 if _NUMERAL.fullmatch(gold) and "." in gold else _num_leaves(gold, units)  # 0.75 is 3/4 too
    if len(answer) > MAX_CHARACTERS or not is_reduced(answer) or _num_leaves(answer, units) > room:
        return False
    given, due = _last_side(answer, units), _last_side(gold, units)
    if _POLYNOMIAL.fullmatch(due) and _SUM.search(due) and _PRODUCT.search(given):
        return False
    return all(sign.search(due) or not sign.search(given) for sign in _UNFINISHED)


def is_reduced(answer: str) -> bool:
    """Whether all fractions of whole numbers are in lowest terms: 435/15 is a problem, no answer to one."""
    plain = re.sub(r"(\\[dtc]?frac)\s*(\d)", r"\1{\2}", plain_signs(answer), flags=re.ASCII)
    plain = re.sub(r"(\\[dtc]?frac\{\d+\})\s*(\d)", r"\1{\2}", plain, flags=re.ASCII)
    found = [(int(up), int(down)) for up, down in _FRACTION.findall(plain)]
    return all(down > 1 and math.gcd(up, down) == 1 for up, down in found)


def _num_leaves(text: str, units: tuple[str, ...]) -> int:
    """Numbers and letters behind the last equals sign; a function's name is one letter, \\frac is none.

    The variable of an inequality or of `x \\in` is none either: an interval says the same without it.
    """
    last = _MEMBER.sub("", _last_side(text, units))
    plain = _TEN.sub("1", _MIXED.sub(r"\1", re.sub(r"\\frac\{(.*)\}\{100\}$", r"\1", last)))
    plain = _RELATION.sub("<", plain)
    if "<" in plain:
        plain = _COMPARED.sub(r"\1", plain)
    return len(_LEAF.findall(_NOTHING.sub(" ", plain)))


def _last_side(text: str, units: tuple[str, ...]) -> str:
    """What stands behind the last equals sign."""
    return _EQUALS.split(_latex(text, units) or text)[-1].strip()


def mathematics(task: Task, trajectory: Trajectory) -> float:
    """1 if the final answer equals the expression of the truth, else 0."""
    return float(is_equal(trajectory.answer, truth_of(task, Expression)))


def require_math() -> None:
    """Raise UserError, with the extra to install, where math-verify is missing: for worlds to call early."""
    if importlib.util.find_spec("math_verify") is None:
        raise UserError(
            "Answers of mathematics need math-verify.", "Install it with: pip install 'ludus[math]'"
        )


def _is_right(text: str, gold: str, truth: Expression) -> bool:
    answer = _latex(text, truth.units)
    if answer is None:
        return False
    if answer == gold or (_is_text(gold) and normalise(answer) == normalise(gold)):
        return True
    if not _words(answer) <= _words(gold):
        return False
    sides = _EQUALS.split(answer)
    if not _EQUALS.search(gold) and len(sides) > 1:
        named = _NAME.fullmatch(sides[0].strip()) is not None
        sides = sides[1:] if named else sides
    elif len(sides) > 1:
        sides = [answer]
    return all(_same(gold, side.strip()) for side in sides)


def _same(gold: str, answer: str) -> bool:
    """Whether one expression without a loose end is the other; plain numerals are compared exactly."""
    gold, answer = (_MEMBER.sub("", side) for side in (gold, answer))
    if not answer or not _shapes_agree(gold, answer):
        return False
    if _PASSED_OVER.findall(gold) != _PASSED_OVER.findall(answer):
        return False
    if not _cases_agree(gold, answer) or not _units_agree(gold, answer):
        return False
    if _NUMERAL.fullmatch(gold) and _WITH_LETTER.fullmatch(answer):
        return False
    if _NUMERAL.fullmatch(gold) and _NUMERAL.fullmatch(answer):
        return Fraction(gold) == Fraction(answer)
    return gold == answer or _compared(gold, answer)


def _cases_agree(gold: str, answer: str) -> bool:
    """Whether the answer has no letter that the gold expression has in the other case only."""
    due, given = (set(re.findall(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", side))) for side in (gold, answer))
    return not any(letter.swapcase() in due for letter in given - due)


def _units_agree(gold: str, answer: str) -> bool:
    """Whether two numbers with units have the same; that of the gold one may be shortened (h for hours)."""
    due, given = (_UNIT.fullmatch(re.sub(r"[{}]", "", side)) for side in (gold, answer))
    if due is None or given is None or due[1] == given[1]:
        return True
    return len(due[1]) > 3 and given[1] == due[1][0]


def _latex(text: str, units: tuple[str, ...]) -> str | None:
    """The LaTeX that math-verify reads; None for what is too long, nested too deep, or broken text."""
    if len(text) > MAX_CHARACTERS:
        return None
    plain = plain_signs(text).strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if len(plain) > len(opening + closing) and plain.startswith(opening) and plain.endswith(closing):
            plain = plain[len(opening) : -len(closing)].strip()
    plain = _SPACING.sub(" ", plain.removesuffix("."))
    for sign, latex in _SIGNS.items():
        plain = plain.replace(sign, latex)
    plain = re.sub(r"\{,\}", ",", plain).replace(r"\$", "").replace("$", r"\$")
    for _ in range(MAX_DEPTH):
        plain = _TEXT.sub(r" \1 ", plain)
    if _TEXT_LEFT.search(plain):
        return None
    plain = _without_unit(plain.replace(r"\%", "%").strip(), units)
    plain = (
        re.sub(r"(?<=\d),(?=\d{3}(?:,\d{3})*(?!\d|,))(?<!\d{4},)", "", plain) if _is_grouped(plain) else plain
    )
    plain = re.sub(r"^(.*?)\s*(?:%|\bpercent)$", r"\\frac{\1}{100}", plain.strip())
    plain = re.sub(r"\s+", " ", re.sub(r",?\s+(?:or|and)\s+", ", ", _with_commands(plain))).strip()
    return plain if _depth(plain) <= MAX_DEPTH else None


def _is_grouped(text: str) -> bool:
    """Whether the text is one number whose commas separate thousands."""
    return re.fullmatch(r"-?\s*\d{1,3}(?:,\d{3})+(?:\.\d+)?\s*%?", text, re.ASCII) is not None


def _without_unit(text: str, units: tuple[str, ...]) -> str:
    for unit in sorted(units, key=len, reverse=True):
        if text.endswith(unit) and not text.removesuffix(unit)[-1:].isalpha():
            return text.removesuffix(unit).strip()
    return text


def _with_commands(text: str) -> str:
    """Plain signs of programs as LaTeX: `sqrt(x)`, `pi`, `x**10`, `2*x`."""
    text = re.sub(r"\\(?:approx|simeq)(?![a-zA-Z])|≈", "=", text).strip().removeprefix("=")
    text = re.sub(
        r"^\s*([+-]?\d+(?:\.\d+)?)[eE]([+-]?\d{1,3})\s*$", r"\1 \\cdot 10^{\2}", text, flags=re.ASCII
    )
    text = re.sub(r"^\s*(-?)\s*(\d+)\s+(\d+)/(\d+)\s*$", r"\1(\2+\\frac{\3}{\4})", text, flags=re.ASCII)
    text = re.sub(r"\*\*|\^", "^", text)
    text = re.sub(r"\^\s*(-?\d{2,}(?:\.\d+)?|-\d+)", r"^{\1}", text)
    text = re.sub(r"\^\s*\(([^()]*)\)", r"^{(\1)}", text)
    text = re.sub(r"(?<!\\)\bsqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = _WORD.sub(lambda m: f"\\{_PLAIN[m[0].lower()]} " if m[0].lower() in _PLAIN else m[0], text)
    return text.replace("*", r" \cdot ").replace("<=", r"\le ").replace(">=", r"\ge ")


def _words(text: str) -> set[str]:
    """The words that are no commands; a brace of an environment names one too, and those are let pass."""
    return set(_WORD.findall(re.sub(r"\\(?:begin|end)\{[a-z]*\}", "", text)))


def _is_text(text: str) -> bool:
    return bool(_words(text)) and re.fullmatch(r"[\w\s'-]+", text) is not None


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _shapes_agree(gold: str, answer: str) -> bool:
    """A pair or interval is compared with one (or with an inequality), and a list or set with one."""
    kinds = [_shape(gold), _shape(answer)]
    return "relation" in kinds or kinds[0] == kinds[1]


def _shape(text: str) -> str:
    if re.search(r"[<>]|\\(?:le|ge|lt|gt|leq|geq|ne|neq|cup|cap|pm|mathbb|setminus|begin)(?![a-z])", text):
        return "relation"
    inner = text[2:-2] if text.startswith(r"\{") and text.endswith(r"\}") else text
    if inner is not text:
        return "list" if _has_comma(inner) else "one"
    if text[:1] in ("(", "[") and text[-1:] in (")", "]") and _has_comma(text[1:-1]):
        return "pair"
    return "list" if _has_comma(text) else "one"


def _has_comma(text: str) -> bool:
    """Whether a comma stands outside all brackets."""
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return False
        if depth == 0 and character in ",;":
            return True
    return False


@lru_cache(maxsize=20_000)
def _compared(gold: str, answer: str) -> bool:
    return _process(os.getpid()).ask(gold, answer)


@cache
def _process(pid: int) -> _Process:
    """The comparing process of this process; one that was forked off has its own."""
    del pid
    return _Process()


@dataclass
class _Process:
    """A process that compares, started at the first question."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    running: subprocess.Popen[str] | None = None

    def ask(self, gold: str, answer: str) -> bool:
        """Whether the two are equal; no, where finding out takes more time or memory than it may."""
        with self.lock:
            process = self.running or self._start()
            self._write(process, json.dumps([gold, answer, CPU_S]))
            reply = self._read(process)
            if reply in ("0", "1"):
                return reply == "1"
            if not reply:
                self._end(process)
            raise WorldError("The process that compares mathematics was ended.", "Is memory short?")

    def _start(self) -> subprocess.Popen[str]:
        require_math()
        command = [sys.executable, "-c", _START, json.dumps(sys.path)]
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, text=True, bufsize=1)
        if self._read(process) != "ready":
            self._end(process)
            raise WorldError(
                "The process that compares mathematics does not start.", "Try: python -m math_verify"
            )
        self.running = process
        return process

    def _write(self, process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            return  # the reply will be missing

    def _read(self, process: subprocess.Popen[str]) -> str:
        """One line of the process; empty where it has ended."""
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], WAIT_S)[0]:
            self._end(process)
            raise WorldError(f"The process that compares mathematics is silent for {WAIT_S:g} s.")
        return process.stdout.readline().strip()

    def _end(self, process: subprocess.Popen[str]) -> None:
        self.running = None
        if process.stdin is not None and process.stdout is not None:
            process.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
