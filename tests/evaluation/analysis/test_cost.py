"""Cost of evaluations: tokens by hand, unknown tokens, prices, and tables and files that contain every number."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from ludus.cli.ui.tables import evaluation_tables, format_cost
from ludus.errors import UserError
from ludus.evaluation.analysis.cost import (
    EvaluationCost,
    TokenPrice,
    checked_price,
    context_tokens,
    measure_cost,
    read_price,
)
from ludus.evaluation.evaluate import EvaluationPlan, evaluation_data, load_evaluation, save_evaluation, summarise
from ludus.rewards.base import Reward
from ludus.rollouts.ledger import RolloutKey
from ludus.rollouts.openai_client import TokenUsage
from ludus.rollouts.scheduler import Episode
from ludus.types import Message, Segment, StopReason, Task, Timings, ToolOutcome, ToolStatus, Trajectory

REWARDS = (Reward("won", lambda task, one: 0.0, outcome=True),)
PLAN = EvaluationPlan("test", 4, 2, 1.0, 0)
PROMPT = (Message(role="user", content="?"),)
CHAIN = (
    Segment("prompt", (1, 2, 3)),
    Segment("action", (4, 5), 0),
    Segment("observation", (6,), 0),
    Segment("action", (7,), 1),
)


def episode(number, sample=0, won=True, segments=CHAIN):
    task = Task(f"t{number}", PROMPT, None, {"size": "odd" if number % 2 else "even", "kind": str(number)})
    outcome = ToolOutcome("a", "look", ToolStatus.OK, "found")
    messages = (*PROMPT, *(Message(role=r, content="x") for r in ("assistant", "tool", "assistant")))
    trajectory = Trajectory(
        task.id,
        sample,
        segments,
        messages,
        StopReason.ANSWERED if won else StopReason.MAX_TURNS,
        (outcome,),
        {"won": float(won)},
        timings=Timings(total_s=2.0),
    )
    return Episode(RolloutKey(0, task.id, sample), task, trajectory)


EPISODES = [episode(n, sample, won=n > sample) for n in range(4) for sample in range(2)]


def evaluated(cost):
    tasks = [one.task for one in EPISODES[::2]]
    result = summarise(PLAN, tasks, [one.trajectory for one in EPISODES], REWARDS)
    return replace(result, cost=cost)


def test_context_tokens_count_the_full_context_of_each_turn():
    assert context_tokens(EPISODES[0].trajectory) == (3 + 6, 3)
    branch = replace(EPISODES[0].trajectory, segments=(*CHAIN, Segment("action", (8, 9), 1, parent=2)))
    assert context_tokens(branch) == (3 + 6 + 6, 5)


def test_totals_are_divided_by_tasks_and_by_solved_tasks():
    cost = measure_cost(EPISODES, 3, price=TokenPrice(1.0, 10.0))
    totals = {"prompt_tokens": 8 * 9, "completion_tokens": 8 * 3, "calls": 8, "turns": 16, "seconds": 16.0}
    assert cost == EvaluationCost(4, 3, totals | {"money": pytest.approx((72 * 1 + 24 * 10) / 1e6)})
    assert (cost.per(4)["prompt_tokens"], cost.per(3)["prompt_tokens"]) == (18, 24)
    assert measure_cost(EPISODES, 0).per(0)["calls"] is None
    assert "money" not in measure_cost(EPISODES, 3).per(4)


def test_incomplete_endpoint_usage_makes_cost_unknown_but_counts_turns():
    episodes = [episode(1, segments=())]
    told = measure_cost(episodes, 1, TokenUsage(30, 5, 2, 2), TokenPrice(1.0, 1.0))
    names = ("prompt_tokens", "completion_tokens", "money", "turns")
    assert [told.totals[name] for name in names] == [30, 5, 35e-6, 2]
    silent = measure_cost(episodes, 1, TokenUsage(30, 5, 2, 1), TokenPrice(1.0, 1.0))
    assert [silent.totals[name] for name in names] == [None, None, None, 2]
    assert format_cost(silent.per(silent.num_tasks)["prompt_tokens"]) == "-"


def test_prices_are_read_by_the_name_of_the_model(tmp_path):
    path = tmp_path / "prices.toml"
    path.write_text('["a/b"]\ninput = 2\noutput = 8.5\n\n[half]\ninput = 1\n')
    assert read_price(path, "a/b") == TokenPrice(2.0, 8.5)
    for model, expected in (("c", "no price of 'c'"), ("half", "is not a table with exactly")):
        with pytest.raises(UserError, match=expected):
            read_price(path, model)
    path.write_text("no toml")
    with pytest.raises(UserError, match="cannot be read"):
        read_price(path, "c")
    for wrong in (-1.0, float("nan"), True, "2"):
        with pytest.raises(UserError, match="not valid"):
            checked_price(wrong, 1.0)


@pytest.mark.parametrize("width", [60, 80])
def test_evaluation_tables_truncate_no_numbers_in_console_or_markdown(width):
    names = ("prompt_tokens", "completion_tokens", "calls", "turns", "seconds", "money")
    numbers = (123456789, 7654321, 4321, 1234, 98765.4, 385.1)
    result = evaluated(EvaluationCost(4, 3, dict(zip(names, numbers, strict=True))))
    data = evaluation_data(result)
    tables = list(evaluation_tables([result], ["won"]))
    file = io.StringIO()
    console = Console(file=file, width=width)
    for table in tables:
        console.print(table)
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in file.getvalue()
    markdown = "\n".join(table.to_markdown() for table in tables).replace("\\", "")
    rate, num, low, high = data["by_tag"]["size"]["odd"]
    numbers = [f"{rate:.1%} [{low:.1%}, {high:.1%}]", "30,864,197", "41,152,263", "96.3", "128", "answered", "75.0%"]
    for attempt in data["attempts"]:
        numbers += [f"{e:.1%} [{a:.1%}, {b:.1%}]" for e, a, b in (attempt["pass_at"], attempt["pass_hat"])]
    assert num == 2
    for number in numbers:
        assert number in markdown
    if width == 60:  # printed as blocks with all columns
        assert [n for n in numbers if n not in file.getvalue()] == []


def test_tags_and_stop_reasons_are_saved_and_optional_when_loading(tmp_path):
    result = evaluated(measure_cost(EPISODES, 3))
    path = save_evaluation(tmp_path, result, EPISODES)
    loaded = load_evaluation(path)
    assert loaded.by_tag() == result.by_tag()
    assert loaded.stop_reasons == {"answered": 5, "max_turns": 3}
    data = json.loads(path.read_text())
    assert data["cost"]["per_task"]["turns"] == 4
    for task in data["tasks"]:
        del task["tags"]
    del data["stop_reasons"]
    path.write_text(json.dumps(data))
    assert load_evaluation(path) == result
    assert load_evaluation(path).by_tag() == {}
