"""A tool of which only the description is known: it is shown to a model and never run here."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from pydantic import BaseModel

from ludus.tools.base import Tool, ToolSchema


class _NoArguments(BaseModel):
    """The tool is never called."""


@dataclass(frozen=True)
class DescribedTool(Tool):
    """A tool with a schema from elsewhere: a client's, or one that stands in a file."""

    given: ToolSchema | None = field(default=None, kw_only=True)

    @cached_property
    def schema(self) -> ToolSchema:
        """The schema as it was given."""
        assert self.given is not None
        return self.given


def described_tool(schema: ToolSchema) -> DescribedTool:
    """The tool that an OpenAI description names."""
    function = schema["function"]
    return DescribedTool(function["name"], function["description"], str, _NoArguments, given=schema)
