"""Sessions of `ludus serve --record`: what clients may do, what is stored, and that a policy learns from it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import openai
import pytest
from starlette.applications import Starlette

from ludus.config.load import load_config
from ludus.config.sections.rollout import RolloutConfig
from ludus.config.sections.training import ReplayConfig
from ludus.diagnostics.trackers import read_metrics
from ludus.envs.registry import build_world
from ludus.errors import ConfigError
from ludus.gateway.endpoints import error_response
from ludus.gateway.limits import http_server, model_limits, open_socket, url_of
from ludus.gateway.recording import RecordingLimits, SessionRecorder
from ludus.rollouts.ledger import RolloutOutcome
from ludus.rollouts.rollout_files import NO_REWARD, append_rollout, read_rollouts, rollouts_path
from ludus.training.collection.replay_buffer import ReplayBuffer
from ludus.training.preference.pairs import NO_SIDE, labels_of_rollouts, load_pairs
from ludus.training.run.run_dir import RunFolder
from ludus.types import StopReason, Task
from served import serving_model
from small_worlds import in_order, make_chat, renderer, scripted
from tiny_run import cold_start, ludus, make_recipe, refused

TOKEN = "a token of the test"


@asynccontextmanager
async def recording(folder: Path, *lines: str, idle_s: float = 60, max_sessions: int = 9, **limits):
    """Yield the recorder of a real HTTP server with a scripted policy, and a client with its session token."""
    engine = scripted(in_order(*lines))
    settings = RecordingLimits(RolloutConfig(**limits), idle_s, max_sessions)
    recorder = SessionRecorder(folder, lambda name: make_chat(engine, name), settings, TOKEN)
    app = Starlette(routes=recorder.app().routes, lifespan=recorder.lifespan)
    with open_socket("127.0.0.1", 0) as listener:
        server = http_server(app, model_limits(4096), error_response, lifespan=True)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with httpx.AsyncClient(base_url=url_of(listener), headers=headers, timeout=20) as client:
            try:
                yield recorder, client
            finally:
                server.should_exit = True
                await running


async def opened(client: httpx.AsyncClient, **body: str) -> openai.AsyncOpenAI:
    """Open a session; return the SDK's client of it."""
    found = (await client.post("/sessions", json=body)).raise_for_status().json()
    return openai.AsyncOpenAI(base_url=found["base_url"], api_key=found["api_key"], max_retries=0)


async def ask(sdk: openai.AsyncOpenAI, *texts: str):
    messages = [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts)]
    return await sdk.chat.completions.create(model="policy", messages=messages)


async def post(sdk: openai.AsyncOpenAI, path: str, **body: object) -> int:
    headers = {"Authorization": f"Bearer {sdk.api_key}"}
    async with httpx.AsyncClient(base_url=str(sdk.base_url), headers=headers, timeout=20) as client:
        return (await client.post(path, json=body)).status_code


def stored(folder: Path, step: int = 1):
    path = rollouts_path(folder, step)
    return list(read_rollouts(path)) if path.is_file() else []


def test_two_sessions_at_once_are_stored_with_their_own_rewards(tmp_path):
    async def serve() -> None:
        async with recording(tmp_path, *"abcd") as (_, client):
            one, two = await opened(client), await opened(client)
            first, second = await asyncio.gather(ask(one, "1"), ask(two, "2"))
            await asyncio.gather(
                ask(one, "1", first.choices[0].message.content, "3"),
                ask(two, "2", second.choices[0].message.content, "4"),
            )
            assert await post(two, "reward", response_id=first.id, reward=1) == 404
            two.api_key, key = one.api_key, two.api_key
            assert await post(two, "reward", reward=1) == 401  # the key of another session
            two.api_key = key
            assert await post(one, "reward", reward=7) == await post(one, "reward", reward=0) == 200
            assert await post(one, "done") == await post(two, "done", reward=1) == 200
            assert len(stored(tmp_path)) == 2  # before the response
            for path in ("reward", "done"):
                assert await post(one, path, reward=1) == 409
            with pytest.raises(openai.ConflictError):
                await ask(one, "5")

    asyncio.run(serve())
    assert [(r.trajectory.reward, dict(r.trajectory.rewards), r.trajectory.sample) for r in stored(tmp_path)] == [
        (0, {"reported": 0}, 0),
        (1, {"reported": 1}, 1),
    ]
    texts = [[message["content"] for message in r.trajectory.messages][::2] for r in stored(tmp_path)]
    assert texts == [["1", "3"], ["2", "4"]]


