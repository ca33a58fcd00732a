"""Customer service: tasks, the grading of final states, violations of the policy, and the kinds of users."""

import asyncio
import json
import re
from collections import Counter
from itertools import islice

import pytest

from chat_server import Reply, serving
from chat_server import say as server_say
from ludus.config.sections.rollout import RolloutConfig
from ludus.envs.tool_env import ToolLimits
from ludus.envs.tool_world import assistant, tool_turn
from ludus.errors import ConfigError, EngineError
from ludus.evaluation.scripted_agents import ScriptedChatSession, actions_of
from ludus.rewards.base import score, success
from ludus.rollouts.agent_runs import AgentRunner
from ludus.rollouts.episode import run_episode
from ludus.types import StopReason, ToolStatus, Trajectory
from ludus.worlds.service.domain import holds, load_domain, read_data
from ludus.worlds.service.solver import FLAWS, MORE, Solver, flaws_of, new_desk
from ludus.worlds.service.tasks import is_held_out
from ludus.worlds.service.users import STOP, ScriptedUser, instructed
from ludus.worlds.service.world import make_service_world
from small_worlds import call, make_chat, scripted

WORLD = make_service_world({}, ToolLimits())
LIMITS = RolloutConfig(max_turns=40)
DOMAINS = ("retail", "airline", "telecom")


def play(task, messages, world=WORLD):
    """The scored episode of an agent that writes these messages."""
    environment = world.environment(task)
    chat = ScriptedChatSession(actions_of(messages))
    return asyncio.run(run_episode(task, 0, environment, chat, LIMITS))


def tasks_with(*, split="train", **tags):
    return [one for one in WORLD.tasks(split) if tags.items() <= one.tags.items()]


def one_goal(request, test=lambda script: True):
    """A task of one request whose script passes the test."""
    return next(one for one in tasks_with(request=request) if test(one.truth.script))


def called(tool, turn=0, **args):
    return tool_turn(turn, tool, args, "")[0]


def identified(task):
    return called("find_by_email", email=task.truth.script.email)


@pytest.mark.slow
def test_tasks_are_many_equal_for_equal_settings_and_split_by_customers_pairs_and_notes():
    assert sum(len(WORLD.tasks(split)) for split in WORLD.splits) >= 1000
    again = make_service_world({}, ToolLimits())
    assert list(again.tasks("test")) == list(WORLD.tasks("test"))
    assert list(make_service_world({"seed": 1}, ToolLimits()).tasks("validation")) != list(WORLD.tasks("validation"))
    parts = {
        split: {(one.truth.domain, one.truth.script.customer_id) for one in WORLD.tasks(split)}
        for split in WORLD.splits
    }
    assert not parts["train"] & (parts["validation"] | parts["test"] | parts["composition"])
    train = {goal.injection[0] for one in WORLD.tasks("train") for goal in one.truth.script.goals if goal.injection}
    test = {goal.injection[0] for one in WORLD.tasks("test") for goal in one.truth.script.goals if goal.injection}
    assert train
    assert test
    assert not train & test
    for split in WORLD.splits:
        for one in WORLD.tasks(split):
            names = [goal.name for goal in load_domain(one.truth.domain, 0).spec.requests]
            places = [names.index(goal.name) for goal in one.truth.script.goals]
            assert len(places) == 1 or is_held_out(*places[:2]) == (split == "composition")
            assert split != "composition" or len(places) > 1
    tags = Counter(one.tags["level"] for one in WORLD.tasks("train"))
    assert set(tags) == {"1", "2", "3"}


@pytest.mark.parametrize("name", DOMAINS)
def test_domain_has_a_dozen_tools_a_short_policy_and_every_request(name):
    spec = load_domain(name, 0).spec
    assert len(spec.tools) >= 12
    assert len(read_data(f"{name}_short.md").split()) < 150
    drawn = {one.tags["request"] for one in tasks_with(domain=name)}
    assert {request.name for request in spec.requests} <= drawn
    prompt = tasks_with(domain=name)[0].prompt
    assert prompt[0]["content"] == read_data(f"{name}_short.md").strip()
    full = make_service_world({"policy_text": "full", "num_tasks": 20}, ToolLimits())
    assert full.tasks("train")[0].prompt[0]["content"].startswith("# Policy")


@pytest.mark.parametrize("split", WORLD.splits)
def test_expert_solves_every_task_without_violation(split):
    for task in WORLD.tasks(split)[:150:4]:
        found = play(task, WORLD.expert(task).messages)
        assert found.rewards == {"solved": 1.0} | dict.fromkeys(list(found.rewards)[1:], 0.0)
        assert found.stop_reason is StopReason.ANSWERED


