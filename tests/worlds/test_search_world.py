"""The search world: its questions can be answered by searching and not otherwise."""

import asyncio
import hashlib
import json
import lzma
import random
import re
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from importlib.resources import files
from itertools import islice

import pytest
from generators.search.__main__ import data_text
from generators.search.compose import CHAINS, HELD_OUT, NOUNS, QUERIES, QUESTION_FORMS

from ludus.config.sections.rollout import EnvConfig, RolloutConfig
from ludus.envs.registry import build_world
from ludus.envs.task_archive import SPLITS
from ludus.envs.tool_env import ToolLimits
from ludus.errors import ConfigError, UserError
from ludus.rewards.base import check_rewards, success
from ludus.rewards.exact_match import ExpectedAnswers, matches, normalise
from ludus.rollouts.episode import run_episode
from ludus.types import Action, Message, StopReason, ToolCall
from ludus.worlds.search.questions import WEIGHTS, all_hops, all_questions, passage_values
from ludus.worlds.search.world import SYSTEM, SearchFlaws, SearchSettings, SearchWorld, make_search_world, solve
from tests.rewards.test_turn_verifiers import calls_of, shares

NO_FLAWS = SearchFlaws(0, 0, 0, 0, 0)
HELD_OUT_FAMILY = "/".join(HELD_OUT)


@pytest.fixture(scope="module")
def world():
    return SearchWorld()


@pytest.fixture(scope="module")
def questions():
    """Every question by split."""
    pools = {split: all_questions(split) for split in SPLITS}
    return {split: [q for pool in pools[split].values() for q in pool] for split in SPLITS}


@pytest.fixture(scope="module")
def tasks(world):
    return {split: world.tasks(split) for split in SPLITS}


def some(items, num, seed=0):
    return random.Random(seed).sample(list(items), num)


# Splits


def test_every_split_is_large_enough(tasks):
    assert len(tasks["train"]) >= 20_000
    assert all(len(tasks[split]) >= 1_000 for split in SPLITS[1:])


def test_ids_are_unique_over_all_splits(tasks, questions):
    for of_split in (tasks, questions):
        ids = [item.id for split in SPLITS for item in of_split[split]]
        assert len(set(ids)) == len(ids) > 27_000


def test_training_questions_have_no_head_of_another_split(questions):
    def heads(split):
        return {(q.family.split("/")[0], q.hops[0].subject) for q in questions[split]}

    train, validation, test = heads("train"), heads("validation"), heads("test")
    assert len(validation) > 500
    assert len(test) > 2_000
    assert not train & validation
    assert not train & test
    assert not validation & test
    assert heads("composition") <= test


def test_no_two_questions_have_equal_text(questions):
    texts = Counter(q.text for split in SPLITS for q in questions[split])
    assert texts.most_common(1)[0][1] == 1


def test_held_out_chain_occurs_only_in_its_split(questions, tasks):
    assert {q.family for q in questions["composition"]} == {HELD_OUT_FAMILY}
    assert {t.tags["family"] for t in tasks["composition"]} == {HELD_OUT_FAMILY}
    for split in ("train", "validation", "test"):
        assert HELD_OUT_FAMILY not in {q.family for q in questions[split]}
        assert not any(is_held_out(t.prompt[-1]["content"]) for t in tasks[split])
    assert all(is_held_out(t.prompt[-1]["content"]) for t in tasks["composition"])
    steps = {step for family in {q.family for q in questions["train"]} for step in family.split("/")}
    assert set(HELD_OUT) <= steps


def is_held_out(text):
    relations, _ = read_question(text)
    return relations == list(HELD_OUT[1:])


def test_families_and_weights_belong_together(questions):
    assert sum(WEIGHTS.values()) == pytest.approx(1)
    assert set(WEIGHTS) == {q.family for q in questions["train"]}
    assert {q.family for q in questions["test"]} == set(WEIGHTS)


def test_no_answer_is_frequent_enough_to_guess(tasks):
    """Time zones are few; of the held-out chain the best guess is right more often."""
    for split, bound in (("train", 0.05), ("validation", 0.05), ("test", 0.05), ("composition", 0.15)):
        gold = Counter(t.truth.accepted[0] for t in tasks[split])
        assert gold.most_common(1)[0][1] / len(tasks[split]) < bound


# Answers


