"""Find the first stage at which an endpoint's agent fails, from its connection to its success.

One episode tests the connection; the stages after it count episodes. A stage fails if fewer than half of what it counts
passes, or, for tool calls and their use, if nothing does. Later stages are not reported, since they follow from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ludus.errors import EngineError, LudusError, UserError
from ludus.evaluation.probes import common
from ludus.evaluation.probes.common import Cell, MakeScheduler, MeanEstimate, ProbePlan, ProbeReport
from ludus.evaluation.stats import wilson
from ludus.rollouts.episode import scored
from ludus.rollouts.scheduler import Scheduler
from ludus.types import Message, StopReason, ToolStatus, Trajectory

CONTROL = re.compile(r"<\|[^|<>]{1,30}\|>|\[/?INST\]|</?(s|bos|eos|start_of_turn|end_of_turn)>")
"""Control tokens of chat formats, which a server should not return as text."""
_LOOKS_LIKE_CALL = re.compile(r"<tool_call|<function|\"(name|arguments|parameters)\"\s*:|\[TOOL_CALLS\]|<search>", re.I)
_EXCERPT_CHARS = 120


@dataclass(frozen=True, slots=True)
class EndpointStage:
    """A stage: how many of `total` passed, evidence and remedy; it fails below the share `least`, or with 0."""

    name: str
    passed: int
    total: int
    evidence: str
    remedy: str
    least: float = 0.5

    @property
    def failed(self) -> bool:
        return self.passed == 0 or self.passed < self.least * self.total


_REACHED = EndpointStage("reachable", 1, 1, "The server responds.", "")


async def diagnose_endpoint(make: MakeScheduler, plan: ProbePlan) -> ProbeReport:
    """Return the results of the stages, up to the first that fails. Raises UserError for fewer than 2 tasks."""
    common.check_tasks_suffice(plan.tasks)
    scheduler = make(plan.sampling)
    try:
        await common.roll_out(make(plan.sampling), plan.requests()[:1])
        episodes = await common.roll_out(scheduler, plan.requests())
    except LudusError as error:
        remedy = error.hint or "See the server's log."
        if isinstance(error, EngineError) and "did not respond" in error.message:
            return _report([EndpointStage("reachable", 0, 1, error.message, remedy)])
        if not isinstance(error, EngineError | UserError):
            raise
        return _report([_REACHED, EndpointStage("answers", 0, 1, error.message, remedy)])
    answers = EndpointStage("answers", 1, 1, "A completion was received.", "")
    return _report([_REACHED, answers, *_stages(scheduler, plan, [one for one in episodes if one.failure is None])])


def _report(stages: Sequence[EndpointStage]) -> ProbeReport:
    rows: list[dict[str, Cell]] = []
    title = "Stages of an endpoint's agent"
    for stage in stages:
        counts, remedy = f"{stage.passed} of {stage.total}", stage.remedy if stage.failed else ""
        rows.append({"stage": stage.name, "passed": counts, "evidence": stage.evidence, "remedy": remedy})
        if stage.failed:
            note = f"The first stage that fails: {stage.name}. {stage.remedy}"
            return ProbeReport("endpoint", title, rows, (note,), failed=True)
    return ProbeReport("endpoint", title, rows, ("No stage fails.",))


def _stages(scheduler: Scheduler, plan: ProbePlan, episodes: Sequence[Trajectory]) -> Iterator[EndpointStage]:
    num = len(episodes)
    marked = [text for one in episodes if (text := _control_text(one))]
    ended = [one for one in episodes if one.stop_reason not in (StopReason.TRUNCATED, StopReason.EMPTY_ANSWER)]
    clean = sum(not _control_text(one) for one in ended)
    found = (
        f"Control tokens in the text: {_excerpt(marked[0])}" if marked else f"{num - len(ended)} turns cut or empty."
    )
    found = found if clean < num else "Turns are complete text."
    remedy = "Correct the server's chat template, or increase rollout.max_tokens_per_turn if turns are cut."
    yield EndpointStage("chat format", clean, num, found, remedy)
    if any(scheduler.world.environment(task).tools for task in plan.tasks[:1]):
        yield from _tool_stages(episodes)
    answered = sum(one.stop_reason is StopReason.ANSWERED for one in episodes)
    reasons = ", ".join(sorted({str(one.stop_reason) for one in episodes}))
    limits = "Increase the limit that ends the episodes: rollout.max_turns, max_seq_len or max_tokens_per_turn."
    yield EndpointStage("answer found", answered, num, f"Episodes end with: {reasons}.", limits)
    yield _success_stage(scheduler, plan, episodes)


def _tool_stages(episodes: Sequence[Trajectory]) -> Iterator[EndpointStage]:
    outcomes = [outcome for one in episodes for outcome in one.outcomes if outcome.call_id]
    parsed = [one for one in episodes if any(outcome.status is not ToolStatus.MALFORMED for outcome in one.outcomes)]
    texts = [m["content"] for one in episodes for m in _turns(one) if _LOOKS_LIKE_CALL.search(m["content"])]
    unread = f"Text that looks like a call: {_excerpt(texts[0])}" if texts else "No text looks like a tool call."
    parser = "Start the server with a tool-call parser, or name the format with --env.tool_parser."
    yield EndpointStage("tool call parsed", len(parsed), len(episodes), f"Episodes with a call. {unread}", parser, 0.0)
    valid = [outcome for outcome in outcomes if outcome.status is ToolStatus.OK]
    wrong = next((one for one in outcomes if one.status is not ToolStatus.OK), None)
    fault = f"{wrong.tool or 'call'}: {_excerpt(wrong.output)}" if wrong else "All calls ran."
    describe = "Describe tools and arguments in the prompt."
    yield EndpointStage("tool call valid", len(valid), len(outcomes), fault, describe)
    with_result = [one for one in episodes if any(outcome.status is ToolStatus.OK for outcome in one.outcomes)]
    used, words = sum(map(_uses_result, with_result)), "Later turns that repeat words of a result."
    remedy = "Check that the server's chat template shows tool messages to the model."
    yield EndpointStage("tool result used", used, len(with_result), words, remedy, 0.0)


def _success_stage(scheduler: Scheduler, plan: ProbePlan, episodes: Sequence[Trajectory]) -> EndpointStage:
    """Return the last stage; the chance is the success of each episode at the next task."""
    tasks = {task.id: task for task in plan.tasks}
    wins = sum(common.succeeded(scheduler, one) for one in episodes)
    others, rewards = [tasks[one.task_id] for one in [*episodes[1:], episodes[0]]], scheduler.world.rewards
    lucky = [
        common.succeeded(scheduler, scored(rewards, task, one)) for task, one in zip(others, episodes, strict=True)
    ]
    rate, chance = MeanEstimate(wins / len(episodes), wilson(round(wins), len(episodes))), sum(lucky) / len(lucky)
    evidence = f"Success {rate}; with another task's answer {chance:.1%}."
    above = len(episodes) if rate.interval.low > chance else 0
    remedy = "The agent runs but does not solve the tasks: read transcripts, try more --tasks, or train the model."
    return EndpointStage("success above chance", above and round(wins), len(episodes), evidence, remedy, 0.0)


def _turns(episode: Trajectory) -> list[Message]:
    return [message for message in episode.messages if message["role"] == "assistant"]


def _control_text(episode: Trajectory) -> str:
    return next((message["content"] for message in _turns(episode) if CONTROL.search(message["content"])), "")


def _uses_result(episode: Trajectory) -> bool:
    """Return whether an assistant turn after a result repeats a word of it that was not shown before."""
    shown: set[str] = set()
    new: set[str] = set()
    results = {outcome.output for outcome in episode.outcomes if outcome.status is ToolStatus.OK}
    for message in episode.messages:
        words = set(re.findall(r"\w+", str([message["content"], message.get("tool_calls", "")]).lower()))
        if message["role"] == "assistant" and words & new:
            return True
        if message["role"] != "assistant" and any(output in message["content"] for output in results if output):
            new |= words - shown
        shown |= words
    return False


def _excerpt(text: str) -> str:
    return repr(" ".join(text.split())[:_EXCERPT_CHARS])
