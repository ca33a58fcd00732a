"""Sessions of agents: requests continue, fork or start rows; the tokens are those that the engine got and returned."""

import asyncio
import json
import sys
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import openai
import pytest

from ludus.algorithms.spec.resolve import PRESETS
from ludus.chat.parse_json import tool_call
from ludus.config.sections.rollout import RolloutConfig
from ludus.diagnostics.metrics import rollout_metrics
from ludus.envs.agent_world import AgentWorld
from ludus.envs.base import Environment
from ludus.errors import ConfigError, EngineError, WorldError
from ludus.gateway.sessions import SessionServer
from ludus.rewards.base import check_scored_elsewhere
from ludus.rollouts import agent_runs
from ludus.rollouts.agent_runs import AgentRunner
from ludus.rollouts.agent_session import AgentSession, InvalidRequest, ReplyLimits, RolloutEnded
from ludus.rollouts.ledger import RolloutKey, RolloutOutcome
from ludus.rollouts.rollout_files import RolloutRecord, parse_rollout, rollout_line
from ludus.rollouts.scheduler import Episode
from ludus.training.batches.rows import row_of_trajectory
from ludus.training.credit.advantages import assign_credit
from ludus.types import Completion, Group, Message, StopReason, Task, Trajectory
from scripted_engine import Faults
from small_worlds import call, echo, in_order, make_chat, renderer, scripted, tokenizer

LIMITS = RolloutConfig()
SEARCH = call("echo", text="x", number=1.0)


def user(text):
    return Message(role="user", content=text)


def result(text, ids=""):
    return Message(role="tool", content=text, tool_call_id=ids, name="echo")


def session_of(*lines, limits=LIMITS, **options):
    engine = scripted(in_order(*lines), **options)
    return engine, AgentSession(lambda: make_chat(engine), limits)


def run(coroutine):
    return asyncio.run(coroutine)


def row_tokens(session):
    """The tokens of each row."""
    segments = session.segments()
    trajectory = trajectory_of(segments)
    return [tuple(token for i in row for token in segments[i].tokens) for row in trajectory.rows]


def trajectory_of(segments, sample=0, reward=0.0):
    return Trajectory("t", sample, segments, (), StopReason.ANSWERED, reward=reward, shared_reward=True)


def test_request_that_extends_the_history_continues_its_row_by_tokens():
    asked = call("echo", text="x", number=1.0, large=1234567890123456789)
    engine, session = session_of(f"Let me see. {asked}", "Paris", "yes")

    async def dialogue():
        messages = [user("Where?")]
        reply = await session.chat(messages, [echo])
        # what clients do with a reply: other ids, compact JSON, whole or rounded numbers, blanks, no thinking
        arguments = json.dumps({"number": 1, "text": "x", "large": 1234567890123456800}, separators=(",", ":"))
        sent = {"id": "other", "type": "function", "function": {"name": "echo", "arguments": arguments}}
        messages += [Message(role="assistant", content=reply["content"] + "\n", tool_calls=[sent]), result("x")]
        messages += [await session.chat(messages, [echo]), user("Sure?")]
        await session.chat(messages, [echo])

    run(dialogue())
    assert [len(a.token_ids) < len(b.token_ids) for a, b in pairwise(engine.requests)] == [True, True]
    (row,) = row_tokens(session)
    for request in engine.requests:
        assert row[: len(request.token_ids)] == request.token_ids
    assert [s.kind for s in session.segments()] == [
        "prompt",
        "action",
        "observation",
        "action",
        "observation",
        "action",
    ]
    assert [s.turn for s in session.segments()] == [0, 0, 0, 1, 1, 2]