STATED = {
    "city": r"(?P<a>.+) is an airport\. It serves (?P<b>.+) and has the code \w+\.",
    "code": r"(?P<a>.+) is an airport\. It serves .+ and has the code (?P<b>\w+)\.",
    "country": r"(?P<a>.+) is a city in the country of (?P<b>.+)\.",
    "population": r"(?P<a>.+) has a population of (?P<b>\d+) people\.",
    "timezone": r"(?P<a>.+) keeps the time zone (?P<b>.+)\.",
    "nearest": r"The closest neighbour of (?P<a>.+) is (?P<b>.+)\.",
    "capital": r"The capital of (?P<a>.+) is (?P<b>.+)\.",
    "currency": r"The currency of (?P<a>.+) is the (?P<b>.+)\.",
}
"""What the passages say of `a`, read with patterns of the tests' own."""
PAIR = re.compile(r"In which country is the (?P<a>.+) that keeps the time zone (?P<zone>.+)\?")


def stated(passages, relation):
    """The values that passages state of each subject."""
    found = defaultdict(set)
    for passage in passages:
        if match := re.fullmatch(STATED[relation], passage):
            found[match["a"]].add(match["b"])
    return found


def patterns(templates):
    return {
        name: [re.compile(re.escape(t).replace(r"\{\}", "(.+)")) for t in ([ts] if isinstance(ts, str) else ts)]
        for name, ts in templates.items()
    }


ASK_PATTERNS, NOUN_PATTERNS = patterns(QUESTION_FORMS), patterns(NOUNS)


def read_question(text):
    """The relations to follow and the head, read from the words of a question; of a pair, no relations."""
    if match := PAIR.fullmatch(text):
        return [], f"{match['a']}, in the time zone {match['zone']},"
    ((relation, subject),) = [
        (name, match[1]) for name, forms in ASK_PATTERNS.items() for form in forms if (match := form.fullmatch(text))
    ]
    relations = [relation]
    while inner := next(
        (
            (name, match[1])
            for name, forms in NOUN_PATTERNS.items()
            for form in forms
            if (match := form.fullmatch(subject))
        ),
        None,
    ):
        relations.insert(0, inner[0])
        subject = inner[1]
    return relations, subject


@pytest.mark.slow
def test_following_the_passages_from_the_question_reaches_the_answer(questions):
    says = {relation: stated(passage_values(), relation) for relation in STATED}
    for split in SPLITS:
        asked = questions[split]
        for question in asked if len(asked) < 5_000 else some(asked, 5_000):
            relations, subject = read_question(question.text)
            for relation in relations or ["country"]:
                (subject,) = says[relation][subject]
            assert matches(subject, ExpectedAnswers(question.answers)), question
            assert normalise(subject) == normalise(question.answers[0])


def test_every_hop_starts_where_the_previous_one_ended(questions):
    for question in questions["test"]:
        subjects = [hop.subject for hop in question.hops]
        values = [hop.value for hop in question.hops]
        assert subjects == [question.hops[0].subject, *values[:-1]]
        assert question.answers[0] == values[-1]
        assert all(hop.subject in hop.passage for hop in question.hops)
        assert all(hop.value in hop.passage for hop in question.hops)


@pytest.mark.slow
def test_generator_reproduces_the_questions_byte_for_byte():
    packed = (files("ludus.worlds.search") / "data/questions.jsonl.xz").read_bytes()
    assert lzma.decompress(packed).decode() == data_text()


def test_name_and_time_zone_identify_one_country_and_the_name_alone_does_not(questions):
    by_pair, by_name = defaultdict(set), defaultdict(set)
    for hop in all_hops():
        if ", in the time zone" in hop.passage:
            by_pair[hop.query].add(hop.value)
            by_name[hop.subject].add(hop.value)
    assert {len(countries) for countries in by_pair.values()} == {1}
    pairs = [q for q in questions["train"] if q.family == "intersection"]
    assert sum(len(by_name[q.hops[0].subject]) > 1 for q in pairs) / len(pairs) > 0.85


# Search


def test_passages_are_single_lines_without_duplicates(world):
    passages = list(passage_values())
    assert len(set(passages)) == len(passages) > 20_000
    assert not any("\n" in passage for passage in passages)


