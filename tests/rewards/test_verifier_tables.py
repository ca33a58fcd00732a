"""Every verifier has a table of at least 40 pairs; a new one without a table fails here."""

import importlib
import inspect
import pkgutil

import pytest

import ludus.rewards
from ludus.rewards.code.sql_rows import read_rows, same_rows
from ludus.rewards.exact_match import ExpectedAnswers, is_answer, matches
from ludus.rewards.math.math_verify import is_equal
from ludus.rewards.paper_rewards import ExpectedCall
from ludus.worlds.functions.grader import calls_agree
from tables import (
    answer_pairs,
    call_pairs,
    choice_pairs,
    composite_pairs,
    episode_pairs,
    framed_pairs,
    function_pairs,
    held_out_answers,
    held_out_math,
    json_pairs,
    math_pairs,
    number_pairs,
    patch_pairs,
    rows_forms,
    rows_pairs,
    shaping_pairs,
    suite_pairs,
)

LEAST = 40
LARGE = 150
"""Right and wrong forms each, of the verifiers that are attacked most."""
COMBINATORS = {"by_record", "only_if", "either"}
"""Those that make a verifier of others."""
_answers = (answer_pairs.ACCEPTED, answer_pairs.REJECTED)
_calls = (call_pairs.ACCEPTED, call_pairs.REJECTED)
TABLES = {
    "exact_match": _answers,
    "strict_match": _answers,
    "token_f1": _answers,
    "accuracy": _answers,
    "calls_of_the_wrong": _answers,
    "wrong_and_ill_formed": _answers,
    "tool_correctness": _calls,
    "right_names": _calls,
    "right_argument_names": _calls,
    "right_argument_values": _calls,
    "well_formed": (episode_pairs.EPISODES,),
    "format_kept": (episode_pairs.EPISODES,),
    "valid_calls": (episode_pairs.EPISODES,),
    "multiple_choice": (choice_pairs.ACCEPTED, choice_pairs.REJECTED),
    "mathematics": (math_pairs.ACCEPTED, math_pairs.REJECTED),
    "number_close": (number_pairs.ACCEPTED, number_pairs.REJECTED),
    "patch_similarity": (patch_pairs.ACCEPTED, patch_pairs.REJECTED, patch_pairs.BETWEEN),
    "rows_match": (rows_pairs.ACCEPTED, rows_pairs.REJECTED),
    "json_schema": (json_pairs.SCHEMA_ACCEPTED, json_pairs.SCHEMA_REJECTED),
    "json_value": (json_pairs.VALUE_ACCEPTED, json_pairs.VALUE_REJECTED),
    "same_state": (json_pairs.STATE_ACCEPTED, json_pairs.STATE_REJECTED),
    "suite_passes": (suite_pairs.ACCEPTED, suite_pairs.REJECTED),
    "share_passed": (suite_pairs.SHARES,),
    "thrift": (suite_pairs.THRIFT,),
    "extra_calls": (shaping_pairs.COUNTS,),
    "invalid_calls": (shaping_pairs.COUNTS,),
    "used_results": (shaping_pairs.USED_RESULTS,),
    "tool_diversity": (shaping_pairs.DIVERSITY,),
    "repeated_calls": (shaping_pairs.REPEATS, shaping_pairs.REPEATED_CALLS),
    "long_answer": (shaping_pairs.LENGTHS, shaping_pairs.LONG_TEXTS),
    "language_consistency": (shaping_pairs.SCRIPTS,),
    "citation_support": (shaping_pairs.SUPPORT_ACCEPTED, shaping_pairs.SUPPORT_REJECTED),
    **dict.fromkeys(("think_format", "format_score", "tool_use", "extra_turns"), (composite_pairs.TRANSCRIPTS,)),
}


def verifiers():
    """The public functions that score an episode, or make one that does."""
    found = set()
    for info in pkgutil.walk_packages(ludus.rewards.__path__, "ludus.rewards."):
        module = importlib.import_module(info.name)
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ != info.name or name.startswith("_"):
                continue
            signature = inspect.signature(function)
            arguments = list(signature.parameters) == ["task", "trajectory"]
            scores = arguments and signature.return_annotation == "float"
            if scores or signature.return_annotation == "RewardFunction":
                found.add(name)
    return found - COMBINATORS


def test_every_verifier_has_a_table():
    assert verifiers() == TABLES.keys()


@pytest.mark.parametrize("name", TABLES)
def test_verifier_table_has_enough_pairs_and_no_duplicates(name):
    pairs = [repr(pair) for table in TABLES[name] for pair in table]
    assert len(pairs) >= LEAST
    assert len(set(pairs)) == len(pairs)


def _is_rows(text, due):
    rows = read_rows(text)
    return rows is not None and same_rows(rows, due)


def _is_short_answer(text, accepted):
    return is_answer(text, ExpectedAnswers(tuple(accepted)))


FORMS = {
    "mathematics": (is_equal, math_pairs),
    "mathematics, held out": (is_equal, held_out_math),
    "answers": (_is_short_answer, framed_pairs),
    "answers, held out": (_is_short_answer, held_out_answers),
    "rows": (_is_rows, rows_forms),
    "functions": (lambda made, gold: calls_agree(gold, [ExpectedCall(*call) for call in made]), function_pairs),
}


@pytest.mark.parametrize("name", FORMS)
def test_correct_forms_are_accepted_and_wrong_forms_are_rejected(name):
    judge, table = FORMS[name]
    refused = [pair for pair in table.ACCEPTED if not judge(*pair)]
    paid = [pair for pair in table.REJECTED if judge(*pair)]
    right, wrong = len(table.ACCEPTED), len(table.REJECTED)
    print(f"{name}: {len(refused)} of {right} right forms refused, {len(paid)} of {wrong} wrong forms paid")
    assert (refused, paid) == ([], [])
    assert min(right, wrong) >= (120 if "held out" in name else LARGE)


def test_answer_in_a_sentence_is_rejected_by_strict_matching():
    plain = [frame for frame in framed_pairs.RIGHT_FRAMES if not any(map(str.isalpha, frame))]
    framed = [frame for frame in framed_pairs.RIGHT_FRAMES if frame not in plain]
    assert len(framed) >= 30
    assert not [frame for frame in framed if matches(frame.format("Paris"), ExpectedAnswers(("Paris",)))]
