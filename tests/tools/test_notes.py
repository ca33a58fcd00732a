"""The tools of notes, and the notes that episodes of one task pass on."""

import asyncio
import json
from dataclasses import replace

import pytest

from ludus.config.schema import Config
from ludus.config.sections.rollout import NotesConfig, RolloutConfig, SubagentsConfig
from ludus.envs.registry import build_world
from ludus.envs.tool_env import ToolExecutor
from ludus.errors import ConfigError
from ludus.rollouts.ledger import RolloutKey
from ludus.rollouts.scheduler import Episode
from ludus.tools.base import ToolError
from ludus.tools.notes import MAX_TITLE, Notes, notes_tools
from ludus.training.collection.task_notes import TaskNotes
from ludus.training.rl.validate import check_notes
from ludus.types import Action, Message, StopReason, ToolCall, ToolStatus, Trajectory
from small_worlds import RecordingWorld, call, make_requests, make_scheduler, make_task, scripted


def said(notes, *calls):
    """The outputs of calls in one turn."""
    made = tuple(ToolCall(str(i), name, arguments) for i, (name, arguments) in enumerate(calls))
    action = Action(Message(role="assistant", content=""), made)
    return [one.output for one in asyncio.run(ToolExecutor(notes_tools(notes)).run(action))]


def test_tools_write_read_and_search_in_the_order_of_the_calls():
    notes = Notes({"paris": "The capital of France."})
    assert said(
        notes,
        ("note_write", {"title": "rome", "text": "Rome is the capital of Italy."}),
        ("note_write", {"title": "rome", "text": "Rome: capital, Italy."}),
        ("note_read", {"title": "rome"}),
        ("note_search", {"query": "capital italy"}),
        ("note_search", {"query": ""}),
        ("note_write", {"title": "paris", "text": ""}),
        ("note_search", {"query": "france"}),
        ("note_read", {"title": "rom"}),
    ) == [
        "saved",
        "saved",
        "Rome: capital, Italy.",
        "rome: Rome: capital, Italy.\nparis: The capital of France.",
        "paris\nrome",
        "removed",
        "no note has these words",
        "Error: the note 'rom' does not exist. Did you mean 'rome'?",
    ]
    assert (notes.written, notes.texts) == (
        {"rome": "Rome: capital, Italy.", "paris": ""},
        {"rome": "Rome: capital, Italy."},
    )


def test_limits_are_errors_that_say_what_to_do():
    notes = Notes({"a": "1"}, max_notes=2, max_chars=5)
    notes.write("b", "12345")
    for title, text, error in (
        ("c", "1", "there are 2 notes, the maximum: replace one"),
        ("b", "123456", "has 6 characters, more than 5"),
        ("x" * (MAX_TITLE + 1), "1", "a title has 1 to 100 characters"),
        (" ", "1", "a title has 1 to 100 characters"),
    ):
        with pytest.raises(ToolError, match=error):
            notes.write(title, text)
    notes.write("a", "2")
    notes.write("b", "")
    notes.write("c", "1")
    assert notes.texts == {"a": "2", "c": "1"}


WRITE = call("note_write", title="city", text="Paris")


def roll_out(script, scope, earlier=None, **settings):
    limits = RolloutConfig(notes=NotesConfig(scope=scope), **settings)
    scheduler = make_scheduler(scripted(script), RecordingWorld(), limits)
    requests = [replace(one, notes=earlier or {}) for one in make_requests(1, samples=2)]
    return [one.trajectory for one in asyncio.run(scheduler.run(requests))]


def test_episodes_have_the_tools_and_separate_notes():
    def script(request, turn):
        other = "/0001/" in request.episode
        return [WRITE if other else call("echo", text="x"), call("note_read", title="city"), "Paris"][turn]

    first, second = roll_out(script, "episode")
    assert [one.status for one in first.outcomes] == [ToolStatus.OK, ToolStatus.RAISED]
    assert [one.output for one in second.outcomes] == ["saved", "Paris"]
    assert (first.notes, second.notes) == ({}, {"city": "Paris"})
    assert first.reward == second.reward == 1.0