def test_a_careful_query_finds_the_passage_of_each_hop(world, questions):
    hops = [hop for question in some(questions["test"], 200) for hop in question.hops]
    found = [hop.passage in world.index.search(hop.query, 2) for hop in hops]
    assert sum(found) / len(found) > 0.97
    late = [hop.passage in world.index.search(hop.query, 5) for hop in hops]
    assert sum(late) / len(late) > 0.99


def test_turn_reward_counts_newly_found_passages(world, tasks):
    task = next(t for t in tasks["validation"] if t.tags["hops"] == "2")
    first, second = calls_of(world.expert(task))
    assert shares(world, task, first, first, [*second, *first], second) == (0.5, 0.0, 0.5, 0.0, 0.0)
    assert shares(world, task, [("search", {"query": "zzz"})]) == (0.0, 0.0)
    assert SearchWorld(SearchSettings(access="once")).turn_verifier is None


def test_a_bare_name_does_not_find_the_country_of_a_city(world):
    hops = some([hop for hop in all_hops() if hop.query.endswith(" city country")], 300, seed=1)
    found = [hop.passage in world.index.search(hop.subject, 2) for hop in hops]
    assert sum(found) / len(found) < 0.05


def test_a_single_condition_mostly_finds_the_wrong_place(world, questions):
    pairs = some([q for q in questions["train"] if q.family == "intersection"], 200)
    by_name = [q.hops[0].passage in world.index.search(q.hops[0].subject, 1) for q in pairs]
    assert sum(by_name) / len(by_name) < 0.5


# Playing it


@dataclass
class Agent:
    """A conversation that shows no tokens; `turn` makes the next search or answer of what was seen."""

    segments: tuple = ()
    seen: list[Message] = field(default_factory=list)
    num_calls: int = 0

    def open(self, messages, tools):
        self.seen += messages
        return

    def observe(self, messages):
        self.seen += messages
        return

    def close(self):
        pass

    async def act(self):
        told = self.turn()
        if isinstance(told, str):
            return Action(Message(role="assistant", content=told))
        self.num_calls += 1
        call = ToolCall(f"call_{self.num_calls}_0", "search", told)
        return Action(Message(role="assistant", content=""), (call,))


@dataclass
class Reader(Agent):
    """Reads the question, searches for each step of it, and reads the passages that come back."""

    relations: list[str] = field(default_factory=list)
    subject: str = ""
    query: str = ""

    def turn(self):
        if not self.query:
            self.relations, self.subject = read_question(self.seen[-1]["content"])
            if not self.relations:
                self.relations, self.query = ["country"], self.subject
                return {"query": self.query, "k": 5}
        elif (found := stated(self.seen[-1]["content"].split("\n"), self.relations[0])).get(self.subject):
            (self.subject,) = found[self.subject]
            self.relations = self.relations[1:]
            if not self.relations:
                return self.subject
        else:
            return "I do not know."
        self.query = QUERIES[self.relations[0]].format(self.subject)
        return {"query": self.query, "k": 5}


@dataclass
class Player(Agent):
    """Says what was written for it."""

    messages: list[Message] = field(default_factory=list)

    def turn(self):
        said = self.messages.pop(0)
        if not said.get("tool_calls"):
            return said["content"]
        return json.loads(said["tool_calls"][0]["function"]["arguments"])


def play_all(world, tasks, agents):
    """Each agent plays its task in the real environment, a hundred at a time."""
    limits = RolloutConfig(max_turns=12)

    async def one(task, agent):
        return await run_episode(task, 0, world.environment(task), agent, limits)

    async def everyone():
        played = []
        for at in range(0, len(tasks), 100):
            pairs = zip(tasks[at : at + 100], agents[at : at + 100], strict=True)
            played += await asyncio.gather(*(one(task, agent) for task, agent in pairs))
        return played

    return asyncio.run(everyone())


def rate(world, trajectories):
    return sum(success(world.rewards, t) for t in trajectories) / len(trajectories)


@pytest.mark.slow
def test_searching_and_reading_answers_nearly_all_questions(world, tasks):
    for split in ("test", "composition"):
        chosen = some(tasks[split], 300)
        played = play_all(world, chosen, [Reader() for _ in chosen])
        assert rate(world, played) >= 0.95
        right = [t for t in played if t.rewards["exact_match"] == 1.0]
        assert all(t.reward == pytest.approx(1.1) for t in right)
        assert {t.stop_reason for t in played} == {StopReason.ANSWERED}


