"""Worlds in another process: equal to the local world, restarts, bounds, and hostile requests."""

import asyncio
import json
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

import httpx
import pytest

from ludus.cli.arguments import environment_config
from ludus.envs.registry import build_world
from ludus.envs.remote.messages import MessageRecord, pack_chat, unpack_chat
from ludus.envs.remote.server import MAX_BODY_BYTES, EnvServerSettings, make_app
from ludus.envs.remote.world import GRADES, make_remote_world
from ludus.errors import ConfigError, UserError, WorldError
from ludus.evaluation.env_audit import CheckPlan, run_agents, solutions
from ludus.evaluation.scripted_agents import blind_agents, informed_agents
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path
from ludus.types import Action, Message, ToolCall
from tiny_run import ludus, make_recipe

STOCK = str(Path(__file__).parents[2] / "examples" / "stock.py")
SQL = ("sql", "--env.settings.tasks", "40", "--env.settings.databases", "1")
TOKEN = "a token of sixteen characters"


def command(*words):
    return [sys.executable, "-m", "ludus", "env", "serve", *words, "--port", "0", "--until-eof"]


@contextmanager
def remote(*words, **settings):
    world = make_remote_world({"command": command(*words), **settings}, None)
    try:
        yield world
    finally:
        asyncio.run(world.close())


@contextmanager
def served(*words):
    """Start a server; yield its URL and process."""
    process = subprocess.Popen(command(*words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process.stdout.readline().strip().rsplit(" at ")[1], process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def local(*words):
    config = environment_config(words[0], words[1:])
    return build_world(config.env, config.rollout)


def say(text):
    return Action(Message(role="assistant", content=text))


def post(url, path, body, **headers):
    return httpx.post(url + path, json=body, headers=headers, trust_env=False)


def played(world, split, informed):
    """Play the scripted agents; return messages, outcomes and rewards of each episode."""
    plan = CheckPlan(split, 3)
    tasks = world.tasks(split)[:3]
    agents = blind_agents(tasks, 0) if informed is None else informed_agents(tasks, *informed)[-1:]
    rows = asyncio.run(run_agents(world, tasks, agents, plan))
    found = [(row.agent.name, one.failure, one.trajectory) for row in rows for one in row.plays]
    return [
        (
            name,
            failure,
            t.messages,
            t.stop_reason,
            t.rewards,
            t.turn_rewards,
            [o for o in t.outcomes if o.tool != GRADES],
        )
        for name, failure, t in found
    ]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("guess",), marks=pytest.mark.slow, id="guess"),
        pytest.param(SQL, marks=pytest.mark.slow, id="sql"),
        pytest.param((STOCK,), id="a file"),
    ],
)
def test_tasks_episodes_rewards_and_demonstrations_equal_those_of_the_local_world(words):
    ours = local(*words)
    with remote(*words) as theirs:
        assert (theirs.name, tuple(theirs.splits)) == (ours.name, tuple(ours.splits))
        for split in ours.splits:
            assert list(theirs.tasks(split)) == [replace(task, truth=None) for task in ours.tasks(split)]
        task, copy = ours.tasks("train")[0], theirs.tasks("train")[0]
        schemas = [[tool.schema for tool in w.environment(t).tools] for w, t in ((ours, task), (theirs, copy))]
        assert schemas[0] == schemas[1]
        for method in ("demonstrations", "expert", "texts", "paraphrases", "difficulty_report"):
            assert method == "difficulty_report" or theirs.implements(method) == ours.implements(method)
        shown = [[(d.messages, d.trains) for d in islice(w.demonstrations(3), 120)] for w in (ours, theirs)]
        assert shown[0] == shown[1]
        assert list(islice(theirs.texts(), 50)) == list(islice(ours.texts(), 50))
        known = solutions(ours, ours.tasks("test")[:3])
        for informed in (None, known):
            assert played(theirs, "test", informed) == played(ours, "test", informed)


@pytest.mark.slow
def test_state_keys_and_turn_rewards_are_those_of_the_served_world():
    with remote("guess") as world:
        task = world.tasks("train")[0]

        async def play():
            episode = world.environment(task)
            await episode.start(task)
            begin = episode.state_key()
            result = await episode.step(say(task.tags["low"]))
            await episode.close()
            return begin, episode.state_key(), result.reward, episode.implements("state_key")

        begin, after, reward, has_key = asyncio.run(play())
        assert (begin, has_key) == (f"{task.tags['low']}-{task.tags['high']}", True)
        assert after != begin
        assert reward > 0


def test_chat_messages_arrive_with_all_keys():
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    whole = {"role": "tool", "content": "<image>", "reasoning_content": "r", "tool_calls": calls, "tool_call_id": "c"}
    whole |= {"name": "f", "train": False, "images": ["data:image/png;base64,AA=="]}
    assert whole.keys() == Message.__annotations__.keys()
    for message in (whole, {"role": "user", "content": "x"}):
        sent = pack_chat([message])[0].model_dump_json(exclude_unset=True)
        assert unpack_chat([MessageRecord.model_validate_json(sent)]) == (message,)