def test_only_persistent_scopes_start_with_earlier_notes():
    def script(request, turn):
        return [call("note_search", query=""), "Paris"][turn]

    for scope, expected in (("task", "city"), ("run", "city"), ("episode", "there are no notes")):
        for one in roll_out(script, scope, {"city": "Paris"}):
            assert one.outcomes[0].output == expected
            assert one.notes == {}
    (one, _) = roll_out(script, "none", {"city": "Paris"})
    assert one.outcomes[0].status is ToolStatus.UNKNOWN_TOOL


def test_sub_agents_share_the_notes_of_their_rollout():
    def script(request, turn):
        reading = [call("delegate", task="x"), call("note_read", title="city"), "Paris"]
        return ([WRITE, "done"] if "~" in request.episode else reading)[turn]

    for depth, exclusive in ((1, False), (1, True), (2, False)):
        subagents = SubagentsConfig(max_depth=depth, exclusive=exclusive)
        for one in roll_out(script, "episode", subagents=subagents):
            assert (one.notes, one.reward, len(one.rows)) == ({"city": "Paris"}, 1.0, 2)
            assert one.outcomes[1].output == "Paris"


def episode(step, sample, notes, greedy=False):
    done = Trajectory("t", sample, (), (), StopReason.ANSWERED, notes=notes)
    return Episode(RolloutKey(step, "t", sample), make_task(), done, greedy)


def test_notes_of_a_group_are_merged_in_the_order_of_samples(tmp_path):
    notes = TaskNotes.load(tmp_path / "notes.jsonl", 3, 0)
    before = notes.of("t")
    notes.add(1, [episode(1, 0, {"a": "1", "b": "1"}), episode(1, 1, {"a": "2"}), episode(1, 2, {"z": "9"}, True)])
    assert (before, notes.of("t"), notes.of("other")) == ({}, {"a": "2", "b": "1"}, {})
    notes.add(2, [episode(2, 0, {"b": "", "c": "3"}), episode(2, 1, {"d": "4"}), episode(2, 2, {"e": "5"})])
    assert notes.of("t") == {"c": "3", "d": "4", "e": "5"}  # a is the oldest of four
    notes.add(3, [episode(3, 0, {})])
    lines = (tmp_path / "notes.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_tasks_share_the_notes_of_a_run(tmp_path):
    notes = TaskNotes.load(tmp_path / "notes.jsonl", 2, 0, shared=True)
    other = replace(episode(1, 0, {"b": "2"}), task=replace(make_task(), id="other"))
    notes.add(1, [episode(1, 0, {"a": "1"}), other])
    assert notes.of("t") == notes.of("new") == {"a": "1", "b": "2"}
    notes.add(2, [replace(other, trajectory=replace(other.trajectory, notes={"c": "3"}))])
    again = TaskNotes.load(tmp_path / "notes.jsonl", 2, 1, shared=True)
    assert (notes.of("t"), again.of("t")) == ({"b": "2", "c": "3"}, {"a": "1", "b": "2"})


def test_notes_of_later_steps_and_a_torn_line_are_removed_on_loading(tmp_path):
    path = tmp_path / "notes.jsonl"
    notes = TaskNotes.load(path, 8, 0)
    for step in (1, 2, 3):
        notes.add(step, [episode(step, 0, {"a": str(step)})])
    with path.open("a") as file:
        file.write('{"step": 4, "task')
    assert TaskNotes.load(path, 8, 2).of("t") == {"a": "2"}
    assert len(path.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"training": {"mode": "async"}}, "training.mode = 'async' does not apply to notes"),
        ({"rollout": {"partial": {"tokens": 10}}}, "rollout.partial does not apply"),
        ({"rollout": {"agent": {"command": ["a"]}}}, "rollout.agent does not apply"),
    ],
)
def test_settings_that_do_not_apply_are_refused(changes, text):
    rollout = {"notes": {"scope": "task"}, **changes.get("rollout", {})}
    config = Config.model_validate({**changes, "rollout": rollout})
    with pytest.raises(ConfigError, match=text):
        check_notes(config, build_world(config.env, config.rollout))