def test_flawless_expert_answers_nearly_all_questions(world, tasks, questions):
    by_id = {q.id: q for q in questions["test"]}
    chosen, agents = some(tasks["test"], 120, seed=1), []
    for task in chosen:
        turns = solve(by_id[task.id], world.tool, NO_FLAWS, random.Random(0)) or []
        said = [m for m in turns if m["role"] == "assistant"]
        agents.append(Player(messages=said or [Message(role="assistant", content="unknown")]))
    played = play_all(world, chosen, agents)
    assert rate(world, played) >= 0.95
    assert sum(len(t.outcomes) for t in played) >= len(chosen)


@pytest.mark.parametrize("answer", ["", "I do not know.", "United States", "Euro", "0"])
def test_constant_answer_has_nearly_no_reward(world, tasks, answer):
    chosen = some(tasks["test"], 150)
    agents = [Player(messages=[Message(role="assistant", content=answer)]) for _ in chosen]
    played = play_all(world, chosen, agents)
    assert rate(world, played) < 0.05
    empty = StopReason.ANSWERED if answer else StopReason.EMPTY_ANSWER
    assert {t.stop_reason for t in played} == {empty}


def test_the_rewards_cannot_be_earned_by_their_form(world):
    check_rewards(world.rewards)
    assert [(part.name, part.weight, part.outcome) for part in world.rewards] == [
        ("exact_match", 1.0, True),
        ("f1", 0.0, False),
        ("well_formed", 0.1, False),
    ]


# The truth stays out of reach


def test_visible_data_does_not_depend_on_the_truth(world, tasks):
    secret = "zqx secret"
    chosen = some(tasks["test"], 60, seed=2)
    honest = [Reader() for _ in chosen]
    blind = [Reader() for _ in chosen]
    play_all(world, chosen, honest)
    play_all(world, [replace(task, truth=ExpectedAnswers((secret,))) for task in chosen], blind)
    assert [agent.seen for agent in blind] == [agent.seen for agent in honest]
    assert secret not in json.dumps([agent.seen for agent in blind])
    assert secret not in json.dumps(world.tool.schema)


def test_prompt_is_the_question_and_rarely_contains_its_answer(tasks, questions):
    texts = {q.id: q.text for split in SPLITS for q in questions[split]}
    named = Counter()
    for task in tasks["test"]:
        system, user = task.prompt
        assert system["content"] == SYSTEM["tool"]
        assert user["content"] == texts[task.id]
        said = f" {normalise(user['content'])} "
        named[task.tags["family"]] += any(f" {normalise(a)} " in said for a in task.truth.accepted)
    # Airports are often named after their city, and capitals after their country: there the head tells.
    telling = {family for family in named if family.endswith(("airport/city", "capital"))}
    assert sum(named[f] for f in set(named) - telling) / len(tasks["test"]) < 0.01
    assert sum(named.values()) / len(tasks["test"]) < 0.05


def test_tags_and_ids_do_not_reveal_the_answer_and_are_hidden(world, tasks):
    task = tasks["test"][0]
    assert task.tags.keys() == {"split", "family", "hops"}
    changed = replace(task, id="other", tags={"split": "zqx"})
    agents = [Reader(), Reader()]
    play_all(world, [task, changed], agents)
    assert agents[0].seen == agents[1].seen


# Demonstrations


def share(count, total, expected):
    """Whether a count is within four standard deviations of what is expected."""
    spread = (expected * (1 - expected) / total) ** 0.5
    return abs(count / total - expected) <= 4 * spread + 1e-9


@pytest.fixture(scope="module")
def demonstrations(world):
    return list(islice(world.demonstrations(5), 800))


def test_demonstrations_ask_training_questions_only(demonstrations, questions):
    train = {q.text for q in questions["train"]}
    for dialogue in demonstrations:
        question = dialogue.messages[1]["content"].split("\n")[0]
        assert question in train
        assert not is_held_out(question)


def test_families_of_demonstrations_come_by_their_weights(demonstrations, questions):
    by_text = {q.text: q.family for q in questions["train"]}
    counts = Counter(by_text[d.messages[1]["content"].split("\n")[0]] for d in demonstrations)
    for family, weight in WEIGHTS.items():
        assert share(counts[family], len(demonstrations), weight), family


