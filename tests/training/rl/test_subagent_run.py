"""Training with sub-agents: their tokens are in the loss."""

import gzip
import json

import pytest

from ludus.rollouts.ledger import RolloutOutcome
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path, token_values_path
from ludus.training.rl.build import train
from ludus.training.run.run_dir import RunFolder, lock_run, new_run
from ludus.training.run.session import open_session
from small_runs import SMALLEST, RecordingReporter, config

PLANNER = SMALLEST | {
    "rollout__subagents__max_depth": "1",
    "rollout__subagents__exclusive": "true",
    "rollout__guided_tools": "true",  # the cold start calls `search` only
    "algorithm__preset": "reinforce",
    "training__steps": "1",
    "evaluation__tasks": "1",
    "evaluation__tasks_during": "1",
    "run__token_values": "true",
}


@pytest.mark.slow
def test_tokens_of_sub_agents_are_trained_with_the_reward_of_the_rollout(tmp_path):
    settings = config(tmp_path / "run", **PLANNER)
    reporter = RecordingReporter()
    with lock_run(new_run(settings, "search", "rl")):
        train(open_session(settings), RunFolder(tmp_path / "run"), reporter)
    records = list(read_rollouts(rollouts_path(tmp_path / "run", 1)))
    delegated = [one for one in records if any(s.agent == "sub/0" for s in one.trajectory.segments)]
    assert delegated
    assert {one.outcome for one in delegated} == {RolloutOutcome.TRAINED}
    lines = gzip.decompress(token_values_path(tmp_path / "run", 1).read_bytes()).splitlines()
    values = {(one["task"], one["sample"]): one["segments"] for one in map(json.loads, lines)}
    for one in delegated:
        segments = values[one.group, one.trajectory.sample]
        for number, segment in enumerate(one.trajectory.segments):
            if segment.kind == "action":
                assert len(segments[str(number)]["logprob"]) == len(segment.tokens)
                advantages = {value for value in segments[str(number)]["advantage"] if value is not None}
                assert advantages == {one.advantage}
    (_, metrics), *_ = reporter.steps
    assert metrics["tools/delegate/calls"] >= len(delegated)
    assert metrics["agent/rows/max"] > 1
