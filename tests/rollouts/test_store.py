"""Rollouts on disk: lossless, deterministic bytes, and no partially written files."""

import errno
import gzip
import json
import math
import random
import resource
import shutil
from contextlib import contextmanager
from dataclasses import fields, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ludus.errors import StorageError, UserError
from ludus.rollouts.ledger import RolloutKey, RolloutOutcome
from ludus.rollouts.rollout_files import RolloutRecord, read_rollouts, replaced_file, rollouts_path, write_rollouts
from ludus.types import Failure, Segment, StopReason, Timings, ToolOutcome, ToolStatus, Trajectory

TRAJECTORY = Trajectory(
    task_id="population/peru",
    sample=3,
    segments=(
        Segment("prompt", (1, 2, 3), policy="role_critic"),
        Segment("action", (7, 8), turn=0, logprobs=(-0.1, -1 / 3), versions=(4, 5), finish_reason="stop"),
        Segment("observation", (9,), turn=0),
        Segment("action", (5,), turn=1, parent=1, agent="critic", logprobs=(-2.5,), versions=(5,)),
    ),
    messages=(
        {"role": "user", "content": "Wie viele Menschen? 🦙"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "look it up",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"q":  "Peru"}'}}
            ],
        },
        {"role": "tool", "content": "34 million\ud800", "tool_call_id": "1", "name": "find"},
    ),
    stop_reason=StopReason.MAX_TURNS,
    outcomes=(ToolOutcome("1", "find", ToolStatus.OK, "34 million\ud800", truncated=True, cost=0.25, retried=True),),
    rewards={"outcome": 1.0, "format": 0.1 + 0.2},
    reward=1.03,
    turn_rewards=(0.0, 0.5),
    failure=Failure("engine", "no answer", 2),
    tags={"split": "train"},
    anchors=("a1", "b2"),
)
RECORD = RolloutRecord(12, "population/peru", RolloutOutcome.TRAINED, "kept", TRAJECTORY, -0.7071067811865475, 1)

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(max_size=12)
IDS = st.integers(0, 2**31 - 1)


@st.composite
def segments(draw):
    """A tree of at most three segments; the last is an action, and some actions were not sampled here."""
    made = []
    for i in range(draw(st.integers(1, 3))):
        tokens = draw(st.lists(IDS, min_size=1, max_size=4).map(tuple))
        sampled = len(tokens) if draw(st.booleans()) else 0
        segment = Segment(
            kind=draw(st.sampled_from(["prompt", "action", "observation"])),
            tokens=tokens,
            turn=draw(st.integers(0, 9)),
            parent=draw(st.none() | st.integers(-1, i - 1)),
            agent=draw(TEXT),
            finish_reason=draw(st.sampled_from(["stop", "length", "abort", None])),
        )
        numbers = draw(st.lists(NUMBERS, min_size=sampled, max_size=sampled))
        versions = draw(st.lists(IDS, min_size=sampled, max_size=sampled))
        told = {"logprobs": tuple(-abs(x) for x in numbers), "versions": tuple(versions)}
        made.append(replace(segment, **told) if segment.kind == "action" else segment)
    return (*made, Segment("action", (1,)))


TRAJECTORIES = st.builds(
    Trajectory,
    task_id=TEXT,
    sample=IDS,
    segments=segments(),
    messages=st.lists(
        st.fixed_dictionaries({"role": st.just("user"), "content": TEXT}, optional={"name": TEXT}), max_size=2
    ).map(tuple),
    stop_reason=st.sampled_from(StopReason),
    outcomes=st.lists(
        st.builds(
            ToolOutcome,
            TEXT,
            TEXT,
            st.sampled_from(ToolStatus),
            TEXT,
            st.booleans(),
            cost=NUMBERS,
            retried=st.booleans(),
        ),
        max_size=2,
    ).map(tuple),
    rewards=st.dictionaries(TEXT, NUMBERS, max_size=3),
    reward=NUMBERS,
    turn_rewards=st.lists(NUMBERS, max_size=3).map(tuple),
    failure=st.none() | st.builds(Failure, TEXT, TEXT, IDS),
    tags=st.dictionaries(TEXT, TEXT, max_size=2),
    anchors=st.lists(TEXT, max_size=3).map(tuple),
)
RECORDS = st.builds(
    RolloutRecord,
    IDS,
    TEXT,
    st.sampled_from(RolloutOutcome),
    TEXT,
    TRAJECTORIES,
    st.none() | NUMBERS,
    st.integers(0, 3),
)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=20)
@given(records=st.lists(RECORDS, max_size=3))
def test_written_rollouts_read_back_equal(tmp_path, records):
    path = tmp_path / "x.jsonl.gz"
    write_rollouts(path, records)
    back = list(read_rollouts(path))
    assert back == records
    first = path.read_bytes()
    write_rollouts(path, back)
    assert path.read_bytes() == first


