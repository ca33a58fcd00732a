"""The research world: pages, unique answers, cheats without reward, and rubrics that can be checked."""

import asyncio
import json
import random
import re
from dataclasses import replace
from itertools import islice

import pytest
from generators.research.__main__ import OUT, draw, pack

from chat_families import byte_level
from ludus.chat.render import TemplateRenderer, control_ids
from ludus.config import load_config
from ludus.config.sections.rollout import EnvConfig, RolloutConfig
from ludus.envs.registry import build_world
from ludus.envs.task_archive import SPLITS
from ludus.envs.tool_env import ToolLimits
from ludus.envs.tool_world import assistant, calling_message
from ludus.errors import ConfigError
from ludus.evaluation.env_audit import CheckPlan, check_world, run_agent
from ludus.evaluation.scripted_agents import Agent, AgentKind, actions_of
from ludus.recipes import recipe_folder
from ludus.rewards.exact_match import matches
from ludus.types import Action, Message, ToolCall, ToolStatus
from ludus.worlds.research.facts import Place, distance_km, load_facts
from ludus.worlds.research.pages import Web, contains
from ludus.worlds.research.questions import HELD_OUT, LEVELS, split_of
from ludus.worlds.research.reports import GATES, TRUE_CITATIONS, TRUE_NUMBERS, leaves, report_score
from ludus.worlds.research.world import make_research_world, solve

LIMITS = RolloutConfig(max_turns=16)
ROW = re.compile(r"(-?\d+ \w+)\W+(\d+ [NS])\W+(\d+ [EW])\W+\[([^\]]+)\]")


def world_of(**settings):
    return make_research_world(settings, ToolLimits())


WORLD = world_of(num_tasks=300, levels=[1, 2, 3, 4, 5])
REPORTS = world_of(tasks="report", num_tasks=60)


def played(world, task, messages):
    agent = Agent("messages", AgentKind.ORACLE, "", lambda *_: actions_of(messages))
    return asyncio.run(run_agent(world, task, agent, CheckPlan(limits=LIMITS)))


def steps_of(world, task, *calls):
    async def episode():
        environment = world.environment(task)
        await environment.start(task)
        turns = [
            Action(Message(role="assistant", content=""), (ToolCall(f"call_{i}_0", name, given),))
            for i, (name, given) in enumerate(calls)
        ]
        return [await environment.step(turn) for turn in turns]

    return asyncio.run(episode())


def all_tasks(world):
    return [task for split in world.splits for task in world.tasks(split)]


# Pages


def test_web_has_thousands_of_pages_and_every_link_leads_to_a_page():
    web = Web()
    titles = set(web.titles)
    assert len(titles) == len(web.titles) > 5_000
    linked = {link for title in web.titles for part in web.parts(title) for link in re.findall(r"\[([^\]]+)\]", part)}
    assert linked <= titles
    places = set(web.facts.places)
    assert places <= linked


def test_pages_are_shown_in_parts_of_whole_lines():
    web = Web(240)
    for title in random.Random(0).sample(web.titles, 500):
        parts = web.parts(title)
        assert "\n".join(parts).split("\n") == (web.lines(title) or ["The list is empty."])
        assert all(len(part) <= 240 or "\n" not in part for part in parts)


def test_open_accepts_a_title_a_link_and_the_name_of_an_airport():
    web = Web()
    assert web.open("[SRH]") == web.open("srh") == web.open("Sarh Airport")
    assert web.open("Airports of Chad", 1).startswith("Airports of Chad (part 1 of 2)\n")
    assert web.find("Airports of Chad", "13 N").count("\n") == 2
    assert web.find("Airports of Chad", "3 N").startswith("The page")