def test_session_without_feedback_is_marked_and_rewards_of_replies_are_added(tmp_path):
    async def serve() -> None:
        async with recording(tmp_path, *"abcd") as (_, client):
            silent, replies, empty = await opened(client), await opened(client), await opened(client)
            await ask(silent, "1")
            for text, reward in (("2", 0.5), ("3", -2)):
                await post(replies, "reward", response_id=(await ask(replies, text)).id, reward=reward)
            for one in (silent, replies, empty):
                assert await post(one, "done", answer="bye") == 200
                assert await post(one, "reward", reward=1) == 409

    asyncio.run(serve())
    silent, replies = stored(tmp_path)  # none without a reply
    assert (silent.reason, dict(silent.trajectory.rewards), silent.is_scored) == (NO_REWARD, {}, False)
    assert (replies.trajectory.reward, replies.trajectory.turn_rewards) == (-1.5, (0.5, -2))
    assert replies.is_scored


def test_idle_session_ends_and_a_request_renews_it(tmp_path):
    async def serve() -> None:
        async with recording(tmp_path, "a", "b", idle_s=3) as (_, client):
            idle, active = await opened(client), await opened(client)
            await asyncio.gather(ask(idle, "1"), ask(active, "2"))
            while not stored(tmp_path):
                assert await post(active, "reward", reward=1) == 200
                await asyncio.sleep(0.2)
            assert await post(idle, "reward", reward=1) == 409
            assert await post(active, "done") == 200

    asyncio.run(serve())
    assert [(r.reason, r.trajectory.stop_reason) for r in stored(tmp_path)] == [
        (NO_REWARD, StopReason.ANSWERED),
        ("recorded", StopReason.ANSWERED),
    ]


def test_feedback_is_accepted_after_a_limit_of_the_rollout(tmp_path):
    async def serve() -> None:
        async with recording(tmp_path, "a", max_turns=1) as (_, client):
            one = await opened(client)
            first = await ask(one, "1")
            with pytest.raises(openai.ConflictError):
                await ask(one, "1", first.choices[0].message.content, "2")
            assert await post(one, "reward", reward=-1) == 200

    asyncio.run(serve())  # the server stops with an open session
    (record,) = stored(tmp_path)
    assert (record.trajectory.reward, record.trajectory.stop_reason) == (-1, StopReason.MAX_TURNS)


def test_sessions_need_the_token_and_are_bounded(tmp_path):
    async def serve() -> None:
        async with recording(tmp_path, "a", max_sessions=1) as (_, client):
            for header in ("Bearer wrong", "", f"Bearer {TOKEN}x"):
                assert (await client.post("/sessions", json={}, headers={"Authorization": header})).status_code == 401
            origin = {"Origin": "http://elsewhere"}
            assert (await client.post("/sessions", json={}, headers=origin)).status_code == 403
            assert (await client.post("/sessions", json={"task": "\n"})).status_code == 400
            one = await opened(client)
            full = await client.post("/sessions", json={})
            assert (full.status_code, full.headers["retry-after"]) == (429, "1")
            assert (await client.post("/v1/chat/completions", json={})).status_code == 401  # the token opens only
            assert await post(one, "done") == 200
            await opened(client)

    asyncio.run(serve())


def test_session_that_cannot_be_stored_is_reported_and_others_continue(tmp_path):
    async def serve() -> None:
        async with recording(tmp_path, "a", "b") as (_, client):
            one, two = await opened(client), await opened(client)
            await asyncio.gather(ask(one, "1"), ask(two, "2"))
            (tmp_path / "rollouts").write_text("no folder")
            assert await post(one, "done") == 500
            (tmp_path / "rollouts").unlink()
            assert await post(two, "done") == 200

    asyncio.run(serve())
    (record,) = stored(tmp_path)
    assert [message["content"] for message in record.trajectory.messages] == ["2", "b"]


