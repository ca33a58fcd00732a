"""Logged metrics are on disk and exact, and a resumed run continues its log."""

import json
import math
import resource
import struct
import subprocess
import sys
from contextlib import contextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ludus.diagnostics.trackers import (
    TRACKERS,
    JsonLinesTracker,
    MetricsRow,
    TensorBoardTracker,
    make_tracker,
    read_metrics,
)
from ludus.errors import ConfigError, StorageError, UserError


def logged(path, steps, resume_step=None):
    tracker = JsonLinesTracker(path, resume_step)
    for step in steps:
        tracker.log(step, {"reward/mean": step / 3, "loss": -1e-17 * step})
    tracker.close()
    return path


def test_lines_are_json_in_the_order_logged(tmp_path):
    path = logged(tmp_path / "run" / "metrics.jsonl", [0, 1])
    first, second = path.read_text().splitlines()
    assert first == '{"step": 0, "reward/mean": 0.0, "loss": -0.0}'
    assert second == '{"step": 1, "reward/mean": 0.3333333333333333, "loss": -1e-17}'
    assert read_metrics(path)[1] == MetricsRow(1, {"reward/mean": 1 / 3, "loss": -1e-17})


def test_a_line_is_on_disk_before_the_tracker_is_closed(tmp_path):
    tracker = JsonLinesTracker(tmp_path / "m.jsonl")
    tracker.log(0, {"a": 1})
    assert read_metrics(tmp_path / "m.jsonl") == [MetricsRow(0, {"a": 1.0})]
    tracker.close()


NAMES = st.text(min_size=1, max_size=8).filter(lambda name: name != "step")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=20)
@given(metrics=st.dictionaries(NAMES, st.floats(allow_nan=False), max_size=4), step=st.integers(0, 10**9))
def test_every_number_reads_back_exactly(tmp_path, metrics, step):
    path = tmp_path / "m.jsonl"
    path.unlink(missing_ok=True)
    tracker = JsonLinesTracker(path)
    tracker.log(step, metrics)
    tracker.close()
    (row,) = read_metrics(path)
    assert row.step == step
    assert {n: struct.pack("d", v) for n, v in row.metrics.items()} == {
        n: struct.pack("d", v) for n, v in metrics.items()
    }


def test_non_finite_numbers_are_written_as_valid_json(tmp_path):
    path = tmp_path / "m.jsonl"
    tracker = JsonLinesTracker(path)
    tracker.log(0, {"a": math.nan, "b": math.inf, "c": -math.inf})
    tracker.close()

    def refuse(name):
        raise AssertionError(name)

    line = json.loads(path.read_text(), parse_constant=refuse)
    assert line == {"step": 0, "a": "NaN", "b": "Infinity", "c": "-Infinity"}
    (row,) = read_metrics(path)
    assert math.isnan(row.metrics["a"])
    assert (row.metrics["b"], row.metrics["c"]) == (math.inf, -math.inf)


def test_a_metric_named_step_is_refused(tmp_path):
    tracker = JsonLinesTracker(tmp_path / "m.jsonl")
    with pytest.raises(ValueError, match="step"):
        tracker.log(0, {"step": 1.0})
    tracker.close()


@pytest.mark.parametrize("resume_step", [0, 2, 4, 9])
def test_a_resumed_file_equals_an_uninterrupted_one(tmp_path, resume_step):
    whole = logged(tmp_path / "whole.jsonl", range(10))
    torn = logged(tmp_path / "torn.jsonl", range(5))
    with torn.open("ab") as file:
        file.write(b'{"step": 5, "reward/me')
    first = min(resume_step, 4) + 1
    logged(torn, range(first, 10), resume_step)
    assert torn.read_bytes() == whole.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["torn.jsonl", "whole.jsonl"]


def test_opening_without_a_resume_step_removes_only_the_incomplete_line(tmp_path):
    path = logged(tmp_path / "m.jsonl", [0, 1])
    path.write_bytes(path.read_bytes() + b"\0\0\0\0")
    logged(path, [2])
    assert [row.step for row in read_metrics(path)] == [0, 1, 2]


def test_complete_last_line_without_newline_is_kept(tmp_path):
    path = logged(tmp_path / "m.jsonl", [0, 1])
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert [row.step for row in read_metrics(path)] == [0, 1]
    logged(path, [2])
    assert [row.step for row in read_metrics(path)] == [0, 1, 2]


@pytest.mark.parametrize("line", ["[]", "{", '{"a": 1}', '{"step": 1, "a": "much"}', '{"step": 1, "a": null}', ""])
def test_invalid_line_in_the_middle_raises_error_with_its_number(tmp_path, line):
    path = tmp_path / "m.jsonl"
    text = f'{{"step": 0}}\n{line}\n{{"step": 2}}\n'
    path.write_text(text)
    with pytest.raises(UserError, match=r"m\.jsonl, line 2"):
        read_metrics(path)
    with pytest.raises(UserError, match=r"m\.jsonl, line 2"):
        JsonLinesTracker(path, resume_step=0)
    assert path.read_text() == text