def test_mistakes_of_the_model_are_observations():
    calls = [
        ("open", {"page": "No such page"}),
        ("open", {"page": "Chad", "part": 9}),
        ("open", {"page": 3}),
        ("find", {"page": "", "text": "(("}),
        ("find", {"page": "Chad", "text": "(("}),
    ]
    statuses = [result.outcomes[0].status for result in steps_of(WORLD, WORLD.tasks("train")[0], *calls)]
    assert statuses == [*[ToolStatus.RAISED] * 2, ToolStatus.BAD_ARGUMENTS, ToolStatus.RAISED, ToolStatus.OK]


def test_distance_equals_a_known_great_circle():
    paris, tokyo = (Place("city", "", "", 0, *at, "") for at in ((48.8566, 2.3522), (35.6895, 139.6917)))
    assert distance_km(paris, tokyo) == pytest.approx(9712, abs=3)


@pytest.mark.pages
def test_shipped_facts_are_those_that_the_generator_writes():
    assert pack(draw()) == OUT.read_bytes()
    assert OUT.stat().st_size < 1_000_000


# Questions


def rows_of(web, title):
    rows = [match.groups() for line in web.lines(title) for match in [ROW.search(line)]]
    return [(name, *values) for *values, name in rows]


def test_answers_of_lookups_are_unique_on_the_pages():
    num = 0
    for task in all_tasks(WORLD):
        truth = task.truth
        if truth.shape.asked != "lookup":
            continue
        fits = re.search(r"fits (.*?)[.?]$", truth.text)[1].split(", ")
        rows = rows_of(WORLD.web, truth.steps[-1].title)
        assert [row[0] for row in rows if set(fits) <= set(row)] == [truth.accepted[0]]
        some = {row[0] for row in rows if set(fits) & set(row)} - {truth.accepted[0]}
        assert set() < set(truth.near_misses) <= some
        assert len(truth.near_misses) == min(len(some), 8)
        num += 1
    assert num > 50


def test_answers_of_filters_are_unique_on_the_pages():
    num = 0
    for task in all_tasks(WORLD):
        truth = task.truth
        if truth.shape.asked != "filter":
            continue
        limit, distance = (int(text) for text in re.findall(r"(?:than|and|is) (\d+) (?:m|km|people)\b", truth.text))
        (listed,) = [step.title for step in truth.steps if step.title in WORLD.web.lists]
        above = {row[0] for row in rows_of(WORLD.web, listed) if int(row[1].split()[0]) > limit}
        near = {title for title in above if f"], {distance} km" in "\n".join(WORLD.web.lines(title))}
        assert near == {truth.accepted[0]}
        assert above <= truth.pages
        assert 2 <= len(above) <= 3
        num += 1
    assert num > 40


def test_described_countries_are_unique():
    facts = load_facts()
    for task in all_tasks(WORLD):
        shape, titles = task.truth.shape, [step.title for step in task.truth.steps]
        if shape.where == "capital":
            assert len([one for one in facts.countries.values() if one.capital == titles[0]]) == 1
        if shape.where == "borders":
            both = [one for one in facts.countries.values() if set(titles[:2]) <= set(one.borders)]
            assert len(both) == 1


def test_levels_need_their_number_of_pages():
    for task in all_tasks(WORLD):
        level = LEVELS[task.truth.shape]
        assert task.tags["family"] == f"level {level}"
        assert len(task.truth.pages) == level if level < 3 else len(task.truth.pages) >= (level if level < 5 else 1)
    assert {task.tags["family"] for task in WORLD.tasks("train")} == {f"level {level}" for level in range(1, 6)}


def test_splits_have_different_countries_and_composition_has_held_out_shapes():
    def countries(split):
        lists = [step.title for task in WORLD.tasks(split) for step in task.truth.steps if " of " in step.title]
        return {title.split(" of ", 1)[1] for title in lists}

    found = {split: countries(split) for split in SPLITS}
    assert all(found.values())
    for split in SPLITS:
        assert {split_of(one) for one in found[split]} == {"test" if split == "composition" else split}
        shapes = {task.truth.shape for task in WORLD.tasks(split)}
        assert shapes == HELD_OUT if split == "composition" else not shapes & HELD_OUT


