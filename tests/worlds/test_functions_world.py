"""The functions world: correct calls earn the full reward, cheap tricks nothing, and tasks are varied."""

import asyncio
import hashlib
import json
import random
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import islice

import pytest
from generators.archive import as_line
from generators.functions.__main__ import LEVELS, members
from generators.functions.generate import draw_tasks, looks_like, request_specs
from generators.functions.plans import change_signature, draw_value, invent
from generators.reports.functions import majority_rate, no_tool_rate, task_shapes, trajectory_of
from generators.reports.shared import variety

from ludus.config.load import load_config
from ludus.config.sections.rollout import EnvConfig, RolloutConfig
from ludus.envs.registry import build_world
from ludus.envs.task_archive import SPLITS, open_archive, read_lines
from ludus.envs.tool_env import ToolLimits
from ludus.envs.tool_world import calling_message
from ludus.errors import ConfigError, UserError
from ludus.recipes import recipe_folder
from ludus.rewards.base import check_rewards, score, success
from ludus.rewards.paper_rewards import ExpectedCall, tool_correctness, toolrl
from ludus.rewards.registry import PUBLISHED
from ludus.rollouts.episode import run_episode
from ludus.tools.base import ArgumentError
from ludus.types import Action, Message, StopReason, ToolCall
from ludus.worlds.functions.catalogue import DomainState, Scene, catalogue, vocabulary
from ludus.worlds.functions.grader import GoldCall, calls_agree, equal, solved
from ludus.worlds.functions.world import (
    DONE,
    Attempt,
    CallFlaws,
    FunctionsSettings,
    FunctionsWorld,
    make_functions_world,
    play,
)

NO_FLAWS = CallFlaws()


def request_of(task):
    return task.prompt[-1]["content"]


@pytest.fixture(scope="module")
def world():
    return FunctionsWorld(FunctionsSettings(num_tasks=700))


@pytest.fixture(scope="module")
def tasks(world):
    return {split: world.tasks(split) for split in SPLITS}


@pytest.fixture(scope="module")
def drawn():
    """The first training tasks, with their plans."""
    return list(islice(draw_tasks("train", LEVELS, set(), "0"), 700))


@pytest.fixture(scope="module")
def everything(tasks):
    return [task for split in SPLITS for task in tasks[split]]


def call(name, **arguments):
    return ExpectedCall(name, arguments)


# The catalogue


def test_there_are_sixty_functions_or_more_in_eight_domains():
    by_domain = Counter(function.domain for function in catalogue().values())
    assert len(catalogue()) >= 60
    assert len(by_domain) >= 8
    assert min(by_domain.values()) >= 5
    assert all(function.description.endswith(".") for function in catalogue().values())


def draw(function, rng):
    return {param.name: draw_value(param.of, rng, "train") for param in function.params}


@pytest.mark.parametrize("name", catalogue())
def test_a_function_is_deterministic_and_matches_its_description(name):
    function, rng = catalogue()[name], random.Random(name)
    given = draw(function, rng)
    known = tuple((p.kind, given[p.name]) for p in function.params if p.of.letter)
    first, again = (function.run(DomainState(7, known), **given) for _ in range(2))
    assert first == again
    assert json.loads(json.dumps(first)) == first
    for field_, kind in function.returns.items():
        types = {"string": str, "integer": int, "number": (int, float)}
        assert isinstance(first[field_], types[vocabulary().kinds[kind].type])
        assert str(first[field_]).startswith(vocabulary().kinds[kind].letter)
    wanted = {param.kind for param in function.params if param.of.letter} - {"email", "phone"}
    if wanted:
        with pytest.raises(LookupError, match="there is no"):
            function.run(DomainState(7), **given)


def test_functions_share_the_state_of_an_episode():
    state = DomainState(1)

    def run(name, *values):
        function = catalogue()[name]
        return function.run(state, **dict(zip((param.name for param in function.params), values, strict=True)))

    flight = run("search_flights", "Paris", "Rome", "May 3")["flight_id"]
    booking = run("book_flight", flight, "Ana")["booking_id"]
    assert run("get_booking", booking) == {"city": "Rome", "date": "May 3"}
    run("cancel_booking", booking)
    with pytest.raises(LookupError):
        run("get_booking", booking)
    before = run("get_balance", "savings")["balance"]
    run("transfer_money", 40, "savings", "travel")
    assert run("get_balance", "Savings")["balance"] == before - 40
    with pytest.raises(ValueError, match="holds less"):
        run("transfer_money", 10_000, "savings", "travel")
    file = run("create_file", "notes.txt", "feed the cat")["file_id"]
    run("append_text", "and the dog", file)
    assert run("read_file", file) == {"text": "feed the cat and the dog"}
    assert run("count_words", file) == {"words": 6}


