"""Pairs and examples in a run folder: round trip, and damaged records are refused."""

from __future__ import annotations

import gzip
import math

import pytest

from ludus.errors import StorageError
from ludus.training.datasets.files import write_records
from ludus.training.preference.pairs import PairSide, PreferencePair, load_pairs
from ludus.training.reward_model.data import load_examples
from ludus.training.value_models.reward_model import RewardExample, ScoredSequence

ARM = PairSide((5, 6, 7), (False, True, True), (-0.1, -1 / 3))
PAIRS = [
    PreferencePair("step-000001/é", 0.3, ARM, PairSide((5, 8), (False, True)), (ARM,)),
    PreferencePair("b", 1.0, ARM, ARM),
]
EXAMPLES = [
    RewardExample("a", 1, (ScoredSequence((1, 2), (1,), (0.1 + 0.2,)),)),
    RewardExample("b", 1, (), held_out=True),
]


@pytest.mark.parametrize(("records", "load"), [(PAIRS, load_pairs), (EXAMPLES, load_examples)])
def test_records_read_back_as_written_and_equal_ones_make_equal_bytes(records, load, tmp_path):
    one, two = tmp_path / "one.gz", tmp_path / "two.gz"
    write_records(one, records)
    write_records(two, records)
    assert load(one) == records
    assert one.read_bytes() == two.read_bytes()


def cut(data):
    return data[:-9]


def garbled(data):
    return data[:10] + bytes(256 - b - 1 for b in data[10:])


def plain(data):
    return gzip.decompress(data)


def other(data):
    return gzip.compress(b'{"source": "a"}\n')


@pytest.mark.parametrize("damage", [cut, garbled, plain, other])
@pytest.mark.parametrize(("records", "load"), [(PAIRS, load_pairs), (EXAMPLES, load_examples)])
def test_a_damaged_file_is_refused(records, load, damage, tmp_path):
    path = tmp_path / "records.gz"
    write_records(path, records)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(StorageError, match=r"records.gz cannot be read: .* Start a new run"):
        load(path)


def test_non_finite_loss_leaves_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        write_records(tmp_path / "new.gz", [PreferencePair("a", math.nan, ARM, ARM)])
    assert list(tmp_path.iterdir()) == []