def test_new_server_begins_a_new_file(tmp_path):
    async def serve() -> None:
        async with recording(tmp_path, "a") as (_, client):
            await ask(await opened(client, task="t"), "1")

    asyncio.run(serve())
    asyncio.run(serve())
    assert [[(r.step, r.group) for r in stored(tmp_path, step)] for step in (1, 2)] == [[(1, "t")], [(2, "t")]]


def test_each_row_is_labelled_and_a_shared_action_is_trained_once(tmp_path):
    async def serve() -> None:
        async with recording(tmp_path, *"abcdef") as (_, client):
            one, two = await opened(client), await opened(client)
            first = (await ask(one, "1")).choices[0].message.content
            for text in "23":  # the second one forks
                await ask(one, "1", first, text)
            await ask(two, "other")
            assert await post(one, "done", reward=0.4) == await post(two, "done", reward=0.2) == 200
            await ask(await opened(client), "silent")

    asyncio.run(serve())
    path = rollouts_path(tmp_path, 1)
    trunk, fork, other = labels_of_rollouts([path], None, 999)
    assert (trunk.rejected, fork.rejected, other.chosen) == (NO_SIDE, NO_SIDE, NO_SIDE)
    tree = stored(tmp_path)[0].trajectory
    assert [one.tokens for one in (trunk.chosen, fork.chosen)] == [
        tuple(token for i in row for token in tree.segments[i].tokens) for row in tree.rows
    ]
    trained = sum(map(sum, (trunk.chosen.trains, fork.chosen.trains)))
    assert trained == tree.num_action_tokens
    above = labels_of_rollouts([path], 0.5, 999)
    assert [one.chosen for one in above] == [NO_SIDE] * 3
    assert labels_of_rollouts([path], 0.5, 3) == []
    equal = tmp_path / "equal.jsonl.gz"
    append_rollout(equal, stored(tmp_path)[0])
    assert labels_of_rollouts([equal], None, 999) == []


class Client:
    """A session of a server in another process."""

    def __init__(self, url: str, token: str, **body: str) -> None:
        found = httpx.post(f"{url}/sessions", json=body, headers={"Authorization": f"Bearer {token}"}, timeout=60)
        self.found = found.raise_for_status().json()
        self.sdk = openai.OpenAI(base_url=self.found["base_url"], api_key=self.found["api_key"], timeout=60)

    def complete(self, prompt: str) -> list[int]:
        """Return the sampled tokens."""
        asked = {"prompt": prompt, "max_tokens": 8, "extra_body": {"return_token_ids": True}}
        return self.sdk.completions.create(model="policy", **asked).choices[0].token_ids

    def done(self, **body: object) -> None:
        headers = {"Authorization": f"Bearer {self.found['api_key']}"}
        httpx.post(f"{self.found['base_url']}/done", json=body, headers=headers, timeout=60).raise_for_status()


def tasks_of(run: Path) -> list[str]:
    """The ids of the training tasks of a run's world."""
    config = RunFolder(run).load_config()
    return [task.id for task in build_world(config.env, config.rollout).tasks("train")]


@pytest.fixture(scope="module")
def served_sessions(tiny_run, tmp_path_factory):
    """The folder of a server that was killed, and the tokens that each client received, by its reward."""
    folder = tmp_path_factory.mktemp("recorded") / "sessions"
    with serving_model("--record", str(folder), "--context-tokens", "512", model=cold_start(tiny_run)) as served:
        token = served.process.stdout.readline().split()[-1]
        first, second = tasks_of(tiny_run)[:2]
        clients = [Client(served.url, token, task=task) for task in (first, first, second, first)]
        with ThreadPoolExecutor() as pool:
            tokens = list(pool.map(Client.complete, clients, ("what", "what", "which", "what")))
        for client, body in zip(clients, ({"reward": 1}, {"reward": 0}, {"reward": 0.5}, {}), strict=True):
            client.done(**body)
        Client(served.url, token).complete("lost")
        served.kill()
    return folder, tokens


