"""`mini-swe-agent` on tasks of the terminal world, in the sandbox: python examples/agents/mini_swe_agent.py"""

import asyncio
import json
from functools import cache
from importlib import resources

import litellm
import yaml
from long_prompts import train
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

from ludus.sandbox import open_sandbox
from ludus.worlds.terminal.checks import SessionState
from ludus.worlds.terminal.splits import kinds_of, make_task
from ludus.worlds.terminal.task import TerminalTask
from ludus.worlds.terminal.world import TerminalSettings, TerminalWorld

litellm.suppress_debug_info = True
SYSTEM = {"system": "Linux", "release": "", "version": "", "machine": ""}
KINDS = (
    "text/blank",
    "text/number",
    "text/reverse",
    "text/tabs",
    "text/line_ends",
    "files/empty",
    "files/temporary",
    "archives/pack",
)
"""Tasks of one command. All splits have all kinds, with other names of files."""
TOPICS = ("text", "files", "archives")
WORLD = TerminalWorld(TerminalSettings(levels=(1,), topics=TOPICS, per_shape=40, num_held_out=600, unseen="names"))
SHOWN = [make_task(kind, number, 0) for kind in kinds_of(TOPICS) if kind.name in KINDS for number in kind.shown[:60]]
SHELL_TASKS = {**WORLD.shell_tasks, **{task.id: task for task in SHOWN}}
TASKS = {
    split: [{"id": task.id} for task in WORLD.tasks(split) if task.tags["kind"] in KINDS]
    for split in ("train", "validation", "test")
}
TASKS["demonstrations"] = [{"id": task.id} for task in SHOWN]
TASK = "Please solve this issue: {{task}}\n\n"


@cache
def config() -> dict:
    """Return the configuration `mini.yaml` with the task behind its instructions, within the window of the model."""
    found = yaml.safe_load((resources.files("minisweagent") / "config" / "mini.yaml").read_text())
    text = found["agent"]["instance_template"].removeprefix(TASK)
    found["agent"]["instance_template"] = f"{text.rstrip()}\n\n{TASK.rstrip()}"
    return found


class PolicyModel(LitellmModel):
    """A model whose failed requests are not repeated: they are refused after the end of the rollout."""

    abort_exceptions = (Exception,)


class SandboxEnvironment(LocalEnvironment):
    """A shell session of the sandbox in place of this machine's shell."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__()
        self._runner, self._sandbox = asyncio.Runner(), open_sandbox()
        self._session = self._runner.run(self._sandbox.session("shell", files=files))

    def execute(self, action: dict, cwd: str = "", *, timeout: int | None = None) -> dict:
        outcome = self._runner.run(self._session.run(f"(\n{action['command']}\n) 2>&1"))
        error = "The command was stopped." if outcome.exit is None else ""
        output = {"output": outcome.text, "returncode": outcome.exit, "exception_info": error}
        self._check_finished(output)
        return output

    def get_template_vars(self, **kwargs) -> dict:
        return {**self.config.model_dump(), **SYSTEM, **kwargs}

    def close(self, task: TerminalTask) -> bool:
        """End the session and return whether all checks of the task hold for its files."""
        found = self._runner.run(self._session.snapshot())
        self._runner.run(self._session.close())
        checks = self._runner.run(task.grade(SessionState(found.files, found.executable), self._sandbox))
        self._runner.run(self._sandbox.close())
        self._runner.close()
        return all(checks.values())


def agent(task, base_url, api_key):
    shell_task = SHELL_TASKS[task["id"]]
    options = {name: text for name, text in config()["model"].items() if name.endswith("template")}
    options |= {"model_kwargs": {"api_base": base_url, "api_key": api_key}, "cost_tracking": "ignore_errors"}
    model = PolicyModel(model_name="openai/policy", **options)
    environment = SandboxEnvironment(dict(shell_task.start.files))
    templates = {name: config()["agent"][name] for name in ("system_template", "instance_template")}
    try:
        DefaultAgent(model, environment, **templates, step_limit=6).run(shell_task.text)
    finally:
        solved = environment.close(shell_task)
    return "solved" if solved else ""


def reward(task: dict, answer: object) -> float:
    return float(answer == "solved")


def script(task: dict, flawed: bool) -> list[dict]:
    """Return the replies of a demonstration; a flawed one only looks."""
    commands = [] if flawed else SHELL_TASKS[task["id"]].steps
    steps = [("Look.", "ls"), *(("Do it.", command) for command in commands)]
    steps.append(("Done.", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"))
    return [{"content": text, "tool_calls": [_call(i, command)]} for i, (text, command) in enumerate(steps)]


def _call(number: int, command: str) -> dict:
    function = {"name": "bash", "arguments": json.dumps({"command": command})}
    return {"id": f"call_{number}", "type": "function", "function": function}


if __name__ == "__main__":
    train(agent, script, TASKS, reward)
