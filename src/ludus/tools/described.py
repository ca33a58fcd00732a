"""A tool known only by its description: shown to a model, but not executed here."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from pydantic import BaseModel

from ludus.tools.base import Tool, ToolSchema


class _NoArguments(BaseModel):
    """Placeholder: the tool is never called."""


@dataclass(frozen=True)
class DescribedTool(Tool):
    """A tool with an external schema, from a client or a file."""

    given: ToolSchema | None = field(default=None, kw_only=True)

    @cached_property
    def schema(self) -> ToolSchema:
        """The given schema."""
        assert self.given is not None
        return self.given


def described_tool(schema: ToolSchema) -> DescribedTool:
    """Create a tool from an OpenAI tool description."""
    function = schema["function"]
    return DescribedTool(function["name"], function["description"], str, _NoArguments, given=schema)
