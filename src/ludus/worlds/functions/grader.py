"""The truth of a task, and the comparison of episodes with it: of calls, and of answers without a call.

Calls that fit no offered function are ignored if the truth has calls, and failures if no call is right.
Values are compared by type: texts without case and extra blanks, numbers by value, lists in order; a text
never equals a number. An answer without a call asks for a missing argument, states a fact, or refuses.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal

from ludus.rewards.base import truth_of
from ludus.rewards.code.turns import Progress, made_calls
from ludus.rewards.code.unit_tests import Suite, share_passed, suite_passes
from ludus.rewards.exact_match import ExpectedAnswers, matches, normalise
from ludus.rewards.extract import last_output
from ludus.rewards.paper_rewards import ExpectedCall, ExpectedCalls
from ludus.types import JSON, StopReason, Task, ToolStatus, Trajectory
from ludus.worlds.functions.catalogue import Param, Scene, catalogue, read_data, vocabulary

VERDICT: Final = "verdict"
"""The tool name of the outcome that lists which turns of a task of several turns agree with the gold calls."""
_all_turns = suite_passes(last_output(VERDICT))
_some_turns = share_passed(last_output(VERDICT))
_INVALID = (ToolStatus.MALFORMED, ToolStatus.UNKNOWN_TOOL, ToolStatus.BAD_ARGUMENTS)
_ABSOLUTE_TOLERANCE = 1e-9
Right = Literal["call", "any_call", "ask", "answer", "decline"]
"""The right response: the gold calls, any call, or without a call a question, an answer, or a refusal."""
_INVISIBLE: Final = frozenset("\u115f\u1160\u2800")
"""Invisible letters and symbols."""
_HIDDEN: Final = ("Cc", "Cf", "Cn", "Co", "Cs", "Me", "Mn")
"""Categories of characters that are not displayed."""


def words_of(text: str) -> frozenset[str]:
    """Return the words of a text in lower case."""
    return frozenset(re.findall(r"[\w']+", text.casefold()))


_FILLERS: Final = words_of("how what which for of to in at on by the a an is it one")
"""Words of any question, which alone identify no argument."""
_EMPTY: Final = words_of("of in at on by num id is a the to into what which one most send add")
_INTERROGATIVES: Final = words_of("who whom where when name called")
"""Interrogatives and nouns of no particular topic."""


@dataclass(frozen=True, slots=True)
class Ask:
    """The question for the parameter `param` of `function`; `values` are the required arguments in the request."""

    function: str
    param: Param
    request: str
    values: tuple[tuple[Param, JSON], ...]

    def stated(self) -> Iterator[tuple[frozenset[str], str]]:
        """Yield the words that ask for each other argument, and its value in the request.

        The words of the missing parameter and identifiers are excluded, since a question may name its
        topic; persons have interrogatives only.
        """
        taken = frozenset({"from"}).union(*ask_phrases(self.param))
        for param, value in self.values:
            if param == self.param or param.of.letter:
                continue
            words = frozenset(param.of.asks) & _INTERROGATIVES
            if param.kind in ("person", "people"):
                words -= {"name"}
            else:
                words |= {*param.name.split("_"), *vocabulary().aliases[param.name][0].split("_")}
            if words := words - taken - _EMPTY:
                yield words, " and ".join(map(str, value if isinstance(value, list) else [value]))


@dataclass(frozen=True, slots=True)
class GoldCall:
    """A required call: the right values of each argument, and the arguments that may be omitted.

    `after` are the indices of earlier gold calls whose results it takes.
    """

    name: str
    accepted: Mapping[str, tuple[JSON, ...]]
    optional: frozenset[str] = frozenset()
    after: tuple[int, ...] = ()

    def with_values(self, place: int) -> ExpectedCall:
        """Return the call with the right value at index `place` of each argument, without optional ones."""
        required = {name: values for name, values in self.accepted.items() if name not in self.optional}
        return ExpectedCall(self.name, {name: values[place] for name, values in required.items()})

    @property
    def expected(self) -> ExpectedCall:
        """The call with the first values."""
        return self.with_values(0)

    def fits(self, made: ExpectedCall) -> bool:
        """Return whether a call equals this one."""
        if made.name != self.name or not made.arguments.keys() <= self.accepted.keys():
            return False
        missing = self.accepted.keys() - made.arguments.keys()
        return missing <= self.optional and all(
            any(equal(value, accepted) for accepted in self.accepted[name]) for name, value in made.arguments.items()
        )


@dataclass(frozen=True, slots=True)
class Truth(ExpectedCalls):
    """The truth: the gold calls, or another right response. `invented` is a wrong call with values from nowhere."""

    right: Right
    gold: tuple[GoldCall, ...]
    scene: Scene
    ask: Ask | None = None
    answer: ExpectedAnswers | None = None
    invented: ExpectedCall | None = None

    def accepts_text(self, answer: str) -> bool:
        """Return whether an answer without calls is right: it asks, answers, or refuses.

        If only descriptions of functions are available, any text is right unless it claims a call.
        """
        if self.ask is not None:
            return asks_for(answer, self.ask)
        if self.answer is not None:
            return matches(answer, self.answer)
        return refuses(answer) if self.scene.functions else speaks(answer)


def equal(given: JSON, wanted: JSON) -> bool:
    """Return whether two values count as equal."""
    if isinstance(given, bool) or isinstance(wanted, bool):
        return given is wanted
    if isinstance(given, int | float) and isinstance(wanted, int | float):
        try:
            return abs(given - wanted) < _ABSOLUTE_TOLERANCE
        except OverflowError:  # an integer beyond the range of floats
            return False
    if isinstance(given, str) and isinstance(wanted, str):
        return " ".join(given.casefold().split()) == " ".join(wanted.casefold().split())
    if isinstance(given, list) and isinstance(wanted, list):
        return len(given) == len(wanted) and all(map(equal, given, wanted))
    if isinstance(given, dict) and isinstance(wanted, dict):
        return given.keys() == wanted.keys() and all(equal(given[key], wanted[key]) for key in given)
    return given is None and wanted is None


def executed_calls(trajectory: Trajectory) -> list[ExpectedCall]:
    """Return the calls of an episode that fit an offered function, in order."""
    ran = {outcome.call_id for outcome in trajectory.outcomes if outcome.status not in _INVALID}
    return [
        ExpectedCall(call["function"]["name"], json.loads(call["function"]["arguments"]))
        for message in trajectory.messages
        for call in message.get("tool_calls", [])
        if call["id"] in ran
    ]


def calls_agree(gold: Sequence[GoldCall], made: Sequence[ExpectedCall], matched: frozenset[int] = frozenset()) -> bool:
    """Return whether the calls are the gold calls, each once and after those whose results it takes.

    `matched` are the indices of the gold calls that were made before.
    """
    if len(matched) + len(made) != len(gold):
        return False
    return not made or any(calls_agree(gold, made[1:], matched | {i}) for i in _matches_of(made[0], gold, matched))


def _matches_of(call: ExpectedCall, gold: Sequence[GoldCall], made: Set[int]) -> Iterator[int]:
    """Yield the indices of the gold calls that equal a call, except those in `made` and those that take results
    of calls not in `made`."""
    return (i for i, wanted in enumerate(gold) if i not in made and made >= set(wanted.after) and wanted.fits(call))


def solved(task: Task, trajectory: Trajectory) -> float:
    """Return 1 if the episode has the right response and ended with an answer; else 0."""
    if isinstance(task.truth, Suite):
        return _all_turns(task, trajectory)
    truth = truth_of(task, Truth)
    if trajectory.stop_reason is not StopReason.ANSWERED or not trajectory.answer.strip():
        return 0.0
    if truth.right == "call":
        return float(calls_agree(truth.gold, executed_calls(trajectory)))
    if truth.right == "any_call":
        return float(bool(executed_calls(trajectory)))
    return float(not trajectory.outcomes and truth.accepts_text(trajectory.answer))


def part_made(task: Task, trajectory: Trajectory) -> float:
    """Return 1 if at least one gold call was made, or one turn agrees with its gold calls; else 0."""
    if isinstance(task.truth, Suite):
        return float(_some_turns(task, trajectory) > 0)
    made = executed_calls(trajectory)
    return float(any(wanted.fits(call) for wanted in truth_of(task, Truth).gold for call in made))


def gold_calls_made(task: Task, trajectory: Trajectory) -> Progress:
    """Verify turns: a milestone is a gold call, made after those whose results it takes."""
    gold = truth_of(task, Truth).gold
    reached: list[set[str]] = [set() for _ in range(trajectory.num_turns)]
    made: set[int] = set()
    for call in made_calls(task, trajectory):
        number = next(_matches_of(ExpectedCall(call.name, call.arguments), gold, made), None)
        if number is not None and call.outcome.status is ToolStatus.OK:
            made.add(number)
            reached[call.turn].add(str(number))
    return Progress(reached, len(gold))


def ask_phrases(param: Param) -> frozenset[frozenset[str]]:
    """Return the phrases, as words, one of which a question for a parameter contains: of its kind and its names."""
    asks = map(words_of, vocabulary().asks.get(param.name, param.of.asks))
    names = (frozenset(name.split("_")) - _EMPTY for name in (param.name, *vocabulary().aliases[param.name]))
    return frozenset(phrase for phrase in (*asks, *names) if phrase - _FILLERS or len(phrase) > 1)


def asks_for(answer: str, ask: Ask) -> bool:
    """Return whether an answer asks for the missing argument.

    Its questions have all words of a phrase. The answer neither repeats the request nor claims that it was
    carried out. Its questions name no given argument without its value, and at most one other kind of thing
    that the function takes: a list of everything is not a question.
    """
    plain = visible(answer)
    sentences = [(one, _asks(one)) for one in re.findall(r"[^.?!\n]+[.?!]?", plain)]
    asking, other = ("\n".join(one for one, is_asking in sentences if is_asking is which) for which in (True, False))
    asked, normal, params = words_of(asking), normalise(plain), catalogue()[ask.function].params
    phrases = ask_phrases(ask.param)
    others = asked - words_of(ask.request) - frozenset(ask.function.split("_")).union(*phrases)
    return (
        any(phrase <= asked for phrase in phrases)
        and _of_one_kind(others, frozenset(param.kind for param in params))
        and normalise(ask.request) not in normal
        and not claims_done(other)
        and all(not asked & words or normalise(value) in normal for words, value in ask.stated())
    )


def refuses(answer: str) -> bool:
    """Return whether the visible words of an answer refuse and claim nothing as done."""
    plain = visible(answer)
    return _matches("refusals", plain) and not claims_done(plain)


def speaks(answer: str) -> bool:
    """Return whether an answer has visible words that do not claim an action of the model."""
    plain = visible(answer)
    is_done = re.fullmatch(r"\W*(?:all |it is |it's )?(?:done|completed|finished)\W*", plain)
    return any(map(str.isalnum, plain)) and is_done is None and not claims_done(plain, frozenset({"own", "ahead"}))


def visible(text: str) -> str:
    """Return the text in lower case without format characters, fillers and combining marks."""
    if text.isascii() and text.isprintable():
        return text.strip().casefold()
    plain = re.sub(r"[^\S\n]", " ", unicodedata.normalize("NFKD", text).replace("\u2019", "'"))
    shown = (c for c in plain if c == "\n" or (c not in _INVISIBLE and unicodedata.category(c) not in _HIDDEN))
    return re.sub(" +", " ", "".join(shown)).strip().casefold()


def claims_done(plain: str, groups: frozenset[str] = frozenset()) -> bool:
    """Return whether a clause of a text, as returned by `visible`, claims that something was done.

    `groups`, if any, restricts this to some named groups of the pattern `claims`.
    """
    return any(
        (not groups or found.lastgroup in groups)
        and not _patterns()["tried"].fullmatch(found[str(found.lastgroup)])
        and not _matches("denied", clause)
        for clause in _patterns()["clauses"].split(plain)
        for found in _patterns()["claims"].finditer(clause)
    )


@cache
def _patterns() -> Mapping[str, re.Pattern[str]]:
    tables = read_data("replies.toml", dict)
    groups = {f"<{name}>": f"(?:{'|'.join(parts)})" for name, parts in tables.pop("fragments").items()}
    texts = {name: re.split(r"(<\w+>)", "|".join(parts)) for name, parts in tables.items()}
    return {name: re.compile("".join(groups.get(part, part) for part in parts)) for name, parts in texts.items()}


def _matches(name: str, text: str) -> bool:
    return _patterns()[name].search(text) is not None


def _asks(sentence: str) -> bool:
    is_open = not _matches("absent", sentence) or _matches("interrogative", sentence)
    return _matches("requests", sentence) or (sentence.endswith("?") and is_open)


def _of_one_kind(words: frozenset[str], takes: frozenset[str]) -> bool:
    """Return whether all asking words refer to one kind; if only one word does, the function must take that kind."""
    kinds = {word: _asking_words()[word] for word in words & _asking_words().keys()}
    alone = {phrase for kind in vocabulary().kinds.values() for phrase in kind.asks} | {"place"}
    taken = all(kinds[word] & takes for word in kinds.keys() & alone)
    return taken and (not kinds or bool(frozenset.intersection(*kinds.values())))


@cache
def _asking_words() -> Mapping[str, frozenset[str]]:
    """Return the kinds that each word of any phrase asks for."""
    found: dict[str, frozenset[str]] = {}
    kinds = [(name, kind) for name, kind in vocabulary().kinds.items() if not kind.letter]
    params = [param for function in catalogue().values() for param in function.params if not param.of.letter]
    phrases = [(param.kind, ask_phrases(param)) for param in params]
    for kind, asks in phrases + [(name, frozenset(map(words_of, kind.asks))) for name, kind in kinds]:
        for word in frozenset[str]().union(*asks) - _FILLERS:
            found[word] = found.get(word, frozenset()) | {kind}
    return found
