"""Multi-turn tasks in the layout of BFCL: calls run on API classes and are graded by state."""

import asyncio
import json
import textwrap

import pytest

from ludus.envs.tool_env import ToolLimits
from ludus.errors import UserError, WorldError
from ludus.evaluation.env_audit import actions_of
from ludus.types import Action, StopReason, ToolCall, ToolStatus, Trajectory
from ludus.worlds.functions.bfcl.reader import read_gold
from ludus.worlds.functions.world import make_functions_world

SHELF = """
import random
from bfcl_eval.eval_checker.multi_turn_eval.func_source_code.more import LONG

class ShelfAPI:
    def __init__(self):
        self.books = ["default"]
        self._reads = 0

    def _load_scenario(self, scenario, long_context=False):
        self.books = scenario["books"] + (LONG if long_context else [])
        self._random = random.Random(scenario.get("random_seed", 7))

    def put(self, title, copies=1):
        print("noise on stdout")
        if title == "bad":
            raise ValueError("no such book")
        self.books += [title] * copies
        return {"count": len(self.books)}

    def find(self, title):
        self._reads += 1
        return {"found": title in self.books}

    def draw(self):
        return {"drawn": self._random.random()}
"""
SUMS = "import decimal\n\nclass SumAPI:\n    def add(self, a, b):\n        return a + b\n"
ONLINE = "import requests\n\nclass OnlineAPI:\n    pass\n"


def described(name, required=(), **types):
    properties = {key: {"type": kind} for key, kind in types.items()}
    parameters = {"type": "dict", "properties": properties, "required": list(required)}
    return {"name": name, "description": f"{name}.", "parameters": parameters, "response": {"type": "dict"}}