def test_request_without_the_text_before_a_call_continues_its_row():
    engine, session = session_of(f"Let me see. {SEARCH}", f"Again. {SEARCH}", "Paris")

    async def dialogue():
        messages = [user("Where?")]
        for _ in range(2):
            reply = await session.chat(messages, [echo])
            messages += [Message(role="assistant", content="", tool_calls=reply["tool_calls"]), result("x")]
        return await session.chat(messages, [echo])

    assert run(dialogue())["content"] == "Paris"
    (row,) = row_tokens(session)
    assert row[: len(engine.requests[2].token_ids)] == engine.requests[2].token_ids


def test_messages_that_a_client_writes_as_the_assistant_are_observations():
    engine, session = session_of(SEARCH, "a", "b", "c")
    said = [Message(role="assistant", content="This is not valid.") for _ in range(2)]
    malformed = Message(role="assistant", content="", tool_calls=[tool_call("x", "echo", "{")])

    async def dialogue():
        messages = [user("one"), await session.chat([user("one")], [echo]), result("x"), said[0], user("Again.")]
        messages += [await session.chat(messages, [echo]), said[1]]
        messages += [await session.chat(messages, [echo]), malformed, result("error")]
        await session.chat(messages, [echo])

    run(dialogue())
    (row,) = row_tokens(session)
    assert all(row[: len(request.token_ids)] == request.token_ids for request in engine.requests)
    texts = [tokenizer().decode(one.tokens) for one in session.segments() if one.kind == "observation"]
    written = "\n<|im_start|>assistant\nThis is not valid.<|im_end|>\n<|im_start|>"
    assert texts[0].endswith(f"{written}user\nAgain.<|im_end|>\n<|im_start|>assistant\n")
    assert texts[1] == f"{written}assistant\n"
    assert "echo({)" in texts[2]


def test_reply_that_comes_back_as_other_json_continues_its_row():
    engine, session = session_of('{"x": 1.0, "y": "z"}', call("echo", text="x", n=[2]), "end", '{"x": 1}', '{"x": 2}')

    async def dialogue():
        messages = [user("one")]
        for text in (' {"y":"z","x":1}', '{"n":[2],"text":"x"}'):
            await session.chat(messages, [echo])
            messages += [Message(role="assistant", content=text), user("more")]
        await session.chat(messages, [echo])
        asked = user('{"a": 1}')  # texts of others are not compared as JSON
        reply = await session.chat([asked])
        await session.chat([user('{"a":1}'), reply, user("more")])

    run(dialogue())
    assert len(row_tokens(session)) == 3
    first = row_tokens(session)[0]
    assert all(first[: len(request.token_ids)] == request.token_ids for request in engine.requests[:3])


def test_other_tools_rewritten_history_and_other_system_messages_start_rows():
    engine, session = session_of(*["a", "b", "c", "d", "e"])

    async def dialogue():
        first = [user("one"), await session.chat([user("one")]), user("two")]
        await session.chat(first, [echo])  # other tools
        await session.chat([user("one"), Message(role="assistant", content="not a"), user("two")])  # rewritten
        await session.chat([Message(role="system", content="help"), user("part")])  # a sub-agent
        await session.chat(first)  # the first row is found again

    run(dialogue())
    trajectory = trajectory_of(session.segments())
    assert len(trajectory.rows) == 4
    assert [s.kind for s in (session.segments()[i] for i in trajectory.rows[0])] == [
        "prompt",
        "action",
        "observation",
        "action",
    ]
    assert engine.requests[0].token_ids == renderer().prompt([user("one")], [])
    assert len({request.episode for request in engine.requests}) == 4


def unended(text):
    """A completion that a stop string ends, without an end-of-turn token."""
    tokens = tuple(tokenizer().encode(text, add_special_tokens=False))
    return Completion(tokens, (-1.0,) * len(tokens), (0,) * len(tokens), "stop")


