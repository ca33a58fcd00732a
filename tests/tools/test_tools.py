"""Tools made from functions, and passage search."""

import json
import math
import random
from collections import Counter
from enum import Enum
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AfterValidator, BaseModel, Field

from ludus.tools.base import ArgumentError, tool
from ludus.tools.search import MAX_PASSAGES, PassageIndex, search_tool, words


@tool
def look_up(name: str, k: int = 2, deep: bool = False) -> str:
    """Look something up
    in the book.

    Args:
        name: what to look up,
            spelled as in the book.
        k: how many pages: 1 to 9.

    Returns:
        name: the page.
    """
    return f"{name} {k} {deep}"


def test_schema_is_built_from_signature_and_docstring():
    assert look_up.schema == {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look something up in the book.",
            "parameters": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "description": "what to look up, spelled as in the book."},
                    "k": {"type": "integer", "description": "how many pages: 1 to 9.", "default": 2},
                    "deep": {"type": "boolean", "default": False},
                },
                "required": ["name"],
            },
        },
    }


def test_tool_with_explicit_name_and_no_arguments():
    @tool(name="now", timeout_s=1.5, concurrency=3)
    def what_time() -> str:
        return "noon"

    assert (what_time.name, what_time.timeout_s, what_time.concurrency) == ("now", 1.5, 3)
    assert what_time.schema["function"]["parameters"] == {"type": "object", "properties": {}, "required": []}
    assert what_time.check({}) == {}


def test_missing_arguments_are_filled_with_defaults():
    assert look_up.check({"name": "x"}) == {"name": "x", "k": 2, "deep": False}
    assert look_up.check({"k": 5, "deep": True, "name": ""}) == {"name": "", "k": 5, "deep": True}


@pytest.mark.parametrize(
    ("arguments", "words_said"),
    [
        ({}, ["the argument 'name' is missing"]),
        ({"name": None}, ["'name' is wrong", "string"]),
        ({"name": 3}, ["'name' is wrong", "string"]),
        ({"name": ["x"]}, ["'name' is wrong", "string"]),
        ({"name": "x", "k": "2"}, ["'k' is wrong", "integer"]),
        ({"name": "x", "k": 2.5}, ["'k' is wrong"]),
        ({"name": "x", "k": True}, ["'k' is wrong", "integer"]),
        ({"name": "x", "k": {"a": 1}}, ["'k' is wrong", "integer"]),
        ({"name": "x", "deep": "yes"}, ["'deep' is wrong", "boolean"]),
        ({"name": "x", "page": 1}, ["there is no argument 'page'"]),
        ({"k": "2", "page": 1}, ["'name' is missing", "'k' is wrong", "there is no argument 'page'"]),
        ({"name": "\ud800"}, ["is wrong"]),
        ({"name": "x", "k": 10**5000}, ["cannot be read"]),
    ],
)
def test_invalid_arguments_are_described_to_the_model(arguments, words_said):
    with pytest.raises(ArgumentError) as refusal:
        look_up.check(arguments)
    assert all(said in str(refusal.value) for said in words_said), str(refusal.value)
    assert "pydantic" not in str(refusal.value)


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Place(BaseModel):
    name: str
    floor: int = 0


@tool
def paint(colour: Colour, where: Place, size: tuple[int, int], mode: Literal["a", "b"] = "a", title: str = "") -> str:
    """Paint."""
    return f"{colour.name} {where.name} {size} {mode} {title}"


def test_rich_types_are_parsed_from_json_arguments():
    arguments = paint.check({"colour": "red", "where": {"name": "hall"}, "size": [1, 2], "title": "t"})
    assert paint.function(**arguments) == "RED hall (1, 2) a t"
    for wrong in ({"colour": "green"}, {"size": [1]}, {"where": {}}, {"mode": "c"}):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            paint.check({"colour": "red", "where": {"name": "hall"}, "size": [1, 2]} | wrong)


def test_every_schema_reference_resolves():
    parameters = paint.schema["function"]["parameters"]
    assert "title" in parameters["properties"]
    assert parameters["required"] == ["colour", "where", "size"]
    references = [part.split('"')[0] for part in json.dumps(parameters).split('"$ref": "')[1:]]
    assert len(references) == 2
    for reference in references:
        assert reference.removeprefix("#/$defs/") in parameters["$defs"]


def test_annotated_bounds_and_descriptions_are_used():
    @tool
    def turn_to(page: Annotated[int, Field(ge=1, description="the page")] = 1) -> str:
        return str(page)

    assert turn_to.schema["function"]["parameters"]["properties"] == {
        "page": {"type": "integer", "description": "the page", "minimum": 1, "default": 1}
    }
    assert turn_to.check({"page": 2}) == {"page": 2}
    with pytest.raises(ArgumentError, match="'page' is wrong: input should be greater than or equal to 1"):
        turn_to.check({"page": 0})


