"""An agent of `mini-swe-agent`, with its commands in the sandbox: python examples/agents/mini_swe_agent.py"""

import asyncio
import json
from functools import cache
from importlib import resources

import yaml
from long_prompts import train
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

from ludus.sandbox import open_sandbox

SYSTEM = {"system": "Linux", "release": "", "version": "", "machine": ""}
TASKS = {
    "sum": "write the sum of the numbers in the files {} and {} to the file answer.",
    "larger": "write the larger one of the numbers in the files {} and {} to the file answer.",
    "smaller": "write the smaller one of the numbers in the files {} and {} to the file answer.",
}


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

    def close(self) -> str:
        """End the session and return the text of the file `answer`."""
        files = self._runner.run(self._session.snapshot()).files
        self._runner.run(self._session.close())
        self._runner.run(self._sandbox.close())
        self._runner.close()
        return files.get("answer", b"").decode(errors="replace")


def agent(task, base_url, api_key):
    options = {name: text for name, text in config()["model"].items() if name.endswith("template")}
    options |= {"model_kwargs": {"api_base": base_url, "api_key": api_key}, "cost_tracking": "ignore_errors"}
    model = PolicyModel(model_name="openai/policy", **options)
    environment = SandboxEnvironment({name: f"{number}\n".encode() for name, number in task["numbers"].items()})
    templates = {name: config()["agent"][name] for name in ("system_template", "instance_template")}
    try:
        DefaultAgent(model, environment, **templates, step_limit=6).run(TASKS[task["word"]].format(*task["numbers"]))
    finally:
        answer = environment.close()
    return answer


def script(task: dict, flawed: bool) -> list[dict]:
    """Return the replies of a demonstration."""
    first, second = task["numbers"]
    result = {
        "sum": f"echo $(( $(cat {first}) + $(cat {second}) ))",
        "larger": f"sort -n {first} {second} | tail -n 1",
        "smaller": f"sort -n {first} {second} | head -n 1",
    }[task["word"]]
    steps = [
        ("Both numbers.", f"cat {first} {second}"),
        ("Write.", f"{f'cat {first}' if flawed else result} > answer"),
        ("Done.", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ]
    return [{"content": text, "tool_calls": [_call(i, command)]} for i, (text, command) in enumerate(steps)]


def _call(number: int, command: str) -> dict:
    function = {"name": "bash", "arguments": json.dumps({"command": command})}
    return {"id": f"call_{number}", "type": "function", "function": function}


if __name__ == "__main__":
    train(agent, script)
