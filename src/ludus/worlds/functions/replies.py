"""Classification of answers without a call: whether they ask for a missing argument, or refuse."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

from ludus.rewards.exact_match import normalise
from ludus.types import JSON
from ludus.worlds.functions.catalogue import Param, catalogue
from ludus.worlds.functions.state import read_data, vocabulary

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


def ask_phrases(param: Param) -> frozenset[frozenset[str]]:
    """Return the phrases, as words, one of which a question for a parameter contains: of its kind and its names."""
    said = map(words_of, vocabulary().asks.get(param.name, param.of.asks))
    names = (frozenset(name.split("_")) - _EMPTY for name in (param.name, *vocabulary().aliases[param.name]))
    return frozenset(phrase for phrase in (*said, *names) if phrase - _FILLERS or len(phrase) > 1)


def asks_for(answer: str, ask: Ask) -> bool:
    """Return whether an answer asks for the missing argument.

    Its questions have all words of a phrase. The answer neither repeats the request nor claims that it was
    carried out. Its questions name no given argument without its value, and at most one other kind of thing
    that the function takes: a list of everything is not a question.
    """
    plain = visible(answer)
    sentences = [(one, _asks(one)) for one in re.findall(r"[^.?!\n]+[.?!]?", plain)]
    asking, other = ("\n".join(one for one, is_asking in sentences if is_asking is which) for which in (True, False))
    asked, said, params = words_of(asking), normalise(plain), catalogue()[ask.function].params
    phrases = ask_phrases(ask.param)
    others = asked - words_of(ask.request) - frozenset(ask.function.split("_")).union(*phrases)
    return (
        any(phrase <= asked for phrase in phrases)
        and _of_one_kind(others, frozenset(param.kind for param in params))
        and normalise(ask.request) not in said
        and not claims_done(other)
        and all(not asked & words or normalise(value) in said for words, value in ask.stated())
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
