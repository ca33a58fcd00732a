"""Tools that run in a sandbox, with the real sandbox."""

import asyncio

import pytest

from ludus.config.sections.rollout import RolloutConfig
from ludus.envs.base import World
from ludus.envs.tool_env import ToolEnv, ToolExecutor, ToolLimits
from ludus.errors import UserError
from ludus.rewards.base import Reward
from ludus.rollouts.episode import run_episode
from ludus.sandbox import Limits, NamespacesSandbox, SandboxSettings
from ludus.tools.base import Traits, submit_tool, tool
from ludus.tools.calculator import calculator_tool
from ludus.tools.workspace import Workspace, python_session_tool, python_tool, shell_tool
from ludus.types import Action, Message, StopReason, ToolCall, ToolStatus
from small_worlds import call, is_right, make_chat, make_task, play, scripted

QUICK = Limits(wall_s=2, files_out=200)


def inside(act, **options):
    """What `act(sandbox, workspace)` gives; both are closed after it."""

    async def whole():
        sandbox = NamespacesSandbox(SandboxSettings(concurrency=2))
        workspace = Workspace(sandbox, **options)
        try:
            return await act(sandbox, workspace)
        finally:
            await workspace.close()
            await sandbox.close()

    return asyncio.run(whole())


async def ask(tool, **arguments):
    """What a model reads after one call."""
    action = Action(Message(role="assistant", content=""), (ToolCall("1", tool.name, arguments),))
    (outcome,) = await ToolExecutor([tool], ToolLimits(max_output=5000)).run(action)
    return outcome.status, outcome.output


# python and shell


def test_stateless_programs_return_text_and_keep_no_state():
    async def act(sandbox, _):
        run = python_tool(sandbox, QUICK)
        programs = (
            "print(1 + 1); open('kept', 'w').write('x'); x = 1",
            "import os; print(os.listdir()); print(x)",
            "x = 2",
            "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)",
            "while True: pass",
        )
        return [await ask(run, code=code) for code in programs]

    said = inside(act)
    assert {status for status, _ in said} == {ToolStatus.OK}
    texts = [text for _, text in said]
    assert texts[0] == "2"
    assert texts[1].startswith("[]\n[stderr]\nTraceback")
    assert "NameError: name 'x' is not defined" in texts[1]
    assert texts[2] == "[no output: print what you want to see]"
    assert texts[3] == "out\n[stderr]\nerr\n[exit code 3]"
    assert texts[4] == "[stopped: it took longer than 2 s]"


def test_end_of_long_output_is_kept_with_omitted_byte_count():
    async def act(sandbox, _):
        return await ask(python_tool(sandbox, Limits(files_out=0)), code="print('x' * 200_000); print('END')")

    status, text = inside(act)
    assert status is ToolStatus.OK
    assert "\nEND\n[134" in text
    assert text.endswith(" bytes in the middle of the output are not kept]")


def test_python_session_keeps_variables_and_reports_their_loss():
    async def act(_, workspace):
        run = python_session_tool(workspace)
        codes = ("x = 20", "x + 1", "1 / 0", "x", "open('f', 'w').write('kept')", "while 1: pass", "x")
        return [(await ask(run, code=code))[1] for code in (*codes, "print(open('f').read())")]

    said = inside(act, limits=QUICK)
    assert said[:2] == ["[no output]", "21"]
    assert "ZeroDivisionError" in said[2]
    assert said[3:5] == ["20", "4"]
    assert said[5] == "[stopped: it took longer than 2 s; variables are lost, files stay]"
    assert "NameError" in said[6]
    assert said[7] == "kept"


def test_shell_keeps_its_folder_and_sees_initial_files():
    async def act(_, workspace):
        run = shell_tool(workspace)
        return [
            (await ask(run, command=text))[1] for text in ("mkdir d; cd d; X=5", "pwd; echo $X", "cat ../a", "false")
        ]

    said = inside(act, kind="shell", files={"a": b"first\n"}, limits=QUICK)
    assert said == ["[no output]", "/box/d\n5", "first", "[exit code 1]"]


def test_tool_for_another_session_kind_raises_user_error():
    workspace = Workspace(NamespacesSandbox(), kind="shell")
    with pytest.raises(UserError, match="kind 'python', but got 'shell'"):
        python_session_tool(workspace)


