"""Values of trained tokens that `run.token_values` stores and the viewer shows."""

import gzip
import json
import math

import pytest

from ludus.errors import ConfigError
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path, token_values_path
from ludus.training.rl.build import train
from ludus.training.rl.validate import check_token_values
from ludus.training.run.run_dir import RunFolder, lock_run, new_run
from ludus.training.run.session import open_session
from ludus.viewer.index import RolloutIndex
from ludus.viewer.pages import RunPages
from small_runs import SMALLEST, RecordingReporter, config


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A step with two updates of all rows, a KL to the reference, and a clip that acts."""
    folder = tmp_path_factory.mktemp("values") / "run"
    changes = {"training__steps": "1", "training__epochs": "2", "training__prompts_per_step": "4"}
    changes |= {"algorithm__group_size": "4", "algorithm__kl_coef": "0.1", "training__learning_rate": "3e-3"}
    changes |= {"algorithm__preset": "grpo", "run__token_values": "true"}
    settings = config(folder, **SMALLEST | changes)
    made = new_run(settings, "search", "rl")
    with lock_run(made):
        train(open_session(settings), made, RecordingReporter())
    return folder


def stored(run):
    with gzip.open(token_values_path(run, 1), "rt") as lines:
        return {(one["task"], one["sample"]): one["segments"] for one in map(json.loads, lines)}


@pytest.mark.slow
def test_values_of_each_action_token_of_trained_rollouts_are_stored(run):
    values, ratios = stored(run), []
    records = [r for r in read_rollouts(rollouts_path(run, 1)) if r.outcome == "trained"]
    assert values.keys() == {(r.group, r.trajectory.sample) for r in records}
    for record in records:
        segments = values[record.group, record.trajectory.sample]
        actions = {str(i): s for i, s in enumerate(record.trajectory.segments) if s.kind == "action"}
        assert segments.keys() == actions.keys()
        for number, segment in actions.items():
            found = segments[number]
            assert {len(found[name]) for name in found} == {len(segment.tokens)}
            assert found["advantage"] == pytest.approx([record.advantage] * len(segment.tokens), abs=1e-5)
            assert found["old"] == pytest.approx(segment.logprobs, abs=1e-4)
            assert found["reference"] == pytest.approx(found["old"], abs=1e-4)  # the first step starts from it
            assert min(found["entropy"]) >= 0
            ratios += [
                (math.exp(now - old), clipped)
                for now, old, clipped in zip(found["logprob"], found["old"], found["clipped"], strict=True)
            ]
    assert max(ratio for ratio, _ in ratios) > 1.01  # the second update sees changed weights
    assert any(clipped for _, clipped in ratios)
    assert all(abs(ratio - 1) > 0.19 for ratio, clipped in ratios if clipped)


def test_viewer_returns_the_values_of_a_rollout(run):
    index = RolloutIndex(RunFolder(run), lambda record: record.trajectory.reward > 0)
    index.refresh()
    pages, values = RunPages(index), stored(run)
    shown = [pages.rollout(row["id"]) for row in index.query("SELECT id FROM rollouts WHERE source = ''")]
    index.close()
    for one in shown:
        expected = values.get((one["row"]["task"], one["row"]["sample"]), {})
        assert {str(i): s["trained"] for i, s in enumerate(one["segments"]) if s["trained"]} == expected
    assert any(segment["trained"] for one in shown for segment in one["segments"])


def test_token_values_exclude_transitions(tmp_path):
    with pytest.raises(ConfigError, match=r"training\.transitions trains each turn apart"):
        check_token_values(config(tmp_path, run__token_values="true", training__transitions="true"))
