"""Prompts and demonstrations against the token limits of a rollout."""

from dataclasses import replace
from functools import cache
from itertools import islice

import pytest

from ludus.chat.render import render_dialogue
from ludus.config.load import load_config
from ludus.config.sections.rollout import RolloutConfig
from ludus.errors import UserError
from ludus.training import sft
from ludus.training.datasets.token_limits import (
    DialogueLength,
    check_dialogues,
    check_prompts,
    dialogue_length,
    dialogue_warnings,
    rollout_warnings,
    sft_warnings,
)
from ludus.training.rl.validate import open_validated_session
from ludus.training.run.session import busy_warning, open_session, usable_cores
from ludus.training.sft import batches
from tiny_run import refused


@cache
def loaded():
    return open_session(load_config("search"))


def session(**rollout):
    words = [word for name, value in rollout.items() for word in (f"--rollout.{name}", str(value))]
    return replace(loaded(), config=load_config("search", words))


@pytest.fixture(scope="module")
def lengths():
    one = loaded()
    shown = list(islice(one.world.demonstrations(1), 64))
    return [dialogue_length(one.renderer, dialogue) for dialogue in shown], shown, one.renderer


def test_dialogue_lengths_equal_rollout_token_counts(lengths):
    found, shown, renderer = lengths
    for length, dialogue in zip(found[:8], shown, strict=False):
        segments = render_dialogue(renderer, dialogue.messages, dialogue.tools)
        actions = [len(s.tokens) for s in segments if s.kind == "action"]
        assert length == DialogueLength(
            sum(len(s.tokens) for s in segments), len(segments[0].tokens), max(actions), len(actions)
        )


def test_length_warnings_count_dialogues_and_propose_a_limit():
    some = [DialogueLength(100, 40, 20, 2), DialogueLength(300, 40, 90, 3), DialogueLength(500, 40, 20, 4)]
    long, wordy = dialogue_warnings(some, RolloutConfig(max_seq_len=256, max_tokens_per_turn=64), "they are left out")
    assert long.startswith("2 of 3 demonstrations (2 of the 2 with three turns or more) are longer than")
    assert "they are left out. --rollout.max_seq_len 512 fits all of them" in long
    assert wordy.startswith("1 of 3 demonstrations have an action that is longer than")
    assert "--rollout.max_tokens_per_turn 128" in wordy
    assert dialogue_warnings(some, RolloutConfig(max_seq_len=512, max_tokens_per_turn=90), "") == []


def test_a_limit_that_no_dialogue_fits_is_refused_before_the_first_step(lengths, monkeypatch):
    monkeypatch.setattr(sft, "MAX_SKIPPED", 40)
    longest = max(length.total for length in lengths[0])
    tight = session(max_seq_len=18, max_tokens_per_turn=8)
    with pytest.raises(UserError, match=r"No dialogue of The world 'search' fits .*\(18\).*chat template"):
        check_dialogues(tight)
    with pytest.raises(UserError, match=r"dialogues in a row are longer than rollout.max_seq_len"):
        next(batches(tight, tight.config.sft))
    check_dialogues(session(max_seq_len=longest, max_tokens_per_turn=8))


def test_dialogues_that_do_not_fit_are_counted_in_each_batch(lengths):
    middle = sorted(length.total for length in lengths[0])[32]
    one = session(max_seq_len=middle, max_tokens_per_turn=8)
    some = list(islice(batches(one, one.config.sft.model_copy(update={"batch_size": 8})), 3))
    assert all(len(row.tokens) <= middle for rows, _ in some for row in rows)
    assert sum(left_out for _, left_out in some) > 0
    (long, _) = sft_warnings(one)
    assert "they are left out" in long
    assert "an episode that solves its task like them is cut off" in " ".join(rollout_warnings(one))
    rewritten = session(max_seq_len=middle, max_tokens_per_turn=8, **{"context.max_tokens": middle - 8})
    assert "cut off" not in " ".join(rollout_warnings(rewritten))


def test_prompts_without_room_for_an_answer_are_refused_before_anything_is_written(tmp_path):
    tight = session(max_seq_len=40, max_tokens_per_turn=8)
    with pytest.raises(UserError, match=r"No prompt of the world 'search' leaves room .* Set --rollout.max_seq_len"):
        check_prompts(tight)
    with pytest.raises(UserError, match="No prompt of the world"):
        open_validated_session(tight.config)
    words = ("--rollout.max_seq_len", "40", "--rollout.max_tokens_per_turn", "8", "--run.dir", tmp_path / "run")
    assert "No prompt of the world" in refused("train", "search", *words)
    assert not (tmp_path / "run").exists()
    one = session()
    (crowded,) = check_prompts(session(max_seq_len=70, max_tokens_per_turn=18))
    assert "leave less room than one action of rollout.max_tokens_per_turn (18)" in crowded
    assert check_prompts(one) == []


def test_competing_threads_are_reported(monkeypatch):
    cores = usable_cores()
    monkeypatch.setattr("os.getloadavg", lambda: (cores * 0.9, 0.0, 0.0))
    two, one = (load_config("search", ["--run.threads", n]) for n in "21")
    assert f"on {cores} cores): 2 compute threads" in busy_warning(two)
    assert busy_warning(one) == ""
    monkeypatch.setattr("os.getloadavg", lambda: (cores * 0.7, 0.0, 0.0))
    assert busy_warning(two) == ""