# Signatures that change


def test_every_parameter_has_synonyms_one_of_them_held_out():
    for function in catalogue().values():
        for param in function.params:
            assert len(set(vocabulary().aliases[param.name]) - {param.name}) >= 3
        for split in ("train", "composition"):
            for seed in range(30):
                offer = change_signature(function, random.Random(seed), split)
                names = [one.offered for one in offer.params]
                assert len(set(names)) == len(names)
                renamed = {one.offered for one in offer.params if one.offered != one.name}
                last = {vocabulary().aliases[one.name][-1] for one in offer.params}
                assert renamed
                assert renamed <= last if split == "composition" else not renamed & last


def test_renamed_signature_accepts_only_its_names():
    refused, forms = 0, Counter()
    for seed in range(200):
        rng = random.Random(seed)
        function = rng.choice(list(catalogue().values()))
        offer = change_signature(function, rng, "train")
        given = draw(function, rng)
        known = tuple((p.kind, given[p.name]) for p in function.params if p.of.letter)
        told = json.loads(offer.tool(DomainState(3, known)).answer(offer.encode(given)))
        assert told == function.run(DomainState(3, known), **given)
        tool = offer.tool(DomainState(3, known))
        tool.check(offer.encode(given))
        forms.update(one.form for one in offer.params)
        try:
            tool.check(function.encode(given))
        except ArgumentError:
            refused += 1
    assert refused == 200
    assert min(forms["plain"], forms["text"], forms["list"]) > 10


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"minutes": 5}, "'label' is missing"),
        ({"minutes": "5", "label": "tea"}, "'minutes' is wrong: it takes the type integer"),
        ({"minutes": True, "label": "tea"}, "'minutes' is wrong"),
        ({"minutes": 5, "label": "tea", "room": "hall"}, "there is no argument 'room'"),
    ],
)
def test_invalid_arguments_return_an_error_message(arguments, said):
    with pytest.raises(ArgumentError, match=said):
        catalogue()["set_timer"].tool(DomainState(0)).check(arguments)


# Tasks


def test_there_are_enough_tasks_and_equal_settings_give_equal_ones(everything, tasks):
    assert len(everything) == 700 + 70 + 175 + 140
    assert len({task.id for task in everything}) == len(everything)
    few = [FunctionsWorld(FunctionsSettings(num_tasks=40)).tasks("test") for _ in range(2)]
    assert few[0] == few[1]
    other = FunctionsWorld(FunctionsSettings(num_tasks=20, seed=1))
    assert request_of(other.tasks("train")[0]) != request_of(tasks["train"][0])


def test_tasks_and_demonstrations_of_a_seed_stay_the_same(world, everything):
    def digest(values):
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]

    tasks = [
        [
            *(task.id, task.prompt, task.tags, task.seed),
            [[one.name, one.arguments] for one in task.truth.calls],
            [tool.schema for tool in task.truth.scene.tools()],
        ]
        for task in everything
    ]
    assert digest(tasks) == "81e3fecd45ef2f24"
    assert digest([shown.messages for shown in islice(world.demonstrations(0), 300)]) == "f37cfd23709c61db"


def test_no_request_is_in_two_splits(everything):
    assert Counter(map(request_of, everything)).most_common(1)[0][1] == 1


def test_shipped_tasks_equal_the_generator_output(drawn):
    for level in LEVELS:
        rows = [as_line(task.row).encode() for task in drawn if task.level == level]
        assert rows == list(islice(read_lines("functions", f"train/{level}"), len(rows)))


@pytest.mark.pages
def test_generator_reproduces_the_archive_byte_for_byte():
    for name, rows in members().items():
        assert "".join(map(as_line, rows)).encode() == open_archive("functions").read(name), name


