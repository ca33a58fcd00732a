"""Damaged run folders: one error message and an exit code each, before any file changes."""

import json
import shutil
from pathlib import Path

import pytest

from ludus.envs.registry import build_world
from ludus.errors import StorageError
from ludus.rollouts.ledger import AccountingError, Ledger, RolloutKey, RolloutOutcome
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path
from ludus.training.rl.build import task_order
from ludus.training.run.checkpoint import checkpoint_path, read_state
from ludus.training.run.run_dir import MANIFEST, RunFolder, check_manifest, write_manifest
from tiny_run import copy_run, ludus, refused

DAMAGES = {
    "removed": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "an empty object": lambda path: path.write_bytes(b"{}"),
    "a changed byte": lambda path: path.write_bytes(path.read_bytes()[:-3] + b"#\n#"),
}


@pytest.fixture(scope="module")
def run(tiny_run, tmp_path_factory):
    return copy_run(tiny_run, tmp_path_factory.mktemp("damaged") / "run")


@pytest.fixture(scope="module")
def newest(run):
    return max((run / "checkpoints").iterdir())


def files(run):
    """What a resume reads: the settings, the manifest of the run, the metrics, the newest checkpoint."""
    newest = max((run / "checkpoints").iterdir())
    own = [run / "config.toml", run / "run.json", run / "metrics.jsonl"]
    return [*own, *sorted(path for path in newest.rglob("*") if path.is_file())]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_files_are_named_before_anything_changes(run, damage):
    for path in files(run):
        if (path.name, damage) in [("config.toml", "a changed byte"), ("metrics.jsonl", "a changed byte")]:
            continue  # one is a comment, the other a line cut short that is written again
        before = path.read_bytes()
        DAMAGES[damage](path)
        kept = {one: one.read_bytes() for one in run.rglob("*") if one.is_file() and one.name != "log.txt"}
        said = refused("train", "--resume", run, "--training.steps", "9")
        after = {one: one.read_bytes() for one in run.rglob("*") if one.is_file() and one.name != "log.txt"}
        path.write_bytes(before)
        assert path.name in said, (path.name, said)
        assert "Traceback" not in said
        assert after.items() >= kept.items()


def test_damaged_checkpoint_names_the_one_to_resume_from(run, newest, tmp_path):
    cut = copy_run(run, tmp_path / "run")
    last = cut / "checkpoints" / newest.name
    earlier = last.with_name("step-000001")
    assert earlier.is_dir()
    (last / "trainer" / "state.json").write_text("{}")
    said = refused("train", "--resume", cut, "--training.steps", "9")
    assert "Remove that folder, and --resume will resume from step-000001." in said
    shutil.rmtree(earlier)
    assert "restart the run" in refused("train", "--resume", cut, "--training.steps", "9")


def test_a_missing_line_of_metrics_is_detected(run):
    path = run / "metrics.jsonl"
    before = path.read_text()
    path.write_text("".join(before.splitlines(keepends=True)[1:]))
    said = refused("train", "--resume", run, "--training.steps", "9")
    path.write_text(before)
    assert "has no line for step 1" in said


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"ledger": None},
        {"ledger": {"total": {}, "last_closed": 2}},
        {"ledger": {"total": {"step": None, "started": -1}, "last_closed": 2}},
        {"step": "two"},
        {"step": 1},
        {"kl": 5},
        {"kl": {"unknown": 1}},
        {"optimizer_steps": None},
    ],
)
def test_a_state_that_is_incomplete_is_refused(newest, tmp_path, change):
    folder = tmp_path / newest.name
    (folder / "trainer").mkdir(parents=True)
    path = folder / "trainer" / "state.json"
    state = json.loads((newest / "trainer" / "state.json").read_text())
    path.write_text(json.dumps(state | change if change else change))
    with pytest.raises(StorageError, match=r"is damaged: trainer/state.json .*Remove that folder"):
        read_state(folder)


def test_a_checkpoint_without_a_manifest_is_damaged(newest, tmp_path):
    folder = Path(shutil.copytree(newest, tmp_path / newest.name))
    (folder / "trainer" / MANIFEST).unlink()
    with pytest.raises(StorageError, match=r"manifest\.json is missing"):
        check_manifest(folder)


def test_asynchronous_checkpoint_without_its_stream_is_damaged(run, newest, tmp_path):
    cut = copy_run(run, tmp_path / "run")
    folder = cut / "checkpoints" / newest.name
    path = folder / "trainer" / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mode": "async"}))
    write_manifest_again(folder)
    said = refused("train", "--resume", cut, "--training.steps", "9")
    assert "trainer/stream.jsonl is missing" in said


def write_manifest_again(folder):
    (folder / "trainer" / MANIFEST).unlink()
    write_manifest(folder)


KEY = RolloutKey(3, "task", 0)


@pytest.mark.parametrize("spanning", [False, True])
def test_rollout_trained_ahead_of_its_step_is_not_repeated(spanning):
    ledger = Ledger(spanning=True)
    other = RolloutKey(3, "other", 0)
    for key, outcome in (
        (KEY, RolloutOutcome.TRAINED),
        (other, RolloutOutcome.DROPPED),
        (RolloutKey(1, "task", 0), "trained"),
    ):
        ledger.start(key)
        ledger.finish(key, RolloutOutcome(outcome), "done")
    ledger.close(1)
    with pytest.raises(AccountingError, match="was trained before"):
        ledger.start(KEY)
    resumed = Ledger.restore(ledger.state(), spanning=spanning)
    assert (resumed.trained_ahead(3), resumed.steps_ahead) == ({"task"}, {3})
    with pytest.raises(AccountingError, match="was trained before"):
        resumed.start(KEY)
    resumed.start(other)
    resumed.finish(other, RolloutOutcome.TRAINED, "done")
    resumed.close(3)
    assert resumed.state().ahead == ()


@pytest.mark.slow
def test_a_run_that_leaves_asynchronous_training_trains_each_group_once(run, newest, tmp_path):
    """A group of the next step has trained already, and one of the steps before has not."""
    cut = copy_run(run, tmp_path / "run")
    folder = cut / "checkpoints" / newest.name
    config = RunFolder(cut).load_config()
    step = config.training.steps + 1
    order = task_order(config, build_world(config.env, config.rollout, config.sandbox))
    due = [task.id for task in order.take((step - 1) * order.chunk, config.training.prompts_per_step)]
    owed = next(task.id for task in order.tasks if task.id not in due)
    path = folder / "trainer" / "state.json"
    state = json.loads(path.read_text())
    state["ledger"]["ahead"] = [{"step": step, "task_id": due[0], "sample": 0, "attempt": 0}]
    state["algorithm_state"] = json.dumps(json.loads(state["algorithm_state"] or "{}") | {"owed": [due[0], owed]})
    path.write_text(json.dumps(state))
    write_manifest_again(folder)
    assert ludus("train", "--resume", cut, "--training.steps", str(step)).code == 0
    played = {record.key.task_id for record in read_rollouts(rollouts_path(cut, step))}
    assert played == {*due[1:], owed}
    after = read_state(checkpoint_path(cut / "checkpoints", step))
    assert after.ledger.ahead == ()
    assert json.loads(after.algorithm_state)["owed"] == [due[0]]