def test_unexpected_validator_exception_becomes_an_argument_error():
    def lookup(value: str) -> str:
        return {"known": value}[value]

    @tool
    def pick(key: Annotated[str, AfterValidator(lookup)]) -> str:
        return key

    assert pick.check({"key": "known"}) == {"key": "known"}
    with pytest.raises(ArgumentError, match="KeyError"):
        pick.check({"key": "unknown"})


def bare(name) -> str:
    return name


def star(*names: str) -> str:
    return " ".join(names)


def double_star(**names: str) -> str:
    return " ".join(names)


def by_position(name: str, /) -> str:
    return name


@pytest.mark.parametrize("function", [bare, star, double_star, by_position])
def test_undescribable_function_raises_type_error_at_tool_creation(function):
    with pytest.raises(TypeError, match=f"tool {function.__name__}: parameter 'names?'"):
        tool(function)


def test_coroutine_functions_are_detected_as_async():
    async def wait(text: str) -> str:
        return text

    assert tool(wait).is_async
    assert not look_up.is_async


PASSAGES = [
    "Lyon is a city in France.",
    "Paris is the capital of France.",
    "São Paulo is a city in Brazil.",
    "Paris, in Texas, is a city.",
    "Paris, in Texas, is a city!",
]


def by_hand(query, passages, k1=1.2, b=0.75):
    """BM25 as Lucene has it (Kamphuis et al. 2020, table 1), for each passage."""
    documents = [words(passage) for passage in passages]
    mean = sum(map(len, documents)) / len(documents)
    scores = []
    for document in documents:
        counts, score = Counter(document), 0.0
        for word in words(query):
            num_with = sum(word in other for other in documents)
            idf = math.log(1 + (len(documents) - num_with + 0.5) / (num_with + 0.5))
            frequency = counts[word]
            score += idf * frequency / (frequency + k1 * (1 - b + b * len(document) / mean))
        scores.append(score)
    return scores


def test_search_order_equals_hand_computed_bm25():
    source = random.Random(5)
    vocabulary = ["red", "blue", "green", "one", "two", "three", "four"]
    for _ in range(40):
        passages = [" ".join(source.choices(vocabulary, k=source.randint(1, 9))) for _ in range(12)]
        query = " ".join(source.choices(vocabulary, k=source.randint(1, 3)))
        scores = by_hand(query, passages)
        found = PassageIndex(passages).search(query, 5)
        expected = sorted((s for s in scores if s > 0), reverse=True)[:5]
        assert [scores[passages.index(p)] for p in found] == pytest.approx(expected, abs=1e-5)


def test_ties_are_returned_in_passage_order():
    index = PassageIndex(PASSAGES)
    assert index.search("Texas", 2) == [PASSAGES[3], PASSAGES[4]]
    assert PassageIndex(PASSAGES[::-1]).search("Texas", 2) == [PASSAGES[4], PASSAGES[3]]


def test_ties_keep_passage_order_in_a_large_index():
    source = random.Random(3)
    passages = [f"{source.choices(['red red', 'red', 'blue'], [1, 20, 4])[0]} n{i}" for i in range(120)]
    scores = by_hand("red", passages)
    best = sorted(range(120), key=lambda i: (-round(scores[i], 9), i))[:10]
    assert 0 < sum(passages[i].startswith("red red") for i in best) < 10
    assert PassageIndex(passages).search("red", 10) == [passages[i] for i in best]


def test_words_match_without_case_accents_and_punctuation():
    index = PassageIndex(PASSAGES)
    assert index.search("SAO PAULO!", 1) == [PASSAGES[2]]
    assert index.search("sa\u0303o", 1) == [PASSAGES[2]]


@pytest.mark.parametrize("query", ["", "   ", "?!", "Atlantis", "日本", "\ud800", "\x00"])
def test_query_without_common_words_returns_no_passages(query):
    assert PassageIndex(PASSAGES).search(query, 5) == []
    assert search_tool(PassageIndex(PASSAGES)).function(query=query) == "No passage matches."


@pytest.mark.parametrize(("k", "num"), [(1, 1), (2, 2), (0, 1), (-5, 1), (4, 4), (10**30, 4)])
def test_number_of_passages_is_clamped(k, num):
    assert len(PassageIndex(PASSAGES).search("city", k)) == num


def test_search_returns_at_most_max_passages():
    index = PassageIndex([f"city number {i}" for i in range(30)])
    assert len(index.search("city", 30)) == MAX_PASSAGES


@given(query=st.text(max_size=60), k=st.integers(-3, 12))
def test_search_returns_distinct_indexed_passages_for_any_query(query, k):
    found = PassageIndex(PASSAGES).search(query, k)
    assert set(found) <= set(PASSAGES)
    assert len(set(found)) == len(found) <= max(1, min(k, MAX_PASSAGES))


def test_default_passage_count_is_configurable():
    three = search_tool(PassageIndex(PASSAGES), 3)
    assert three.schema["function"]["parameters"]["properties"]["k"]["default"] == 3
    assert three.check({"query": "city"}) == {"query": "city", "k": 3}
    assert three.function(**three.check({"query": "city"})).count("\n") == 2
    assert three.function(query="city", k=1) == PassageIndex(PASSAGES).search("city", 1)[0]