def test_most_demonstrations_use_the_tool_and_some_go_without(demonstrations):
    counts = Counter(d.messages[0]["content"] for d in demonstrations)
    for access, expected in (("tool", 0.90), ("once", 0.05), ("none", 0.05)):
        assert share(counts[SYSTEM[access]], len(demonstrations), expected)
    for dialogue in demonstrations:
        uses_tool = dialogue.messages[0]["content"] == SYSTEM["tool"]
        assert [t.name for t in dialogue.tools] == (["search"] if uses_tool else [])
        assert uses_tool or [m["role"] for m in dialogue.messages] == ["system", "user", "assistant"]
        assert dialogue.messages[-1]["role"] == "assistant"
        assert not dialogue.messages[-1].get("tool_calls")


def test_tool_output_in_demonstrations_is_the_output_of_the_tool(demonstrations, world):
    for dialogue in demonstrations[:200]:
        said = [m for m in dialogue.messages if m.get("tool_calls")]
        told = [m for m in dialogue.messages if m["role"] == "tool"]
        for call, output in zip(said, told, strict=True):
            arguments = json.loads(call["tool_calls"][0]["function"]["arguments"])
            assert output["content"] == world.tool.function(**world.tool.check(arguments))
            assert output["tool_call_id"] == call["tool_calls"][0]["id"]


def flawed(world, pool, flaws, num=300):
    """The messages of questions by an expert with these flaws."""
    rng = random.Random(7)
    played = [(q, solve(q, world.tool, flaws, rng)) for q in some(pool, num)]
    return [(q, turns) for q, turns in played if turns is not None]


def searches(turns):
    calls = [call for message in turns for call in message.get("tool_calls", [])]
    return [json.loads(call["function"]["arguments"])["query"] for call in calls]


def in_family(questions, *families):
    return [q for q in questions["train"] if q.family in families]


TWO_HOPS = [family for family in ("/".join(chain) for chain in CHAINS) if family.count("/") == 2]
THREE_HOPS = [family for family in ("/".join(chain) for chain in CHAINS) if family.count("/") == 3]


def test_the_expert_stops_early_as_often_as_configured(world, questions):
    flaws = replace(NO_FLAWS, stop_early=SearchFlaws().stop_early)
    played = flawed(world, in_family(questions, *TWO_HOPS), flaws)
    early = [turns[-1]["content"] == q.hops[0].value != q.answers[0] for q, turns in played]
    assert share(sum(early), len(early), flaws.stop_early)


def test_the_expert_stops_after_the_second_hop_as_often_as_configured(world, questions):
    flaws = replace(NO_FLAWS, stop_second=SearchFlaws().stop_second)
    played = flawed(world, in_family(questions, *THREE_HOPS), flaws)
    early = [turns[-1]["content"] == q.hops[1].value and len(set(searches(turns))) == 2 for q, turns in played]
    assert share(sum(early), len(early), flaws.stop_second)


def test_the_expert_searches_by_a_bare_name_as_often_as_configured(world, questions):
    flaws = replace(NO_FLAWS, lazy_query=SearchFlaws().lazy_query)
    pool = in_family(questions, "city/country", "city/population", "city/timezone")
    played = flawed(world, pool, flaws, num=600)
    lazy = [searches(turns)[0] == q.hops[0].subject for q, turns in played]
    assert share(sum(lazy), len(lazy), flaws.lazy_query)
    assert any(turns[-1]["content"] != q.answers[0] for q, turns in played)


def test_expert_uses_one_of_two_conditions_as_often_as_configured(world, questions):
    flaws = replace(NO_FLAWS, lazy_intersection=SearchFlaws().lazy_intersection)
    played = flawed(world, in_family(questions, "intersection"), flaws)
    lazy = [searches(turns) == [q.hops[0].subject] for q, turns in played]
    assert share(sum(lazy), len(lazy), flaws.lazy_intersection)


def test_expert_starts_with_a_useless_search_as_often_as_configured(world, questions):
    flaws = replace(NO_FLAWS, wrong_search=SearchFlaws().wrong_search)
    played = flawed(world, in_family(questions, *TWO_HOPS), flaws, num=300)
    wrong = [searches(turns)[0] == q.hops[-1].relation for q, turns in played]
    assert share(sum(wrong), len(wrong), flaws.wrong_search)
    assert all(turns[-1]["content"] == q.answers[0] for q, turns in played)