def test_truth_is_not_in_the_prompt():
    for task in all_tasks(WORLD):
        said = "\n".join(message["content"] for message in task.prompt)
        assert not re.search(rf"(?<!\w){re.escape(task.truth.accepted[0])}(?!\w)", said), task.id


def test_near_misses_are_wrong():
    assert not [t.id for t in all_tasks(WORLD) for miss in t.truth.near_misses if matches(miss, t.truth)]


def test_equal_settings_have_equal_tasks_and_another_seed_others():
    first, again = (world_of(num_tasks=40).tasks("train") for _ in range(2))
    assert first == again
    assert first != world_of(num_tasks=40, seed=1).tasks("train")


def test_answer_of_level_5_is_on_a_page_of_the_solution_by_chance_only():
    tasks = [task for task in WORLD.tasks("train") if task.truth.program]
    assert len(tasks) > 20
    read = [" ".join(part for title in task.truth.pages for part in WORLD.web.parts(title)) for task in tasks]
    stated = [t.id for t, text in zip(tasks, read, strict=True) if t.truth.accepted[0] in re.findall(r"\d+", text)]
    assert len(stated) <= 0.05 * len(tasks)


def test_python_is_offered_with_level_5_only():
    assert WORLD.runs_programs
    assert [one.name for one in WORLD.tools] == ["search", "open", "find", "python"]
    assert not world_of().runs_programs
    assert not REPORTS.runs_programs
    assert world_of(levels=[1]).splits == SPLITS[:3]


def test_numbers_of_rows_are_unique_answers_and_need_level_1():
    world = world_of(labels="numbers", levels=[1], num_tasks=60)
    for task in all_tasks(world):
        truth = task.truth
        fits = re.search(r"fits (.*?)[.?]$", truth.text)[1].split(", ")
        rows = [line for line in world.web.lines(truth.steps[-1].title) if all(f"{fit}" in line for fit in fits)]
        assert [row.split()[-1] for row in rows if set(fits) <= set(re.split(r" \| |, |: |- ", row))] == [
            truth.accepted[0]
        ]
        assert not any("[" in line for line in world.web.lines(truth.steps[-1].title))
        assert not contains(truth.text, truth.accepted[0])
    found = assert_sound(check_world(world, CheckPlan(num_tasks=10, limits=LIMITS)))
    assert found == dict.fromkeys(("every candidate", "near miss", "other one"), 0)
    with pytest.raises(ConfigError, match="numbers"):
        world_of(labels="numbers", levels=[1, 2])


def test_unknown_level_is_a_config_error():
    with pytest.raises(ConfigError, match="levels"):
        world_of(levels=[6])


# Rewards


def assert_sound(report):
    assert report.problems == []
    assert report.shaped == {}
    oracle = next(row for row in report.rows if row.agent.kind is AgentKind.ORACLE)
    assert oracle.num_successes == len(report.tasks)
    return {row.agent.name: row.num_successes for row in report.rows if row.agent.what == "a cheat of this world"}


@pytest.mark.parametrize("split", ["train", pytest.param("composition", marks=pytest.mark.slow)])
def test_solver_is_rewarded_and_cheats_are_not(split):
    found = assert_sound(check_world(world_of(num_tasks=60), CheckPlan(split, num_tasks=6, limits=LIMITS)))
    assert found == dict.fromkeys(("every candidate", "near miss", "other one"), 0)


def test_right_answers_without_opened_pages_do_not_count_if_required():
    world = world_of(num_tasks=60, require_opened=True)
    found = assert_sound(check_world(world, CheckPlan(num_tasks=10, limits=LIMITS)))
    assert found["unopened"] == 0


def test_pages_of_other_candidates_are_not_required():
    world = world_of(num_tasks=200, levels=[3], require_opened=True)
    task = next(t for t in world.tasks("train") if t.truth.shape.asked == "filter")
    listed, right = task.truth.steps[0].title, task.truth.accepted[0]
    opening = [("open", {"page": listed}), ("open", {"page": right})]
    turns = [calling_message(turn, name, given) for turn, (name, given) in enumerate(opening)]
    answered = assistant(right)
    assert task.truth.required == {listed, right} < task.truth.pages
    assert played(world, task, [*turns, answered]).succeeded
    assert not played(world, task, [turns[0], answered]).succeeded


