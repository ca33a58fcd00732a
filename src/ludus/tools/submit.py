"""`submit`: a call that hands in the answer and ends the episode."""

from __future__ import annotations

from ludus.tools.base import Tool, Traits, tool


def submit_tool() -> Tool:
    """Create the tool `submit(answer)`: `ToolEnv` ends the episode, and `Trajectory.answer` is the text."""

    async def submit(answer: str) -> str:
        """Hand in the final answer. This ends the task.

        Args:
            answer: the answer, and nothing else.
        """
        return answer

    return tool(traits=Traits(latency="instant", ends=True))(submit)