def test_flawless_expert_is_always_right(world, questions):
    played = flawed(world, questions["train"], NO_FLAWS)
    assert all(turns[-1]["content"] == q.answers[0] for q, turns in played)
    assert len(played) >= 0.97 * 300


# Settings


DIGEST = """
import hashlib
from itertools import islice
from ludus.worlds.search.world import SearchWorld
world = SearchWorld()
print(hashlib.sha256(repr((world.tasks("validation"), world.tool.schema)).encode()).hexdigest())
print(hashlib.sha256(repr([d.messages for d in islice(world.demonstrations(1), 30)]).encode()).hexdigest())
"""


@pytest.mark.scale
def test_equal_settings_give_equal_tasks_and_demonstrations_in_every_process(world, tasks):
    """Whatever the seed of Python's hashes, which sets the order of sets."""
    told = subprocess.run(
        [sys.executable, "-c", DIGEST],
        capture_output=True,
        text=True,
        env={"PYTHONHASHSEED": "4242"},
        check=True,
        timeout=300,
    )
    dialogues = [d.messages for d in islice(world.demonstrations(1), 30)]
    mine = [repr((tasks["validation"], world.tool.schema)), repr(dialogues)]
    assert told.stdout.split() == [hashlib.sha256(text.encode()).hexdigest() for text in mine]


def test_another_seed_chooses_other_tasks_of_the_same_split(tasks, questions):
    other = SearchWorld(SearchSettings(seed=1)).tasks("validation")
    assert [t.id for t in other] != [t.id for t in tasks["validation"]]
    assert {t.id for t in other} <= {q.id for q in questions["validation"]}


def test_no_tool_is_offered_without_access(tasks):
    none = SearchWorld(SearchSettings(access="none"))
    (task,) = none.tasks("validation")[:1]
    assert none.environment(task).tools == ()
    assert task.prompt[0]["content"] == SYSTEM["none"]
    assert task.prompt[1] == tasks["validation"][0].prompt[1]


@pytest.mark.slow
def test_passages_in_the_prompt_are_the_results_of_one_search(world):
    once = SearchWorld(SearchSettings(access="once", k=3))
    task = once.tasks("validation")[0]
    question, *passages = task.prompt[1]["content"].split("\n")
    assert passages == world.index.search(question, 3)
    assert once.environment(task).tools == ()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kk": 3}, ["env.settings.kk (= 3) is not a setting", "the nearest is env.settings.k."]),
        ({"acces": "tool"}, ["the nearest is env.settings.access"]),
        ({"wholly_other": 1}, ["env.settings.wholly_other (= 1) is not a setting"]),
        ({"k": 0}, ["env.settings.k (= 0)", "greater than or equal to 1"]),
        ({"k": "3"}, ["env.settings.k (= '3')", "integer"]),
        ({"access": "both"}, ["env.settings.access (= 'both')", "'tool', 'once' or 'none'"]),
        ({"well_formed_weight": 0.5}, ["env.settings.well_formed_weight (= 0.5)", "less than 0.5"]),
        ({"k": 0, "sed": 1}, ["env.settings.k (= 0)", "env.settings.seed"]),
    ],
)
def test_invalid_settings_are_reported_with_the_nearest_name(settings, words):
    with pytest.raises(ConfigError) as refusal:
        make_search_world(settings, ToolLimits())
    assert all(word in refusal.value.message for word in words), refusal.value.message
    assert "access, instructions, k, well_formed_weight, method, encoder, seed" in refusal.value.hint


def test_the_world_is_made_of_a_configuration():
    rollout = RolloutConfig(max_tool_output=99, tool_timeout_s=3.0)
    made = build_world(EnvConfig(name="search", settings={"k": 4, "well_formed_weight": 0}), rollout)
    assert (made.settings.k, made.limits) == (4, ToolLimits(3.0, 99))
    with pytest.raises(ConfigError, match=r"env\.settings\.kk"):
        build_world(EnvConfig(name="search", settings={"kk": 4}), rollout)


def test_unknown_split_is_reported_with_the_nearest_name(world):
    with pytest.raises(UserError, match="no split 'tests'") as refusal:
        world.tasks("tests")
    assert "Did you mean 'test'?" in refusal.value.hint
    assert all(split in refusal.value.hint for split in SPLITS)