def test_calls_of_one_action_run_sequentially():
    async def act(_, workspace):
        run = python_session_tool(workspace)
        calls = tuple(
            ToolCall(str(n), "python", {"code": f"seen = [*globals().get('seen', []), {n}]; seen"}) for n in range(4)
        )
        return await ToolExecutor([run]).run(Action(Message(role="assistant", content=""), calls))

    outcomes = inside(act)
    assert [outcome.output for outcome in outcomes] == ["[0]", "[0, 1]", "[0, 1, 2]", "[0, 1, 2, 3]"]


def test_session_survives_a_cancelled_call():
    async def act(_, workspace):
        await workspace.run("x = 7")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(workspace.run("import time; time.sleep(1.5); x = 8"), 0.05)
        return (await workspace.run("x")).text

    assert inside(act) == "8\n"


def test_a_lost_session_is_reported_and_replaced():
    async def act(_, workspace):
        run = python_session_tool(workspace)
        await ask(run, code="open('a', 'w').write('changed')")
        await workspace._session.close()
        lost = await ask(run, code="1")
        return lost, await ask(run, code="print(open('a').read())")

    lost, after = inside(act, files={"a": b"first"})
    assert lost[0] is ToolStatus.RAISED
    assert lost[1].endswith("The session is lost; the next call finds a new one with the first files.")
    assert after == (ToolStatus.OK, "first")


def test_closing_a_workspace_cancels_running_calls():
    async def act(_, workspace):
        await workspace.open()
        task = asyncio.create_task(workspace.run("import time; time.sleep(9)"))
        await asyncio.sleep(0.05)
        await workspace.close()
        return await asyncio.gather(task, return_exceptions=True)

    (ended,) = inside(act)
    assert isinstance(ended, asyncio.CancelledError)


# the environment


class WorkspaceWorld(World):
    """A world whose episodes have a workspace each."""

    name, splits = "one", ("train",)
    rewards = (Reward("right", is_right, outcome=True),)

    def __init__(self, sandbox):
        self.sandbox, self.workspaces = sandbox, []

    def tasks(self, split):
        return [make_task()]

    def environment(self, task):
        workspace = Workspace(self.sandbox)
        self.workspaces.append(workspace)
        tools = [python_session_tool(workspace), submit_tool(), calculator_tool()]
        return ToolEnv(tools, self.rewards, resources=[workspace])


def test_submit_ends_the_episode_and_closes_the_workspace():
    sandbox = NamespacesSandbox(SandboxSettings(concurrency=2))
    world = WorkspaceWorld(sandbox)
    script = [call("python", code="x = 'Par'"), call("submit"), call("submit", answer="Paris")]
    trajectory = play(scripted(script), world)
    statuses = [outcome.status for outcome in trajectory.outcomes]
    assert statuses == [ToolStatus.OK, ToolStatus.BAD_ARGUMENTS, ToolStatus.OK]
    assert (trajectory.stop_reason, trajectory.answer, trajectory.reward) == (StopReason.ANSWERED, "Paris", 1.0)
    (workspace,) = world.workspaces
    assert workspace._session is None
    assert not sandbox._open


def test_submitted_answer_is_not_truncated_by_the_output_limit():
    trajectory = play(scripted([call("submit", answer="z" * 99)]), SubmittingWorld())
    assert trajectory.outcomes[0].truncated
    assert trajectory.answer == "z" * 99


class SubmittingWorld(WorkspaceWorld):
    def __init__(self):
        pass

    def environment(self, task):
        return ToolEnv([submit_tool()], self.rewards, ToolLimits(max_output=20))


def test_tools_declare_latency_cost_idempotence_and_episode_end():
    assert python_tool(NamespacesSandbox()).traits == Traits(latency="fast", idempotent=True)
    assert submit_tool().traits.ends

    @tool(traits=Traits("slow", cost=2.5))
    def think() -> str:
        return ""

    assert (think.traits.latency, think.traits.cost, think.traits.ends) == ("slow", 2.5, False)