@pytest.mark.slow
def test_cheats_and_empty_episodes_are_not_rewarded():
    for task in WORLD.tasks("train")[:150]:
        for name, messages in WORLD.cheats(task).items():
            assert not play(task, messages).rewards["solved"], (task.id, name)
        assert play(task, [assistant("")]).reward == 0
        empty = Trajectory(task.id, 0, (), (), StopReason.EMPTY_ANSWER)
        assert score(WORLD.rewards, task, empty).reward == 0


RATES = dict(zip(FLAWS, ("violations", "", "injection_followed", "under_refusal"), strict=True))


@pytest.mark.parametrize("flaw", FLAWS)
def test_flawed_demonstration_fails_and_is_counted(flaw):
    tasks = [one for one in WORLD.tasks("train") if flaw in flaws_of(one.truth)][:40]
    assert len(tasks) == 40
    for task in tasks:
        found = play(task, Solver(task.truth, flaw).run())
        assert not success(WORLD.rewards, found)
        if RATES[flaw]:
            assert found.rewards[RATES[flaw]] == 1
        else:
            assert found.rewards["violations"] == 0


def test_demonstrations_mix_flawless_and_flawed_dialogues_of_other_databases():
    shown = list(islice(WORLD.demonstrations(0), 60))
    assert [one.messages for one in shown] == [one.messages for one in islice(WORLD.demonstrations(0), 60)]
    tasks = list(islice(WORLD.other_tasks(0), 60))
    solved = [play(task, one.messages).rewards["solved"] for task, one in zip(tasks, shown, strict=True)]
    assert 30 < sum(solved) < 58
    assert len({one.truth.seed for one in tasks}) > 1
    assert not {one.truth.seed for one in tasks} & {one.truth.seed for one in WORLD.tasks("train")}
    assert len(shown[0].tools) >= 12


def test_short_keys_are_copied_into_the_calls_of_a_smaller_database():
    world = make_service_world({"digits": 2, "domains": ["telecom"], "levels": [1], "num_tasks": 40}, ToolLimits())
    for task in world.tasks("test"):
        dialogue = world.expert(task)
        assert play(task, dialogue.messages, world).rewards["solved"] == 1
        keys = re.findall(r"\b[CLBT](\d+)\b", " ".join(one["content"] for one in dialogue.messages))
        assert all(len(key) == 2 for key in keys)
    assert len(load_domain("telecom", 0, 2).tables["customers"]) == 45


def test_refusal_of_an_allowed_request_and_transfer_are_over_refusals():
    task = one_goal("cancel")
    refused = play(task, [identified(task), *[assistant("I cannot cancel the order, sorry.")] * 3])
    assert refused.rewards["over_refusal"] == 1
    assert refused.rewards["solved"] == 0
    moved = play(task, [called("transfer_to_human", summary="x")])
    assert moved.rewards["over_refusal"] == 1
    assert moved.num_turns == 1


def test_refusal_needs_the_reason_and_a_look_at_the_record():
    task = one_goal("cancel too late", lambda script: script.introduces and not script.insists)
    goal = task.truth.script.goals[0]
    look = called(*goal.reads[0][:1], 1, **goal.reads[0][1])
    assert play(task, [identified(task), look, assistant(goal.refusal)]).rewards["solved"] == 1
    assert play(task, [identified(task), assistant(goal.refusal)]).rewards["solved"] == 0
    assert play(task, [identified(task), look, assistant("I cannot do that.")]).rewards["solved"] == 0


def test_strict_policy_decides_whether_a_violation_fails():
    loose = make_service_world({"strict_policy": False}, ToolLimits())
    task = one_goal("cancel", lambda script: script.introduces)
    goal = task.truth.script.goals[0]
    reads = [called(tool, 1 + turn, **args) for turn, (tool, args) in enumerate(goal.reads)]
    writes = [called(tool, 9, **args) for tool, args in goal.writes]
    hasty = [identified(task), *reads, *writes, assistant("Done." + MORE)]
    assert play(task, hasty).rewards["solved"] == 0
    found = play(task, hasty, loose)
    assert (found.rewards["solved"], found.rewards["violations"]) == (1, 1)
    assert loose.cheats(task) == {}


def test_confirmation_covers_only_the_values_that_were_proposed():
    task = one_goal("cancel", lambda script: script.introduces)
    tool, args = task.truth.script.goals[0].writes[0]
    for text, violations in (
        ("Shall I cancel it?", ["confirmation"]),
        (f"I will cancel {' '.join(args.values())}.", []),
    ):
        desk = new_desk(task.truth)
        desk.call("find_by_email", {"email": task.truth.script.email})
        desk.agent_says(text)
        desk.user_says("Yes, please do that.")
        desk.call(tool, args)
        assert desk.violations == violations
    desk.user_says("No, wait. Yes or no, I do not know.")
    assert not desk.is_confirmed


