import unittest

import pytest
from tidy import chunks, clamp, spread, window


def test_chunks_are_full():
    assert chunks([1, 2, 3, 4], 2) == [[1, 2], [3, 4]]


def test_the_last_chunk_is_shorter():
    assert chunks("abcde", 2) == ["ab", "cd", "e"]


def test_no_chunks_of_nothing():
    assert chunks([], 3) == []


def test_chunks_need_a_size():
    with pytest.raises(ValueError, match="size"):
        chunks([1], 0)


def test_chunks_of_one():
    assert chunks([1, 2], 1) == [[1], [2]]


@pytest.mark.parametrize(("value", "held"), [(0, 1), (1, 1), (2, 2), (9, 5)])
def test_clamp(value, held):
    assert clamp(value, 1, 5) == held


class TestWindow(unittest.TestCase):
    def test_pairs(self):
        self.assertEqual(window([1, 2, 3], 2), [[1, 2], [2, 3]])

    def test_all(self):
        self.assertEqual(window([1, 2], 2), [[1, 2]])

    def test_too_long(self):
        self.assertEqual(window([1], 2), [])


def test_spread():
    assert spread([3, 1, 2]) == 2


def test_spread_of_nothing():
    assert spread([]) == 0
