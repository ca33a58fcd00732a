"""What an answer without a call says: whether it asks for what is missing, and whether it refuses."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from ludus.rewards.exact_match import normalise
from ludus.worlds.functions.domains.catalogue import Function, Param, catalogue
from ludus.worlds.functions.domains.kinds import KINDS
from ludus.worlds.functions.domains.names import FILLERS, ask_phrases, words_of

_IDIOMS = {r"\btime of (the )?day\b": "time", r"\btak(e|es|ing) place\b": "happen"}
"""Phrases with a word that asks for something else, and what they mean."""
_REQUESTS = re.compile(
    r"\b(tell|give|send|let) (me|us)\b|\bi(('d)? still)? (would )?need\b|\bwe need\b|"
    r"\b(please|kindly) (provide|specify|state|name|say|clarify|confirm|choose|pick|share|add|enter)\b|"
    r"^\W*(provide|specify|state|clarify|choose|pick)\b"
)
"""A sentence with one of these asks without a question mark."""

_ABSENT = re.compile(r"^\W*(?:no|not|without|never)\b")
"""A question that begins so ("No time?") asks for nothing unless an interrogative follows."""
_INTERROGATIVE = re.compile(r"\b(?:what|which|when|where|who\w*|how|could|can|would|will|may|shall|should)\b")

_ALONE = frozenset(ask for kind in KINDS.values() for ask in kind.asks) | {"place"}
"""What asks for a kind of thing in one word."""
_FILLERS = frozenset("\u115f\u1160\u2800")
"""Letters and symbols without ink."""
_NOT = r"(?:not|n't|never|no longer)"
_THING = r"(?:tool|function|option|way|means|capabilit\w+|access|abilit\w+|support|call|match|matche|api)s?"
_REFUSALS = re.compile(
    r"^\W*(?:no|nope|none|impossible|unsupported|unavailable)\W*$|"
    rf"\b(?:can|could|do|does|did|is|are|was|were|am|be|will|would|have|has|'m|'re|'s)(?:\s+\w+)?\s*{_NOT}\b"
    r"(?!\W+(?:an? |any )?(?:problem|issue|worr|trouble|difficult|hard|bad|only|hesitate|mention)).*\w|"
    r"\b(?:can only|cannot|can'?t|won'?t|unable|impossible|unavailable|unsupported)\b|"
    r"\b(?:lack(?:s|ing)?|decline|refuse)\b|"
    r"\b(?:beyond|outside|out of)\b.*\b(?:me|my|scope|reach|tools?|functions?|abilit\w+|capabilit\w+|i)\b|"
    rf"\b(?:sorry|afraid|unfortunately|regrettably),? (?:but )?(?:no|{_NOT})\b|"
    rf"\b(?:no|none|nothing|not any|neither|without any?|not one|no such)\b(?:\s+\w+){{0,4}}\s+(?:{_THING}|"
    r"these|those|the|my|them|here|fits?|available|suitable|appropriate|applicable|for (?:that|this|it))\b|"
    rf"\b(?:no|none|nothing) (?:{_THING}|of|here|fits?|available|suitable|appropriate|suits?|does|do|can|"
    r"matches|on offer|i have|that)\b|"
    rf"\b{_NOT} (?:possible|available|supported|able|allowed|something|within|covered|offered|provided|"
    r"equipped|an option|among|part of|in a position)\b|"
    r"\b(?:tools?|functions?)\b.*\b(?:missing|absent)\b|\b(?:missing|absent)\b.*\b(?:tools?|functions?)\b"
)
"""A text with one of these says that something cannot be done."""

_TRIED = words_of(
    """looked checked searched tried attempted considered reviewed examined wanted wished noticed understood
    read seen thought explored scanned compared been asked needed found received inspected listed gone hoped
    had limited designed restricted supposed related required provided offered intended based suited equipped
    meant requested unsupported connected allowed permitted given interested concerned called named included
    indeed unrelated located dedicated confused tasked expected prepared inclined scared afraid tired"""
)
"""Participles that do not say that something was carried out."""
_DONE = (
    r"sent|set|made|put|paid|bought|sold|written|wrote|got|took|taken|gave|told|did|done|ran|left|chosen|"
    r"spoken|spent|kept|held|cut|shut|lit|hung|rung|begun|rebuilt|withdrawn|brought|thrown|\w+ed"
)
_CLAIMS = re.compile(
    r"\b(?:i|we)(?:'ve| have|'d| had)?(?: \w+ly| just| already| now| also| then| went ahead and)* "
    rf"(?P<own>{_DONE})\b|"
    r"\b(?:i|we) (?P<ahead>went ahead|managed|took care)\b|"
    r"\b(?:is|are|was|were|been|be|got|gets|it's|that's|all)(?: \w+ly| now| already| all)* "
    rf"(?P<passive>{_DONE})\b|"
    rf"^\W*(?:ok(?:ay)?|sure|yes|alright|great|all|it|now)?\W*(?:successfully )?(?P<alone>{_DONE})\b|"
    r"\b(?P<word>done|completed|accomplished|finished|succeeded|successful(?:ly)?|success|all set|"
    r"taken care of|is ready|are ready|confirmed|found (?:it|them|him|her))\b"
)
"""A clause with one of these says that something was carried out, unless the clause denies it."""
_DENIED = re.compile(
    r"\b(?:not|no|none|nothing|never|cannot|unable|neither|nor|without|nobody|to be|if|once|until)\b|n't\b"
)
_CLAUSES = re.compile(
    r"[.!?;:,()\n\u2013\u2014]|\s-\s|\b(?:but|so|and|however|because|since|although|though|anyway|then|which|while)\b"
)


@dataclass(frozen=True, slots=True)
class Ask:
    """What must be asked for: `name`, a parameter of `function`, by all words of one of the `phrases`.

    `given` has the words and the value of each thing that the request says. `context` are words of the
    request and of the function, which may stand in any question; `kinds` are those of its parameters.
    """

    function: str
    name: str
    phrases: frozenset[frozenset[str]]
    given: tuple[tuple[frozenset[str], str], ...]
    request: str
    context: frozenset[str] = frozenset()
    kinds: frozenset[str] = frozenset()


def make_ask(
    function: Function, param: Param, offered: str, given: Sequence[tuple[frozenset[str], str]], request: str
) -> Ask:
    """Return what must be asked for where a request leaves out `param`, which the task calls `offered`."""
    context = words_of(request) | frozenset(function.name.split("_"))
    kinds = frozenset(one.kind for one in function.params)
    phrases = ask_phrases(param, offered)
    return Ask(function.name, param.name, phrases, tuple(given), request, context, kinds)


def asks_for(answer: str, ask: Ask) -> bool:
    """Return whether an answer asks for what is missing.

    Its questions have all words of a phrase for it. The answer does not repeat the request and does not
    claim that it was carried out. Its questions name nothing that was given, unless it says the value too,
    and beside what is missing one other kind of thing that the function takes at most: a list of everything
    is not an answer.
    """
    plain = visible(answer)
    sentences = [(one, _asks(one)) for one in re.findall(r"[^.?!\n]+[.?!]?", plain)]
    asking, other = ("\n".join(one for one, is_asking in sentences if is_asking is which) for which in (True, False))
    asked = words_of(asking)
    if not any(phrase <= asked for phrase in ask.phrases):
        return False
    own = frozenset[str]().union(*ask.phrases)
    if not _of_one_kind(asked - own - ask.context, ask.kinds):
        return False
    said = normalise(plain)
    if normalise(ask.request) in said or claims_done(other):
        return False
    return all(not asked & words or normalise(value) in said for words, value in ask.given)


def refuses(answer: str) -> bool:
    """Return whether an answer says in visible words that it cannot be done, and nowhere that it was."""
    plain = visible(answer)
    return _REFUSALS.search(plain) is not None and not claims_done(plain)


def speaks(answer: str) -> bool:
    """Return whether an answer has visible words and does not claim that the model carried something out."""
    plain = visible(answer)
    is_done = re.fullmatch(r"\W*(?:all |it is |it's )?(?:done|completed|finished)\W*", plain)
    return any(map(str.isalnum, plain)) and is_done is None and not claims_done(plain, frozenset({"own", "ahead"}))


def visible(text: str) -> str:
    """The text in lower case as a reader sees it: without format characters, fillers and combining marks."""
    if text.isascii() and text.isprintable():
        return text.strip().casefold()
    plain = unicodedata.normalize("NFKD", text).replace("\u2019", "'")
    spaced = (char if char == "\n" or not char.isspace() else " " for char in plain)
    kept = (char for char in spaced if char == "\n" or not _is_hidden(char))
    return re.sub(" +", " ", "".join(kept)).strip().casefold()


def claims_done(plain: str, groups: frozenset[str] = frozenset()) -> bool:
    """Return whether a clause of a text, as `visible` returns it, says that something was carried out.

    `groups`, if any, narrows this to some of the groups of `_CLAIMS`.
    """
    for clause in _CLAUSES.split(plain):
        for found in _CLAIMS.finditer(clause):
            group = str(found.lastgroup)
            counts = not groups or group in groups
            if counts and found[group] not in _TRIED and not _DENIED.search(clause):
                return True
    return False


def _asks(sentence: str) -> bool:
    if _REQUESTS.search(sentence) is not None:
        return True
    return sentence.endswith("?") and (not _ABSENT.search(sentence) or _INTERROGATIVE.search(sentence) is not None)


def _is_hidden(char: str) -> bool:
    return char in _FILLERS or unicodedata.category(char) in ("Cc", "Cf", "Cn", "Co", "Cs", "Me", "Mn")


def _of_one_kind(words: frozenset[str], takes: frozenset[str]) -> bool:
    """Whether all of the words that ask for anything ask for one kind of thing; by a word that alone is a
    question for it, only if the function takes it."""
    kinds = {word: _asking_words()[word] for word in words & _asking_words().keys()}
    plain = all(kinds[word] & takes for word in kinds.keys() & _ALONE)
    return plain and (not kinds or bool(frozenset.intersection(*kinds.values())))


@cache
def _asking_words() -> Mapping[str, frozenset[str]]:
    """The kinds that each word asks for: the words of every phrase by which a question is paid, and those of
    the other kinds."""
    found: dict[str, set[str]] = {}
    params = [param for function in catalogue().values() for param in function.params if not param.of.letter]
    phrases = [(param.kind, ask_phrases(param, param.name)) for param in params]
    phrases += [(kind.name, frozenset(map(words_of, kind.asks))) for kind in KINDS.values() if not kind.letter]
    for kind, asks in phrases:
        for word in frozenset[str]().union(*asks) - FILLERS:
            found.setdefault(word, set()).add(kind)
    return {word: frozenset(kinds) for word, kinds in found.items()}
