"""The household world: rooms, actions, goals, splits, the expert, the mistakes in demonstrations, and its page."""

import asyncio
import itertools
import re
from collections import Counter

import pytest

from ludus.config import load_config
from ludus.envs.tool_env import ToolLimits
from ludus.errors import ConfigError
from ludus.evaluation.env_audit import CheckPlan, check_world
from ludus.evaluation.scripted_agents import AgentKind
from ludus.recipes import recipe_folder
from ludus.types import Action, StopReason, Trajectory
from ludus.worlds.household.layouts import FAMILIES, HouseholdGoal, Layout, is_held_out, kind_of, place_objects
from ludus.worlds.household.simulator import NOTHING, Household
from ludus.worlds.household.world import goal_of, make_household_world

ROLLOUT = load_config("household").rollout


def make(**settings):
    return make_household_world({"num_layouts": 60, **settings}, ToolLimits())


WORLD = make()
KITCHEN = Layout("small", "kitchen", ("countertop 1", "cabinet 1", "fridge 1", "microwave 1", "sinkbasin 1"))
DESK = Layout("desks", "bedroom", ("bed 1", "desk 1", "drawer 1"))


def room(family, kind, target, contents, layout=KITCHEN, **options):
    held = {place: contents.get(place, []) for place in layout.receptacles}
    return Household(layout, HouseholdGoal(family, kind, target), held, **options)


def play(simulator, *actions):
    return [simulator.step(action) for action in actions]


def played(world, task, texts):
    async def episode():
        environment = world.environment(task)
        assert await environment.start(task) == list(task.prompt)
        results = [await environment.step(Action({"role": "assistant", "content": text})) for text in texts]
        await environment.close()
        return results

    results = asyncio.run(episode())
    outcomes = tuple(outcome for result in results for outcome in result.outcomes)
    trajectory = Trajectory(task.id, 0, (), task.prompt, StopReason.MAX_TURNS, outcomes=outcomes)
    return results, {reward.name: reward.function(task, trajectory) for reward in world.rewards}


def acts(messages):
    return [message["content"] for message in messages if message["role"] == "assistant"]


def test_object_is_heated_and_put_away():
    simulator = room("heat", "mug", "cabinet", {"fridge 1": ["mug 1", "egg 1"]})
    assert simulator.reset() == (
        "You are in a kitchen. You see a countertop 1, a cabinet 1, a fridge 1, a microwave 1 and a sinkbasin 1. "
        "Put a hot mug in/on a cabinet."
    )
    seen = play(simulator, "go to fridge 1", "open fridge 1", "Take  mug 1 from fridge 1", "inventory", "examine mug 1")
    assert [one.text for one in seen] == [
        "You are at fridge 1. It is closed.",
        "You open fridge 1. You see a mug 1 and an egg 1.",
        "You take mug 1 from fridge 1.",
        "You hold a mug 1.",
        "There is nothing special about mug 1.",
    ]
    *_, heated, shown, cold, _ = play(
        simulator, "go to microwave 1", "heat mug 1 with microwave 1", "examine mug 1", "look", "go to cabinet 1"
    )
    assert (heated.text, shown.text) == ("You heat mug 1 with microwave 1.", "mug 1 is hot.")
    assert cold.text == "You are at microwave 1. It is closed."
    assert not simulator.success
    *_, last = play(simulator, "open cabinet 1", "put mug 1 in cabinet 1")
    assert (last.done, last.valid, simulator.success) == (True, True, 1.0)
    assert simulator.reached == {"find", "take", "heat", "put"} == set(simulator.goal.checkpoints)


@pytest.mark.parametrize(
    "action",
    [
        "",
        "take egg 1 from fridge 1",
        "open countertop 1",
        "go to countertop 1",
        "put mug 1 in/on countertop 1",
        "heat egg 1 with microwave 1",
        "use egg 1",
        "take egg ١ from countertop 1",
        "look around",
        "x" * 10_000,
    ],
)
def test_action_without_effect_is_invalid_and_changes_nothing(action):
    simulator = room("cool", "egg", "countertop", {"countertop 1": ["egg 1"], "fridge 1": ["mug 1"]})
    play(simulator, "go to countertop 1")
    before = simulator.state_key()
    assert simulator.step(action) == (NOTHING, 0.0, False, False)
    assert simulator.state_key() == before