def test_text_that_a_client_writes_behind_an_unended_reply_is_an_observation():
    engine, session = session_of(unended("go <code>x</code>"), unended("go <code>y</code>"), "end", "other")

    async def dialogue():
        messages = [user("one")]
        for step in "xy":
            pending = await session.sample(messages, limits=ReplyLimits(stop=("</code>",)))
            pending.commit()
            text = f"{pending.action.message['content'].strip()}</code>\nCalls: {step}"
            messages += [Message(role="assistant", content=text), user(f"saw {step}")]
        await session.chat(messages)
        messages[1]["content"] = messages[1]["content"].replace("go", "gone")
        await session.chat(messages)  # does not begin with the reply

    run(dialogue())
    assert [len(row) for row in trajectory_of(session.segments()).rows] == [6, 2]
    first = session.segments()
    assert tokenizer().decode(first[1].tokens) == "go <code>x</code>"
    added, end = tokenizer().encode("\nCalls: x", add_special_tokens=False), renderer().stop_token_ids[0]
    assert first[2].kind == "observation"
    assert first[2].tokens == (*added, *renderer().observation([user("saw x")], added[-1]))
    assert first[2].tokens[len(added)] == end
    assert row_tokens(session)[0][: len(engine.requests[2].token_ids)] == engine.requests[2].token_ids


def test_text_behind_a_reply_that_ended_its_turn_starts_a_row():
    _, session = session_of("go", "end")

    async def dialogue():
        said = await session.chat([user("one")])
        written_on = Message(role="assistant", content=said["content"] + " on")
        await session.chat([user("one"), written_on, user("two")])

    run(dialogue())
    assert len(row_tokens(session)) == 2


def test_siblings_and_older_turns_fork_and_share_their_tokens():
    engine, session = session_of("a", "b", "c", "d")

    async def dialogue():
        start = [user("one"), await session.chat([user("one")])]
        left, right = await asyncio.gather(session.chat([*start, user("l")]), session.chat([*start, user("r")]))
        await session.chat([*start, user("r"), right, user("more")])
        return left, right

    run(dialogue())
    rows = row_tokens(session)
    assert len(rows) == 2
    segments = session.segments()
    assert sum(s.kind == "action" for s in segments) == 4
    shared = len(segments[0].tokens) + len(segments[1].tokens)
    assert rows[0][:shared] == rows[1][:shared]
    for request in engine.requests:
        assert any(row[: len(request.token_ids)] == request.token_ids for row in rows)


def test_uncommitted_and_failed_requests_leave_nothing():
    engine, session = session_of("a", "b", "c", faults=Faults(hang_at=[2]))

    async def dialogue():
        start = [user("one"), await session.chat([user("one")]), user("two")]
        await session.sample(start)  # never committed: the client is gone
        hanging = asyncio.create_task(session.chat(start))
        await asyncio.sleep(0.01)
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)
        return await session.chat(start)

    assert run(dialogue())["content"] == "c"
    assert [s.kind for s in session.segments()] == ["prompt", "action", "observation", "action"]
    assert engine.requests[3].token_ids == engine.requests[1].token_ids


def test_replies_with_the_same_text_are_told_apart_by_their_thinking():
    engine, session = session_of("<think>\n1\n</think>\nx", "<think>\n2\n</think>\nx", "y")

    async def dialogue():
        replies = [await session.chat([user("one")]) for _ in range(2)]
        assert [one["reasoning_content"] for one in replies] == ["1", "2"]
        await session.chat([user("one"), replies[0], user("go")])

    run(dialogue())
    assert "1" in tokenizer().decode(engine.requests[2].token_ids)
    assert "2" not in tokenizer().decode(engine.requests[2].token_ids)


def test_ids_of_calls_are_unique_over_rollouts():
    found = []
    for name in ("e", "f"):
        engine = scripted(in_order(*[SEARCH] * 4))
        session = AgentSession(lambda engine=engine, name=name: make_chat(engine, name), RolloutConfig())

        async def dialogue(session=session):
            messages = [user("one")]
            reply = await session.chat(messages, [echo])
            second = await session.chat([*messages, reply, result("x")], [echo])
            both = await asyncio.gather(*(session.chat([user(text)], [echo]) for text in "xy"))
            return [one["tool_calls"][0]["id"] for one in (reply, second, *both)]

        found += run(dialogue())
    assert len(set(found)) == 8