@pytest.mark.slow
def test_reports_of_the_solver_are_accepted_and_cheats_are_not():
    found = assert_sound(check_world(REPORTS, CheckPlan(num_tasks=20, limits=LIMITS)))
    assert found == dict.fromkeys(("unopened", "made-up facts", "everything", "half"), 0)


@pytest.mark.scale
def test_every_solution_of_every_split_is_right():
    for world in (world_of(), world_of(tasks="report")):
        for split in world.splits:
            plan = CheckPlan(split, num_tasks=len(world.tasks(split)), limits=LIMITS)
            agent = Agent("solver", AgentKind.ORACLE, "", lambda t, _, w=world: actions_of(w.expert(t).messages))
            for task in world.tasks(split):
                assert asyncio.run(run_agent(world, task, agent, plan)).succeeded, task.id


@pytest.mark.scale
def test_programs_of_level_5_print_the_answers_in_the_sandbox():
    world = build_world(EnvConfig(name="research", settings={"levels": [5], "num_tasks": 20}), LIMITS)
    assert_sound(check_world(world, CheckPlan(num_tasks=4, limits=LIMITS)))


def test_programs_of_level_5_compute_the_answers(capsys):
    for task in WORLD.tasks("train"):
        if task.truth.program:
            exec(task.truth.program, {})
            assert capsys.readouterr().out == f"{task.truth.accepted[0]}\n"


def test_coverage_is_the_share_of_the_pages_of_the_solution():
    task = next(task for task in WORLD.tasks("train") if len(task.truth.pages) == 3)
    messages = WORLD.expert(task).messages[len(task.prompt) :]
    whole = played(WORLD, task, messages).trajectory
    progress = WORLD.turn_verifier(task, whole)
    assert whole.rewards["coverage"] == 1.0
    assert (set.union(*map(set, progress.reached)), progress.total) == (set(task.truth.pages), 3)
    opened = next(i for i, m in enumerate(messages) if "open" in str(m.get("tool_calls")))
    part = played(WORLD, task, [*messages[: opened + 2], messages[-1]]).trajectory
    assert part.rewards["coverage"] == pytest.approx(1 / 3)


@pytest.mark.slow
def test_demonstrations_of_the_flawed_solver_fail_as_often_as_they_should():
    world = world_of(num_tasks=200, levels=[2], stop_early=0.3, ignore_condition=0.0)
    tasks, right = world.tasks("train"), 0
    shown = {task.truth.text: task for task in tasks}
    for dialogue in islice(world.demonstrations(0), 200):
        task = shown.get(dialogue.messages[1]["content"])
        right += task is not None and matches(dialogue.messages[-1]["content"], task.truth)
    solved = [
        matches(solve(task.truth, world.reader(), world.settings, random.Random(task.id))[-1]["content"], task.truth)
        for task in tasks
    ]
    assert 0.6 < sum(solved) / len(solved) < 0.8


# Reports


TASK = REPORTS.tasks("train")[0]


def test_reports_have_the_numbers_of_places_and_the_lists_of_the_settings():
    world = world_of(tasks="report", sizes=[2, 3], max_rows=12)
    truths = [task.truth for task in all_tasks(world)]
    assert {len(one.items) for one in truths} == {2, 3}
    assert max(one.num_listed for one in truths) == 12


def test_demonstrations_of_reports_that_no_country_has_are_refused():
    with pytest.raises(ConfigError, match="No country has a list"):
        next(world_of(tasks="report", kinds=["city"], max_rows=4, sizes=[2]).demonstrations(0))


