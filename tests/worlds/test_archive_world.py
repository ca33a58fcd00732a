"""The archive: its documents and counts, and demonstrations that equal the rows of rewritten dialogues."""

import asyncio
import itertools
import random
import re

import pytest

from ludus.chat.render import TemplateRenderer
from ludus.chat.tokenizer import train_tokenizer
from ludus.config.load import load_config
from ludus.config.sections.rollout import ContextConfig, RolloutConfig
from ludus.envs.tool_env import ToolLimits
from ludus.envs.tool_world import SUMMARY, Dialogue
from ludus.errors import ConfigError
from ludus.rollouts.dialogues.context import ManagedChatSession
from ludus.rollouts.episode import EngineChatSession, run_episode
from ludus.training.sft import dialogue_row
from ludus.types import SamplingParams
from ludus.worlds.archive.world import COUNTS, ArchiveSettings, make_archive_world, read_tool, rows_of
from scripted_engine import ScriptedEngine
from small_worlds import call

WORLD = make_archive_world({"num_documents": 40}, ToolLimits())
FLAWLESS = ArchiveSettings(miscount=0.0, stop_early=0.0)


def reader(tokenizer):
    """A policy that reads document after document and keeps the count in its summaries."""

    def reply(request, turn):
        text = tokenizer.decode(request.token_ids)
        told = next((i for i, word in enumerate(COUNTS) if f"{SUMMARY}{word}\n" in text), 0)
        count = COUNTS[told + text.count(": missing\n")]
        following = ["next: 1", *re.findall(r"next: \w+|the last document", text)][-1]
        if following == "the last document":
            following = "next: none"
        if ContextConfig().prompt in text:
            return f"{count}\n{following}"
        return count if following == "next: none" else f"{count}\n{call('read', number=int(following[6:]))}"

    return reply


def play(world, task, **context):
    config = load_config("archive")
    tokenizer = train_tokenizer(itertools.islice(world.texts(), 2000), 500)
    renderer = TemplateRenderer(tokenizer)
    engine = ScriptedEngine(reader(tokenizer), tokenizer, renderer.stop_token_ids[0])
    settings = config.rollout.context.model_copy(update=context)
    params = SamplingParams(max_new_tokens=100)
    session = ManagedChatSession(EngineChatSession(engine, renderer, params, 1000, "e", seed=0), settings)
    limits = RolloutConfig(max_turns=len(task.truth.documents) + 1)
    trajectory = asyncio.run(run_episode(task, 0, world.environment(task), session, limits))
    rows = [[trajectory.segments[i] for i in row] for row in trajectory.rows]
    return renderer, trajectory, [tuple(t for segment in row for t in segment.tokens) for row in rows]


@pytest.mark.parametrize("max_tokens", [500, *(pytest.param(size, marks=pytest.mark.slow) for size in (400, 510))])
def test_demonstrated_rows_equal_those_of_a_rewritten_episode(max_tokens):
    task = WORLD.tasks("test")[0]
    renderer, trajectory, rows = play(WORLD, task, max_tokens=max_tokens)
    assert (trajectory.reward, len(trajectory.outcomes)) == (1.0, 40)
    assert len(rows) > 3
    numbers = [re.findall(r'"number": (\d+)', renderer.tokenizer.decode(row)) for row in rows]
    ends = [int((found or ["40"])[-1]) for found in numbers]
    shown = rows_of(task.truth, ends, random.Random(0), FLAWLESS)
    tools = (read_tool(()),)
    assert [tuple(dialogue_row(renderer, Dialogue(tuple(one), tools)).tokens) for one in shown] == rows


@pytest.mark.slow
def test_episode_of_300_calls_is_solved_in_rewritten_dialogues():
    world = make_archive_world({"num_documents": 300, "num_tasks": 10}, ToolLimits())
    _, trajectory, rows = play(world, world.tasks("test")[0], max_tokens=500)
    assert (trajectory.reward, len(trajectory.outcomes)) == (1.0, 300)
    assert max(map(len, rows)) <= 1000
    assert len(rows) > 20


def test_documents_state_the_number_of_missing_items():
    for split in WORLD.splits:
        for task in WORLD.tasks(split)[:100]:
            archive = task.truth
            assert len(archive.documents) == 40
            assert COUNTS[archive.count(0, 40)] == archive.accepted[0] in COUNTS[:5]
    documents = [task.truth.documents for split in WORLD.splits for task in WORLD.tasks(split)]
    assert len(set(documents)) == len(documents) == 1200
    assert make_archive_world({"num_documents": 40}, ToolLimits()).tasks("test")[5] == WORLD.tasks("test")[5]


def test_documents_that_do_not_exist_are_refused():
    tool = WORLD.environment(WORLD.tasks("test")[0]).tools[0]
    for number in (0, -1, 41):
        with pytest.raises(Exception, match=f"Document {number} does not exist"):
            asyncio.run(tool.function(number))


@pytest.mark.parametrize(("miscount", "stop_early"), [(0.0, 0.0), (0.65, 0.0), (0.0, 0.3)])
def test_demonstrations_have_the_flaws_that_are_set(miscount, stop_early):
    archive = next(task.truth for task in WORLD.tasks("train") if task.truth.accepted == ("four",))
    settings = ArchiveSettings(miscount=miscount, stop_early=stop_early)
    low = stopped = summaries = 0
    for seed in range(200):
        before = 0
        for number, row in enumerate(rows_of(archive, [10, 20, 30, 40], random.Random(seed), settings)[:3]):
            said, *rest = row[-1]["content"].split("\n")
            right = before + archive.count(10 * number, 10 * number + 10)
            stopped += not rest
            before = COUNTS.index(said) if rest else right
            summaries += bool(rest) and right > 1
            low += bool(rest) and before == right - 1
    assert low / summaries == pytest.approx(miscount, abs=0.12)
    assert 0.8 * stop_early <= stopped / 600 / 0.9 <= 1.1 * stop_early


def test_demonstrations_begin_and_end_at_any_row_of_archives_of_many_lengths():
    shown = [dialogue.messages for dialogue in itertools.islice(WORLD.demonstrations(3), 300)]
    lengths = {int(re.search(r"1 to (\d+)", messages[0]["content"])[1]) for messages in shown}
    assert 40 in lengths
    assert max(lengths) > 200
    assert {messages[1]["role"] for messages in shown} == {"user", "assistant"}
    assert {"next" in messages[-1]["content"] for messages in shown} == {True, False}


def test_summary_after_the_last_document_is_followed_by_the_answer():
    archive = WORLD.tasks("train")[0].truth
    first, last = rows_of(archive, [40, 40], random.Random(0), FLAWLESS)
    assert first[-1]["content"].split("\n") == [*archive.accepted, "next: none"]
    assert [message["role"] for message in last] == ["user", "user", "assistant"]
    assert last[-1]["content"] == archive.accepted[0]


def test_invalid_settings_are_reported():
    with pytest.raises(ConfigError, match="num_documents"):
        make_archive_world({"num_documents": 301}, ToolLimits())
