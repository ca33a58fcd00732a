"""Replies without a call in the functions world: questions ask for the missing argument, refusals refuse."""

import pytest

from ludus.worlds.functions.catalogue import catalogue
from ludus.worlds.functions.grader import Ask, ask_phrases, asks_for, refuses, speaks
from ludus.worlds.functions.world import FunctionsSettings, FunctionsWorld
from tables import held_out_replies
from tables.reply_pairs import ASKS_RIGHT, ASKS_WRONG, REFUSALS_RIGHT, REFUSALS_WRONG

REQUESTS = {
    "event date": ("create_event", {"title": "dentist", "time": "10:00"}, "Put dentist on my calendar at 10:00."),
    "event time": ("create_event", {"title": "dentist", "date": "March 3"}, "Put dentist on my calendar on March 3."),
    "event title": ("create_event", {"date": "March 3", "time": "10:00"}, "Put an entry in for March 3 at 10:00."),
    "message text": ("send_text", {"phone": "0705"}, "Send a text message to 0705."),
    "hotel nights": ("book_hotel", {"hotel_id": "H12", "guest": "Ana"}, "Book hotel H12 for Ana."),
    "transfer amount": (
        "transfer_money",
        {"source": "checking", "target": "savings"},
        "Transfer money from checking to savings.",
    ),
    "lamp room": ("find_device", {"appliance": "lamp"}, "Find the lamp."),
}
"""What each case of the table says; the one parameter that is left out is to be asked for."""


def ask_of(case):
    name, values, request = REQUESTS[case]
    function = catalogue()[name]
    (missing,) = (param for param in function.required if param.name not in values)
    stated = tuple((param, values[param.name]) for param in function.required if param != missing)
    return Ask(name, missing, request, stated)


@pytest.mark.parametrize(("pairs", "is_right"), [(ASKS_RIGHT, True), (ASKS_WRONG, False)])
def test_clarifying_question_must_name_the_missing_value_and_little_else(pairs, is_right):
    assert len(pairs) + len(REFUSALS_RIGHT if is_right else REFUSALS_WRONG) >= 100
    assert [(case, text) for case, text in pairs if asks_for(text, ask_of(case)) is not is_right] == []


@pytest.mark.parametrize(("texts", "is_right"), [(REFUSALS_RIGHT, True), (REFUSALS_WRONG, False)])
def test_refusal_needs_refusing_words_and_no_claim(texts, is_right):
    assert [text for text in texts if refuses(text) is not is_right] == []


def test_held_out_questions_and_refusals():
    right, wrong = map(held_out_replies.cases, (held_out_replies.ASKS_RIGHT, held_out_replies.ASKS_WRONG))
    assert [pair for pair in right if not asks_for(pair[1], ask_of(pair[0]))] == []
    assert [pair for pair in wrong if asks_for(pair[1], ask_of(pair[0]))] == []
    assert [text for text in held_out_replies.REFUSALS_RIGHT if not refuses(text)] == []
    assert [text for text in held_out_replies.REFUSALS_WRONG if refuses(text)] == []
    assert min(len(right), len(wrong)) >= 40


def test_no_constant_question_is_paid_often():
    tasks = FunctionsWorld(FunctionsSettings(num_tasks=150, levels=(2, 3))).tasks("train")
    asks = [task.truth.ask for task in tasks if task.truth.ask is not None]
    phrases = {tuple(sorted(phrase)) for ask in asks for phrase in ask_phrases(ask.param)}

    def paid(*words):
        return sum(asks_for(f"Which {', '.join(words)}?", ask) for ask in asks) / len(asks)

    one = max(phrases, key=lambda phrase: paid(*phrase))
    two = max(paid(*one, *phrase) for phrase in phrases)
    assert paid("name", "when", "many") == 0
    assert two < 0.4  # the best of two phrases, where 0.53 was paid for two words, and 0.89 for thirteen


@pytest.mark.parametrize(
    ("text", "accepts_text"),
    [
        ("Paris was founded long ago.", True),
        ("\u200b", False),
        ("...", False),
        ("Done.", False),
        ("I booked it.", False),
    ],
)
def test_without_callable_functions_any_answer_that_claims_no_call_is_accepted(text, accepts_text):
    assert speaks(text) is accepts_text