def test_calls_without_offered_tools_are_text():
    _, session = session_of(SEARCH, "b")

    async def dialogue():
        reply = await session.chat([user("one")])
        assert "tool_calls" not in reply
        assert '"name": "echo"' in reply["content"]
        await session.chat([user("one"), Message(role="assistant", content=reply["content"]), user("two")])

    run(dialogue())
    assert len(row_tokens(session)) == 1


def test_limits_end_the_rollout_and_later_requests_are_refused():
    _, session = session_of("a", "b", limits=RolloutConfig(max_turns=1))

    async def dialogue():
        await session.chat([user("one")])
        with pytest.raises(RolloutEnded, match="max_turns"):
            await session.chat([user("two")])
        with pytest.raises(RolloutEnded):
            await session.chat([user("three")])

    run(dialogue())
    assert session.stop is StopReason.MAX_TURNS
    _, session = session_of("a")
    with pytest.raises(RolloutEnded, match="prompt_too_long"):
        run(session.chat([user("word " * 3000)]))
    with pytest.raises(InvalidRequest, match="no messages"):
        run(session_of("a")[1].chat([]))


def test_reply_at_the_token_limit_ends_the_rollout_unless_the_request_set_it():
    _, session = session_of("word " * 50, "word " * 500)

    async def dialogue():
        short = await session.sample([user("one")], limits=ReplyLimits(5))
        short.commit()
        assert (short.action.finish_reason, session.stop) == ("length", None)
        await session.chat([user("one"), short.action.message, user("two")])

    run(dialogue())
    assert session.stop is StopReason.TRUNCATED
    kinds = [segment.kind for segment in session.segments()]
    assert kinds == ["prompt", "action", "observation", "action"]


def test_request_can_lower_the_token_limit_and_add_stop_strings():
    engine, session = session_of("a", "b", "c")

    async def dialogue():
        await session.sample([user("one")], limits=ReplyLimits(7, ("END",)))
        await session.sample([user("two")], limits=ReplyLimits(10**6))
        await session.sample([user("three")])

    run(dialogue())
    assert [request.params.max_new_tokens for request in engine.requests] == [7, 400, 400]
    assert ["END" in request.params.stop for request in engine.requests] == [True, False, False]


# Episodes of agent functions


def play(agent, *lines, reward=lambda task, answer: float(task == answer), limits=LIMITS, server=None, **options):
    """Return the trajectory of an agent function, for these replies of the policy, and its reward."""
    engine = scripted(in_order(*lines), **options)
    world = AgentWorld.of(agent, [f"task {i}" for i in range(10)], reward)
    task = world.tasks("train")[0]
    environment = world.environment(task)
    found = run(AgentRunner(server).run(task, 0, environment, lambda: make_chat(engine), limits))
    return found, environment.rewards[0].function(task, found)


def test_rewards_of_agent_functions_are_not_computed_in_another_process():
    world = AgentWorld.of(twice, ["x"] * 5, float)
    environment = world.environment(world.tasks("train")[0])
    with pytest.raises(ConfigError, match="cannot be scored by its rewards alone"):
        check_scored_elsewhere(world.rewards, environment.rewards, environment)


async def twice(task, policy):
    messages = [user(task)]
    messages.append(await policy.chat(messages))
    messages.append(user("again"))
    return (await policy.chat(messages))["content"]


def twice_plain(task, policy):
    messages = [user(task)]
    messages.append(policy.chat(messages))
    messages.append(user("again"))
    return policy.chat(messages)["content"]


async def fair(task, answer):
    return float(task == answer)


