"""Archives of tasks: members are read in order or shuffled, repeated, and mixed in turn."""

import random
from itertools import islice
from zipfile import ZipFile

import pytest
from generators.archive import pack

from ludus.envs import task_archive
from ludus.envs.task_archive import in_turn, read_lines, repeat_lines


@pytest.fixture
def archive(tmp_path, monkeypatch):
    path = tmp_path / "tasks.zip"
    path.write_bytes(pack({"train/1": list(range(50)), "empty": []}))
    assert path.read_bytes() == pack({"train/1": list(range(50)), "empty": []})
    with ZipFile(path) as opened:
        monkeypatch.setattr(task_archive, "open_archive", lambda world: opened)
        yield


@pytest.mark.usefixtures("archive")
def test_lines_come_in_order_unless_a_seed_shuffles_them():
    rows = [int(line) for line in read_lines("own", "train/1")]
    assert rows == list(range(50))
    first, other, again = ([int(line) for line in read_lines("own", "train/1", seed)] for seed in (1, 2, 1))
    assert first == again != other
    assert sorted(first) == sorted(other) == rows
    assert list(read_lines("own", "train/2")) == list(read_lines("own", "empty")) == []


@pytest.mark.usefixtures("archive")
def test_repeated_lines_have_another_order_each_time():
    stream = repeat_lines("own", "train/1", random.Random(0))
    first, second = (list(islice(stream, 50)) for _ in range(2))
    assert first != second
    assert sorted(first) == sorted(second) == sorted(read_lines("own", "train/1"))
    assert list(repeat_lines("own", "train/2", random.Random(0))) == []


def test_streams_of_different_lengths_are_mixed_in_turn():
    assert list(in_turn(["abc", "", "d"])) == ["a", "d", "b", "c"]