# the calculator


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        ("(0.1 + 0.2) * 10", "3"),
        ("-2 ** 2", "-4"),
        ("2 ** -1", "0.5"),
        ("7 // 2 + 7 % 4", "6"),
        ("sqrt(16) + max(1, 2, 3) + round(2.567, 1)", "9.6"),
        ("factorial(20) // gcd(12, 18)", "405483668029440000"),
        (" 2 ** 100 ", str(2**100)),
        ("log(e) + sin(pi / 2)", "2"),
        ("1 / 3", "0.333333333333333"),
        ("1 / 3 * 3", "1"),
        ("10.0 ** 20 + 1", "100000000000000000001"),
        ("(2 / 3) ** 2 * 9", "4"),
        ("sqrt(9 / 4) + 4 ** 0.5", "3.5"),
        ("sqrt(2) ** 2", "2"),
        ("8 ** (1 / 3)", "2"),
        ("floor(exp(1)) + ceil(1 / 7)", "3"),
        ("round(-7 / 2) + round(1234.5, -2)", "1196"),
        ("log(10 ** 400, 10)", "400"),
        ("comb(5, 2) + perm(4, 2) + isprime(97) + primes(100)", "48"),
        ("0 ** 0 + 0 ** 7", "1"),
        ("(-1) ** 99999999999999999999", "-1"),
    ],
)
def test_calculator_returns_the_value(expression, value):
    assert asyncio.run(ask(calculator_tool(), expression=expression)) == (ToolStatus.OK, value)


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("2 ^ 3", "write ** for a power"),
        ("9 ** 9 ** 9", "more than 4096 bits"),
        ("factorial(400) ** 2 * factorial(400)", "more than 4096 bits"),
        ("factorial(10 ** 9)", "from 0 to 400"),
        ("lcm(" + ", ".join(f"2**{n} + 1" for n in range(1000, 1030)) + ")", "more than 4096 bits"),
        ("1e308 * exp(5)", "too large"),
        ("2.5 ** 4000", "more than 4096 bits"),
        ("10 ** 400 / 7 * pi", "too large"),
        ("10 ** 400 / 7", "too large"),
        ("gcd(1/2, 3)", "takes whole numbers"),
        ("factorial(sqrt(2))", "from 0 to 400"),
        ("comb(4)", "does not take 1 values"),
        ("2 ** (1/2) ** 99999", "bits"),
        ("1e999", "too large"),
        ("exp(1) ** 1000", "too large"),
        ("1 / (2 - 2)", "division by zero"),
        ("(-8) ** 0.5", "root of a negative number"),
        ("sqrt(-1)", "no value"),
        ("__import__('os').system('true')", "no function"),
        ("().__class__", "is not arithmetic"),
        ("open", "no name 'open'"),
        ("'a' * 9", "is not arithmetic"),
        ("True + 1", "is not arithmetic"),
        ("max(*[1])", "is not arithmetic"),
        ("round(1.5, 10**9)", "digits"),
        ("1 +", "no expression"),
        ("-" * 499 + "1", ""),
        ("(" * 240 + "1" + ")" * 240, "no expression"),
        ("1\0", "no "),
        ("1 + " * 200 + "1", "longer than 500"),
    ],
)
def test_calculator_rejects_invalid_expressions_with_a_reason(expression, words):
    status, text = asyncio.run(ask(calculator_tool(), expression=expression))
    if words:
        assert (status, words in text) == (ToolStatus.RAISED, True), text
        assert text.startswith("Error: ")
        assert "ToolError" not in text


# places


def test_waiting_for_a_sandbox_slot_does_not_count_as_timeout():
    async def act(sandbox, _):
        @tool(timeout_s=3)
        async def nap() -> str:
            """Wake up in the sandbox."""
            return (await sandbox.run("print('woke')")).text

        await sandbox.warm(2)
        rewards = (Reward("right", is_right, outcome=True),)
        limits = RolloutConfig(max_turns=2, environment_timeout_s=3)
        before = [asyncio.create_task(sandbox.run("import time; time.sleep(3.5)")) for _ in range(2)]

        async def episode(number):
            said = scripted([call("nap"), "Paris"])
            environment = ToolEnv((nap,), rewards)
            return await run_episode(make_task(), number, environment, make_chat(said), limits)

        episodes = await asyncio.gather(*map(episode, range(6)))
        await asyncio.gather(*before)
        return episodes

    episodes = inside(act)
    assert [outcome.output for one in episodes for outcome in one.outcomes] == ["woke\n"] * 6
    assert min(outcome.seconds for one in episodes for outcome in one.outcomes) > 3


def test_program_running_in_its_sandbox_slot_still_times_out():
    async def act(sandbox, _):
        @tool(timeout_s=0.3)
        async def nap() -> str:
            """Sleep in the sandbox."""
            return (await sandbox.run("import time; time.sleep(5)")).text

        await sandbox.warm(2)
        return await ask(nap)

    assert inside(act) == (ToolStatus.TIMED_OUT, "Error: nap took longer than 0.3 s.")