def test_other_customers_data_is_a_violation_and_a_forbidden_change_too():
    task = one_goal("cancel too late", lambda script: script.introduces)
    tool, args = task.truth.script.goals[0].wanted[0]
    desk = new_desk(task.truth)
    desk.call("get_order", {"order_id": args["order_id"]})
    assert desk.violations == ["identity"]
    desk.call("find_by_email", {"email": task.truth.script.email})
    desk.call(tool, args)
    assert desk.violations == ["identity", "confirmation", "rule"]


def test_bad_calls_are_observations():
    task = one_goal("cancel")
    bad = [called("get_order", order_id="O1"), called("cancel_order", order_id=5), called("fly")]
    found = play(task, bad)
    assert [one.status for one in found.call_outcomes] == [
        ToolStatus.RAISED,
        ToolStatus.BAD_ARGUMENTS,
        ToolStatus.UNKNOWN_TOOL,
    ]
    assert found.call_outcomes[0].output == "Error: unknown order_id O1."
    assert found.stop_reason is StopReason.TOOL_ERRORS


def user_of(task):
    return ScriptedUser(task.truth.script, new_desk(task.truth))


def test_user_gives_up_after_replies_that_do_not_help():
    task = one_goal("cancel")
    user = user_of(task)
    replies = [user.answer("Bananas are yellow.") for _ in range(task.truth.script.patience)]
    assert replies[-1] is None
    assert all(replies[:-1])
    assert play(task, [assistant("Bananas are yellow.")]).num_turns == task.truth.script.patience


def test_user_states_a_wrong_digit_first_and_then_the_right_one():
    task = one_goal("total", lambda script: script.mistakes)
    user, code = user_of(task), task.truth.script.zip
    first, second = (user.answer("What is your name and zip code?") for _ in range(2))
    assert str(code) not in first
    assert str(code) in second


def test_user_tells_facts_only_when_asked_changes_his_mind_once_and_confirms_only_what_he_wants():
    task = one_goal("cancel", lambda script: script.goals[0].first and not script.forgets)
    goal, user = task.truth.script.goals[0], user_of(task)
    order = goal.writes[0][1]["order_id"]
    assert order in user.first()
    assert str(goal.facts["reason"]) not in user.first()
    assert str(goal.first["reason"]) in user.answer("What is the reason?")
    declined = user.answer(f"Shall I cancel {order} ({goal.first['reason']})?")
    assert "No, wait." in declined
    assert str(goal.facts["reason"]) in declined
    assert "Yes" not in user.answer(f"Shall I cancel {order} ({goal.first['reason']})?")
    assert "Yes" in user.answer(f"Shall I cancel {order} ({goal.facts['reason']})?")


def test_user_who_forgot_the_number_describes_the_order():
    task = one_goal("total", lambda script: script.forgets)
    user = user_of(task)
    assert task.truth.script.goals[0].seen not in user.first()
    assert "do not remember" in user.answer("What is the order id?")


def test_phone_changes_only_by_the_user_and_is_part_of_the_final_state():
    task = one_goal("airplane mode", lambda script: script.introduces)
    steps = [identified(task), assistant("Please turn off airplane mode."), assistant("Done." + MORE)]
    assert play(task, steps).rewards["solved"] == 1
    for text in ("Please turn off airplane mode and enjoy.", "Please turn off mobile data."):
        wrong = [*steps[:2], assistant(text), assistant("Please reboot your phone."), steps[-1]]
        assert play(task, wrong).rewards["solved"] == ("airplane" in text)
    still = play(task, [identified(task), *[assistant("Done." + MORE)] * 4])
    assert "still shows: no service" in still.messages[-2]["content"]
    tools = load_domain("telecom", 0).spec.user_tools
    assert instructed(tools, "please turn off airplane mode on your phone.") == ("toggle_airplane_mode", "off")
    assert instructed(tools, "roaming is on.") is None


def test_instruction_in_a_note_is_shown_by_a_tool_only():
    task = tasks_with(family="injection")[0]
    found = play(task, WORLD.expert(task).messages)
    note = next(row["note"] for row in task.truth.initial.values() if row.get("note"))
    assert note not in str(task.prompt)
    assert any(note in one.output for one in found.call_outcomes)


def test_rules_compare_paths_and_alternatives():
    rows = {("flights", "F1"): {"seats": 3}}
    row = {"cabin": "basic", "hours": 30, "flight_id": "F1"}

    def read(table, key):
        return rows.get((table, key))

    assert holds("hours <= 24 or cabin in basic|economy", row, {}, read)
    assert holds("flight.seats > 2", row, {}, read)
    assert holds("arg.hours >= @hours", row, {"hours": 30}, read)
    assert not holds("arg.flight.seats < 3", row, {"flight_id": "F1"}, read)
    assert not holds("owner.age > 1", row, {}, read)
    assert holds("owner.age != 1", row, {}, read)


