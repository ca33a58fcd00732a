"""Success on paraphrased prompts: whether a model depends on the wording that it was trained with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ludus.envs.task_files import read_text
from ludus.errors import UserError
from ludus.evaluation.probes import common
from ludus.evaluation.probes.common import Cell, MakeScheduler, ProbePlan, ProbeReport, compared, success_rates
from ludus.evaluation.scripted_agents import user_prompt
from ludus.types import Message, Task

WORDINGS: Mapping[str, str] = {
    "please": "Please help me with this.\n\n{prompt}",
    "task": "Here is the task: {prompt}\n\nWork on it as you were instructed.",
    "question last": "Read what follows, and give it your attention before you reply.\n\n{prompt}",
}
"""Wordings of the last user message, by name."""


def with_prompt(task: Task, text: str) -> Task:
    """Return the task with another last user message. Raises UserError if its prompt has none."""
    at = max((i for i, message in enumerate(task.prompt) if message["role"] == "user"), default=None)
    if at is None:
        raise UserError(f"The prompt of task {task.id} has no user message.", "This probe needs one in every task.")
    changed = Message(role="user", content=text)
    return replace(task, prompt=(*task.prompt[:at], changed, *task.prompt[at + 1 :]))


def read_paraphrases(path: Path) -> dict[str, str]:
    """Return the prompts by task id from JSON lines with `task_id` and `prompt`. Raises UserError for invalid lines."""
    found: dict[str, str] = {}
    for number, line in enumerate(read_text(path, "Check --paraphrases.").splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("task_id", "prompt")):
            raise UserError(f"{path}, line {number}: not an object with task_id and prompt as strings.", "Correct it.")
        found[row["task_id"]] = row["prompt"]
    return found


async def measure_paraphrase(make: MakeScheduler, plan: ProbePlan, prompts: Mapping[str, str] | None) -> ProbeReport:
    """Measure success with the original prompts and with `prompts` by task id (if None, `WORDINGS`), paired by task.

    Raises UserError if fewer than 2 tasks have another prompt, or if the world does not send the prompts of its tasks.
    """
    tasks = [task for task in plan.tasks if prompts is None or task.id in prompts]
    if len(tasks) < 2:
        raise UserError(f"{len(tasks)} of the tasks have a paraphrase.", "Check the task ids, --split and --tasks.")
    texts: Mapping[str, Mapping[str, str]]
    if prompts is None:
        shown = {task.id: user_prompt(task) for task in tasks}
        texts = {
            name: {id_: text.replace("{prompt}", one) for id_, one in shown.items()} for name, text in WORDINGS.items()
        }
    else:
        texts = {"paraphrase": prompts}
    original = await _success(make, replace(plan, tasks=tasks))
    rows: list[dict[str, Cell]] = [{"prompt": "original", **compared(original, None)}]
    for name, of_task in texts.items():
        changed = await _success(make, replace(plan, tasks=[with_prompt(task, of_task[task.id]) for task in tasks]))
        rows.append({"prompt": name, **compared(changed, original)})
    note = f"{len(tasks)} tasks, {plan.samples} attempts each; differences are paired by task."
    return ProbeReport("paraphrase", "Success with other wordings of the prompt", rows, (note,))


async def _success(make: MakeScheduler, plan: ProbePlan) -> dict[str, float]:
    scheduler = make(plan.sampling)
    episodes = await common.roll_out(scheduler, plan.requests(plan.samples))
    prompts = {task.id: [message["content"] for message in task.prompt] for task in plan.tasks}
    for one in (one for one in episodes if one.failure is None):
        if not set(prompts[one.task_id]) <= {message["content"] for message in one.messages}:
            text = f"The world {scheduler.world.name!r} does not send the prompts of its tasks to the model."
            raise UserError(text, "This probe cannot paraphrase it.")
    return success_rates(scheduler, episodes)