@pytest.mark.slow
def test_a_killed_server_is_an_infrastructure_failure_and_the_next_episode_restarts_it():
    with remote("guess") as world:
        task = world.tasks("train")[0]
        (server,) = world.pool.servers

        async def play():
            episode = world.environment(task)
            await episode.start(task)
            server._children[-1].kill()
            with pytest.raises(WorldError, match=r"is unreachable|does not exist"):
                await episode.step(say("1"))
            await episode.close()
            again = world.environment(task)
            messages = await again.start(task)
            await again.close()
            return messages

        assert asyncio.run(play()) == list(task.prompt)
        assert (server.starts, server.load) == (2, 0)


@pytest.mark.slow
def test_a_server_that_cannot_start_raises_with_its_output():
    with remote("nonsense") as world, pytest.raises(WorldError, match="did not start") as raised:
        world.tasks("train")
    assert "nonsense" in str(raised.value)


@pytest.mark.slow
def test_episodes_go_to_the_server_with_the_fewest_and_leave_a_dead_one():
    with served("guess") as (first, process), served("guess") as (second, _):
        world = make_remote_world({"urls": [first, second]}, None)
        task = world.tasks("train")[0]

        async def play():
            episodes = [world.environment(task) for _ in range(6)]
            for episode in episodes:
                await episode.start(task)
            open_now = [httpx.get(f"{url}/health", trust_env=False).json()["episodes"] for url in (first, second)]
            process.kill()
            process.wait()
            lost = await asyncio.gather(*(episode.step(say("1")) for episode in episodes), return_exceptions=True)
            for episode in episodes:
                await episode.close()
            for _ in range(4):
                episode = world.environment(task)
                await episode.start(task)
                await episode.close()
            await world.close()
            return open_now, sum(isinstance(one, WorldError) for one in lost)

        assert asyncio.run(play()) == ([3, 3], 3)


@pytest.mark.slow
def test_servers_of_different_worlds_are_refused():
    with (
        served("guess") as (first, _),
        served(STOCK) as (second, _),
        pytest.raises(UserError, match="serves another world"),
    ):
        _ = make_remote_world({"urls": [first, second]}, None).rewards
    for settings in ({}, {"urls": ["http://a"], "command": ["b"]}, {"urls": ["a"]}):
        with pytest.raises(ConfigError):
            make_remote_world(settings, None)


NAME = "the-secret-name-of-an-episode"
TASK = {"split": "train", "id": ""}


def test_a_request_is_repeated_by_its_number_and_hostile_requests_are_refused(tmp_path):
    (tmp_path / "token").write_text(TOKEN)
    with served("guess", "--token-file", str(tmp_path / "token")) as (url, process):

        def ask(path, body, token=TOKEN):
            found = post(url, path, body, authorization=f"Bearer {token}".strip())
            return found.status_code, found.json()

        page = ask("/v1/pages", {"kind": "tasks", "split": "train", "num": 1})[1]
        task = {"split": "train", "id": page["tasks"][0]["id"]}
        number = task["id"].rpartition("-")[2]
        assert "truth" not in json.dumps(page)
        started = ask(f"/v1/episodes/{NAME}/start", task)
        assert started == ask(f"/v1/episodes/{NAME}/start", task)
        wrong = {"step": 1, "message": {"role": "assistant", "content": "1"}}
        first = ask(f"/v1/episodes/{NAME}/step", wrong)
        assert first == ask(f"/v1/episodes/{NAME}/step", wrong)
        assert first[1]["grades"] == {"found": 0.0}
        assert ask(f"/v1/episodes/{NAME}/step", {**wrong, "step": 3})[0] == 400
        right = {"step": 2, "message": {"role": "assistant", "content": number}}
        last = ask(f"/v1/episodes/{NAME}/step", right)[1]
        assert (last["done"], last["grades"]) == (True, {"found": 1.0})
        assert ask(f"/v1/episodes/{NAME}/step", wrong)[0] == 400
        assert ask(f"/v1/episodes/{NAME}/step", {**right, "step": 3})[0] == 400

        deep = "[" * 5000 + "]" * 5000
        for path, body, token, status in (
            (f"/v1/episodes/{NAME}/step", right, "", 401),
            ("/v1/pages", {"kind": "tasks", "split": "train"}, "another token of characters", 401),
            (f"/v1/episodes/{NAME[:-1]}x/step", right, TOKEN, 502),
            ("/v1/episodes/short/start", task, TOKEN, 400),
            (f"/v1/episodes/{NAME}-2/start", {**task, "id": "no"}, TOKEN, 400),
            (f"/v1/episodes/{NAME}/step", {**right, "step": "2"}, TOKEN, 200),
            (f"/v1/episodes/{NAME}/step", {"step": -1, "message": 3}, TOKEN, 400),
            (f"/v1/episodes/{NAME}/step", {"step": 2, "message": {"role": "assistant"}}, TOKEN, 400),
            (f"/v1/episodes/{NAME}/step", {**right, "truth": True}, TOKEN, 400),
            ("/v1/pages", {"kind": "tasks", "split": "train", "num": 10**9}, TOKEN, 400),
            ("/v1/pages", {"kind": "tasks", "split": "no"}, TOKEN, 400),
            ("/v1/nothing", {}, TOKEN, 404),
        ):
            assert ask(path, body, token)[0] == status, (path, body)
        bearer = {"authorization": f"Bearer {TOKEN}"}
        for content, status in ((b"x" * (MAX_BODY_BYTES + 1), 413), (deep.encode(), 400), (b"\xff\x00", 400)):
            assert httpx.post(f"{url}/v1/pages", content=content, headers=bearer).status_code == status
        assert ask(f"/v1/episodes/{NAME}/close", {})[0] == 200
        assert ask(f"/v1/episodes/{NAME}/close", {})[0] == 200
        assert httpx.get(f"{url}/health", trust_env=False).json() == {"status": "ok", "episodes": 0}
        process.stdin.close()
        assert process.wait(20) == 0