def test_solutions_are_diverse_without_their_values(drawn):
    least = {"1": 60, "2": 70, "3": 90, "4": 90, "5": 100}
    found = variety(task_shapes(drawn))
    assert {level: found[level].num_shapes >= least[level] for level in least} == dict.fromkeys(least, True)
    assert all(one.num_forms >= one.num_shapes * 0.9 for one in found.values())


def test_levels_and_families_are_all_there(tasks):
    for split in ("train", "test"):
        families = {task.tags["family"] for task in tasks[split]}
        assert families == {*("single", "several", "parallel", "chain", "fan", "mixed", "missing", "decline", "answer")}
        assert {task.tags["level"] for task in tasks[split]} == set("12345")
        changed = sum(task.tags["signature"] == "changed" for task in tasks[split]) / len(tasks[split])
        assert 0.2 < changed < 0.5
    for task in tasks["train"]:
        assert (task.tags["null"] == "true") == (task.truth.right == "decline")
        assert 2 <= len(task.truth.scene.functions) <= 6


def test_changed_signatures_can_be_held_out_of_training():
    settings = FunctionsSettings(num_tasks=60, num_held_out=60, changed_in_training=False)
    world = FunctionsWorld(settings)
    changed = {s: sum(t.tags["signature"] == "changed" for t in world.tasks(s)) for s in SPLITS}
    assert (changed["train"], changed["validation"]) == (0, 0)
    assert min(changed["test"], changed["composition"]) > 10
    own = {name: function.schema for name, function in catalogue().items()}
    for dialogue in islice(world.demonstrations(0), 60):
        assert [tool.schema for tool in dialogue.tools] == [own[tool.name] for tool in dialogue.tools]


def linked_domains(task):
    """The domains of a gold call and of each call that it takes a result from."""
    domain = {name: function.domain for name, function in catalogue().items()}
    gold = task.truth.gold
    return {(domain[gold[place].name], domain[one.name]) for one in gold for place in one.after}


def test_composition_requests_occur_in_no_other_split(tasks):
    links = set(map(tuple, request_specs().held_out_links))
    for split in SPLITS[:3]:
        for task in tasks[split]:
            assert not linked_domains(task) & links
            assert request_specs().held_out_domain not in {function.domain for function in task.truth.scene.functions}
    for task in tasks["composition"]:
        if task.truth.right == "call":
            named = {catalogue()[one.name].domain for one in task.truth.gold}
            assert request_specs().held_out_domain in named or linked_domains(task) & links, task.id


def test_intermediate_values_of_a_chain_are_in_no_request(everything):
    """Identifiers that an earlier call gives cannot be known before."""
    num = 0
    for task in everything:
        for one in task.truth.gold:
            values = [str(v[0]) for v in one.accepted.values()] if one.after else []
            made_up = [v for v in values if re.fullmatch(r"(\[')?[A-Z]\d{4}('\])?", v)]
            ours = [v for v in made_up if v.strip("[']") not in request_of(task)]
            num += len(ours)
    assert num > 150


def test_accepted_questions_are_not_in_prompts_with_a_missing_value(everything):
    for task in everything:
        if task.truth.right == "ask":
            assert "?" not in request_of(task)
            said = " ".join(message["content"] for message in task.prompt)
            assert solved(task, say(task, said)) == 0
            assert solved(task, say(task, said + "?")) == 0


def test_irrelevant_requests_offer_no_similar_function(drawn):
    known = {name for names in request_specs().lookalikes for name in names}
    assert known <= catalogue().keys()
    declined = [task for task in drawn if task.right == "decline"]
    assert len(declined) > 20
    for task in declined:
        (asked,) = (step.function for step in task.plan)
        offered = {name for name, _ in task.row["functions"]}
        assert not offered & looks_like(asked)


# Values


