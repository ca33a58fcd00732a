"""Tables at several widths: nothing is truncated, columns are dropped by rank, and finally rows become blocks."""

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from ludus.cli.ui.fitted_table import TableColumn, make_table
from ludus.cli.ui.tables import tag_table
from ludus.evaluation.evaluate import Evaluation, EvaluationPlan
from ludus.evaluation.tables import markdown_rows

WIDTHS = (40, 60, 80, 140)
COLUMNS = ("split", TableColumn("sampling", 1), "success", TableColumn("detectable", 3), TableColumn("f1", 2))
ROW = ("composition", "temperature 1, 4 attempts", "70.0% [57.5%, 80.1%]", "13.2%", "0.775")
TEXT = "false negatives 0 of 37 [0.0%, 9.4%]; false positives 0 of 24 [0.0%, 13.8%] of all the answers"


def lines(table, width):
    file = io.StringIO()
    Console(file=file, width=width, markup=False).print(table)
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", WIDTHS)
def test_no_number_and_no_interval_is_cut_at_any_width(width):
    shown = lines(make_table(COLUMNS, [ROW], "Held-out success"), width)
    assert max(map(len, shown)) <= width
    assert "70.0% [57.5%, 80.1%]" in "\n".join(shown)
    assert "composition" in "\n".join(shown)
    assert "…" not in "".join(shown)


def test_columns_are_dropped_by_rank_and_named():
    assert "Columns" not in "".join(lines(make_table(COLUMNS, [ROW]), 100))
    assert lines(make_table(COLUMNS, [ROW]), 84)[-1] == "Columns that need a wider terminal: detectable"
    assert lines(make_table(COLUMNS, [ROW]), 72)[-1] == "Columns that need a wider terminal: detectable, f1"


def test_success_by_long_tags_is_a_table_on_80_columns():
    kinds = ["airport/city", "airport/city/country/currency"] * 6
    plan = EvaluationPlan(split="test", num_tasks=12, samples=1, temperature=0.0, seed=0)
    tags = tuple({"family": kind} for kind in kinds)
    greedy = Evaluation(plan, tuple(map(str, range(12))), (1,) * 12, tuple(kinds), {}, 0, tags=tags)
    shown = lines(tag_table("test", [greedy, replace(greedy, plan=replace(plan, temperature=1.0))]), 80)
    assert sum("airport/city/country/currency" in line for line in shown) == 1
    assert sum("greedy" in line for line in shown) == 1
    assert shown[-1] == "Columns that need a wider terminal: tasks"


def test_rows_that_do_not_fit_are_blocks_with_every_cell():
    said = lines(make_table(COLUMNS, [ROW, (*ROW[:4], None)]), 36)
    assert "success     70.0% [57.5%, 80.1%]" in [line.rstrip() for line in said]
    names = [line.split()[0] for line in said if line[:1].strip()]
    assert names == ["split", "sampling", "success", "detectable", "f1", "split", "sampling", "success", "detectable"]
    assert sum(line.startswith("f1") for line in said) == 1


@pytest.mark.parametrize("width", WIDTHS)
def test_text_is_wrapped_at_spaces_outside_intervals(width):
    table = make_table(("property", TableColumn("found", wrap=True)), [("errors, all", TEXT)])
    shown = lines(table, width)
    assert max(map(len, shown)) <= width
    words = re.findall(r"[^\s│]+", " ".join(line for line in shown if "━" not in line and "─" not in line))
    assert [word for word in TEXT.split() if word not in words] == []
    for interval in ("[0.0%, 9.4%];", "[0.0%, 13.8%]"):
        assert sum(interval in line for line in shown) == 1


def test_markdown_escapes_each_underscore_at_the_ends_of_a_word():
    text = markdown_rows(["name"], [["call __init__ or _x of a_b"]])
    assert text.splitlines()[2] == r"| call \_\_init\_\_ or \_x of a_b |"