def test_without_a_token_requests_of_web_pages_are_refused():
    app = make_app(local("guess"), EnvServerSettings())

    async def statuses():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
            plain = {"content": "{}", "headers": {"content-type": "text/plain"}}
            asked = ({"json": {}}, {"json": {}, "headers": {"host": "evil.example"}}, plain)
            return [(await client.post("/v1/world", **each)).status_code for each in asked]

    assert asyncio.run(statuses()) == [200, 401, 401]


def test_episodes_are_bounded_in_number_and_idle_time():
    world = local("guess")
    app = make_app(world, EnvServerSettings(max_episodes=2, idle_s=0.3, hosts=("here",)))

    async def play():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:

            async def start(number):
                task = {"split": "train", "id": world.tasks("train")[0].id}
                return await client.post(f"/v1/episodes/{NAME}-{number}/start", json=task)

            async def num_open():
                return (await client.get("/health")).json()["episodes"]

            statuses = [(await start(number)).status_code for number in range(3)]
            full = await num_open()
            while await num_open():
                await asyncio.sleep(0.01)
            return statuses, full, (await start(4)).status_code

    assert asyncio.run(asyncio.wait_for(play(), 20)) == ([200, 200, 502], 2, 200)


@pytest.fixture
def failing(tmp_path):
    path = tmp_path / "failing.py"
    path.write_text(
        "from ludus.envs.base import Environment, World\nfrom ludus.rewards.base import Reward\n"
        "from ludus.types import Message, Task\n\n\nclass Episode(Environment):\n"
        "    async def start(self, task):\n        return list(task.prompt)\n\n"
        "    async def step(self, action):\n        raise KeyError('a database')\n\n\n"
        "class Failing(World):\n    name = 'failing'\n    splits = ('train',)\n"
        "    rewards = (Reward('right', lambda task, trajectory: 1.0, outcome=True),)\n\n"
        "    def tasks(self, split):\n        return [Task('a', (Message(role='user', content='b'),), None)]\n\n"
        "    def environment(self, task):\n        return Episode()\n\n\n"
        "def make_world(settings, limits):\n    return Failing()\n"
    )
    return str(path)


@pytest.mark.slow
def test_an_exception_of_the_environment_is_an_infrastructure_failure(failing):
    with remote(failing) as world:
        task = world.tasks("train")[0]

        async def play():
            episode = world.environment(task)
            await episode.start(task)
            with pytest.raises(WorldError, match="The environment raised KeyError: 'a database'"):
                await episode.step(Action(Message(role="assistant", content=""), (ToolCall("1", "x", {"y": [None]}),)))
            await episode.close()

        asyncio.run(play())


def test_worlds_of_agents_that_own_their_loop_are_refused():
    said = ludus("env", "serve", "games", "--port", "0")
    assert (said.code, "several agents" in said.err) == (2, True)


@pytest.mark.slow
def test_a_training_run_through_a_server_equals_a_local_one(tiny_run, tmp_path):
    world = str(Path(__file__).parents[1] / "tiny_world.py")
    recipe = make_recipe(tmp_path)
    text = recipe.read_text()
    settings = f'name = "remote"\nsettings = {{ command = {json.dumps(command(world))} }}\n'
    recipe.write_text(text.replace(f'name = "{world}"\n', settings))
    said = ludus("train", recipe, "--from-scratch", "--run.dir", tmp_path / "run")
    assert said.code == 0, said
    for step in (1, 2):
        ours, theirs = (
            [(r.key, r.trajectory.segments, r.trajectory.rewards, r.advantage) for r in read_rollouts(path)]
            for path in (rollouts_path(tiny_run, step), rollouts_path(tmp_path / "run", step))
        )
        assert theirs == ours