DESCRIBED = {
    "shelf": [
        described("put", ["title"], title="string", copies="integer"),
        described("find", ["title"], title="string"),
        described("draw"),
    ],
    "sums": [described("add", ["a", "b"], a="float", b="float")],
    "online": [described("search", ["q"], q="string")],
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package in the layout of bfcl-eval."""
    sources = tmp_path / "site/bfcl_eval/eval_checker/multi_turn_eval/func_source_code"
    docs = tmp_path / "site/bfcl_eval/data/multi_turn_func_doc"
    for folder in (sources, docs):
        folder.mkdir(parents=True)
    (tmp_path / "site/bfcl_eval/__init__.py").write_text("1 / 0  # never imported on the host\n")
    sources_of = {"shelf": SHELF, "sums": SUMS, "online": ONLINE, "more": "LONG = ['long']\n"}
    for stem, text in sources_of.items():
        (sources / f"{stem}.py").write_text(textwrap.dedent(text))
    for stem, functions in DESCRIBED.items():
        (docs / f"{stem}.json").write_text("".join(json.dumps(one) + "\n" for one in functions))
    monkeypatch.syspath_prepend(tmp_path / "site")


def said(text):
    return [{"role": "user", "content": text}]


def record(id_="multi_turn_base_0", **changes):
    return {
        "id": id_,
        "question": [said("Put one Emma on the shelf."), said("Is it there?"), said("Three Dunes, and 1+1?")],
        "initial_config": {"ShelfAPI": {"books": ["Odyssey"]}},
        "path": ["ShelfAPI.put", "ShelfAPI.find"],
        "involved_classes": ["ShelfAPI", "SumAPI"],
        "ground_truth": [["put('Emma')"], ["find(title='Emma')"], ["put(title='Dune', copies=3)", "add(1,b=1)"]],
    } | changes


def world_of(tmp_path, *records, **settings):
    path = tmp_path / "tasks.json"
    path.write_text("\n".join(map(json.dumps, records)))
    return make_functions_world({"data": str(path), **settings}, ToolLimits())


def call(name, **arguments):
    return name, arguments


def action(*calls):
    message = {"role": "assistant", "content": "" if calls else "Done."}
    return Action(message, tuple(ToolCall(f"c{n}", name, given) for n, (name, given) in enumerate(calls)))


async def play(world, task, turns):
    """Play calls turn by turn; return the reward, all messages of the environment and all outcomes."""
    environment = world.environment(task)
    messages, outcomes = list(await environment.start(task)), []
    for turn in turns:
        for step in [action(*turn), action()] if turn else [action()]:
            result = await environment.step(step)
            messages += result.messages
            outcomes += result.outcomes
    await environment.close()
    ended = StopReason.ANSWERED if result.done else StopReason.MAX_TURNS
    trajectory = Trajectory(task.id, 0, (), tuple(messages), ended, outcomes=tuple(outcomes))
    return world.rewards[0].function(task, trajectory), messages, outcomes


GOLD = [[call("put", title="Emma")], [call("find", title="Emma")]]
GOLD += [[call("put", title="Dune", copies=3), call("add", a=1, b=1)]]
PLAYED = {
    "the gold calls": (GOLD, 1),
    "another order, and one more look": (
        [[*GOLD[0], call("find", title="x")], GOLD[1], [call("add", a=1, b=1), GOLD[2][0]]],
        1,
    ),
    "the same state and last response by other calls": (
        [GOLD[0], GOLD[1], [call("put", title="Dune"), call("put", title="Dune", copies=2), GOLD[2][1]]],
        1,
    ),
    "an earlier response counts": ([[*GOLD[0], *GOLD[1]], [call("draw")], GOLD[2]], 1),
    "another book": ([[call("put", title="Ema")], *GOLD[1:]], 0),
    "corrected too late": ([[call("put", title="x")], GOLD[1], GOLD[2]], 0),
    "no look": ([GOLD[0], [], GOLD[2]], 0),
    "another look": ([GOLD[0], [call("find", title="Odyssey"), call("add", a=2, b=2)], GOLD[2]], 1),
    "no sum": ([GOLD[0], GOLD[1], GOLD[2][:1]], 0),
    "nothing": ([[], [], []], 0),
    "not to the end": (GOLD[:2], 0),
}


@pytest.mark.usefixtures("package")
def test_calls_are_graded_by_state_and_responses_turn_by_turn(tmp_path):
    world = world_of(tmp_path, record())
    (task,) = world.tasks("file")
    assert task.tags == {"split": "file", "family": "multi_turn_base", "null": "false"}
    assert [m["content"] for m in task.prompt[1:]] == ["Put one Emma on the shelf."]
    assert world.runs_programs

    async def everything():
        try:
            return {name: (await play(world, task, turns))[0] for name, (turns, _) in PLAYED.items()}
        finally:
            await world.close()

    assert asyncio.run(everything()) == {name: due for name, (_, due) in PLAYED.items()}


@pytest.mark.usefixtures("package")
def test_responses_errors_and_user_turns_are_visible_to_the_model(tmp_path):
    world = world_of(tmp_path, record("multi_turn_long_context_0"))
    (task,) = world.tasks("file")
    wrong = [call("put", title="bad"), call("put", title=5), call("draw"), call("find", title="long")]
    turns = [[*wrong, call("find", title="Odyssey")], [call("draw")], []]
    reward, messages, outcomes = asyncio.run(play(world, task, turns))
    assert reward == 0
    contents = [message["content"] for message in messages[2:]]
    assert contents[0] == "Error: Error during execution: no such book"
    assert "takes the type string" in contents[1]
    assert contents[3:5] == ['{"found": true}', '{"found": true}']
    assert contents[5] == "Is it there?"
    drawn = [json.loads(contents[place])["drawn"] for place in (2, 6)]
    assert drawn[0] != drawn[1], "the second draw follows the first one"
    assert contents[7] == "Three Dunes, and 1+1?"
    assert [one.status for one in outcomes[:2]] == [ToolStatus.RAISED, ToolStatus.BAD_ARGUMENTS]
    assert json.loads(outcomes[-1].output) == {"turn 1": False, "turn 2": False, "turn 3": False}


@pytest.mark.usefixtures("package")
def test_functions_that_are_missed_are_offered_from_their_turn_on(tmp_path):
    late = record(
        "multi_turn_miss_func_0",
        question=[said("Put one Emma on the shelf, and look."), [], said("Thanks. Dune too.")],
        missed_function={"1": ["find"]},
        ground_truth=[["put('Emma')"], ["find('Emma')"], ["put('Dune')"]],
    )
    world = world_of(tmp_path, late)
    (task,) = world.tasks("file")
    assert {tool.name for tool in world.environment(task).tools} == {"put", "draw", "add"}
    turns = [[GOLD[0][0], GOLD[1][0]], GOLD[1], [call("put", title="Dune")]]
    reward, messages, outcomes = asyncio.run(play(world, task, turns))
    assert reward == 1
    assert outcomes[1].status is ToolStatus.UNKNOWN_TOOL
    (told,) = [one["content"] for one in messages if "there are more tools" in one["content"]]
    assert '"name": "find"' in told
    expert = actions_of(world.expert(task).messages)
    assert [[one.name for one in step.calls] for step in expert] == [["put"], [], ["find"], [], ["put"], []]


@pytest.mark.usefixtures("package")
def test_an_object_that_cannot_be_made_is_a_fault_of_the_world(tmp_path):
    world = world_of(tmp_path, record(initial_config={"ShelfAPI": {}}))
    (task,) = world.tasks("file")
    with pytest.raises(WorldError, match="cannot be created: KeyError: 'books'"):
        asyncio.run(play(world, task, GOLD))


BROKEN = {
    "the last turn has no answer": ({"ground_truth": [["put('a')"], ["find('a')"]]}, "has 2 turns, .* 3"),
    "no call": ({"ground_truth": [[], [], []]}, "has no call"),
    "flat": ({"ground_truth": ["put('a')", "b", "c"]}, "list of calls for each turn"),
    "no function": ({"ground_truth": [["rm('a')"], [], []]}, "calls 'rm', which is not a function"),
    "no literal": ({"ground_truth": [["put(x)"], [], []]}, "'x' .* is not a literal"),
    "no code": ({"ground_truth": [["put("], [], []]}, "is not a call"),
    "an unknown argument": ({"ground_truth": [["put(name='a')"], [], []]}, "no argument 'name'"),
    "too many values": ({"ground_truth": [["find('a', 'b')"], [], []]}, "more values"),
    "another type": ({"ground_truth": [["put(title=5)"], [], []]}, "no value of 'title' is of its type"),
    "too few": ({"ground_truth": [["put(copies=5)"], [], []]}, "requires 'title'"),
    "no class": ({"involved_classes": ["CloudAPI"]}, "'CloudAPI' is not in the installed"),
    "no classes": ({"involved_classes": []}, "involved_classes.*at least 1 item"),
    "a foreign package": ({"involved_classes": ["OnlineAPI"]}, "needs the package 'requests'"),
    "an empty turn": ({"question": [said("a"), [], said("b")]}, "does not end with a message of the user"),
    "no configuration": ({"initial_config": []}, "initial_config.*valid dictionary"),
    "a function that is missed": ({"missed_function": {"1": ["rm"]}}, "names 'rm', which is not"),
}


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", BROKEN)
def test_broken_record_is_reported_and_skipped_if_configured(tmp_path, name):
    changes, reason = BROKEN[name]
    with pytest.raises(UserError, match=f"line 2, is not a task: .*{reason}"):
        world_of(tmp_path, record(), record("b_1", **changes)).tasks("file")
    (task,) = world_of(tmp_path, record(), record("b_1", **changes), data_bad_lines="skip").tasks("file")
    assert task.id == "multi_turn_base_0"


def test_missing_package_error_has_the_install_command(tmp_path):
    with pytest.raises(UserError) as caught:
        world_of(tmp_path, record(), data_bad_lines="skip").tasks("file")
    assert "bfcl-eval is not installed" in caught.value.message
    assert caught.value.hint == "Install it: pip install --no-deps bfcl-eval."


def test_calls_as_text_hold_literals_and_sums(tmp_path):
    functions = {"f": {"function": {"parameters": {"properties": {"x": {}, "y": {}}, "required": []}}}}
    assert read_gold("f(1/4, y=[(1, -2), {'a': None}])", functions).expected.arguments == {
        "x": 0.25,
        "y": [[1, -2], {"a": None}],
    }
    executed = {
        "id": "exec_simple_0",
        "question": [said("The chance of five sixes in 20 throws?")],
        "function": [described("chance", ["n", "p"], n="integer", p="float")],
        "ground_truth": ["chance(n=20, p=1/6)"],
        "execution_result_type": ["exact_match"],
    }
    (task,) = world_of(tmp_path, executed).tasks("file")
    assert task.truth.gold[0].accepted == {"n": (20,), "p": (1 / 6,)}