def test_full_record_reads_back_equal_and_its_line_is_plain_json(tmp_path):
    path = rollouts_path(tmp_path, 12)
    assert path == tmp_path / "rollouts" / "step-000012.jsonl.gz"
    write_rollouts(path, [RECORD, replace(RECORD, advantage=None)])
    first, second = read_rollouts(path)
    assert first == RECORD
    assert second.advantage is None
    assert first.key == RolloutKey(12, "population/peru", 3, 1)
    line = json.loads(gzip.decompress(path.read_bytes()).splitlines()[0])
    assert line["schema"] == 1
    assert line["outcome"] == "trained"
    assert line["trajectory"]["segments"][3]["parent"] == 1
    assert line["trajectory"]["rewards"]["format"] == 0.30000000000000004
    assert line["trajectory"]["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"q":  "Peru"}'


def test_file_without_anchors_from_an_older_version_is_read(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    write_rollouts(path, [RECORD])
    line = json.loads(gzip.decompress(path.read_bytes()))
    del line["trajectory"]["anchors"]
    path.write_bytes(gzip.compress(json.dumps(line).encode()))
    assert list(read_rollouts(path)) == [replace(RECORD, trajectory=replace(TRAJECTORY, anchors=()))]


def test_file_without_call_costs_from_an_older_version_is_read(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    write_rollouts(path, [RECORD])
    line = json.loads(gzip.decompress(path.read_bytes()))
    (outcome,) = line["trajectory"]["outcomes"]
    assert (outcome.pop("cost"), outcome.pop("retried")) == (0.25, True)
    path.write_bytes(gzip.compress(json.dumps(line).encode()))
    (found,) = read_rollouts(path)
    assert found.trajectory.outcomes == (replace(TRAJECTORY.outcomes[0], cost=0.0, retried=False),)


def test_all_record_fields_except_timings_are_stored(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    write_rollouts(path, [RECORD])
    line = json.loads(gzip.decompress(path.read_bytes()))
    stored = {
        RolloutRecord: line,
        Trajectory: line["trajectory"],
        Segment: line["trajectory"]["segments"][0],
        ToolOutcome: line["trajectory"]["outcomes"][0],
        Failure: line["trajectory"]["failure"],
    }
    for record, data in stored.items():
        missing = {f.name for f in fields(record)} - data.keys()
        assert missing <= {"seconds", "timings"}, record
    assert "truth" not in json.dumps(line)
    assert ["policy" in segment for segment in line["trajectory"]["segments"]] == [True, False, False, False]


def test_equal_rollouts_are_written_as_identical_files(tmp_path):
    slow = replace(
        TRAJECTORY,
        timings=Timings(9.0, 5.0, 4.0),
        outcomes=(replace(TRAJECTORY.outcomes[0], seconds=4.0),),
        rewards=dict(reversed(TRAJECTORY.rewards.items())),
    )
    write_rollouts(tmp_path / "a.gz", [RECORD])
    write_rollouts(tmp_path / "b.gz", [replace(RECORD, trajectory=slow)])
    written = (tmp_path / "a.gz").read_bytes()
    assert written == (tmp_path / "b.gz").read_bytes()
    assert written[3:8] == bytes(5), "the gzip header holds a file name or a time"
    (back,) = read_rollouts(tmp_path / "b.gz")
    assert back.trajectory.outcomes[0].seconds == 0.0
    assert back.trajectory.timings == Timings()


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_nonfinite_number_is_rejected_with_its_location(tmp_path, odd):
    path = tmp_path / "x.jsonl.gz"
    write_rollouts(path, [RECORD])
    before = path.read_bytes()
    segments = (TRAJECTORY.segments[0], replace(TRAJECTORY.segments[1], logprobs=(-0.1, odd)))
    bad = replace(RECORD, trajectory=replace(TRAJECTORY, segments=segments))
    with pytest.raises(UserError, match=r"step 12, task population/peru, sample 3.*segments\[1\]\.logprobs\[1\]"):
        write_rollouts(path, [RECORD, bad])
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["x.jsonl.gz"]


def _lines(path, *lines):
    path.write_bytes(gzip.compress("".join(line + "\n" for line in lines).encode()))


def segment(data, number):
    return data["trajectory"]["segments"][number]


def _edited(tmp_path, change):
    """The JSON line of RECORD after `change` has been done to its data."""
    write_rollouts(tmp_path / "good.gz", [RECORD])
    data = json.loads(gzip.decompress((tmp_path / "good.gz").read_bytes()))
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda d: d.update(schema=2), "schema is 2, this version reads 1"),
        (lambda d: d.pop("outcome"), "RolloutRecord: outcome"),
        (lambda d: d.update(outcome="lost"), "lost"),
        (lambda d: d["trajectory"].update(truth=4), "Trajectory: truth"),
        (lambda d: d["trajectory"].update(rewards=[1.0]), "expected a JSON object, got list"),
        (lambda d: d["trajectory"].update(reward=math.nan), "NaN"),
        (lambda d: d["trajectory"].update(reward="1"), "'1' is not a number"),
        (lambda d: d["trajectory"]["segments"][0].update(kind="thought"), "thought"),
        (lambda d: d["trajectory"]["segments"][0].update(tokens=[1.5]), "1.5 is not a whole number"),
        (lambda d: d["trajectory"]["messages"].append({"role": "user"}), "role and content"),
        (lambda d: d["trajectory"].update(reward=10**400), "not a finite number"),
        (lambda d: segment(d, 0).update(tokens=[1, -1]), "segments[0] contains -1, which is not a token id"),
        (lambda d: segment(d, 1).update(tokens=[10**30, 8]), "which is not a token id"),
        (lambda d: segment(d, 1)["logprobs"].pop(), "segments[1] has 2 tokens and 1 of logprobs"),
        (lambda d: segment(d, 1)["versions"].append(5), "segments[1] has 2 tokens and 3 of versions"),
        (lambda d: segment(d, 1).update(logprobs=[-0.1, 5.0]), "segments[1] has the log-probability 5.0"),
        (lambda d: segment(d, 2).update(logprobs=[-0.1]), "segments[2] is an observation and has logprobs"),
        (lambda d: segment(d, 1).update(turn=-3), "segments[1] has the turn -3"),
        (lambda d: segment(d, 3).update(parent=3), "segments[3] continues segments[3]"),
        (lambda d: segment(d, 1).update(parent=99), "segments[1] continues segments[99]"),
        (lambda d: segment(d, 1).update(parent=-2), "segments[1] continues segments[-2]"),
        (lambda d: d["trajectory"].update(leaf_rewards=[1.0]), "length 1, expected the number of leaves 2"),
    ],
)
def test_damaged_line_is_reported_with_file_line_and_reason(tmp_path, change, complaint):
    good = _edited(tmp_path, lambda d: None)
    path = tmp_path / "step-000007.jsonl.gz"
    _lines(path, good, _edited(tmp_path, change), good)
    records = read_rollouts(path)
    assert next(records) == RECORD
    with pytest.raises(UserError) as caught:
        next(records)
    assert "step-000007.jsonl.gz, line 2" in str(caught.value)
    assert complaint in str(caught.value)


def test_lines_with_invalid_json_or_oversized_numbers_are_rejected(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    huge = _edited(tmp_path, lambda d: None).replace("1.03", "1e999")
    for text in ("{", "[]", "", huge, "[" * 200_000):
        _lines(path, text)
        with pytest.raises(UserError, match=r"x\.jsonl\.gz, line 1"):
            list(read_rollouts(path))


def test_damaged_or_missing_file_is_reported(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    with pytest.raises(UserError, match="does not exist"):
        list(read_rollouts(path))
    rng = random.Random(0)
    records = [replace(RECORD, reason=str(rng.random()), step=i) for i in range(500)]
    write_rollouts(path, records)
    whole = path.read_bytes()
    for cut in (len(whole) // 2, len(whole) - 1, 0):
        path.write_bytes(whole[:cut])
        with pytest.raises(UserError, match="is damaged after line"):
            list(read_rollouts(path))
    path.write_bytes(b"plain text")
    with pytest.raises(UserError, match="is damaged after line 0"):
        list(read_rollouts(path))
    with pytest.raises(StorageError, match="cannot be read"):
        list(read_rollouts(tmp_path))


@contextmanager
def files_limited_to(size):
    """Writes beyond `size` bytes of a file fail with an OSError, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_leaves_the_earlier_file_intact(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    write_rollouts(path, [RECORD])
    before = path.read_bytes()
    rng = random.Random(0)
    many = [replace(RECORD, reason=rng.randbytes(400).hex()) for _ in range(2000)]
    with files_limited_to(100_000), pytest.raises(StorageError) as caught:
        write_rollouts(path, many)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.EFBIG
    assert str(path) in caught.value.message
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["x.jsonl.gz"]
    write_rollouts(path, many)
    assert sum(1 for _ in read_rollouts(path)) == 2000


def test_folder_creation_failure_raises_storage_error(tmp_path):
    (tmp_path / "rollouts").write_text("a file in the way")
    with pytest.raises(StorageError, match="could not be written"):
        write_rollouts(rollouts_path(tmp_path, 0), [RECORD])


def test_a_replaced_file_appears_only_when_it_is_complete(tmp_path):
    path = tmp_path / "state"
    path.write_bytes(b"old")
    with replaced_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    with pytest.raises(TypeError, match="bytes-like"), replaced_file(path) as file:
        file.write("newer")
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_leftover_temporary_file_of_a_killed_run_is_replaced(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    (tmp_path / "x.jsonl.gz.tmp").write_bytes(b"half")
    write_rollouts(path, [RECORD])
    assert list(read_rollouts(path)) == [RECORD]
    assert [p.name for p in tmp_path.iterdir()] == ["x.jsonl.gz"]


@pytest.mark.skipif(shutil.which("zcat") is None, reason="zcat is not there")
def test_zcat_output_of_a_rollout_file_is_json(tmp_path):
    import subprocess

    path = tmp_path / "x.jsonl.gz"
    write_rollouts(path, [RECORD])
    text = subprocess.run(["zcat", str(path)], capture_output=True, check=True).stdout
    assert json.loads(text)["reason"] == "kept"
