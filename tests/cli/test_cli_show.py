"""`ludus show`: curves, explanations, transcripts, tokens, and rescored rewards."""

import json
from dataclasses import replace

import pytest

from ludus.cli.ui.run_summary import explain_loss, find_curves, format_alarms, format_ledger, mean_timings, sparkline
from ludus.cli.ui.transcripts import marked_messages
from ludus.diagnostics.trackers import MetricsRow, read_metrics
from ludus.evaluation.evaluate import load_evaluation
from ludus.rollouts.ledger import RolloutOutcome
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path, write_rollouts
from ludus.types import Failure, StopReason, Trajectory
from tiny_run import WORLD, copy_run, ludus, refused


def other_world(folder, old, new):
    """The tiny world with a change in its source."""
    source = WORLD.read_text()
    assert source.count(old) == 1
    path = folder / "other_world.py"
    path.write_text(source.replace(old, new))
    return path


def rows(*metrics):
    return [MetricsRow(step, numbers) for step, numbers in enumerate(metrics, start=1)]


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], "▁▂▃▄▅▆▇█"),
        ([2, 2, 2], "▅▅▅"),
        ([0, 0, 0], "▁▁▁"),
        ([1, float("nan"), 0], "█x▁"),
        ([float("inf")], "x"),
        ([0] * 40 + [8] * 40, "▁" * 20 + "█" * 20),
        ([], ""),
    ],
)
def test_a_sparkline_is_drawn_between_least_and_greatest(values, line):
    assert sparkline(values) == line


def test_curves_are_those_a_run_has_and_the_last_row_of_a_step_counts():
    given = [
        MetricsRow(1, {"reward/mean": 0.1, "other": 9.0}),
        MetricsRow(2, {"reward/mean": 0.2}),
        MetricsRow(1, {"reward/mean": 0.4}),
        MetricsRow(2, {"eval/test/greedy/success": 0.5, "eval/test/greedy/low": 0.1}),
    ]
    found = {name: (tuple(curve), tuple(curve.values())) for name, curve in find_curves(given).items()}
    assert found == {"reward": ((1, 2), (0.4, 0.2)), "held-out success, test greedy": ((2,), (0.5,))}


def test_a_repeated_step_counts_once_in_the_mean_timings():
    given = [MetricsRow(step, {"time/step_s": seconds}) for step, seconds in ((1, 1.0), (2, 9.0), (2, 3.0))]
    assert mean_timings(given) == {"time/step_s": 2.0}


def test_the_ledger_is_summed_with_its_reasons():
    step = {
        "ledger/started": 8.0,
        "ledger/trained": 4.0,
        "ledger/masked": 0.0,
        "ledger/dropped": 3.0,
        "ledger/failed": 1.0,
        "ledger/clock_limited": 0.0,
        "ledger/trained/trained": 4.0,
        "ledger/dropped/zero_variance": 3.0,
        "ledger/failed/engine": 1.0,
    }
    assert format_ledger(rows(step, step | {"ledger/clock_limited": 1.0})) == (
        "16 rollouts started: 8 trained, 0 masked, 6 dropped (6 zero_variance), 2 failed (2 engine). "
        "A wall-clock limit fired in 1 of 2 steps: the run is not reproducible."
    )
    assert format_ledger(rows({"loss/total": 1.0})) == ""


def test_an_alarm_is_listed_once_with_its_steps():
    loud = {"tools/error_rate": 0.9, "tools/status/raised": 0.9}
    (text,) = format_alarms(rows(loud, {"tools/error_rate": 0.1}, loud | {"tools/error_rate": 0.8}))
    assert text.startswith("Most tool calls end in an error: 80% of the calls, most often raised")
    assert text.endswith("(at 2 of 3 steps, last at step 3)")
    dead = {"reward/mean": 0.0, "reward/std": 0.0}
    assert "(at 2 of 6 steps, last at step 6)" in format_alarms(rows(*[dead] * 6))[0]


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"loss/policy": 0.0, "groups/zero_variance": 1.0}, "all rewards within each group were equal"),
        ({"loss/policy": 1e-9, "groups/zero_variance": 0.5, "optim/grad_norm": 0.25}, "its norm is 0.25"),
        ({"loss/policy": 0.0, "optim/grad_norm": 0.0}, "both 0: the step did not change the weights"),
        ({"ledger/started": 8.0, "reward/mean": 0.0}, "has no loss: none of its rollouts was trained on"),
        ({"loss/policy": 0.01, "groups/zero_variance": 1.0}, ""),
        ({"loss/policy": -0.5, "loss/total": 0.0}, ""),
    ],
)
def test_a_loss_of_zero_is_explained(metrics, said):
    text = explain_loss(rows({"loss/policy": 0.0}, metrics))
    assert said in text
    assert bool(text) == bool(said)
    assert not said or "step 2" in text.lower()