def test_missing_metrics_file_raises_user_error(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read_metrics(tmp_path / "nothing.jsonl")


@contextmanager
def files_limited_to(size):
    """Writes beyond `size` bytes of a file fail with an OSError, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_leaves_complete_lines_and_allows_later_logging(tmp_path):
    path = tmp_path / "m.jsonl"
    tracker = JsonLinesTracker(path)
    tracker.log(0, {"a": 1.0})
    before = path.read_bytes()
    with files_limited_to(len(before) + 5), pytest.raises(StorageError, match=r"m\.jsonl could not be written"):
        tracker.log(1, {"a": 2.0})
    assert path.read_bytes() == before
    tracker.log(1, {"a": 2.0})
    tracker.close()
    assert [row.step for row in read_metrics(path)] == [0, 1]


def test_full_disk_while_truncating_leaves_the_file_unchanged(tmp_path):
    path = logged(tmp_path / "m.jsonl", range(100))
    before = path.read_bytes()
    with files_limited_to(100), pytest.raises(StorageError, match="could not be written"):
        JsonLinesTracker(path, resume_step=50)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["m.jsonl"]


def test_folder_at_the_metrics_path_raises_storage_error(tmp_path):
    (tmp_path / "m.jsonl").mkdir()
    with pytest.raises(StorageError, match="cannot be read"):
        JsonLinesTracker(tmp_path / "m.jsonl")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be opened"):
        JsonLinesTracker(tmp_path / "file" / "m.jsonl")


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_reads_what_was_logged(tmp_path):
    tracker = make_tracker("tensorboard", tmp_path)
    tracker.log(0, {"reward/mean": 0.25, "loss": -1.5})
    tracker.log(1, {"reward/mean": 0.5})
    tracker.close()
    assert scalars(tmp_path / "tensorboard") == {"reward/mean": [(0, 0.25), (1, 0.5)], "loss": [(0, -1.5)]}


def test_tensorboard_drops_repeated_steps(tmp_path):
    first = TensorBoardTracker(tmp_path)
    for step in range(6):
        first.log(step, {"a": float(step)})
    first.close()
    second = TensorBoardTracker(tmp_path, resume_step=2)
    for step in range(3, 5):
        second.log(step, {"a": 10.0 + step})
    second.close()
    assert scalars(tmp_path) == {"a": [(0, 0.0), (1, 1.0), (2, 2.0), (3, 13.0), (4, 14.0)]}


def test_tensorboard_on_a_full_disk_keeps_existing_events(tmp_path):
    tracker = TensorBoardTracker(tmp_path)
    tracker.log(0, {"a": 1.0})
    with files_limited_to(tracker.path.stat().st_size + 5), pytest.raises(StorageError):
        tracker.log(1, {"a": 2.0})
    tracker.log(2, {"a": 3.0})
    tracker.close()
    assert scalars(tmp_path) == {"a": [(0, 1.0), (2, 3.0)]}


EXTRAS = ("tensorboard", "wandb", "mlflow", "trackio")


def test_missing_tracker_package_error_names_the_extra_to_install(tmp_path):
    """In a process of its own in which the packages are made unimportable; it also loads no torch."""
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from ludus.diagnostics.trackers import make_tracker\n"
        "from ludus.errors import UserError\n"
        f"for name in {EXTRAS}:\n"
        "    sys.modules[name] = None\n"
        "    try:\n"
        "        make_tracker(name, Path(sys.argv[1]))\n"
        "    except UserError as error:\n"
        "        print(error, 'torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "x")], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    for name, line in zip(EXTRAS, lines, strict=True):
        assert line.startswith(f"The {name} tracker needs a package that is not installed ({name}")
        assert line.endswith(f"Install it: pip install 'ludus[{name}]'. False")
    assert not (tmp_path / "x").exists()


def test_trackers_are_made_by_name(tmp_path):
    tracker = make_tracker("jsonl", tmp_path)
    tracker.log(3, {"a": 0.5})
    tracker.close()
    make_tracker("jsonl", tmp_path, resume_step=2).close()
    assert read_metrics(tmp_path / "metrics.jsonl") == []
    assert set(TRACKERS) == {"jsonl", *EXTRAS}


def test_unknown_tracker_error_suggests_the_nearest_name(tmp_path):
    with pytest.raises(ConfigError, match=r"'tensorbord' is not known. Did you mean 'tensorboard'\?"):
        make_tracker("tensorbord", tmp_path)
    with pytest.raises(ConfigError, match="'comet' is not known. Choose from: " + ", ".join(TRACKERS)):
        make_tracker("comet", tmp_path)