@pytest.mark.parametrize(
    ("given", "wanted", "is_equal"),
    [
        ("paris ", "Paris", True),
        ("Notes.txt", "notes txt", False),
        (3, 3.0, True),
        ("3", 3, False),
        (True, 1, False),
        (True, True, True),
        (["Ana", "ben"], ["ana", "Ben"], True),
        (["Ben", "Ana"], ["Ana", "Ben"], False),
        ({"a": ["X"]}, {"a": ["x"]}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ("a", "the", False),
        (None, None, True),
        (None, "", False),
        (-1, 1, False),
        (10**400, 1.5, False),
        (10**400, 10**400, True),
        (10**400, 10**400 + 1, False),
    ],
)
def test_values_are_compared_by_type(given, wanted, is_equal):
    assert equal(given, wanted) is is_equal
    assert equal(wanted, given) is is_equal


def test_parallel_calls_have_no_order_and_chained_ones_do():
    look, book = GoldCall("look", {"x": (1,)}), GoldCall("book", {"id": ("F1",)}, after=(0,))
    other = GoldCall("look", {"x": (2, 3)}, frozenset({"x"}))
    one, two, end = call("look", x=1), call("look", x=3), call("book", id="f1")
    assert calls_agree((look, other, book), [two, one, end])
    assert calls_agree((look, other, book), [one, end, call("look")])
    assert not calls_agree((look, other, book), [end, one, two])
    assert not calls_agree((look, other, book), [two, end, one])
    assert not calls_agree((look, other, book), [one, two])
    assert not calls_agree((look, other, book), [one, two, end, end])
    assert not calls_agree((look, other, book), [one, one, end])


def test_calls_match_gold_calls_in_any_valid_order():
    wide, narrow = GoldCall("look", {"x": (1, 2)}), GoldCall("look", {"x": (1,)})
    assert calls_agree((wide, narrow), [call("look", x=1), call("look", x=2)])
    assert calls_agree((narrow, wide), [call("look", x=2), call("look", x=1)])


# Playing


def say(task, text):
    attempt = Attempt(task)
    attempt.answer(text)
    return trajectory_of(attempt)


@dataclass
class Player:
    """A conversation that shows no tokens: it says the messages that were written for it."""

    script: list[Message]
    segments: tuple = ()
    seen: list[Message] = field(default_factory=list)
    tools: tuple = ()

    def open(self, messages, tools):
        self.seen += messages
        self.tools = tuple(tool.schema for tool in tools)

    def observe(self, messages):
        self.seen += messages

    def close(self):
        pass

    async def act(self):
        message = self.script.pop(0)
        calls = tuple(
            ToolCall(one["id"], one["function"]["name"], json.loads(one["function"]["arguments"]))
            for one in message.get("tool_calls", [])
        )
        return Action(message, calls)


def play_all(world, tasks, scripts):
    """Each script in the real environment."""
    players = [Player([m for m in script if m["role"] == "assistant"]) for script in scripts]
    limits = RolloutConfig(max_turns=12)

    async def everyone():
        return [
            await run_episode(task, 0, world.environment(task), player, limits)
            for task, player in zip(tasks, players, strict=True)
        ]

    return asyncio.run(everyone()), players


@pytest.mark.slow
def test_oracle_has_full_reward_in_every_task(world, everything):
    scripts = [world.expert(task).messages[2:] for task in everything]
    played, players = play_all(world, everything, scripts)
    assert [t.task_id for t in played if t.reward != pytest.approx(1.1)] == []
    assert all(success(world.rewards, t) for t in played)
    for script, player in zip(scripts, players, strict=True):  # the oracle's own replies are the real ones
        shown = [m["content"] for m in player.seen if m["role"] == "tool"]
        assert shown == [m["content"] for m in script if m["role"] == "tool"]


def test_toolrl_scores_the_oracle_highest(everything):
    for task in everything[::7]:
        right = trajectory_of(play(task, NO_FLAWS, random.Random(0)))
        assert score(toolrl(), task, right).reward == pytest.approx(4.0)
        assert score(toolrl(), task, say(task, DONE)).reward == pytest.approx(-2.0)


def test_toolrl_rewards_no_random_text_if_no_call_is_expected(everything):
    quiet = [task for task in everything if task.truth.right in ("ask", "answer")]
    assert {task.truth.right for task in quiet} == {"ask", "answer"}
    for task in quiet:
        for text in (DONE, "No tool fits.", "?", "Which?", "What do you mean?", task.prompt[-1]["content"]):
            assert tool_correctness(task, say(task, text)) == -1.0, (task.prompt[-1], text)
    null = next(task for task in everything if task.truth.right == "decline")
    assert [tool_correctness(null, say(null, text)) for text in ("No.", " ")] == [1.0, -1.0]


def rate(tasks, attempt):
    return sum(solved(task, attempt(task)) for task in tasks) / len(tasks)


def without_null(tasks):
    return [task for task in tasks if task.tags["null"] == "false"]


SINK = "What is the date, time, city, title, name, person, room, amount, text, label and file?"


@pytest.mark.parametrize("text", ["", DONE, "I do not know.", "Which date?", SINK])
def test_answers_without_calls_solve_only_tasks_without_work(tasks, text):
    null = [task for task in tasks["test"] if task.tags["null"] == "true"]
    assert rate(null, lambda task: say(task, text)) == float(text == "I do not know.")
    assert rate(without_null(tasks["test"]), lambda task: say(task, text)) < 0.04


def test_repeating_the_prompt_solves_no_other_task(everything):
    for repeat in (request_of, lambda t: t.prompt[0]["content"] + request_of(t), lambda t: request_of(t) + "?"):
        assert rate(without_null(everything), lambda task, repeat=repeat: say(task, repeat(task))) == 0


def made_up(task, names, seed=0):
    """An attempt that calls these functions with values from nowhere, and then says that it is done."""
    rng, attempt = random.Random(seed), Attempt(task)
    for name in names:
        function = task.truth.scene.function(name)
        attempt.call(ExpectedCall(name, function.encode(invent(function, rng))))
    attempt.answer(DONE)
    return trajectory_of(attempt)


def test_indiscriminate_or_wrong_calls_solve_no_task(everything):
    def offered(task):
        return [function.name for function in task.truth.scene.functions]

    everything = everything[::2]
    assert rate(everything, lambda task: made_up(task, offered(task))) == 0
    assert rate(everything, lambda task: made_up(task, offered(task)[:1])) < 0.005
    right = [task for task in everything if task.truth.right == "call"]
    assert rate(right, lambda task: made_up(task, [one.name for one in task.truth.gold])) < 0.02


def test_one_wrong_value_one_call_too_many_or_too_few_is_a_failure(tasks):
    for task in tasks["test"]:
        if task.truth.right != "call":
            continue
        gold = [one.expected for one in task.truth.gold]
        for calls in ([*gold, gold[-1]], gold[:-1], [*gold[:-1], spoilt(gold[-1])]):
            attempt = Attempt(task)
            for one in calls:
                attempt.call(one)
            attempt.answer(DONE)
            assert solved(task, trajectory_of(attempt)) == 0, task.id


def spoilt(made):
    name, value = next(iter(made.arguments.items()))
    return ExpectedCall(made.name, {**made.arguments, name: other(value)})


def other(value):
    if isinstance(value, list):
        return [other(value[0]), *value[1:]]
    return value + 1 if isinstance(value, int | float) else f"{value}1"


def test_a_refused_call_does_not_count_against_a_solution_but_against_silence(tasks):
    for task in tasks["test"][::3]:
        script = [
            calling_message(0, "no_such_function", {}),
            *renumbered(play(task, NO_FLAWS, random.Random(0)).messages),
        ]
        (trajectory,), _ = play_all(FunctionsWorld(), [task], [script])
        assert trajectory.rewards["solved"] == float(task.truth.right == "call")
        assert trajectory.rewards["well_formed"] == 0


def renumbered(script):
    """The same calls with ids of their own."""
    return [
        {**m, "tool_calls": [{**c, "id": f"x{c['id']}"} for c in m["tool_calls"]]} if "tool_calls" in m else m
        for m in script
    ]


def test_unfinished_episode_is_not_a_success(tasks):
    task = tasks["test"][0]
    right = trajectory_of(play(task, NO_FLAWS, random.Random(0)))
    assert solved(task, right) == 1
    assert solved(task, replace(right, stop_reason=StopReason.MAX_TURNS)) == 0


def test_visible_data_does_not_depend_on_the_truth(world, tasks):
    for task in tasks["test"][:60]:
        blind = replace(task, truth=replace(task.truth, calls=(), gold=(), ask=None, answer=None))
        script = play(task, NO_FLAWS, random.Random(0)).messages
        _, players = play_all(world, [task, blind], [script, script])
        assert players[0].seen == players[1].seen
        assert players[0].tools == players[1].tools
        assert str(task.truth.scene.seed) not in json.dumps([players[0].seen, players[0].tools])


@pytest.mark.scale
def test_baselines_without_skill(tasks):
    for split in ("test", "composition"):
        silent, common = no_tool_rate(tasks[split]), majority_rate(tasks["train"], tasks[split])
        null = sum(task.tags["null"] == "true" for task in tasks[split]) / len(tasks[split])
        print(f"\n{split}: no tool {silent:.1%}, majority {common:.1%}, nothing to do {null:.1%}")
        assert silent == pytest.approx(null)
        assert null < 0.1
        assert common < 0.02


# Demonstrations


def test_demonstrations_fall_short_and_mend_as_often_as_set():
    def shown(**flaws):
        world = FunctionsWorld(FunctionsSettings(num_tasks=40, **flaws))
        return list(islice(world.demonstrations(3), 80))

    def refused(dialogue):
        return any(m["content"].startswith("Error") for m in dialogue.messages if m["role"] == "tool")

    right = shown(flaw_rate=0.0, correction_rate=0.0)
    assert not any(map(refused, right))
    assert 0.25 < sum(map(refused, shown(flaw_rate=0.0, correction_rate=0.5))) / 80 < 0.5
    calls = [sum(len(m.get("tool_calls", [])) for m in d.messages) for d in right]
    fewer = [sum(len(m.get("tool_calls", [])) for m in d.messages) for d in shown(flaw_rate=1.0, correction_rate=0.0)]
    assert max(fewer) == 1
    assert max(calls) == 3
    again = FunctionsWorld(FunctionsSettings(num_tasks=40, flaw_rate=0.0, correction_rate=0.0)).demonstrations(3)
    assert [d.messages for d in islice(again, 20)] == [d.messages for d in right[:20]]


def test_demonstrations_and_texts_contain_no_held_out_item(world, tasks):
    held_out = {request_of(task) for split in SPLITS[1:] for task in tasks[split]}
    media = {name for name, function in catalogue().items() if function.domain == request_specs().held_out_domain}
    for dialogue in islice(world.demonstrations(0), 300):
        assert dialogue.messages[1]["content"] not in held_out
        assert not media & {tool.name for tool in dialogue.tools}
    assert not any(name in text for text in islice(world.texts(), 1000) for name in media)


# The world and its settings


def test_world_is_registered_and_its_recipe_selects_the_reward(world):
    config = load_config("functions")
    built = build_world(config.env, config.rollout)
    assert built.splits == SPLITS
    assert config.rewards.preset == "toolrl"
    assert isinstance(world.tasks("train")[0].truth, PUBLISHED["toolrl"].truth)
    coarse = load_config("functions", ["--rewards.preset", "none"])
    assert coarse.rewards.is_default
    check_rewards(world.rewards)


def test_no_access_offers_no_tool(tasks):
    bare = build_world(EnvConfig(name="functions", settings={"access": "none"}), RolloutConfig())
    assert bare.environment(tasks["test"][0]).tools == ()
    assert bare.expert(tasks["test"][0]) is None


def test_custom_question_finds_tools_of_every_domain(world, tasks):
    opening = world.opening("What is the weather in Rome?")
    own = replace(tasks["test"][0], prompt=opening, truth=None)
    assert len(world.environment(own).tools) == 8


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"level": [1]}, "the nearest is"),
        ({"levels": [1, 6]}, "levels.1 .= 6.*should be 1, 2, 3, 4 or 5"),
        ({"num_tasks": "many"}, "num_tasks"),
    ],
)
def test_invalid_settings_are_reported(settings, said):
    with pytest.raises(ConfigError, match=said):
        make_functions_world(settings, ToolLimits())