def test_the_overview_holds_the_numbers_of_the_run(tiny_run):
    said = ludus("show", tiny_run)
    assert said.code == 0, said
    assert said.out.splitlines()[0].endswith("algorithm grpo, 2 of 2 steps")
    history = read_metrics(tiny_run / "metrics.jsonl")
    cells = {
        columns[0]: columns[2:]
        for line in said.out.splitlines()
        if len(columns := [cell.strip() for cell in line.strip("│").split("│")]) == 6
    }
    rewards = [row.metrics["reward/mean"] for row in history]
    numbers = (rewards[0], rewards[-1], min(rewards), max(rewards))
    assert cells["reward"] == [f"{number:.4g}" for number in numbers]
    assert {"entropy, nats/token", "KL to the initial policy, nats/token", "sampled tokens/s"} <= cells.keys()
    assert "held-out success, validation greedy" in cells
    result = load_evaluation(tiny_run / "evaluations" / "step-000002-test-greedy.json")
    assert f"{result.rate:.1%} [" in next(line for line in said.out.splitlines() if "step-000002-test-greedy" in line)
    assert "18 rollouts started: " in said.out
    assert "Cold start: 30 steps of fine-tuning" in said.out
    assert "From rollouts/step-000002.jsonl.gz:" in said.out


def test_a_transcript_marks_kinds_and_shows_the_outcome(tiny_run):
    said = ludus("show", tiny_run, "--step", "1", "--episodes", "99").out
    records = list(read_rollouts(rollouts_path(tiny_run, 1)))
    assert said.count("─ task ") == len(records) == 9
    for record in records:
        trajectory = record.trajectory
        assert f"task {record.group}, sample {trajectory.sample}" in said
        assert f"advantage {record.advantage:+.4g}" in said
    assert said.count("[prompt]") == 2 * len(records)
    turns = sum(m["role"] == "assistant" for r in records for m in r.trajectory.messages)
    tools = sum(m["role"] == "tool" for r in records for m in r.trajectory.messages)
    assert (said.count("[action]"), said.count("[observation]")) == (turns, tools)
    assert "Steps 1 to" not in said


@pytest.fixture
def judged(tiny_run, tmp_path):
    """A copy whose step 2 has one solved, one wrong and one failed rollout, in words of our own."""
    run = copy_run(tiny_run, tmp_path)
    path = rollouts_path(run, 2)
    first, second, third, *_ = read_rollouts(path)
    right = replace(first.trajectory, rewards={"exact_match": 1.0, "f1": 1.0, "well_formed": 1.0}, reward=1.1)
    wrong = replace(second.trajectory, rewards={"exact_match": 0.0, "f1": 0.5, "well_formed": 1.0}, reward=0.1)
    failed = replace(
        third.trajectory,
        segments=(),
        messages=(),
        outcomes=(),
        rewards={},
        reward=0.0,
        stop_reason=StopReason.FAILED,
        failure=Failure("engine", "the plug was pulled", 3),
    )
    write_rollouts(
        path,
        [
            replace(first, trajectory=right, advantage=0.75),
            replace(second, trajectory=wrong, outcome=RolloutOutcome.DROPPED, reason="dull", advantage=None),
            replace(third, trajectory=failed, outcome=RolloutOutcome.FAILED, reason="engine", advantage=None),
        ],
    )
    return run


