"""Hints, attempts with hints that join their group without them, prompts of the self-teacher, and refusals."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
from transformers import GPT2Config

from ludus.algorithms.spec.resolve import PRESETS, algorithm_of
from ludus.chat.hints import describe_start, split_at_action, with_text
from ludus.chat.tags import PROTOCOLS, TagsRenderer
from ludus.chat.tokenizer import train_tokenizer
from ludus.config.load import load_config
from ludus.config.sections.training import GuidanceConfig, SelfTeacherConfig
from ludus.envs.base import HintedEnv
from ludus.envs.registry import build_world
from ludus.errors import ConfigError
from ludus.rollouts.ledger import RolloutKey, RolloutOutcome
from ludus.rollouts.scheduler import Episode
from ludus.training.collection.demonstrations import Demonstrations
from ludus.training.collection.guidance import (
    Guidance,
    TeacherPrompts,
    check_guidance,
    check_self_teacher,
    without_hint,
)
from ludus.training.credit.advantages import assign_credit, training_rows
from ludus.training.credit.roles import is_demonstrated
from ludus.training.rl.train_step import check_samples
from ludus.types import Message, Segment, StopReason, ToolOutcome, ToolStatus, Trajectory

CONFIG = load_config(None, ["--env.name", "guess", "--env.rendering", "tags"])
WORLD = build_world(CONFIG.env, CONFIG.rollout, CONFIG.sandbox)
RENDERER = TagsRenderer(train_tokenizer(WORLD.texts(), 400), PROTOCOLS["tags"])
TASK = next(task for task in WORLD.tasks("train") if len(WORLD.expert(task).messages) > 6)


def attempt(sample: int, guesses: tuple[str, ...], solved: bool, hint: str = "") -> Episode:
    """A game with recorded log-probabilities of -1; the model repeats the guesses whatever the reply."""
    messages: list[Message] = with_text(TASK.prompt, hint) if hint else list(TASK.prompt)
    segments = [Segment("prompt", tuple(RENDERER.prompt(messages, ())))]
    for turn, guess in enumerate(guesses):
        said = Message(role="assistant", content=guess)
        tokens = tuple(RENDERER.action(messages, said, ()))
        segments.append(Segment("action", tokens, turn, logprobs=(-1.0,) * len(tokens), versions=(0,) * len(tokens)))
        messages.append(said)
        if turn < len(guesses) - 1:
            messages.append(Message(role="user", content="higher"))
            segments.append(Segment("observation", tuple(RENDERER.observation(messages[-1:])), turn))
    reason = StopReason.ANSWERED if solved else StopReason.MAX_TURNS
    done = Trajectory(
        TASK.id,
        sample,
        tuple(segments),
        tuple(messages),
        reason,
        rewards={"found": float(solved)},
        reward=float(solved),
    )
    return Episode(RolloutKey(1, TASK.id, sample), TASK, done)


def test_hint_has_the_failed_call_and_the_first_actions_without_the_answer():
    failed = attempt(0, ("3",), False).trajectory
    outcomes = (
        ToolOutcome("a", "run", ToolStatus.OK, "fine"),
        ToolOutcome("b", "run", ToolStatus.RAISED, "no such file"),
    )
    hint = WORLD.hint(TASK, replace(failed, outcomes=outcomes), 2)
    guesses = [m["content"] for m in WORLD.expert(TASK).messages if m["role"] == "assistant"]
    assert "The call of run failed: no such file" in hint
    assert "max turns" in hint
    assert hint.endswith("A solution begins with:\n" + "\n".join(guesses[:2]))
    everything = WORLD.hint(TASK, failed, 99)
    assert everything.endswith("\n".join(guesses[:-1]))
    assert "A solution" not in WORLD.hint(TASK, failed, 0)
    assert WORLD.hint(TASK, attempt(0, ("3",), True).trajectory, 0) is None


def test_start_of_a_solution_of_one_action_is_half_of_it_and_calls_are_text():
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}}
    shown = [
        Message(role="assistant", content="First.", tool_calls=[call]),
        Message(role="tool", content="2"),
        Message(role="assistant", content="It is 2."),
    ]
    assert describe_start(shown, 5) == 'First.\nlook({"x": 1})'
    assert describe_start(shown[2:], 1) == "It"
    assert describe_start((), 1) == ""


def test_hint_ends_the_first_user_message_of_an_episode():
    environment = HintedEnv(WORLD.environment(TASK), "Try 7.")
    (message,) = asyncio.run(environment.start(TASK))
    assert message["content"] == f"{TASK.prompt[0]['content']}\n\nTry 7."
    assert with_text([Message(role="system", content="s")], "t")[-1] == {"role": "user", "content": "t"}


def test_solved_attempts_with_a_hint_join_failed_groups_without_it():
    guidance = Guidance(WORLD, GuidanceConfig(samples=2, actions=2))
    failed = [attempt(i, ("3", "4"), False) for i in range(2)]
    hint = WORLD.hint(TASK, failed[0].trajectory, 2)
    guided = [attempt(2, ("3", "9"), False, hint), attempt(3, ("5", "9"), True, hint)]
    requests = guidance.requests(1, [failed])
    (joined,) = guidance.join(1, [failed], guided)
    assert [(r.key.sample, r.hint) for r in requests] == [(2, hint), (3, hint)]
    assert len(joined) == 3
    plain, kept = failed[0].trajectory, joined[2].trajectory
    assert kept.segments[0].tokens == plain.segments[0].tokens
    assert kept.messages[:1] == split_at_action(plain.messages)[0]
    assert [s.tokens for s in kept.segments[1:]] == [s.tokens for s in guided[1].trajectory.segments[1:]]
    samples = assign_credit([joined], PRESETS["grpo"])
    assert [s.outcome for s in samples] == [RolloutOutcome.TRAINED] * 3
    assert [s.expert for s in samples] == [False, False, True]
    assert not is_demonstrated(samples[2].episode)
    assert samples[2].advantage > 0 > samples[0].advantage
    row = training_rows(samples, mask_observations=True)[2]
    # the engine's log-probabilities, with the hint, stay the denominator of the importance ratio
    assert [lp for lp, own in zip(row.behavior, row.sampled, strict=True) if own] == [-1.0] * sum(row.sampled)
    assert sum(row.sampled) == kept.num_action_tokens
    assert guidance.metrics(1) == {
        "guidance/failed_groups": 1.0,
        "guidance/hints": 1.0,
        "guidance/attempts": 2.0,
        "guidance/success": 0.5,
    }
    assert guidance.metrics(1)["guidance/attempts"] == 0


def test_groups_with_a_success_get_no_hints_and_attempts_no_parity_check():
    guidance = Guidance(WORLD, GuidanceConfig(samples=2))
    mixed = [attempt(0, ("3",), False), attempt(1, ("9",), True)]
    assert guidance.requests(1, [mixed]) == []
    kept = attempt(2, ("9",), True)
    kept = replace(kept, trajectory=without_hint(kept.trajectory, mixed[0].trajectory))
    only = [
        replace(s, outcome=RolloutOutcome.MASKED) if not s.expert else s
        for s in assign_credit([[*mixed, kept]], PRESETS["grpo"])
    ]
    assert check_samples(only, None) is None


def prompts(settings=CONFIG.teacher, demonstrations=None, positions=5_000):
    model = SimpleNamespace(config=GPT2Config(n_positions=positions))
    config = CONFIG.model_copy(update={"teacher": settings})
    session = SimpleNamespace(config=config, world=WORLD, renderer=RENDERER, model=model)
    return TeacherPrompts(session, demonstrations)


def shown_text(samples):
    return [RENDERER.tokenizer.decode(sample.teacher_prompt) for sample in samples]


def test_the_teacher_is_shown_another_success_and_the_feedback():
    group = [attempt(0, ("3", "4"), False), attempt(1, ("6", "9"), True), attempt(2, ("5",), False)]
    samples = prompts().add(assign_credit([group], PRESETS["sdpo"]))
    first, solved, last = shown_text(samples)
    assert "A correct solution:\n6\nuser: higher\n9" in first
    assert "Feedback on an earlier attempt that failed:" in first
    assert "max turns" in first
    assert solved == ""  # the only success is its own
    assert "A correct solution" in last
    alone = prompts(SelfTeacherConfig(feedback=False)).add(assign_credit([[group[0], group[2]]], PRESETS["sdpo"]))
    assert shown_text(alone) == ["", ""]
    rows = training_rows(samples, mask_observations=True)
    for sample, row in zip(samples, rows, strict=True):
        prompt = len(sample.episode.trajectory.segments[0].tokens)
        expected = (*sample.teacher_prompt, *row.tokens[prompt:]) if sample.teacher_prompt else ()
        assert row.teacher_tokens == expected


def test_the_teacher_of_sdft_is_shown_the_expert():
    expert = Demonstrations(SimpleNamespace(world=WORLD, config=CONFIG), None)
    (sample,) = prompts(demonstrations=expert).add(assign_credit([[attempt(0, ("3",), False)]], PRESETS["sdft"]))
    guesses = [m["content"] for m in WORLD.expert(TASK).messages if m["role"] == "assistant"]
    assert "A correct solution:\n" + "\n".join(guesses) in shown_text([sample])[0]


def test_no_teacher_prompt_beyond_the_positions_or_for_another_prompt():
    group = [attempt(0, ("3", "4"), False), attempt(1, ("6", "9"), True)]
    samples = assign_credit([group], PRESETS["sdpo"])
    assert not any(one.teacher_prompt for one in prompts(positions=60).add(samples))
    odd = replace(group[0].trajectory, segments=(Segment("prompt", (1, 2)), *group[0].trajectory.segments[1:]))
    changed = [replace(samples[0], episode=replace(group[0], trajectory=odd)), samples[1]]
    assert not prompts().add(changed)[0].teacher_prompt


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--training.guidance.actions 3", "training.guidance.samples is 0"),
        ("--training.guidance.samples 2 --training.mode async", "training.mode = 'async'"),
        ("--training.guidance.samples 2 --rollout.branch.branches 2 --rollout.branch.turns [0]", "rollout.branch"),
        ("--training.guidance.samples 2 --training.learner.old_logprobs engine", "old_logprobs"),
    ],
)
def test_guidance_without_effect_is_refused(words, message):
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        check_guidance(load_config(None, words.split()), WORLD)


def test_guidance_needs_hints_and_is_corrected_for_the_other_prompt():
    class Mute:
        name, runs_agents = "mute", False

        def implements(self, method):
            return False

    config = load_config(None, ["--training.guidance.samples", "2"])
    with pytest.raises(ConfigError, match="has no hints"):
        check_guidance(config, Mute())
    check_guidance(load_config(None, ["--training.guidance.samples", "2", "--training.guidance.actions", "0"]), Mute())
    assert algorithm_of(config).correction == "tis"
    assert algorithm_of(load_config(None, [])).correction == "none"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--teacher.ema_rate 0.1", "would have no effect: the loss ppo_clip"),
        ("--algorithm.preset sdft --teacher.feedback false", "would have no effect: the loss sdft"),
        ("--algorithm.preset sdpo --training.transitions true", "cannot be combined with training.transitions"),
    ],
)
def test_self_teacher_settings_without_effect_are_refused(words, message):
    config = load_config(None, words.split())
    with pytest.raises(ConfigError, match=message):
        check_self_teacher(config, algorithm_of(config))
