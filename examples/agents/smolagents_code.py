"""The code agent of `smolagents`, with its code in the sandbox: python examples/agents/smolagents_code.py"""

import asyncio

from long_prompts import train
from smolagents import CodeAgent, LogLevel, OpenAIServerModel, PythonExecutor, tool
from smolagents.local_python_executor import CodeOutput
from smolagents.tools import get_tools_definition_code

from ludus.sandbox import open_sandbox

QUESTIONS = {
    "sum": "What is the sum of the numbers of {} and {}?",
    "larger": "What is the larger one of the numbers of {} and {}?",
    "smaller": "What is the smaller one of the numbers of {} and {}?",
}
FINAL = 99
FINAL_ANSWER = f"def final_answer(answer):\n    print(answer)\n    raise SystemExit({FINAL})\n"


@tool
def lookup(name: str) -> int:
    """Return the number of a tree.

    Args:
        name: The name of the tree.
    """
    with open(name) as file:
        return int(file.read())


class SandboxExecutor(PythonExecutor):
    """A Python session of the sandbox, with files. The code of the tools runs there, too."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self._runner, self._sandbox = asyncio.Runner(), open_sandbox()
        self._session = self._runner.run(self._sandbox.session("python", files=files))

    def send_tools(self, tools) -> None:
        self(get_tools_definition_code({name: one for name, one in tools.items() if name != "final_answer"}))
        self(FINAL_ANSWER)

    def send_variables(self, variables) -> None:
        for name, value in variables.items():
            self(f"{name} = {value!r}")

    def __call__(self, code: str) -> CodeOutput:
        outcome = self._runner.run(self._session.run(code))
        if outcome.exit not in (0, FINAL):
            raise RuntimeError(outcome.error_text.strip().rpartition("\n")[2] or "the code was stopped")
        if outcome.exit == FINAL:
            return CodeOutput(outcome.text.strip().rpartition("\n")[2], outcome.text, is_final_answer=True)
        return CodeOutput(None, outcome.text, is_final_answer=False)

    def cleanup(self) -> None:
        self._runner.run(self._session.close())
        self._runner.run(self._sandbox.close())
        self._runner.close()


def agent(task, base_url, api_key):
    model = OpenAIServerModel("policy", api_base=base_url, api_key=api_key)
    files = {name: str(number).encode() for name, number in task["numbers"].items()}
    options = {"max_steps": 5, "verbosity_level": LogLevel.OFF}
    with CodeAgent([lookup], model, executor=SandboxExecutor(files), **options) as runner:
        return runner.run(QUESTIONS[task["word"]].format(*task["numbers"]))


def script(task: dict, flawed: bool) -> list[dict]:
    """Return the replies of a demonstration; a stop string of the SDK ends each of them."""
    first, second = task["numbers"]
    result = {"sum": "a + b", "larger": "max(a, b)", "smaller": "min(a, b)"}[task["word"]]
    steps = [
        f'Thought: First {first}.\n<code>\na = lookup("{first}")\nprint(a)\n',
        f'Thought: Now {second}.\n<code>\nb = lookup("{second}")\nprint(b)\n',
        f"Thought: The {task['word']}.\n<code>\nfinal_answer({result})\n",
    ]
    if flawed:
        steps[1:] = ["Thought: Done.\n<code>\nfinal_answer(a)\n"]
    return [{"content": text, "stop": "</code>"} for text in steps]


if __name__ == "__main__":
    train(agent, script)