@pytest.mark.parametrize("agent", [twice, twice_plain])
@pytest.mark.parametrize("reward", [lambda task, answer: float(task == answer), fair])
def test_agent_function_is_one_rollout_with_its_reward(agent, reward):
    found, value = play(agent, "one", "task 0", reward=reward)
    assert (found.stop_reason, value, found.shared_reward) == (StopReason.ANSWERED, 1.0, True)
    assert [m["content"] for m in found.messages] == ["task 0", "one", "again", "task 0"]
    assert play(agent, "one", "two", reward=reward)[1] == 0.0


@pytest.mark.parametrize("agent", [twice, twice_plain])
def test_agent_function_cut_short_has_zero_reward(agent):
    found, value = play(agent, "one", "two", limits=RolloutConfig(max_turns=1))
    assert (found.stop_reason, value, found.num_turns) == (StopReason.MAX_TURNS, 0.0, 1)


def rewards_replies(task, policy):
    messages = [user(task)]
    messages.append(policy.chat(messages))
    messages += [user("again"), policy.chat([*messages, user("again")])]
    for reply, value in ((messages[1], -1.0), (messages[3], 2), (messages[1], 0.5)):
        policy.reward_reply(reply, value)
    for reply, value in (({**messages[1]}, 1.0), ("chatcmpl-x", 1.0), (messages[1], float("nan"))):
        with pytest.raises((LookupError, ValueError), match=r"no reply|finite"):
            policy.reward_reply(reply, value)
    return policy.chat([user("fork")])["content"]


async def rewards_replies_by_id(task, base_url, api_key, policy):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        first, second, _ = [
            await client.chat.completions.create(model="m", messages=[user(text)]) for text in (task, "again", "fork")
        ]
    for reply, value in ((first, -1.0), (second, 2), (first, 0.5)):
        policy.reward_reply(reply.id, value)


@pytest.mark.parametrize("agent", [rewards_replies, rewards_replies_by_id])
def test_agent_function_rewards_single_replies(agent):
    found, value = play(agent, "same", "same", "three", server=SessionServer())
    assert (found.turn_rewards, value) == ((0.5, 2.0, 0.0), 0.0)


def test_ids_of_calls_differ_between_rollouts_and_not_between_attempts():
    def ids(name):
        session = AgentSession(lambda: make_chat(scripted([SEARCH]), episode=name), LIMITS)
        return run(session.chat([user("a")], [echo]))["tool_calls"][0]["id"]

    assert ids("1/t/0/0") == ids("1/t/0/1")
    assert len({ids(name) for name in ("1/t/0/0", "1/t/1/0", "session-1", "session-2")}) == 4


def test_agent_with_sub_agents_is_one_member_of_its_group():
    async def delegates(task, policy):
        parts = await asyncio.gather(*(policy.chat([user(f"{task} {i}")]) for i in range(3)))
        return (await policy.chat([user(" ".join(part["content"] for part in parts))]))["content"]

    found, _ = play(delegates, "a", "b", "c", "task 0")
    assert found.shared_reward
    assert len(found.rows) == 4
    record = RolloutRecord(1, "t", RolloutOutcome.TRAINED, "trained", found)
    assert parse_rollout(json.loads(rollout_line(record))).trajectory == found
    alone = replace(play(lambda task, policy: policy.chat([user("x")])["content"], "b")[0], sample=1, reward=0.0)
    group = [
        Episode(
            RolloutKey(1, one.task_id, one.sample), AgentWorld.of(delegates, ["x"] * 5, float).tasks("train")[0], one
        )
        for one in (replace(found, reward=1.0), alone)
    ]
    many, one = assign_credit([group], PRESETS["grpo"])
    # the baseline is the mean over two rollouts, not over five rows
    assert set(many.advantages) == {-next(iter(set(one.advantages)))}
    assert len(many.advantages) == found.num_action_tokens
    metrics = rollout_metrics([Group(group[0].task, (found, alone))])
    assert (metrics["agent/rows/mean"], metrics["agent/rows/max"]) == (2.5, 4.0)
    prompts = [len(s.tokens) for s in found.segments if s.kind == "prompt"]
    total = sum(len(s.tokens) for one in (found, alone) for s in one.segments)
    assert metrics["agent/new_prompt_tokens"] == sum(prompts[1:]) / total
    row = row_of_trajectory(found, many.advantages)
    assert sum(row.trains) == found.num_action_tokens