def test_solved_and_failed_episodes_can_be_chosen(judged):
    solved = ludus("show", judged, "--step", "2", "--solved", "--episodes", "9").out
    assert solved.count("─ task ") == 1
    assert "reward 1.1   (exact_match 1  f1 1  well_formed 1)" in solved
    assert "ledger: trained   advantage +0.75" in solved
    failed = ludus("show", judged, "--step", "2", "--failed", "--episodes", "9").out
    assert failed.count("─ task ") == 2
    assert "reward 0.1   (exact_match 0  f1 0.5  well_formed 1)" in failed
    assert "ledger: dropped (dull)   advantage none" in failed
    assert "stop: failed" in failed
    assert "failed in the engine after 3 attempts: the plug was pulled" in failed
    assert ludus("show", judged, "--step", "2", "--failed", "--episodes", "1").out.count("─ task ") == 1


def test_one_task_can_be_chosen(judged):
    task = next(read_rollouts(rollouts_path(judged, 1))).group
    said = ludus("show", judged, "--step", "1", "--task", task, "--episodes", "9").out
    assert said.count(f"─ task {task}, ") == said.count("─ task ") == 3
    assert "No rollout matches." in ludus("show", judged, "--step", "1", "--task", "nope").out


def test_an_evaluations_episodes_can_be_read(tiny_run):
    for name in ("step-000000-test-greedy", "step-000000-test-greedy.json"):
        said = ludus("show", tiny_run, "--evaluation", name, "--episodes", "3").out
        assert said.count("─ task test:") == 3
        assert "ledger: dropped (evaluation)" in said


def test_tokens_are_shown_as_the_model_saw_them(tiny_run):
    from ludus.engines.models.loading import load_tokenizer

    said = ludus("show", tiny_run, "--step", "2", "--tokens", "--episodes", "1").out
    own = load_tokenizer(str(tiny_run / "checkpoints" / "step-000002"))
    record = next(read_rollouts(rollouts_path(tiny_run, 2)))
    for segment in record.trajectory.segments:
        assert own.decode(segment.tokens, skip_special_tokens=False).strip() in said
        assert f"[{segment.kind}] {len(segment.tokens)} tokens, turn {segment.turn}" in said
    assert "weights 1" in said
    assert "<|im_start|>" in said


def with_rows(run):
    """The first rollout of step 2 with two more rows: a fork of the first, and a prompt with the same start."""
    records = list(read_rollouts(rollouts_path(run, 2)))
    prompt, action, *_ = records[0].trajectory.segments
    other = replace(prompt, tokens=(*prompt.tokens[:-3], *action.tokens[:2]), parent=-1)
    segments = (prompt, action, replace(action, tokens=action.tokens[::-1], parent=0), other, action)
    changed = replace(records[0].trajectory, segments=segments, shared_reward=True)
    write_rollouts(rollouts_path(run, 2), [replace(records[0], trajectory=changed), *records[1:]])
    return changed


def test_all_rows_are_shown_with_their_first_difference(tiny_run, tmp_path):
    from ludus.engines.models.loading import load_tokenizer

    run = copy_run(tiny_run, tmp_path)
    prompt, action, again, *_ = with_rows(run).segments
    num, decode = len(prompt.tokens), load_tokenizer(str(run / "checkpoints" / "step-000002")).decode
    said = ludus("show", run, "--step", "2", "--episodes", "1").out
    assert "[prompt] Look first." in said
    assert "row 0 has a new prompt\n" in said
    assert f"row 1 forks from row 0 after {num} tokens; {num} tokens equal those of row 0\n" in said
    assert f"row 0 continues with {decode(action.tokens[:24])!r}" in said
    assert f"row 1 continues with {decode(again.tokens[:24])!r}" in said
    assert f"row 2 has a new prompt; {num - 3} tokens equal those of row 0\n" in said
    assert "[action] " + decode(again.tokens) in said
    assert f"[action] {len(again.tokens)} tokens, turn " in ludus("show", run, "--step", "2", "--tokens").out
    (run / "checkpoints").rename(run / "gone")
    bare = ludus("show", run, "--step", "2", "--episodes", "1").out
    assert f"row 1 continues with '{' '.join(map(str, again.tokens[:24]))}'" in bare


def test_without_a_checkpoint_messages_stand_in_for_tokens(tiny_run, tmp_path):
    run = copy_run(tiny_run, tmp_path)
    (run / "checkpoints").rename(run / "gone")
    said = ludus("show", run, "--step", "2", "--tokens", "--episodes", "1").out
    assert "no tokenizer: printing messages" in said
    assert "[prompt] Look first." in said


