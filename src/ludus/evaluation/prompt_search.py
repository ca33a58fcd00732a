"""Search of a system prompt by reflection on failed episodes: GEPA (arXiv:2507.19457), with the extra `gepa`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from threading import Event
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final, TypeVar

from ludus.errors import UserError
from ludus.evaluation.tables import message_lines
from ludus.rewards.base import Reward, success
from ludus.types import Message, Task, Trajectory

if TYPE_CHECKING:
    from gepa import EvaluationBatch

Sample = Callable[[Sequence[Task]], Awaitable[Sequence[Trajectory]]]
"""Function that runs one episode per task, in their order."""
Reflect = Callable[[str], Awaitable[str]]
"""Function that returns a model's answer to a text."""
Result = TypeVar("Result")

_COMPONENT: Final = "system_prompt"
_MAX_CHARACTERS: Final = 6000
_POLL_S: Final = 0.2


def system_prompt(task: Task) -> str:
    """Return the text of the first system message; empty if there is none."""
    return next((message["content"] for message in task.prompt if message["role"] == "system"), "")


def with_system_prompt(task: Task, text: str) -> Task:
    """Return the task with this text as its first system message."""
    first = next((i for i, message in enumerate(task.prompt) if message["role"] == "system"), None)
    others = task.prompt if first is None else (*task.prompt[:first], *task.prompt[first + 1 :])
    return replace(task, prompt=(Message(role="system", content=text), *others))


def transcript(messages: Sequence[Message]) -> str:
    """Return messages as text with their roles; a long text keeps its two ends."""
    text = "\n".join(f"{message['role']}: {' '.join(message_lines(message))}" for message in messages)
    half = _MAX_CHARACTERS // 2
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:half]}\n...\n{text[-half:]}"


@dataclass
class PromptAdapter:
    """GEPA's view of an environment: a candidate is a system prompt, its scores are the successes of episodes."""

    sample: Callable[[Sequence[Task]], Sequence[Trajectory]]
    rewards: Sequence[Reward]
    propose_new_texts: None = None

    def evaluate(
        self, batch: list[Task], candidate: Mapping[str, str], capture_traces: bool = False
    ) -> EvaluationBatch[Trajectory, str]:
        from gepa import EvaluationBatch

        tried = list(self.sample([with_system_prompt(task, candidate[_COMPONENT]) for task in batch]))
        scores = [float(bool(success(self.rewards, one))) for one in tried]
        texts = [one.messages[-1]["content"] for one in tried]
        return EvaluationBatch(texts, scores, tried if capture_traces else None)

    def make_reflective_dataset(
        self,
        candidate: Mapping[str, str],
        eval_batch: EvaluationBatch[Trajectory, str],
        components_to_update: list[str],
    ) -> dict[str, list[dict[str, str]]]:
        del candidate, components_to_update
        rows = []
        for one in eval_batch.trajectories or ():
            shown = [message for message in one.messages if message["role"] != "system"]
            asked = next((i for i, message in enumerate(shown) if message["role"] == "assistant"), len(shown))
            texts = {"Inputs": transcript(shown[:asked]), "Generated Outputs": transcript(shown[asked:])}
            result = "The task was solved." if success(self.rewards, one) else "The task was not solved."
            parts = ", ".join(f"{name} = {value:g}" for name, value in one.rewards.items())
            rows.append(texts | {"Feedback": f"{result} Rewards: {parts}. The episode ended by {one.stop_reason}."})
        return {_COMPONENT: rows}


async def search_prompt(
    tasks: Sequence[Task], sample: Sample, reflect: Reflect, rewards: Sequence[Reward], *, episodes: int, seed: int
) -> str:
    """Return the best system prompt found with about this number of episodes.

    Half of the tasks select candidates, the others are reflected on. The search starts from the prompt of the first
    task. GEPA runs in a thread; `sample` and `reflect` run in this event loop. Raises UserError without the package,
    and if the tasks have different system prompts.
    """
    try:
        from gepa import optimize
    except ImportError as error:
        hint = "Install it: pip install 'ludus[gepa]'."
        raise UserError("The search of a prompt needs the package gepa.", hint) from error
    if len({system_prompt(task) for task in tasks}) > 1:
        raise UserError("The tasks have different system prompts; only a common one can be optimised.")
    loop, stopped = asyncio.get_running_loop(), Event()
    errors: list[Exception] = []  # GEPA logs those of the reflection and goes on

    def wait(call: Awaitable[Result]) -> Result:
        async def awaited() -> Result:
            return await call

        future = asyncio.run_coroutine_threadsafe(awaited(), loop)
        while not stopped.is_set():
            try:
                return future.result(_POLL_S)
            except FutureTimeout:
                continue
            except Exception as error:
                errors.append(error)
                raise
        raise asyncio.CancelledError

    def search() -> str:
        found = optimize(
            seed_candidate={_COMPONENT: system_prompt(tasks[0])},
            trainset=list(tasks[: len(tasks) // 2]),
            valset=list(tasks[len(tasks) // 2 :]),
            adapter=PromptAdapter(lambda batch: wait(sample(batch)), rewards),
            reflection_lm=lambda prompt: wait(reflect(str(prompt))),
            max_metric_calls=episodes,
            stop_callbacks=lambda _: bool(errors),
            logger=SimpleNamespace(log=lambda message: None),
            seed=seed,
        )
        if errors:
            raise errors[0]
        best = found.best_candidate
        return best if isinstance(best, str) else best[_COMPONENT]

    try:
        return await asyncio.to_thread(search)
    finally:
        stopped.set()
