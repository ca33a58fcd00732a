"""`submit`: the model hands in its answer by a call, and the episode ends."""

from __future__ import annotations

from ludus.tools.base import Tool, Traits, tool


def submit_tool() -> Tool:
    """The tool `submit(answer)`: `ToolEnv` ends the episode with it, and `Trajectory.answer` is the text."""

    async def submit(answer: str) -> str:
        """Hand in the final answer. This ends the task.

        Args:
            answer: the answer, and nothing else.
        """
        return answer

    return tool(traits=Traits(latency="instant", ends=True))(submit)