def test_reports_on_a_list_need_the_list_alone_and_call_places_by_number():
    world = world_of(tasks="report", sources="list", labels="numbers", levels=[1], num_tasks=60, kinds=["airport"])
    for task in islice(world.tasks("train"), 20):
        (step,), text = task.truth.steps, task.truth.solution()
        rows = re.findall(r"(-?\d+) m\D.*?(\d+)$", "\n".join(world.web.lines(step.title)), re.M)
        above = {f"airport {number}: {value} m." for value, number in rows if int(value) > task.truth.limit}
        assert set(text.split("\n")[1:-1]) == above
        assert [one.name for one in task.truth.rubric.leaves()][-1] == f"cites {step.title}"
        holds = leaves(task, text, {step.title})
        assert all(holds.values())
        assert len(holds) == len(above) + 3 + len(GATES)
    assert played(world, task, world.expert(task).messages[2:]).succeeded
    for messages in world.cheats(task).values():
        assert not played(world, task, messages).succeeded


def test_a_report_on_a_list_that_the_request_shows_needs_no_tools():
    world = world_of(tasks="report", sources="shown", labels="numbers", levels=[1], num_tasks=60)
    for task in islice(world.tasks("train"), 20):
        rows = task.prompt[1]["content"].split("\n")[1:]
        above = [row for row in rows if int(row.split()[2]) > task.truth.limit]
        assert len(rows) == task.truth.num_listed
        assert task.truth.solution().split("\n")[1:] == [f"{row}." for row in above]
        result = played(world, task, world.expert(task).messages[2:])
        assert (result.succeeded, result.trajectory.rewards["rubric"]) == (True, 1.0)
        for messages in world.cheats(task).values():
            assert not played(world, task, messages).succeeded


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sizes": [2]}, "sizes apply to reports"),
        ({"tasks": "report", "sizes": [5, 7], "max_rows": 5}, "no list of at most max_rows = 5"),
        ({"tasks": "report", "sizes": [1]}, "greater than or equal to 2"),
        ({"tasks": "report", "labels": "numbers"}, "reports without pages of places"),
    ],
)
def test_numbers_of_places_that_no_report_can_have_are_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        world_of(**given)


def marks(text, opened=None):
    return leaves(TASK, text, opened)


def test_all_leaves_of_the_solution_hold_and_none_of_an_empty_text():
    assert set(marks(TASK.truth.solution()).values()) == {True}
    assert report_score(TASK.truth, marks(TASK.truth.solution(), TASK.truth.pages)) == 1.0
    assert {name for name, holds in marks("").items() if holds} == {TRUE_CITATIONS}
    assert report_score(TASK.truth, marks("")) == 0.0
    names = [leaf.name for part in TASK.truth.rubric.parts for leaf in part.parts]
    assert sorted([*names, *GATES]) == sorted(marks(""))


def prose(report):
    """The same report in sentences, with the thousands grouped, and links as names."""
    unit = {"airport": "metres", "city": "inhabitants"}[report.kind]
    plural = {"airport": "airports", "city": "cities"}[report.kind]
    word = {"airport": "highest", "city": "largest"}[report.kind]
    lines = [f"There are {len(report.items)} {plural} to report, of {report.num_listed} {plural} in all."]
    for number, one in enumerate(report.items, 1):
        lines.append(f"{number}. [{one.title}] has {one.value:,} {unit} and lies {one.distance} km from another one.")
    return "\n".join([*lines, f"At the top, {report.first} is the {word} one [{report.steps[0].title}]."])


def test_report_in_other_words_is_accepted():
    for task in REPORTS.tasks("train"):
        found = leaves(task, prose(task.truth), task.truth.pages)
        assert {name for name, holds in found.items() if not holds} == set(), prose(task.truth)


