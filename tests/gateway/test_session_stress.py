"""Random clients: what a session records equals what the engine was asked and returned, and what clients received."""

import asyncio
import json
import random

import httpx
import pytest

from ludus.config.sections.rollout import RolloutConfig
from ludus.engines.base import TOKEN_WATCHERS
from ludus.gateway.sessions import SessionServer
from ludus.rollouts.agent_session import AgentSession
from ludus.types import StopReason, Trajectory
from small_worlds import call, make_chat, scripted

LIMITS = RolloutConfig(max_turns=1000)
TOOL = {"type": "function", "function": {"name": "echo"}}


class Recorder:
    """An engine that records each request with its completion."""

    def __init__(self, seed):
        self.rng, self.made = random.Random(seed), []
        self.engine = scripted(lambda request, turn: self.text())
        generate = self.engine.generate

        async def recorded(request):
            await asyncio.sleep(self.rng.choice((0, 0, 0.003)))
            completion = await generate(request)
            for token in completion.tokens:
                if watch := TOKEN_WATCHERS.get(request.episode):
                    watch([token])
            await asyncio.sleep(0)
            self.made.append((request, completion))
            return completion

        self.engine.generate = recorded

    def text(self):
        kind = self.rng.random()
        if kind < 0.4:
            return call("echo", text=str(self.rng.randrange(3)), number=float(self.rng.randrange(3)))
        return self.rng.choice(("a", "b", "  c\n", "<think>\nx\n</think>\nd", "<think>\ny\n</think>\nd"))


class Client:
    """A client of one session with random habits, and the replies that it received."""

    def __init__(self, http, rng):
        self.http, self.rng, self.received, self.num_started = http, rng, 0, 0

    async def ask(self, messages):
        stream = self.rng.random() < 0.5
        body = {"model": "m", "messages": messages, "tools": [TOOL], "stream": stream}
        response = await self.http.post("/chat/completions", json=body)
        assert response.status_code == 200, response.text
        if stream:
            return await self.streamed(response, messages)
        self.received += 1
        self.num_started += len(messages) == 1
        if self.rng.random() < 0.1:
            again = await self.http.post("/chat/completions", json=body, headers={"x-stainless-retry-count": "1"})
            assert again.content == response.content
        return response.json()["choices"][0]["message"]

    async def streamed(self, response, messages):
        """Count a streamed reply, and return its message."""
        assert response.text.endswith("data: [DONE]\n\n")
        self.received += 1
        self.num_started += len(messages) == 1
        message = {"role": "assistant", "content": ""}
        for line in response.text.split("\n\n")[:-2]:
            delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
            for name in ("content", "reasoning_content", "tool_calls"):
                if delta.get(name):
                    message[name] = message[name] + delta[name] if name in message else delta[name]
        return message

    async def run(self, num):
        await asyncio.gather(*(self.dialogue(f"{i}", num) for i in range(self.rng.choice((1, 1, 3)))))

    async def dialogue(self, name, num):
        messages = [{"role": "user", "content": f"start {name}"}]
        for _ in range(num):
            reply = await self.ask(messages)
            messages = [*messages, self.sent_back(reply), *self.answers(reply)]
            habit = self.rng.random()
            if habit < 0.1 and len(messages) > 4:  # an older turn is tried again
                turns = [i for i, one in enumerate(messages) if one["role"] == "assistant"]
                cut = self.rng.choice(turns) + 1
                messages = [*messages[:cut], {"role": "user", "content": f"other {self.rng.random()}"}]
            elif habit < 0.2:  # the history is rewritten
                messages = [{"role": "user", "content": f"summary {self.rng.random()}"}]
            elif habit < 0.3:  # the client gives up
                body = {"model": "m", "messages": messages, "tools": [TOOL], "stream": self.rng.random() < 0.5}
                with pytest.raises(httpx.ReadTimeout):
                    await self.http.post("/chat/completions", json=body, timeout=httpx.Timeout(5, read=1e-6))

    def sent_back(self, reply):
        message = dict(reply)
        if self.rng.random() < 0.5:
            message.pop("reasoning_content", None)
        return message | {"content": (message["content"] or "").strip()}

    def answers(self, reply):
        calls = reply.get("tool_calls") or []
        found = [{"role": "tool", "tool_call_id": one["id"], "content": "found"} for one in calls]
        return found or [{"role": "user", "content": "go on"}]


def check_record(session, recorder, client):
    """Each recorded action is a completion of the engine for exactly the tokens before it, and was received once."""
    made = {(request.token_ids, done.tokens, done.logprobs) for request, done in recorder.made}
    segments = session.segments()
    trajectory = Trajectory("t", 0, segments, (), StopReason.ANSWERED, shared_reward=True)
    actions = set()
    for row in trajectory.rows:
        tokens = ()
        for i in row:
            if segments[i].kind == "action":
                assert (tokens, segments[i].tokens, segments[i].logprobs) in made
                actions.add(i)
            tokens += segments[i].tokens
    assert len(actions) == client.received == session.num_turns


async def play(number, server):
    recorder, rng = Recorder(number), random.Random(f"client {number}")
    session = AgentSession(lambda: make_chat(recorder.engine, f"e{number}", max_tokens=4000), LIMITS)
    url, key = await server.add(session)
    async with httpx.AsyncClient(base_url=url, headers={"x-api-key": key}, timeout=60) as http:
        client = Client(http, rng)
        await client.run(6)
    check_record(session, recorder, client)
    # every follow-up continues a row or forks from one, whatever the client did to its history
    assert sum(segment.kind == "prompt" for segment in session.segments()) == client.num_started
    server.remove(session)


def sessions(num):
    async def run():
        server, room = SessionServer(), asyncio.Semaphore(32)

        async def one(number):
            async with room:
                return await play(number, server)

        return await asyncio.gather(*map(one, range(num)))

    return asyncio.run(run())


def test_random_clients_are_recorded_exactly():
    sessions(4)


@pytest.mark.scale
def test_thousand_random_clients_are_recorded_exactly():
    sessions(1000)