def test_too_many_tasks_of_one_level_are_refused():
    world = make_functions_world({"levels": [1], "num_tasks": 20}, ToolLimits())
    assert {task.tags["level"] for task in world.tasks("train")} == {"1"}
    with pytest.raises(UserError, match="no split 'tests'"):
        world.tasks("tests")


# Tasks from files


WEATHER = {
    "name": "weather.get",
    "description": "The weather.",
    "parameters": {
        "type": "dict",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "at": {"type": "dict", "properties": {"lat": {"type": "float"}}},
            "unit": {"type": "string", "enum": ["C", "F"]},
        },
        "required": ["city"],
    },
}


RIGHT = {"city": ["Rome", "Roma"], "days": ["", 3], "at": ["", {"lat": [1.5, 2]}]}


def record(id_="simple_0", **changes):
    return {
        "id": id_,
        "question": [[{"role": "user", "content": "The weather in Rome?"}]],
        "function": [WEATHER],
        "ground_truth": [{"weather.get": {"city": ["Rome", "Roma"], "days": ["", 3], "at": ["", {"lat": [1.5, 2]}]}}],
    } | changes


def write(path, *records):
    path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in records))
    return make_functions_world({"data": str(path)}, ToolLimits())


@pytest.mark.parametrize(
    ("arguments", "is_right"),
    [
        ({"city": "roma"}, True),
        ({"city": "Rome", "days": 3, "at": {"lat": 2.0}}, True),
        ({"city": "Rome", "days": 4}, False),
        ({"city": "Rome", "at": {"lat": 3}}, False),
        ({"city": "Rome", "unit": "C"}, False),
        ({"city": "Oslo"}, False),
        ({"days": 3}, False),
    ],
)
def test_tasks_of_a_file_accept_all_listed_values(tmp_path, arguments, is_right):
    world = write(tmp_path / "tasks.jsonl", record())
    (task,) = world.tasks("file")
    assert world.splits[-1] == "file"
    assert task.tags["family"] == "simple"
    attempt = Attempt(task)
    attempt.call(ExpectedCall("weather.get", arguments))
    attempt.answer(DONE)
    (played,), _ = play_all(world, [task], [attempt.messages])
    assert played.rewards["solved"] == float(is_right)
    assert played.outcomes == tuple(attempt.outcomes)