@pytest.mark.slow
def test_killed_server_has_lost_the_open_session_only(served_sessions, tmp_path):
    folder, tokens = served_sessions
    records = stored(folder)
    assert [r.group == records[0].group for r in records] == [True, True, False, True]
    assert [[s.tokens for s in r.trajectory.segments if s.kind == "action"] for r in records] == [
        [tuple(one)] for one in tokens
    ]
    assert {r.outcome for r in records} == {RolloutOutcome.DROPPED}
    shown = ludus("show", folder, "--tokens", "--task", records[2].group)
    assert "[action] 8 tokens" in shown.out, shown
    assert ludus("export", folder, "--sharegpt", tmp_path / "out.jsonl").code == 0
    assert "has sessions only" in refused("train", "--resume", folder)


@pytest.mark.slow
def test_kto_learns_from_recorded_sessions(served_sessions, tiny_run, tmp_path):
    folder, tokens = served_sessions
    model = ("--model", cold_start(tiny_run), "--run.dir", tmp_path / "run")
    settings = ("--preference.loss", "kto", "--preference.steps", "6", "--preference.learning_rate", "1e-2")
    said = ludus("preference", make_recipe(tmp_path), "--run", folder, *model, *settings)
    assert said.code == 0, said
    pairs = load_pairs(tmp_path / "run" / "pairs.jsonl.gz")
    sides = [pair.sides[0] for pair in pairs]  # without the silent one
    assert [[t for t, trains in zip(s.tokens, s.trains, strict=True) if trains] for s in sides] == tokens[:3]
    assert [pair.chosen is not NO_SIDE and bool(pair.chosen.tokens) for pair in pairs] == [True, False, True]
    rows = [row.metrics for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert rows[-1]["loss/total"] < rows[0]["loss/total"] - 0.05
    assert rows[-1]["preference/margin"] > rows[0]["preference/margin"] + 1, rows


def test_sessions_of_one_task_are_a_group_to_replay(tmp_path):
    async def serve() -> None:
        async with recording(tmp_path, *"abcd") as (_, client):
            for task, body in (("one", {"reward": 1}), ("one", {"reward": 0}), ("two", {"reward": 0.5}), ("one", {})):
                session = await opened(client, task=task)
                await ask(session, "what")
                assert await post(session, "done", **body) == 200

    asyncio.run(serve())
    replay = ReplayBuffer(ReplayConfig(share=0.5, sources=[str(tmp_path)]), groups_per_step=1)
    tasks = {record.group: Task(record.group, (), None) for record in stored(tmp_path)}
    assert set(tasks) == {"one", "two"}
    replay.load_sources(tasks, len(renderer().tokenizer), lambda _: 1.0, 0.1)
    (group,) = replay._stored  # without the session that has no feedback, and the only one of its task
    assert [one.trajectory.reward for one in group.episodes] == [1, 0]


@pytest.mark.scale
def test_reinforcement_learning_replays_recorded_sessions(served_sessions, tiny_run, tmp_path):
    folder, _ = served_sessions
    words = {"staleness.replay.share": 0.5, "staleness.replay.sources": f'["{folder}"]', "training.steps": 1}
    words |= {"algorithm.preset": "rae", "training.mode": "async", "training.prompts_per_step": 1}
    words |= {"evaluation.every": 99, "evaluation.tasks": 1, "run.dir": tmp_path / "run"}
    flat = [str(word) for key, value in words.items() for word in (f"--{key}", value)]
    said = ludus("train", make_recipe(tmp_path), "--model", cold_start(tiny_run), *flat)
    assert said.code == 0, said
    (row,) = [row.metrics for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert (row["replay/groups"], row["replay/trained"]) == (1, 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--preference.pairs", "none"), "needs preference.run, and the loss kto or bco"),
        (("--preference.run", "x", "--preference.threshold", "1"), "is for the loss kto or bco"),
        (("--preference.loss", "kto", "--preference.threshold", "1"), "needs preference.run, without pairs"),
        (("--preference.data", "x", "--preference.threshold", "1"), "applies to rollouts"),
    ],
)
def test_labels_without_a_run_or_loss_are_rejected(words, said):
    with pytest.raises(ConfigError, match=said):
        load_config("search", words)


def test_record_refuses_control_and_other_folders(tiny_run, tmp_path):
    assert "excludes --control" in refused("serve", tiny_run, "--record", tmp_path / "a", "--control")
    assert "is not a folder with sessions" in refused("serve", tiny_run, "--record", tiny_run, "--port", "0")