def test_errors_of_agents_are_infrastructure_failures_only_before_the_first_reply(caplog):
    def broken(task, policy):
        raise ValueError("the agent is broken")

    def fails(task, policy):
        policy.chat([user(task)])
        raise ValueError("no such tool")

    with pytest.raises(WorldError, match="the agent is broken"):
        play(broken, "one")
    with pytest.raises(WorldError, match="without a request"):
        play(lambda task, policy: "done", "one")
    found, value = play(fails, "one")
    assert (found.stop_reason, value, found.num_turns) == (StopReason.AGENT_FAILED, 0.0, 1)
    assert "no such tool" in caplog.text


def test_engine_failure_is_raised_even_if_the_agent_catches_it():
    def catches(task, policy):
        try:
            policy.chat([user(task)])
        except EngineError:
            return "task 0"
        return ""

    with pytest.raises(EngineError, match="Scripted failure"):
        play(catches, "one", faults=Faults(fail_at=[0]))


async def cancels_itself(task, policy):
    await policy.chat([user(task)])
    raise asyncio.CancelledError


def exits(task, policy):
    policy.chat([user(task)])
    sys.exit(1)


async def swallows_cancellation(task, policy):
    await policy.chat([user(task)])
    for _ in range(3):
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(30)


@pytest.mark.parametrize("agent", [cancels_itself, exits])
def test_agent_that_ends_its_own_task_is_a_failure_of_the_agent(agent):
    found, _ = play(agent, "one")
    assert found.stop_reason is StopReason.AGENT_FAILED


@pytest.mark.slow
def test_agent_that_swallows_cancellation_does_not_outlive_the_time_limit(monkeypatch):
    monkeypatch.setattr(agent_runs, "_STOP_S", 0.1)
    found, _ = play(swallows_cancellation, "one", limits=RolloutConfig(episode_timeout_s=0.2))
    assert found.stop_reason is StopReason.TIMEOUT


def test_reward_that_raises_is_an_infrastructure_failure():
    def fails(task, answer):
        raise KeyError("grader bug")

    with pytest.raises(WorldError, match="grader bug"):
        play(twice, "one", "two", reward=fails)


def test_fork_does_not_inherit_the_limits_of_a_running_request():
    engine, session = session_of("a", "b", "c", faults=Faults(hang_at=[1]))

    async def dialogue():
        start = [user("one"), await session.chat([user("one")])]
        left = asyncio.create_task(session.sample([*start, user("l")], limits=ReplyLimits(5, ("x",))))
        await asyncio.sleep(0.01)
        await session.chat([*start, user("r")])
        left.cancel()

    run(dialogue())
    assert engine.requests[2].params.max_new_tokens == 400
    assert session.stop is None


def test_end_of_the_rollout_stops_its_requests():
    _, session = session_of("a", "b", faults=Faults(hang_at=[0]))

    async def dialogue():
        asking = asyncio.create_task(session.chat([user("one")]))
        await asyncio.sleep(0.01)
        session.close()
        with pytest.raises(RolloutEnded):
            await asking

    run(dialogue())
    assert session.segments() == ()


def test_hanging_agent_ends_at_the_time_limit():
    async def hangs(task, policy):
        await policy.chat([user(task)])
        await asyncio.Event().wait()

    found, _ = play(hangs, "one", limits=RolloutConfig(episode_timeout_s=0.2))
    assert (found.stop_reason, found.num_turns) == (StopReason.TIMEOUT, 1)


# Several agents