def test_file_may_have_tasks_without_a_call_and_a_separate_answer_file(tmp_path):
    bare = {key: value for key, value in record("irrelevance_1").items() if key != "ground_truth"}
    world = write(tmp_path / "tasks.jsonl", bare, "", record("multi_le_2", question="Hello?"))
    none, some = world.tasks("file")
    assert (none.tags["null"], some.tags["null"]) == ("true", "false")
    assert solved(none, say(none, "No.")) == 1
    assert world.expert(some).messages[2]["tool_calls"][0]["function"]["name"] == "weather.get"
    answers = tmp_path / "answers.jsonl"
    answers.write_text(json.dumps({"id": "irrelevance_1", "ground_truth": record()["ground_truth"]}))
    settings = {"data": str(tmp_path / "tasks.jsonl"), "data_answers": str(answers)}
    with pytest.raises(UserError, match=r"line 3.*no \"ground_truth\" for 'multi_le_2'"):
        make_functions_world(settings, ToolLimits()).tasks("file")
    write(tmp_path / "tasks.jsonl", bare)
    (task,) = make_functions_world(settings, ToolLimits()).tasks("file")
    assert task.truth.right == "call"


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        (record(id=3), '"id": Input should be a valid string'),
        (record(), "duplicate id 'simple_0'"),
        (record("b", question=[]), '"question": Value should have at least 1 item'),
        (record("b", question=[[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]), "turns"),
        (record("b", question=[[]]), "does not end with a message of the user"),
        (record("b", question=[{"role": "tool", "content": "a"}]), "question.0.0.role\": Input should be 'system'"),
        (record("b", function=[{"description": "x"}]), 'function.0.name": Field required'),
        (record("b", function=[WEATHER, WEATHER]), "duplicate function"),
        (record("b", ground_truth={"a": 1}), '"ground_truth": Input should be a valid list'),
        (record("b", ground_truth=[{"other": {}}]), "not a function of the task"),
        (record("b", ground_truth=[{"weather.get": {"town": ["Rome"]}}]), "no argument 'town'"),
        (record("b", ground_truth=[{"weather.get": {"city": "Rome"}}]), "are not a list"),
        (record("b", ground_truth=[{"weather.get": {"at": [{"lat": [*range(2000)]}]}}]), "more than 1000"),
        (record("b", ground_truth=[{"weather.get": {"city": [5]}}]), "no value of 'city' is of its type"),
        (record("b", ground_truth=[{"weather.get": {"days": [3]}}]), "requires 'city'"),
    ],
)
def test_broken_record_is_reported_with_its_line(tmp_path, broken, said):
    world = write(tmp_path / "tasks.jsonl", record(), broken)
    with pytest.raises(UserError, match=f"line 2, is not a task: .*{re.escape(said)}"):
        world.tasks("file")