def test_rewards_are_the_same_when_they_are_replayed(tiny_run):
    said = ludus("rewards", "replay", tiny_run)
    assert said.code == 0, said
    assert "18 rollouts scored again: all rewards are unchanged, bit for bit." in said.out
    part = ludus("rewards", "replay", tiny_run, "--step", "1").out
    assert "9 rollouts scored again: all rewards" in part
    held_out = ludus("rewards", "replay", tiny_run, "--evaluation", "step-000002-test-t1").out
    assert "8 rollouts scored again: all rewards" in held_out


def test_another_reward_shows_what_it_changes(tiny_run, tmp_path):
    other = other_world(tmp_path, 'Reward("f1", token_f1,', 'Reward("f1", lambda task, t: 1.0,')
    said = ludus("rewards", "replay", tiny_run, "--env.name", other).out
    records = [r for step in (1, 2) for r in read_rollouts(rollouts_path(tiny_run, step))]
    changed = sum(record.trajectory.rewards["f1"] != 1.0 for record in records)
    assert changed > 0
    assert f"0 have a changed reward, {changed} more have changed parts and the same reward." in said
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in said.splitlines()]
    before = sum(record.trajectory.rewards["f1"] for record in records) / 18
    assert ["f1", f"{before:.4f}", "1.0000", str(changed)] in cells
    assert [row[3] for row in cells if row[0] == "reward"] == ["0"]


def test_the_wrong_rewards_in_a_file_are_found(judged):
    said = ludus("rewards", "replay", judged, "--step", "2").out
    assert "2 rollouts scored again: " in said
    assert "1 more had an infrastructure failure and have no rewards." in said
    assert "2 have a changed reward" in said


def test_tasks_that_the_world_lost_are_named(tiny_run, tmp_path):
    other = other_world(tmp_path, "NAMES[:12]", "NAMES[12:]")
    said = ludus("rewards", "replay", tiny_run, "--step", "1", "--env.name", other).out
    assert "0 rollouts scored again" in said
    assert "3 tasks are no longer in the world, for example train:" in said


def test_an_exception_of_a_reward_is_reported_with_its_message(tiny_run, tmp_path):
    other = other_world(tmp_path, 'Reward("f1", token_f1,', 'Reward("f1", lambda task, t: 1 / 0,')
    said = refused("rewards", "replay", tiny_run, "--env.name", other, code=4)
    assert "ZeroDivisionError" in said


def test_a_run_that_has_just_begun_says_so(tiny_run, tmp_path):
    (tmp_path / "config.toml").write_bytes((tiny_run / "config.toml").read_bytes())
    said = ludus("show", tmp_path)
    assert said.code == 0
    assert "No step has finished yet." in said.out


def test_a_fine_tuning_run_is_read_as_well(tiny_run, tmp_path):
    run = copy_run(tiny_run, tmp_path)
    for name in ("metrics.jsonl", "timings.jsonl"):
        (run / name).unlink()
    (run / "metrics.jsonl").write_bytes((run / "cold_start" / "metrics.jsonl").read_bytes())
    said = ludus("show", run, "--episodes", "0").out
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["loss/total"]
    assert f"{first:.4g}" in said
    assert "no step of reinforcement learning" in said
    assert "rollouts started" not in said


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("nope",), "nope does not exist"),
        (("empty",), "empty is not a run folder"),
        (("RUN", "--step", "7"), "has no rollouts of step 7. It has rollouts from step 1 to 2."),
        (("RUN", "--evaluation", "x"), "no evaluation 'x'. It has step-000000-test-greedy"),
        (("RUN", "--step", "1", "--evaluation", "x"), "mutually exclusive"),
        (("RUN", "--episodes", "-1"), "--episodes is -1"),
        (("RUN", "--training.steps", "3"), "`ludus show` has no argument --training.steps"),
    ],
)
def test_bad_input_is_one_sentence(words, expected, tiny_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert expected in refused("show", *(tiny_run if word == "RUN" else word for word in words))


def test_an_action_without_words_is_shown_as_nothing():
    messages = ({"role": "user", "content": "q"}, {"role": "assistant", "content": ""})
    silent = Trajectory("t", 0, (), messages, StopReason.EMPTY_ANSWER)
    assert list(marked_messages(silent)) == [("prompt", "q"), ("action", "(nothing)")]
