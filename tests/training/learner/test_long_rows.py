"""Long rows: memory grows linearly with the tokens, and the gradient is the sum over parts of the loss mask."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ludus.training.batches import prefix_packing
from ludus.training.batches.rows import BREAK, Row, apply_mask
from tests.training.batches.test_forest import VOCAB, families
from tests.training.learner.test_learner import gradients, largest_difference, learner, tiny_model


def turns(num, prompt=()):
    """A row of turns of 64 tokens, of which the last 8 are sampled. A prompt begins a second path of as many turns."""
    draw = torch.Generator().manual_seed(num)
    paths = [torch.randint(0, 53, (64 * num,), generator=draw).tolist() for _ in range(1 + bool(prompt))]
    tokens, trains = [], []
    for path in paths:
        gap = [BREAK] if tokens else []
        tokens += [*gap, *prompt, *path]
        trains += [False] * (len(gap) + len(prompt)) + [i % 64 >= 56 for i in range(len(path))]
    numbers = tuple(map(float, trains))
    return Row(tuple(tokens), tuple(trains), tuple(trains), tuple(-4.0 * n for n in numbers), numbers)


class LargestTensor(TorchDispatchMode):
    """The largest number of elements that an operation returned, and the elements kept for the backward pass."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        tensors = found if isinstance(found, tuple | list) else (found,)
        self.elements = max([self.elements, *(t.numel() for t in tensors if isinstance(t, torch.Tensor))])
        return found


def memory(model, row):
    """The largest tensor of a gradient, and all that autograd keeps, in elements."""
    one, kept = learner(model), {}

    def keep(tensor):
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with LargestTensor() as largest, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        one.gradient([row])
    return largest.elements, sum(kept.values())


@pytest.mark.parametrize(("name", "prompt"), [("qwen3", ()), ("qwen3", range(20)), ("mistral", ())])
def test_memory_of_a_long_row_grows_linearly(name, prompt, monkeypatch):
    """A chain, two paths that share their prompt, and attention within a window."""
    monkeypatch.setattr(prefix_packing, "MAX_MASK", 2**15)
    short, long = (memory(families()[name], turns(num, prompt)) for num in (3, 9))
    assert long[0] >= VOCAB * 8 * 9
    assert all(much < 3.5 * little for little, much in zip(short, long, strict=True))


def test_gradients_of_two_halves_of_the_actions_add_up():
    row, model = turns(20), tiny_model()
    one, num = learner(model), 20 * 8
    parts = []
    for first, last in ((0, num // 2), (num // 2, num), (0, num)):
        one.gradient([apply_mask(row, [first <= i < last for i in range(num)])])
        parts.append(gradients(model))
    first, second, whole = parts
    halves = {name: (first[name] + second[name]) / 2 for name in whole}
    assert largest_difference(first, whole) > 1e-4
    assert largest_difference(halves, whole) < 1e-12


@pytest.mark.scale
def test_benchmark_of_a_long_step_plays_an_episode_and_measures_it(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    page = tmp_path / "page.md"
    page.write_text("<!-- begin long step -->\n<!-- end long step -->\n")
    importlib.import_module("long_step").main(["--calls", "6", "--page", str(page)])
    row, exact = page.read_text().splitlines()[3], page.read_text().splitlines()[5]
    calls, _, trained, *costs, halves, gap = (float(cell.replace(",", "")) for cell in row.strip("|").split("|"))
    assert (calls, trained) == (6, 138)
    assert min(costs) > 0
    assert max(halves, gap) < 1e-4
    assert all(float(found) < 1e-12 for found in re.findall(r"\de-\d+", exact))