def test_put_into_a_closed_receptacle_has_no_effect_and_states_replace_each_other():
    simulator = room("cool", "egg", "countertop", {"countertop 1": ["egg 1"]})
    play(simulator, "go to countertop 1", "take egg 1 from countertop 1", "go to microwave 1")
    assert not simulator.step("put egg 1 in/on microwave 1").valid
    play(simulator, "heat egg 1 with microwave 1", "go to fridge 1", "cool egg 1 with fridge 1", "go to sinkbasin 1")
    *_, shown = play(simulator, "clean egg 1 with sinkbasin 1", "examine egg 1")
    assert shown.text == "egg 1 is clean and cold."
    assert play(simulator, "go to countertop 1", "put egg 1 on countertop 1")[-1].done


def test_lamp_lights_the_object_in_the_hand_only():
    simulator = room("light", "cd", "desklamp", {"desk 1": ["cd 1", "desklamp 1"]}, DESK)
    play(simulator, "go to desk 1", "use desklamp 1")
    assert not simulator.success
    assert not simulator.step("take desklamp 1 from desk 1").valid
    play(simulator, "use desklamp 1", "take cd 1 from desk 1")
    assert not simulator.success
    assert simulator.step("use desklamp 1") == ("You switch desklamp 1 on.", 0.0, True, True)


def test_two_objects_count_in_the_same_receptacle():
    simulator = room("two", "cd", "desk", {"bed 1": ["cd 1", "cd 2"]}, DESK)
    assert simulator.goal.text == "Put a cd and another cd in/on a desk."
    play(simulator, "go to bed 1", "take cd 2 from bed 1", "go to desk 1", "put cd 2 in/on desk 1")
    assert (simulator.success, simulator.reached) == (0, {"find", "take", "put"})
    assert play(simulator, "go to bed 1", "take cd 1 from bed 1", "go to desk 1", "put cd 1 in/on desk 1")[-1].done


def test_admissible_actions_are_shown_and_valid():
    simulator = room("place", "cd", "bed", {"desk 1": ["cd 1"]}, DESK, admissible=True)
    assert simulator.reset().endswith("\nActions: go to, look, inventory")
    seen = simulator.step("go to desk 1").text
    assert seen.endswith("\nActions: go to, take cd 1 from desk 1, examine desk 1, examine cd 1, look, inventory")
    for task in WORLD.tasks("train")[:20]:
        simulator = WORLD.make(task)
        simulator.reset()
        for number in range(30):
            options = simulator.actions()
            assert len(set(options)) == len(options)
            assert simulator.step(options[number * 7 % len(options)]).valid


@pytest.mark.parametrize("split", WORLD.splits)
def test_expert_solves_every_task_within_the_turns_of_the_recipe(split):
    world = make(num_layouts=100)
    for number, task in enumerate(world.tasks(split)):
        said = acts(world.expert(task).messages)
        assert len(said) <= ROLLOUT.max_turns - 5
        if number < 15:
            results, rewards = played(world, task, said)
            assert (results[-1].done, rewards["success"], rewards["valid_actions"]) == (True, 1, 1)
            assert rewards["coverage"] == 1
            assert {result.reward for result in results} == {0.0}


def test_expert_uses_only_what_was_seen():
    """It acts equally in two rooms that differ only in receptacles that were not seen."""
    first = room("place", "mug", "sinkbasin", {"cabinet 1": ["mug 1"], "countertop 1": ["egg 1"]})
    second = room("place", "mug", "sinkbasin", {"fridge 1": ["mug 1"], "countertop 1": ["egg 1"]})
    for _ in range(4):
        assert first.expert_action() == second.expert_action()
        texts = [one.step(one.expert_action()).text for one in (first, second)]
        if texts[0] != texts[1]:
            break
    assert texts == ["You open cabinet 1. You see a mug 1.", "You open cabinet 1. You see nothing."]


def test_expert_recovers_from_any_state():
    for number, task in enumerate(WORLD.tasks("train")[:60]):
        simulator = WORLD.make(task)
        for step in range(40):
            if simulator.success:
                break
            options = simulator.actions()
            simulator.step(options[(number * 31 + step * step * 17) % len(options)])
        for _ in range(60):
            if simulator.success:
                break
            assert simulator.step(simulator.expert_action()).valid
        assert simulator.success