def test_in_relevance_a_call_must_be_made_and_in_irrelevance_none(tmp_path):
    ids = ("live_relevance_0-0-0", "relevance_1", "live_irrelevance_2-1-0", "irrelevance_3")
    lines = [json.dumps({k: v for k, v in record(id_).items() if k != "ground_truth"}) for id_ in ids]
    (tmp_path / "tasks.jsonl").write_text("\n".join(lines))
    world = FunctionsWorld(FunctionsSettings(data=str(tmp_path / "tasks.jsonl")))
    right = {task.id: task.truth.right for task in world.tasks("file")}
    assert [right[id_] for id_ in ids] == ["any_call", "any_call", "decline", "decline"]
    for task in world.tasks("file"):
        must_call = "irrelevance" not in task.id
        silent, called = Attempt(task), Attempt(task)
        silent.answer("None of these can do that.")
        called.call(ExpectedCall("weather.get", {"city": "Anywhere"}))
        called.answer("Done.")
        misfit = Attempt(task)
        misfit.call(ExpectedCall("weather.get", {"town": "Anywhere"}))
        misfit.answer("Done.")
        paid = [solved(task, trajectory_of(one)) for one in (silent, called, misfit)]
        assert paid == ([0, 1, 0] if must_call else [1, 0, 0])
        assert solved(task, trajectory_of(play(task, CallFlaws(), random.Random(0)))) == 1
        assert task.tags["null"] == str(not must_call).lower()


