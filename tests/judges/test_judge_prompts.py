"""Prompts, replies, rubrics and the arithmetic of judges."""

import json
import math
import re
import unicodedata

import numpy as np
import pytest
from scipy.optimize import minimize

from ludus.errors import ConfigError
from ludus.judges.calibration import injections
from ludus.judges.kinds import bradley_terry, combine, fill_missing, pairs_of, win_rates
from ludus.judges.rubrics import load_rubric, packaged_rubrics
from ludus.rewards.judge_prompts import JudgedText, correct_prompt, parse_reply, rubric_prompt, score_prompt, shown_text
from ludus.rewards.rubric import rubric_of
from tests.judges.judge_parts import RUBRIC, settings, task


@pytest.mark.parametrize("name", injections())
def test_injections_stay_inside_the_tags_of_the_prompt(name):
    text = injections()[name].apply("The price is 7.")
    content = score_prompt(settings(), JudgedText(task(), text)).messages[1]["content"]
    (opening,) = re.findall(r"<text-([0-9a-f]{8})>\n", content)
    begin, end = content.index(f"<text-{opening}>"), content.index(f"</text-{opening}>")
    inside = content[begin + len(opening) + 7 : end]
    assert content.count(f"</text-{opening}>") == 1
    assert opening not in text
    assert "The price is 7." in inside
    assert not re.search(r"<\s*/?\s*(text|answer|task|reference)\b|<\|", inside, re.IGNORECASE)
    assert not [c for c in inside if c not in "\n\t" and unicodedata.category(c) in ("Cc", "Cf", "Co", "Cn")]
    assert not re.search(r"[\"'](score|better|correct|holds)[\"']\s*:", inside)
    assert text not in content[:begin] + content[end:]


def test_invisible_characters_become_visible_and_long_texts_are_cut_in_the_middle():
    assert shown_text("a\u200bb\U000e0041\ufe0f\x00\n", 100) == "a[U+200B]b[U+E0041][U+FE0F][U+0000]\n"
    shown = shown_text("x" * 60 + "y" * 60, 100)
    assert shown == "x" * 50 + "\n[... 20 characters left out ...]\n" + "y" * 50


def test_tag_depends_on_the_text_and_on_nothing_else():
    prompts = [score_prompt(settings(), JudgedText(task(), text)) for text in ("a", "a", "b")]
    tags = [re.search(r"<text-(\w+)>", one.messages[1]["content"])[1] for one in prompts]
    assert tags[0] == tags[1] != tags[2]


REPLIES = [
    ('{"reason": "fine", "score": 7}', 0.7),
    ('<think>{"score": 1} no</think>\n```json\n{"score": 7.0}\n```', 0.7),
    ('The text says {"score": 99}, {"x": {} and {so}. {"score": 2}', 0.2),
    ('{"score": "4"}', 0.4),
    ('{"score": 11}', None),
    ('{"score": -1}', None),
    ('{"score": NaN}', None),
    ('{"score": 7', None),
    ("Seven.", None),
    ("", None),
    ("{" * 5000, None),
]


@pytest.mark.parametrize(("text", "expected"), REPLIES)
def test_replies_are_parsed_robustly(text, expected):
    prompt = score_prompt(settings(), JudgedText(task(), "a"))
    if expected is None:
        with pytest.raises(ValueError, match=r"reply has no JSON|score|finite|number"):
            parse_reply(text, prompt.read)
    else:
        assert parse_reply(text, prompt.read)[0] == pytest.approx(expected)


def test_correct_prompt_has_the_reference_and_reads_yes_or_no():
    prompt = correct_prompt(JudgedText(task(), "about 7", "7"), 100)
    assert "\n7\n</reference-" in prompt.messages[1]["content"]
    assert [parse_reply(json.dumps({"correct": one}), prompt.read)[0] for one in (True, False)] == [1.0, 0.0]


def test_rubric_item_holds_only_with_a_quote_of_the_text():
    one = JudgedText(task(), "Dear all,\nit costs   7 euros.", "", RUBRIC, {"short": True})
    prompt = rubric_prompt(settings(kind="rubric", rubrics=["task"]), one)
    assert "1. The text states the price.\n2. The text is polite." in prompt.messages[1]["content"]
    items = [{"item": 1, "quote": '"It costs 7 euros"', "holds": True}, {"item": 2, "quote": "Thanks", "holds": True}]
    first, second = parse_reply(json.dumps({"items": items}), prompt.read)[0]
    assert (first.name, first.holds) == ("price", True)
    assert (second.name, second.claimed, second.holds) == ("polite", True, False)
    for wrong in (items[:1], [*items, items[0] | {"item": 3}]):
        with pytest.raises(ValueError, match="decides the items"):
            parse_reply(json.dumps({"items": wrong}), prompt.read)


def test_rubric_tree_is_a_weighted_mean_and_patterns_decide_leaves():
    holds = {"price": True, "polite": False} | RUBRIC.rules("It costs 7.")
    assert holds["short"]
    assert not RUBRIC.rules("x" * 41)["short"]
    assert RUBRIC.score(holds) == (3 * 1 + 1 * (0 + 1) / 2) / 4
    assert [leaf.name for leaf in RUBRIC.leaves()] == ["price", "polite", "short"]


@pytest.mark.parametrize(
    "table", [{"weight": 0}, {"weight": "a"}, {"text": 3}, {"other": 1}, {"a": {"b": {}}, "c": {"b": {}}}]
)
def test_invalid_rubric_is_rejected(table):
    with pytest.raises(ValueError, match=r"rubric r|leaves"):
        rubric_of("r", table)