@pytest.mark.slow
def test_splits_differ_in_layouts_and_composition_in_rooms_and_pairs():
    layouts = {split: {task.tags["layout"] for task in WORLD.tasks(split)} for split in WORLD.splits}
    assert sum(map(len, layouts.values())) == len(set().union(*layouts.values())) == 60
    shapes = [layout.receptacles for layout in WORLD.layouts.values()]
    assert len(set(shapes)) == len(shapes)
    for split in WORLD.splits:
        new = split == "composition"
        assert {task.tags["room"] == "studio" for task in WORLD.tasks(split)} == {new}
        assert {is_held_out(task.tags["object"], task.tags["target"]) for task in WORLD.tasks(split)} == {new}
        assert {task.tags["family"] for task in WORLD.tasks(split)} == set(FAMILIES)
    assert [len(make_household_world({}, ToolLimits()).tasks(split)) for split in WORLD.splits] == [3600, 600, 900, 900]


def test_places_of_objects_depend_on_the_task_and_never_solve_it():
    assert [t.prompt for t in make().tasks("train")] == [t.prompt for t in WORLD.tasks("train")]
    assert [t.id for t in make(seed=1).tasks("train")] != [t.id for t in WORLD.tasks("train")]
    for task in WORLD.tasks("train"):
        goal, layout = goal_of(task), WORLD.layouts[task.tags["layout"]]
        held = place_objects(layout, goal, 12, task.id)
        assert held == place_objects(layout, goal, 12, task.id)
        counts = Counter(kind_of(thing) for things in held.values() for thing in things)
        assert counts[goal.kind] >= goal.count
        assert goal.family != "light" or counts[goal.target] == 1
        assert not any(kind_of(t) == goal.kind for p, ts in held.items() if kind_of(p) == goal.target for t in ts)


def success_of_demonstrations(**settings):
    world, wins, num = make(**settings), Counter(), Counter()
    tasks = {str(task.prompt): task for task in world.tasks("train")}
    for shown in itertools.islice(world.demonstrations(0), 200):
        task = tasks[str(tuple(shown.messages[:2]))]
        num[task.tags["family"]] += 1
        wins[task.tags["family"]] += played(world, task, acts(shown.messages))[1]["success"]
    return {family: wins[family] / num[family] for family in num}


@pytest.mark.slow
def test_mistakes_of_demonstrations_are_systematic():
    assert set(success_of_demonstrations(forget=0, misplace=0).values()) == {1.0}
    forgetful = success_of_demonstrations(forget=1, misplace=0)
    assert forgetful == {family: float(family in ("place", "light", "two")) for family in FAMILIES}
    assert max(success_of_demonstrations(forget=0, misplace=1).values()) < 0.2
    first, second = (list(itertools.islice(WORLD.demonstrations(3), 5)) for _ in range(2))
    assert first == second


def test_visited_receptacles_are_checkpoints():
    world = make(checkpoints="visits")
    task = world.tasks("train")[0]
    places = WORLD.layouts[task.tags["layout"]].receptacles
    assert int(task.tags["checkpoints"]) == len(places)
    said = [f"go to {places[0]}", f"go to {places[1]}", f"go to {places[0]}"]
    assert played(world, task, said)[1]["coverage"] == pytest.approx(2 / len(places))


@pytest.mark.slow
def test_no_scripted_cheat_is_rewarded():
    report = check_world(WORLD, CheckPlan(num_tasks=12, limits=ROLLOUT))
    assert report.problems == []
    assert report.shaped == {}
    oracle = next(row for row in report.rows if row.agent.kind is AgentKind.ORACLE)
    assert oracle.num_successes == 12
    assert {"forgets", "misplaces"} <= {row.agent.name for row in report.rows if row.plays}


def test_invalid_settings_are_reported():
    with pytest.raises(ConfigError, match=r"env\.settings\.rooms"):
        make(rooms=["studio"])
    with pytest.raises(ConfigError, match="num_layouts"):
        make(num_layouts=10)
    assert {task.tags["family"] for task in make(families=["heat"]).tasks("train")} == {"heat"}


def test_transcript_of_the_page_is_an_episode_of_the_expert():
    text = (recipe_folder("household") / "README.md").read_text("utf-8")
    block = next(one for one in re.findall(r"```text\n(.*?)```", text, re.S) if "assistant" in one)
    lines = re.findall(r"^(\w+) +(.*(?:\n {11}.*)*)", block, re.M)
    shown = [(role, re.sub(r"\n {11}", " ", said)) for role, said in lines]
    world = make_household_world({}, ToolLimits())
    task = next(task for task in world.tasks("train") if task.prompt[1]["content"] == shown[1][1])
    assert shown == [(m["role"], m["content"]) for m in world.expert(task).messages]