def test_agents_with_equal_dialogues_have_rows_of_their_own_and_rewards_by_name():
    async def debates(task, policy):
        replies = [await policy.chat([user(task)], agent=name) for name in ("pro", "con")]
        more = [user(task), replies[0], user("again")]
        return (await policy.chat(more, agent="pro"))["content"]

    found, value = play(debates, "a", "b", "task 0", reward=lambda task, answer: {"pro": 1.0, "con": 0.0})
    assert [[s.agent for s in found.segments if s.kind == "action"]] == [["pro", "pro", "con"]]
    assert (len(found.rows), found.agent_rewards, value) == (2, {"pro": 1.0, "con": 0.0}, 0.5)
    with pytest.raises(InvalidRequest, match="must not be empty"):
        run(session_of("a")[1].chat([user("x")], agent=""))
    with pytest.raises(WorldError, match="rewards of pro, but not of con"):
        play(debates, "a", "b", "task 0", reward=lambda task, answer: {"pro": 1.0})


def test_agents_without_a_reward_have_zero_if_the_rollout_was_cut_short():
    class Debate(Environment):
        tools, rewards = (), ()

        async def start(self, task):
            return []

        async def step(self, action):
            raise NotImplementedError

        async def drive(self, task, policy):
            await policy.chat([user("a")], agent="pro")
            policy.agent_rewards["pro"] = 0.5
            for _ in range(2):
                await policy.chat([user("a")], agent="con")

    task, engine = Task("t", (user("a"),), None), scripted(in_order("a", "b"))
    limits = LIMITS.model_copy(update={"max_turns": 2})
    found = run(AgentRunner().run(task, 0, Debate(), lambda: make_chat(engine), limits))
    assert (found.stop_reason, found.agent_rewards) == (StopReason.MAX_TURNS, {"con": 0.0, "pro": 0.5})


def test_text_prompts_do_not_fork_from_a_row_without_a_committed_reply():
    async def dialogue():
        _, session = session_of(*"abcde")

        async def complete(prompt):
            return await session.sample((), limits=ReplyLimits(prompt=prompt))

        (await complete("one")).commit()
        second = await complete("two")
        second.commit()
        begun = (*second.prompt, *second.tokens)
        (await complete((*begun, 5))).commit()
        await complete((*begun, 6))  # its client has disconnected
        last = await complete((*begun, 7))
        last.commit()
        return row_tokens(session), (*last.prompt, *last.tokens)

    rows, last = run(dialogue())
    assert rows[2] == last


@pytest.mark.parametrize("token", [-1, 2**40])
def test_token_that_no_tokenizer_has_is_refused(token):
    _, session = session_of("a")
    with pytest.raises(InvalidRequest):
        run(session.sample((), limits=ReplyLimits(prompt=(token,))))


def test_far_too_long_dialogue_is_refused_without_tokenizing_it(monkeypatch):
    most, encode = [0], tokenizer().encode

    def counted(text, **options):
        most[0] = max(most[0], len(text))
        return encode(text, **options)

    monkeypatch.setattr(tokenizer(), "encode", counted)
    long = "word " * 20_000
    sent = tool_call("x", "echo", json.dumps({"text": long}))
    for messages in (
        [user(long)],
        [user("a")] * 2001,
        [user("a"), Message(role="assistant", content="", tool_calls=[sent])],
    ):
        with pytest.raises(RolloutEnded, match="prompt_too_long"):
            run(session_of("a")[1].chat(messages))
    with pytest.raises(RolloutEnded, match="prompt_too_long"):
        run(session_of("a")[1].sample([], limits=ReplyLimits(prompt=long)))
    _, session = session_of("a", "b")
    with pytest.raises(RolloutEnded, match="max_tokens"):
        run(session.chat([user("a"), run(session.chat([user("a")])), user(long)]))
    assert most[0] <= 8 * 2000
    _, session = session_of("a")
    run(session.chat([user("assistant" * 1900)]))  # one token each