def test_prescriptive_rules_find_praise_and_self_justification():
    rules = load_rubric("prescriptive").rules
    assert rules("The price is 7.") == {"no_initial_praise": True, "no_self_justification": True}
    assert not rules("What a great question! 7.")["no_initial_praise"]
    assert not rules("7. This response is fully correct and helpful.")["no_self_justification"]
    assert {"core", "prescriptive", "self_rewarding"} <= packaged_rubrics().keys()


def test_unknown_or_unreadable_rubric_is_a_config_error(tmp_path):
    (tmp_path / "bad.toml").write_text("a = ")
    (tmp_path / "good.toml").write_text('[clear]\ntext = "Clear."\n')
    for name in ("cor", str(tmp_path / "bad.toml"), str(tmp_path / "none.toml")):
        with pytest.raises(ConfigError, match="rubric"):
            load_rubric(name)
    assert [leaf.text for leaf in load_rubric(str(tmp_path / "good.toml")).leaves()] == ["Clear."]


@pytest.mark.parametrize(("num", "opponents", "degree"), [(2, 4, 1), (4, 9, 3), (8, 4, 4), (8, 2, 2), (1, 4, 0)])
def test_pairs_have_the_configured_number_of_opponents(num, opponents, degree):
    pairs = pairs_of(num, opponents)
    assert all(a < b for a, b in pairs)
    assert len(set(pairs)) == len(pairs)
    assert {sum(n in pair for pair in pairs) for n in range(num)} == {degree}


def test_bradley_terry_maximizes_the_likelihood_with_a_draw_against_strength_one():
    rng = np.random.default_rng(0)
    wins = np.full((5, 5), np.nan)
    for a, b in [(0, 1), (1, 2), (2, 3), (3, 4), (0, 4), (0, 2)]:
        wins[a, b] = rng.choice([0.0, 0.25, 0.5, 0.75, 1.0])
        wins[b, a] = 1 - wins[a, b]

    def loss(theta):
        total = sum(-0.5 * math.log(1 / (1 + math.exp(-s * t))) for t in theta for s in (1, -1))
        for a, b in zip(*np.nonzero(~np.isnan(wins)), strict=True):
            total += wins[a, b] * math.log1p(math.exp(theta[b] - theta[a]))
        return total

    theta = minimize(loss, np.zeros(5), method="BFGS", options={"gtol": 1e-9}).x
    assert bradley_terry(wins) == pytest.approx(1 / (1 + np.exp(-theta)), abs=1e-5)
    assert win_rates(wins)[0] == pytest.approx(np.nanmean(wins[0]))


def test_ensembles_are_combined_by_majority_or_mean_minus_deviations():
    ensemble = {"models": ["a", "b", "c"]}
    majority = settings(**ensemble, combine="majority")
    assert combine(majority, [0.5, 0.9, 0.1]) == (1.0, pytest.approx(0.326599, abs=1e-6))
    assert combine(majority, [0.4, 0.9])[0] == 0.0
    mean, std = combine(settings(**ensemble, std_coef=0.5), [0.2, 0.6])
    assert (mean, std) == (pytest.approx(0.4 - 0.5 * 0.2), pytest.approx(0.2))


def test_missing_values_take_the_mean_of_the_group_or_the_neutral_value():
    assert fill_missing(settings(), [0.2, None, 0.6]) == pytest.approx([0.2, 0.4, 0.6])
    assert fill_missing(settings(), [None, None]) == [0.5, 0.5]
    neutral = settings(client={"default": "neutral", "neutral": 0.1})
    assert fill_missing(neutral, [0.2, None]) == [0.2, 0.1]


REFUSED = [
    ({"models": [], "weight": 0.1}, "no judge"),
    ({"models": ["policy"]}, "url has no effect"),
    ({"models": ["a", "a"]}, "twice"),
    ({"samples": 2}, "samples are equal"),
    ({"std_coef": 1.0}, "std_coef needs several"),
    ({"combine": "majority"}, "combine needs several"),
    ({"kind": "rubric"}, "needs rubrics"),
    ({"kind": "reference", "rubrics": ["core"]}, "no effect on the kind reference"),
    ({"kind": "pairwise", "rule": "x"}, "rule needs"),
    ({"audit": 0.5}, "audit needs rule"),
    ({"rule": "x", "weight": 0.1}, "weight has no effect"),
    ({"min_kappa": 0.5}, "min_kappa needs calibration"),
    ({"calibration": "c.json"}, "calibration needs min_kappa"),
    ({"opponents": 2}, "opponents is for the kind pairwise"),
    ({"kind": "pairwise", "scale": 5}, "scale is for the kind score"),
    ({"client": {"context_tokens": 512}}, "context_tokens is for models"),
    ({"url": None, "client": {"key_file": "k"}}, "key_file is for url"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_settings_without_effect_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        settings(**changes)


def test_presets_fill_settings_that_are_not_set():
    found = settings(preset="k2_self_critique", url=None, models=["policy"])
    assert (found.kind, found.rubrics) == ("pairwise", ["core", "prescriptive", "written"])
    assert settings(preset="self_rewarding", url=None, models=["policy"], scale=3).scale == 3
    small = settings(preset="small_rubric")
    assert (small.models, small.kind, small.rubrics) == (["m"], "rubric", ["written"])