def test_all_broken_lines_are_reported_and_skipped_if_configured(tmp_path, caplog):
    path = tmp_path / "tasks.jsonl"
    bare = {key: value for key, value in record("simple_2").items() if key != "ground_truth"}
    path.write_text("\n".join([json.dumps(record("a")), "{", json.dumps(bare), json.dumps(record("a"))]))
    with pytest.raises(UserError, match=r"line 2.*not JSON.*line 3.*ground_truth.*line 4.*duplicate id") as error:
        FunctionsWorld(FunctionsSettings(data=str(path))).tasks("file")
    assert "data_bad_lines" in error.value.hint
    tasks = FunctionsWorld(FunctionsSettings(data=str(path), data_bad_lines="skip")).tasks("file")
    assert [task.id for task in tasks] == ["a"]
    assert [line for line in (2, 3, 4) if f"line {line}" in caplog.text] == [2, 3, 4]


def test_missing_or_empty_file_is_reported(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        make_functions_world({"data": str(tmp_path / "none.jsonl")}, ToolLimits()).tasks("file")
    with pytest.raises(UserError, match="contains no tasks"):
        write(tmp_path / "empty.jsonl").tasks("file")


def test_scenes_are_fresh_for_each_episode(tasks):
    task = next(t for t in tasks["train"] if t.truth.gold and t.truth.gold[0].name.startswith(("cancel", "delete")))
    assert isinstance(task.truth.scene, Scene)
    for _ in range(2):
        assert solved(task, trajectory_of(play(task, NO_FLAWS, random.Random(0)))) == 1


def test_the_transcript_of_the_recipes_page_is_real():
    page = (recipe_folder("functions") / "README.md").read_text("utf-8")
    transcript = page.split("**A transcript.**")[1].split("```text\n")[1].split("```")[0]
    said = [line.split(maxsplit=1) for line in transcript.splitlines() if not line.startswith(" ")]
    world = FunctionsWorld()
    (task,) = (task for task in world.tasks("test") if request_of(task) == dict(said)["user"])
    dialogue = world.expert(task)
    shown = [
        (m["role"], json.dumps({"name": c["function"]["name"], "arguments": json.loads(c["function"]["arguments"])}))
        for m in dialogue.messages
        for c in m.get("tool_calls", [])
    ]
    replies = [(m["role"], m["content"]) for m in dialogue.messages if m["content"]]
    assert Counter(map(tuple, said)) == Counter([*shown, *replies])