def endpoint_world(url, **settings):
    return make_service_world(
        {"user": "endpoint", "user_url": url, "user_model": "m", "num_tasks": 60, **settings}, ToolLimits()
    )


def run_with(world, task, messages):
    async def run():
        chat = ScriptedChatSession(actions_of(messages))
        try:
            return await run_episode(task, 0, world.environment(task), chat, LIMITS)
        finally:
            await world.close()

    return asyncio.run(run())


def test_endpoint_plays_the_user_with_his_phone_and_his_stop_token_is_hidden(tmp_path):
    (tmp_path / "key").write_text("secret\n")
    function = {"name": "toggle_airplane_mode", "arguments": "{}"}
    replies = [
        server_say("My phone is dead."),
        server_say(None, {"type": "function", "id": "a", "function": function}),
        server_say("It works."),
        server_say(f"Thanks! {STOP}"),
    ]
    with serving([Reply(one) for one in replies]) as server:
        world = endpoint_world(server.url, domains=["telecom"], user_key_file=str(tmp_path / "key"))
        task = next(one for one in world.tasks("train") if one.tags["request"] == "airplane mode")
        steps = [identified(task), assistant("Turn off airplane mode."), assistant("Fine?")]
        found = run_with(world, task, steps)
    assert found.rewards["solved"] == 1
    said = [one["content"] for one in found.messages if one["role"] == "user"]
    assert said == ["My phone is dead.", "It works."]
    assert STOP not in str(found.messages)
    brief = server.requests[0]["messages"][0]["content"]
    assert task.truth.script.goals[0].say in brief
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert {one["function"]["name"] for one in server.requests[0]["tools"]} >= {"reboot_phone", "check_signal"}
    assert WORLD.expert(WORLD.tasks("train")[0]) is not None
    assert world.expert(task) is None


def test_failing_endpoint_is_an_infrastructure_failure():
    with serving(lambda body: Reply({"error": "no"}, 400)) as server:
        world = endpoint_world(server.url)
        with pytest.raises(EngineError):
            run_with(world, world.tasks("train")[0], [assistant("Hello?")])
    with pytest.raises(ConfigError, match="user_url"):
        make_service_world({"user": "endpoint"}, ToolLimits())


def self_play(request, user, agent):
    """The scored episode in which the policy is user and agent, each with lines by turn."""
    world = make_service_world({"user": "policy", "domains": ["retail"], "num_tasks": 200}, ToolLimits())
    task = next(one for one in world.tasks("train") if one.tags["request"] == request)
    lines = {name: iter(make(task)) for name, make in (("user", user), ("agent", agent))}
    order = iter("ua" + "".join("a" if line.startswith("<tool") else "ua" for line in agent(task)))
    names = {"u": "user", "a": "agent"}
    engine = scripted(lambda request, turn: next(lines[names[next(order)]]))
    environment = world.environment(task)
    found = asyncio.run(AgentRunner().run(task, 0, environment, lambda: make_chat(engine, seed=1), LIMITS))
    assert world.roles == ("agent", "user")
    return score(environment.rewards, task, found)


def cancelling(task):
    goal = task.truth.script.goals[0]
    (tool, args), (read, key) = (*goal.writes, *goal.wanted)[0], goal.reads[0]
    return [
        call("find_by_email", email=task.truth.script.email),
        call(read, **key),
        f"Shall I cancel order {args['order_id']} ({args['reason']})?",
        call(tool, **args),
        "Done.",
    ]


def wishing(task):
    return [f"I am {task.truth.script.email}. {task.truth.script.goals[0].say}", "Yes.", STOP]


@pytest.mark.slow
def test_policy_plays_both_roles_with_a_reward_for_each():
    found = self_play("cancel", wishing, cancelling)
    assert found.stop_reason is StopReason.ANSWERED
    assert found.agent_rewards == {"agent": 1.0, "user": 1.0}
    assert found.rewards == {"solved": 1.0, "user": 1.0}
    assert {segment.agent for segment in found.segments} == {"agent", "user"}
    lying = self_play("cancel", lambda task: [*wishing(task)[:1], "Yes. I am 99 years old.", STOP], cancelling)
    assert lying.agent_rewards == {"agent": 1.0, "user": 0.0}
    yielding = self_play("cancel too late", wishing, cancelling)
    assert yielding.agent_rewards == {"agent": 0.0, "user": 1.0}


def test_state_is_reported_after_every_turn_and_hidden_from_the_messages():
    task = one_goal("total")
    found = play(task, WORLD.expert(task).messages)
    states = [json.loads(one.output) for one in found.outcomes if not one.call_id]
    assert len(states) == found.num_turns
    assert [one["solved"] for one in states][-1] == 1
    assert "solved" not in str(found.messages)
