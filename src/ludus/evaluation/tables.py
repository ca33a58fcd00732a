"""Tables of text for reports, and the formats of rates, sampling and messages in them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ludus.images import describe_content

if TYPE_CHECKING:
    from ludus.evaluation.evaluate import Evaluation, EvaluationPlan, SubsetResult
    from ludus.evaluation.stats import Interval
    from ludus.types import Message

_MARKUP = re.compile(r"[\\|`*<\[&]|\b_+|_+\b")


def format_temperature(temperature: float) -> str:
    """Describe a temperature."""
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


def format_sampling(plan: EvaluationPlan) -> str:
    """Describe the temperature and, if above 1, the number of attempts."""
    how = format_temperature(plan.temperature)
    return how if plan.samples == 1 else f"{how}, {plan.samples} attempts"


def format_success(result: Evaluation | SubsetResult) -> str:
    """Format a success rate with its interval in per cent."""
    return format_rate(result.rate, result.interval)


def format_rate(rate: float, interval: Interval, form: str = ".1%") -> str:
    """Format a number with its interval, by default in per cent."""
    return f"{rate:{form}} [{interval.low:{form}}, {interval.high:{form}}]"


def message_lines(message: Message, thought: str = "{}", call: str = "{}") -> list[str]:
    """Return reasoning, content and calls of a message that are not empty; reasoning and calls in these formats."""
    calls = [f"{one['function']['name']} {one['function']['arguments']}" for one in message.get("tool_calls", [])]
    reasoning = message.get("reasoning_content", "")
    lines = [thought.format(reasoning) if reasoning else "", describe_content(message), *map(call.format, calls)]
    return [line for line in lines if line]


def markdown_rows(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, with all markup in its cells escaped."""

    def escaped(cell: str) -> str:
        return _MARKUP.sub(lambda found: "".join(f"\\{one}" for one in found[0]), cell).replace("\n", " ")

    cells = [list(map(escaped, row)) for row in (columns, *rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (cells[0], ["---"] * len(columns), *cells[1:]))


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A table of text, with a note below it."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    @property
    def records(self) -> list[dict[str, str]]:
        """The rows as mappings by column."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def to_markdown(self) -> str:
        """Return the table with its title as a heading."""
        parts = [markdown_rows(self.columns, self.rows), self.note] if self.rows else ["None."]
        return "\n\n".join([f"## {self.title}", *filter(None, parts)])