def test_number_of_another_place_is_false():
    first, second, *_ = TASK.truth.items
    unit = "m" if TASK.truth.kind == "airport" else "people"
    assert not marks(f"{first.title}: {second.value} {unit}.")[TRUE_NUMBERS]
    assert not marks(f"{first.title}: {first.value} {unit}, {first.distance + 1} km.")[TRUE_NUMBERS]
    near = marks(f"{first.title}: {first.value} {unit}.")
    assert near[TRUE_NUMBERS]
    assert near[f"{unit} of {first.title}"]
    assert not near[f"km of {first.title}"]
    assert not marks(f"{first.title}: {first.value} {unit}. 99 {'airports' if unit == 'm' else 'cities'}")[TRUE_NUMBERS]


def test_distance_from_a_named_neighbour_belongs_to_the_first_place():
    first, second, *_ = TASK.truth.items
    found = marks(f"{first.title} is near {second.title}, {first.distance} km away.")
    assert found[TRUE_NUMBERS]
    assert found[f"km of {first.title}"]


def test_citation_of_an_unopened_page_is_false():
    page = TASK.truth.steps[0].title
    assert marks(f"[{page}]", {page})[f"cites {page}"]
    unopened = marks(f"[{page}]", set())
    assert not unopened[TRUE_CITATIONS]
    assert not unopened[f"cites {page}"]


def test_longest_and_strange_reports_are_judged():
    for text in ("\0" * 9, "[" * 5000, "9" * 19_000 + " m", TASK.truth.solution() * 500, "\u0663 km \0\x31\0 5 km"):
        assert report_score(TASK.truth, marks(text)) < REPORTS.settings.threshold


def test_half_a_report_scores_in_between():
    half = replace(TASK.truth, items=TASK.truth.items[:2]).solution().split("\n", 1)[1]
    assert 0.3 < report_score(TASK.truth, marks(half, TASK.truth.pages)) < 0.8


# Hostile pages


def test_injected_orders_stay_data():
    world = world_of(num_tasks=40, injected=1.0)
    renderer = TemplateRenderer(byte_level())
    control, kinds = control_ids(renderer.tokenizer), set()
    for task in world.tasks("train"):
        title = task.truth.steps[-1].title
        (result,) = steps_of(world, task, ("open", {"page": title}))
        (message,) = result.messages
        assert not result.done
        assert (message["role"], message["content"].split("\n")[0].split(" (part")[0]) == ("tool", title)
        (injected,) = [line for line in world.web.lines(title) if line not in WORLD.web.lines(title)]
        assert injected in message["content"]
        kinds.add(injected.replace(title, ""))
        harmless = renderer.observation([{**message, "content": "ok"}])
        shown = renderer.observation([message])
        assert [t for t in shown if t in control] == [t for t in harmless if t in control]
    assert len(kinds) == 5


@pytest.mark.slow
def test_injected_is_the_share_of_pages_with_an_order_and_the_solver_ignores_it():
    plain, some = Web(), Web(injected=0.3)
    titles = random.Random(1).sample(plain.titles, 1000)
    assert 250 < sum(plain.lines(title) != some.lines(title) for title in titles) < 350
    assert_sound(check_world(world_of(num_tasks=40, injected=1.0), CheckPlan(num_tasks=10, limits=LIMITS)))


def test_tokenizer_texts_contain_tools_pages_and_answers():
    text = "\n".join(islice(world_of(levels=[1], num_tasks=20).texts(), 200))
    assert "open(page, part)" in text
    assert json.dumps({"query": "Airports of"})[:-2] in text


def test_page_transcript_matches_the_expert_episode():
    text = (recipe_folder("research") / "README.md").read_text("utf-8")
    shown = re.search(r"```text\n(.*?)```", text, re.S)[1]
    config = load_config("research")
    world = build_world(config.env, config.rollout)
    task = next(task for task in world.tasks("train") if task.truth.text in shown)
    turns = []
    for message in world.expert(task).messages:
        calls = [
            f"{call['function']['name']} {call['function']['arguments']}" for call in message.get("tool_calls", [])
        ]
        turns.append(f"{message['role']:<11}" + "\n".join(calls or [message["content"]]).replace("\n", "\n" + " " * 11))
    assert shown == "\n".join([*turns, ""])
