"""Forks by hand, roles of planted models, and differences before and after training."""

import asyncio
import math
from dataclasses import replace

import pytest
import torch

from ludus.errors import UserError
from ludus.evaluation.probes.two_models import forks_report, measure_swap, token_views, transfer_report
from small_worlds import RecordingWorld, call, make_scheduler, renderer, scripted
from tests.evaluation.probes.scripted_policies import PLAN, number_in, text_of

SURE, UNSURE = [9.0, 0.0, 0.0], [1.0, 1.0, 0.0]


def views(*logits):
    return token_views(torch.tensor(logits), torch.zeros(len(logits), dtype=torch.int64))


def test_views_match_hand_computed_values():
    found = views([math.log(0.5), math.log(0.25), math.log(0.25)], [0.0, -math.inf, -math.inf])
    assert found.top.tolist() == [0, 0]
    assert found.entropy.tolist() == pytest.approx([1.5 * math.log(2), 0.0])
    assert found.logprobs.tolist() == pytest.approx([math.log(0.5), 0.0])


def test_fork_counts_match_hand_computed_values():
    base, trained = views(SURE, UNSURE, SURE, SURE), views(SURE, [0.0, 2.0, 0.0], SURE, SURE)
    report = forks_report(["a", "b"], [(base, trained)] * 2, renderer().tokenizer, 0)
    rows = {row["measure"]: row["mean over tasks"].value for row in report.rows}
    assert rows["tokens that are forks"] == 0.25
    assert rows["entropy at forks, nats"] == pytest.approx(float(base.entropy[1]))
    assert rows["entropy elsewhere, nats"] == pytest.approx(float(base.entropy[0]))
    assert rows["difference, nats"] == pytest.approx(float(base.entropy[1] - base.entropy[0]))
    assert report.notes[0] == "2 of 8 sampled tokens are forks, in 2 of 2 episodes."
    assert "(2)" in report.notes[2]
    a, b = (repr(renderer().tokenizer.decode([token])) for token in (0, 1))
    assert [name for name, _ in report.texts] == ["a", "b"]
    assert [note for _, note in report.texts[0][1]] == ["", f"before {a}, after {b}", ""]
    assert "".join(text for text, _ in report.texts[0][1]) == renderer().tokenizer.decode([0, 0, 0, 0])
    assert report.to_json()["texts"][0]["spans"][1][1] == f"before {a}, after {b}"
    one_forked = forks_report(["a", "b"], [(base, trained), (base, base)], renderer().tokenizer, 0)
    assert [row["measure"] for row in one_forked.rows] == ["tokens that are forks"]  # no interval over one task


def test_equal_models_have_no_forks():
    same = views(SURE, UNSURE)
    report = forks_report(["a", "b"], [(same, same)] * 2, renderer().tokenizer, 0)
    assert [row["mean over tasks"].value for row in report.rows] == [0]
    assert not report.texts
    with pytest.raises(UserError, match="1 tasks have sampled tokens"):
        forks_report(["a"], [(same, same)], renderer().tokenizer, 0)


def reads_well(request, turn):
    """Look up nothing useful, and answer what was found."""
    prompt, _ = text_of(request)
    return number_in(prompt.split("|>tool")[-1]) if "|>tool" in prompt else call("echo", text="nothing")


def calls_well(request, turn):
    """Look up the number, and answer another one."""
    prompt, _ = text_of(request)
    return "0" if "|>tool" in prompt else call("echo", text=number_in(prompt))


def swapped(first, second):
    engines = {"A": scripted(first), "B": scripted(second)}
    makers = {
        name: lambda _, engine=engine: make_scheduler(engine, RecordingWorld()) for name, engine in engines.items()
    }
    report = asyncio.run(measure_swap(makers, engines, replace(PLAN, samples=2)))
    assert set(engines["B"].released) <= {one.episode for one in engines["B"].requests}
    return report, {row["calls, answer"]: row for row in report.rows}


def test_swapping_models_identifies_the_failing_role():
    _, rows = swapped(reads_well, calls_well)
    assert [rows[cell]["success"].value for cell in ("A, A", "A, B", "B, A", "B, B")] == [0, 0, 1, 0]
    assert rows["B, A"]["to A, A"].interval.low > 0
    assert (rows["calls by B"]["to A, A"].value, rows["answers by B"]["to A, A"].value) == (0.5, -0.5)


def test_swapping_equal_models_changes_no_result():
    def right(request, turn):
        return calls_well(request, turn).replace("0", "") or number_in(text_of(request)[0])

    report, rows = swapped(right, lambda request, turn: call("echo", text="more"))
    assert [rows[cell]["success"].value for cell in ("A, A", "A, B")] == [1, 0]
    assert len(report.notes) == 1


def test_transfer_report_lists_improved_and_degraded_results():
    tasks = [f"t{i}" for i in range(40)]
    zero, one = dict.fromkeys(tasks, 0.0), dict.fromkeys(tasks, 1.0)
    low = {task: 1.0 + i / 100 for i, task in enumerate(tasks)}
    report = transfer_report({"here": (zero, one), "there": (one, zero)}, (low, {t: v + 2 for t, v in low.items()}), 0)
    assert [row["difference"].value for row in report.rows] == pytest.approx([1, -1, 2])
    assert report.notes[0] == "Better after training: here; worse: there."
    assert report.notes[1].endswith("forgetting.")
    kept = transfer_report({"here": (one, one)}, (low, low), 0)
    assert kept.notes == [
        "Better after training: none; worse: none.",
        "The interval shows no higher loss on the dialogues after training.",
    ]
