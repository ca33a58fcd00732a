"""The math world: answers are verified by another method, the solver earns the full reward, cheats nothing."""

import asyncio
import json
import random
import re
import sys
import types
from collections import Counter
from fractions import Fraction
from functools import partial
from itertools import islice
from math import comb, factorial, gcd, lcm, perm

import pytest
from generators.archive import as_line
from generators.math.__main__ import RECIPE_SIZES, as_row, drawn, members
from generators.math.drafts import tables
from generators.math.generate import HELD_OUT, ProblemMaker, make_problems, split_of_steps
from generators.reports.math import copied_rate, head_rate, majority_rate, task_shapes
from generators.reports.shared import variety

from chat_families import byte_level
from ludus.chat.parse import RETOOL
from ludus.chat.render import render_dialogue
from ludus.chat.tags import TagsRenderer
from ludus.config.load import load_config
from ludus.config.sections.rollout import EnvConfig, RolloutConfig
from ludus.envs.registry import build_world, closing
from ludus.envs.task_archive import SPLITS, open_archive, read_lines
from ludus.envs.tool_env import ToolLimits
from ludus.errors import ConfigError, UserError
from ludus.recipes import recipe_folder
from ludus.rewards.base import check_rewards, score, success
from ludus.rewards.exact_match import ExpectedAnswers
from ludus.rewards.math.math_verify import Expression
from ludus.rewards.math.numeric import Quantity
from ludus.tools.base import ToolError
from ludus.tools.calculator import calculate, show
from ludus.types import Action, Message, StopReason, ToolCall, Trajectory
from ludus.worlds.math.grader import SYSTEM, GymTruth, answer_text, as_task, is_right, solved
from ludus.worlds.math.problems import DEFAULT_TOPICS, LEVELS, RECIPE, TOPICS, read_problems, worked
from ludus.worlds.math.sources import load_problems
from ludus.worlds.math.world import MathSettings, MathWorld, as_program, make_math_world
from tables import math_answers

NUM = 400


@pytest.fixture(scope="module")
def world():
    return MathWorld(MathSettings(num_tasks=NUM, tool="calculator"))


@pytest.fixture(scope="module")
def tasks(world):
    return {split: world.tasks(split) for split in SPLITS}


@pytest.fixture(scope="module")
def everything(tasks):
    return [task for split in SPLITS for task in tasks[split]]


def first(num, levels, topics, seed=0):
    return list(islice(read_problems("train", levels, topics, partial(read_lines, "math", seed=seed)), num))


def answered(text):
    said = Message(role="assistant", content=text)
    return Trajectory("", 0, (), (said,), StopReason.ANSWERED)


def root(value):
    found = round(value**0.5)
    assert found * found == value
    return found


def independently(problem):
    """The steps by Python itself, on fractions: another way than the calculator's."""

    def num_primes(n):
        return sum(all(k % d for d in range(2, k)) for k in range(2, n + 1))

    names = {"gcd": gcd, "lcm": lcm, "comb": comb, "perm": perm, "factorial": factorial, "abs": abs, "max": max}
    names |= {"sqrt": root, "primes": num_primes, "Fraction": Fraction, "isqrt": root}
    value = None
    for expression, _ in worked(problem.steps):
        program = as_program(expression).splitlines()[-1]
        value = eval(program.removeprefix("print"), dict(names))
    return Fraction(value)


# Problems


@pytest.mark.slow
def test_every_answer_equals_its_steps_evaluated_in_python(everything):
    for task in everything:
        problem = task.truth.problem
        assert math_answers.answer(problem.kind, problem.question) == problem.answer, problem
        assert independently(problem) == problem.answer, problem
        assert abs(problem.answer.numerator) < 2**50


@pytest.mark.parametrize("topic", DEFAULT_TOPICS)
def test_every_problem_kind_is_correct_at_every_level(topic):
    rng = random.Random(topic)
    made = Counter()
    for level in LEVELS:
        makers = [maker for split in SPLITS if (maker := ProblemMaker(level, split, (topic,))).open_topics()]
        for _ in range(25):
            for found in (maker.draw(rng, topic) for maker in makers):
                if found is not None:
                    problem = found.problem
                    made[problem.kind, level] += 1
                    assert math_answers.answer(problem.kind, problem.question) == problem.answer, problem
    expected = {(name, level) for name, kind in tables().kinds.get(topic, {}).items() for level in kind["levels"]}
    assert expected <= made.keys()


def test_tasks_are_distinct_and_the_same_again(world, tasks, everything):
    again = MathWorld(world.settings)
    assert all(again.tasks(split) == tasks[split] for split in SPLITS)
    other = MathWorld(MathSettings(num_tasks=NUM, seed=1)).tasks("train")
    asked = [task.prompt[-1]["content"] for task in everything]
    assert len(set(asked) & {task.prompt[-1]["content"] for task in other}) < NUM / 2
    assert len(set(asked)) == len(asked)
    usual = [task.truth.problem.steps for split in SPLITS[:3] for task in tasks[split]]
    assert len(set(usual)) == len(usual)
    assert [len(tasks[split]) for split in SPLITS] == [400, 40, 100, 80]


def test_every_topic_has_problems_at_its_levels_and_seeds_select_others():
    for topic in TOPICS:
        levels = {"expressions": (2, 3, 4, 5), "links": (3, 4, 5)}.get(topic, LEVELS)
        found = [first(5 * len(levels), levels, (topic,), seed) for seed in (0, 1, 2)]
        assert found[0] != found[1] != found[2] != found[0]
        assert all({one.topic for one in own} == {topic} for own in found)
        assert all({one.level for one in own} == set(levels) for own in found)


def test_only_composition_has_held_out_problems(tasks):
    for split in SPLITS:
        for one in islice(make_problems(split, LEVELS, DEFAULT_TOPICS, 0), 80):
            problem = one.problem
            table = tables().kinds.get(problem.topic, {}).get(problem.kind, {})
            held_out = bool(one.links & HELD_OUT or table.get("held_out"))
            assert held_out == (split == "composition")
    kinds = {task.tags["kind"] for task in tasks["composition"]}
    assert kinds >= {"stories", "links", "series", "paths"}


@pytest.mark.slow
def test_shipped_problems_equal_the_generator_output():
    for topics, levels, folder in ((DEFAULT_TOPICS, LEVELS, ""), (RECIPE[1], RECIPE[0], "recipe/")):
        for split in SPLITS:
            made = [one.problem for one in islice(make_problems(split, levels, topics, 0), 200)]
            for level in levels:
                for topic in topics:
                    rows = [as_line(as_row(one)).encode() for one in made if (one.level, one.topic) == (level, topic)]
                    assert rows == list(islice(read_lines("math", f"{folder}{split}/{level}/{topic}"), len(rows)))
            assert made == list(islice(read_problems(split, levels, topics, partial(read_lines, "math")), 200))


@pytest.mark.pages
def test_generator_reproduces_the_archive_byte_for_byte():
    found = members()
    assert list(found) == open_archive("math").namelist()
    for name, rows in found.items():
        assert "".join(map(as_line, rows)).encode() == open_archive("math").read(name), name


def test_demonstrations_of_the_recipe_have_different_questions():
    rows = [row for own in drawn("demonstrations", *RECIPE, 50).values() for row in own]
    assert len({question for _, question, *_ in rows}) == len(rows) == 200
    assert min(RECIPE_SIZES.values()) > 100


def test_all_levels_and_topics_are_there_and_really_differ(tasks):
    assert {task.tags["family"] for task in tasks["train"]} == set(DEFAULT_TOPICS)
    found = variety(task_shapes(tasks["train"]))
    assert list(found) == [str(level) for level in LEVELS]
    assert found["1"].num_shapes >= 10
    assert found["2"].num_shapes >= 30
    assert min(found[level].num_shapes for level in "345") >= 40
    assert min(one.num_forms for one in found.values()) >= 40


def test_little_is_solved_without_skill(tasks):
    for split in ("validation", "test", "composition"):
        assert majority_rate(tasks["train"], tasks[split]) < 0.15
        assert copied_rate(tasks["train"], tasks[split]) < 0.1
    assert majority_rate(tasks["train"], tasks["train"]) > 0


def test_mental_arithmetic_limits_match_the_docs():
    test = MathWorld().tasks("test")
    page = (recipe_folder("math") / "README.md").read_text("utf-8")
    assert re.search(rf"^test +{head_rate(test):.1%} ", page, re.M)
    assert head_rate([task for task in test if task.tags["level"] == "5"]) < head_rate(test)


def test_too_few_problems_are_reported():
    with pytest.raises(ConfigError, match="different problems for training, not 5000"):
        MathWorld(MathSettings(levels=(1,), topics=("counting",))).tasks("train")
    with pytest.raises(ConfigError, match="no problems of these levels"):
        next(MathWorld(MathSettings(levels=(1,), topics=("links",))).demonstrations(0))


# Rewards


def test_oracle_has_full_reward_at_every_level(world, everything):
    assert {task.tags["level"] for task in everything} == set("12345")
    for task in everything:
        said = world.expert(task).messages[-1]["content"]
        result = score(world.rewards, task, answered(said))
        assert success(world.rewards, result)
        assert solved(task, answered(f"So the answer is \\boxed{{{said}}}.")) == 1


def test_cheats_have_no_reward(everything):
    check_rewards(MathWorld().rewards)
    for task in everything[::3]:
        answer, question = answer_text(task.truth.problem), task.prompt[-1]["content"]
        value = task.truth.problem.answer
        texts = ["", question, f"{2 * value.numerator}/{2 * value.denominator}", "\\boxed{}", "I do not know."]
        texts += [show(value + 1), f"{answer} or {show(value + 1)}", " ".join(map(str, range(100)))]
        texts += [f"\\boxed{{{answer}}} \\boxed{{{show(value + 1)}}}", f"{answer}0" if value else "1"]
        texts += [step for step, _ in worked(task.truth.problem.steps) if step != answer]
        for text in texts:
            assert text.replace(" ", "") == answer or solved(task, answered(text)) == 0, (question, text)


def test_fractions_are_exact_and_units_may_stand():
    third = Quantity(1 / 3, relative=1e-9)
    assert is_right("1/3", third)
    assert not is_right("2/6", third)  # a problem, and no answer
    assert not is_right("0.33", third)
    percent = as_task(next(p for p in _problems("ratios") if p.units), "train", 0)
    answer = answer_text(percent.truth.problem)
    assert solved(percent, answered(f"{answer}%")) == 1
    assert solved(percent, answered(f"{answer} cm")) == 0
    with pytest.raises(TypeError, match="not a truth"):
        is_right("1", None)


def _problems(topic):
    return first(30, (2, 3), (topic,))


def test_expressions_are_compared_as_expressions():
    for number, problem in enumerate(first(4, (3, 4), ("expressions",))):
        task = as_task(problem, "train", number)
        assert isinstance(problem.answer, Expression)
        assert solved(task, answered(problem.answer.gold)) == 1
        assert solved(task, answered(f"{problem.answer.gold} + 1")) == 0
        assert solved(task, answered(problem.question)) == 0


# Tools


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 / 3 + 1 / 6", "1/2"),
        ("0.1 + 0.2", "3/10"),
        ("-7 // 2", "-4"),
        ("-7 % 5", "3"),
        ("2 ** -2", "1/4"),
        ("sqrt(9 / 4)", "3/2"),
        ("gcd(12, 18) * lcm(4, 6)", "72"),
        ("comb(5, 2) + perm(4, 2) + factorial(3)", "28"),
        ("primes(100)", "25"),
        ("isprime(97) + isprime(91) + isprime(1)", "1"),
        ("(-1) ** 99999999999999999999", "-1"),
    ],
)
def test_the_calculator_is_exact(expression, value):
    assert show(calculate(expression)) == value


@pytest.mark.parametrize(
    "expression",
    [
        "9 ** 9 ** 9",
        "10 ** 99999",
        "factorial(99999)",
        "primes(10 ** 12)",
        "1e99999999",
        "1 / 0",
        "0 ** -1",
        "2 ** 0.5",
        "sqrt(2)",
        "sqrt(-1)",
        "gcd(1)",
        "gcd(1/2, 3)",
        "__import__('os')",
        "(1).real",
        "[1][0]",
        "'a' * 9",
        "True + 1",
        "x",
        "1 +",
        "(" * 300 + "1" + ")" * 300,
        "-" * 490 + "1" + "1" * 50,
        "1" * 399 + "** 99",
        "comb(400, 200) ** 20",
        "",
        "1j",
        "gcd(*[1, 2])",
        "1\x00",
    ],
)
def test_calculator_rejects_unsupported_expressions(expression):
    with pytest.raises(ToolError):
        calculate(expression)


def test_an_episode_with_the_calculator(world, tasks):
    task = tasks["test"][0]
    environment = world.environment(task)
    shown = world.expert(task).messages

    async def play():
        outputs = []
        for message in (m for m in shown if m.get("tool_calls")):
            (made,) = message["tool_calls"]
            call = ToolCall("1", "calculator", json.loads(made["function"]["arguments"]))
            outputs.append((await environment.step(Action(message, (call,)))).outcomes[0])
        bad = ToolCall("2", "calculator", {"expression": "1 / 0"})
        outputs.append((await environment.step(Action(shown[-1], (bad,)))).outcomes[0])
        return outputs, await environment.step(Action(shown[-1]))

    outputs, end = asyncio.run(play())
    assert [one.output for one in outputs[:-1]] == [m["content"] for m in shown if m["role"] == "tool"]
    assert (outputs[-1].status, outputs[-1].output) == ("raised", "Error: division by zero")
    assert end.done


def python_world(*overrides):
    words = ["--env.settings.tool", "python", "--env.settings.num_tasks", "20", *overrides]
    config = load_config("math", words)
    return build_world(config.env, config.rollout, config.sandbox)


def test_python_in_the_sandbox_prints_the_demonstrated_output(everything):
    """One program holds those of many steps; another one fails, which is an output."""
    steps = [step for task in everything[::5] for step in worked(task.truth.problem.steps)]
    programs = [as_program(expression) for expression, _ in steps]
    world = python_world()
    (tool,) = world.tools

    async def run():
        everything = "\n".join(f"exec({program!r})" for program in programs)
        async with closing(world):
            return [await tool.function(code=code) for code in (everything, programs[0], "1 / 0", "1")]

    printed, alone, failed, silent = asyncio.run(run())
    assert printed.split("\n") == [show(value) for _, value in steps]
    assert alone == show(steps[0][1])
    assert "ZeroDivisionError: division by zero\n[exit code 1]" in failed
    assert "print what you want to see" in silent


def test_programs_run_in_the_sandbox_of_the_settings_which_is_closed():
    world = python_world("--sandbox.concurrency", "3")
    assert world.sandbox.concurrency == 3

    async def run():
        async with closing(world):
            await world.tools[0].function(code="print(1)")
            return len(world.sandbox._open)

    assert asyncio.run(run()) == 1
    assert not world.sandbox._open
    assert python_world("--sandbox.backend", "process", "--sandbox.unsafe", "true").sandbox.name == "process"


def test_an_episode_in_the_tags_of_retool():
    world = python_world()
    renderer = TagsRenderer(byte_level(), RETOOL)
    task = world.tasks("train")[0]
    expert = world.expert(task)
    steps = render_dialogue(renderer, expert.messages, expert.tools)
    asked, *said = [renderer.tokenizer.decode(step.tokens) for step in steps]
    assert asked.endswith(f"</answer>.\n{SYSTEM}\n{task.prompt[-1]['content']}\n")
    assert said[0].startswith("<code>\n")
    assert said[-1] == f"<answer>{answer_text(task.truth.problem)}</answer>"

    async def play(texts):
        environment = world.environment(task)
        async with closing(world):
            for turn, text in enumerate(texts):
                action = renderer.parse(renderer.tokenizer.encode(text), turn, "stop")
                result = await environment.step(action)
                yield result.done or renderer.tokenizer.decode(renderer.observation(result.messages))

    async def played(texts):
        return [found async for found in play(texts)]

    assert asyncio.run(played(said[::2])) == [*said[1::2], True]
    program = "So: <code>```python\nfor n in range(2):\n    print('</interpreter>', n)\n```</code>"
    shown, refused = asyncio.run(played([program, "<code>print(1)"]))
    assert shown.count("</interpreter>") == 1
    assert shown.endswith(" 1</interpreter>\n")
    assert refused.startswith("\n<interpreter>Error: The tag <code> is not closed.")


def test_no_tool_is_offered_without_access():
    world = MathWorld(MathSettings(num_tasks=20, tool="none"))
    task = world.tasks("train")[0]
    assert world.environment(task).tools == ()
    assert [m["role"] for m in world.expert(task).messages] == ["system", "user", "assistant"]


# Demonstrations


def test_demonstrations_have_flaws_and_contain_no_held_out_problem(world, tasks):
    shown = list(islice(world.demonstrations(3), 150))
    assert shown == list(islice(world.demonstrations(3), 150))
    held_out = {task.prompt[-1]["content"] for split in SPLITS[1:] for task in tasks[split]}
    assert not held_out & {one.messages[1]["content"] for one in shown}
    guessing = sum(not any(m["role"] == "tool" for m in one.messages) for one in shown)
    assert 10 < guessing < 75
    assert all(split_of_steps(task.truth.problem.steps) == "test" for task in tasks["test"])
    flawless = MathWorld(MathSettings(tool="calculator", flaw_rate=0.0))
    for one in islice(flawless.demonstrations(0), 50):
        assert one.messages[-2]["content"] == one.messages[-1]["content"]
    assert "expression" in "".join(islice(world.texts(), 50))


# Problems of somebody's own, and of a foreign generator


def test_a_file_of_problems_is_read(tmp_path):
    file = tmp_path / "own.jsonl"
    rows = [
        {"question": "Two and two?", "answer": 4, "split": "train"},
        {"question": "Half of 1,000?", "answer": "First halve it.\n#### 500", "split": "test"},
        {"question": "A third?", "answer": "1/3", "split": "test"},
        {"question": "Which day?", "answer": "Monday", "type": "text", "split": "validation"},
    ]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    world = make_math_world({"data": str(file), "tool": "none"}, ToolLimits())
    assert world.splits == ("train", "validation", "test")
    first, (half, third), (day,) = world.tasks("train")[0], world.tasks("test"), world.tasks("validation")
    assert [solved(t, answered(a)) for t, a in ((first, "4"), (half, "500"), (third, "1/3"))] == [1, 1, 1]
    assert (solved(day, answered("monday")), solved(day, answered("tuesday"))) == (1, 0)
    assert day.truth == ExpectedAnswers(("Monday",))
    assert world.expert(first) is None


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "it is not JSON"),
        ("[]", "not a JSON object"),
        ('{"answer": 1}', '"question" is not a text'),
        ('{"question": "a"}', '"answer" is neither'),
        ('{"question": "a", "answer": true}', '"answer" is neither'),
        ('{"question": "a", "answer": " "}', "exactly one answer"),
        ('{"question": "a", "answer": 1, "split": "dev"}', "'dev'"),
        ('{"question": "a", "answer": "b", "type": "number"}', "is not a number"),
        ('{"question": "a", "answer": "b", "type": "word"}', "'word'"),
        ('{"question": "q", "answer": 1}', "that of line 1"),
    ],
)
def test_broken_line_is_reported(tmp_path, line, reason):
    file = tmp_path / "own.jsonl"
    file.write_text('{"question": "q", "answer": 1}\n' + line)
    with pytest.raises(UserError, match="line 2, is not a task") as error:
        load_problems(file)
    assert reason in str(error.value)


def test_a_missing_or_empty_file_is_reported(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        load_problems(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match="contains no tasks"):
        load_problems(tmp_path / "empty.jsonl")


class SumsGenerator:
    """A stand-in for a generator of reasoning-gym; `pays` and `stores` break it in the ways that occur."""

    def __init__(self, size, seed, pays="", stores=True):
        rngs = [random.Random(seed + i) for i in range(size)]  # as in the package: seeds overlap
        self.pairs = [(rng.randint(1, 99), rng.randint(1, 99)) for rng in rngs]
        self.pays, self.stores = pays, stores

    def __getitem__(self, index):
        a, b = self.pairs[index]
        return {"question": f"{a} + {b}?", "answer": str(a + b) if self.stores else None, "metadata": {}}

    def score_answer(self, answer, entry):
        return float(int(answer) == int(entry["answer"]) or self.pays == answer)


@pytest.fixture
def gym(monkeypatch):
    kinds = {"sums": {}, "empty": {"stores": False}, "generous": {"pays": "-987654321"}}
    package, factory = types.ModuleType("reasoning_gym"), types.ModuleType("reasoning_gym.factory")
    package.__spec__ = types.SimpleNamespace()
    package.create_dataset = lambda name, size, seed: SumsGenerator(size, seed, **kinds[name])
    factory.DATASETS = kinds
    monkeypatch.setitem(sys.modules, "reasoning_gym", package)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)


def gym_world(*names):
    return make_math_world({"gym": list(names), "num_tasks": 40, "tool": "none"}, ToolLimits())


def test_external_generator_grades_its_problems(gym):
    world = gym_world("sums")
    asked = {split: {t.prompt[-1]["content"] for t in world.tasks(split)} for split in world.splits}
    assert (len(asked["train"]), len(asked["validation"]), len(asked["test"])) == (40, 4, 10)
    assert not asked["train"] & (asked["validation"] | asked["test"])
    for task in world.tasks("train"):
        assert solved(task, answered(task.truth.answer)) == 1
        assert solved(task, answered(f"It is \\boxed{{{task.truth.answer}}}")) == 1
        assert solved(task, answered("many")) == 0
        assert solved(task, answered("1")) == 0
    assert isinstance(world.tasks("train")[0].truth, GymTruth)


@pytest.mark.parametrize(
    ("name", "said"), [("empty", "stores no answers"), ("generous", "accepts"), ("nothing", "no generator")]
)
def test_a_foreign_generator_that_cannot_be_trusted_is_refused(gym, name, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        gym_world(name).tasks("train")


# Settings


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"levels": [6]}, "env.settings.levels.0 (= 6)"),
        ({"topics": ["algebro"]}, "env.settings.topics.0 (= 'algebro')"),
        ({"tool": "abacus"}, "env.settings.tool"),
        ({"data": "a", "gym": ["b"]}, "both data and gym"),
        ({"level": 1}, "the nearest is env.settings.levels"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        make_math_world(settings, ToolLimits())


def test_recipe_has_enough_tasks():
    config = load_config("math", [])
    world = build_world(config.env, config.rollout)
    assert len(world.tasks("train")) == 1000
    assert len(world.tasks("test")) >= config.evaluation.tasks
    assert len(world.tasks("validation")) >= config.evaluation.tasks_during
    assert world.tools[0].name == "calculator"
    assert build_world(EnvConfig(name="math"), RolloutConfig()).splits == SPLITS
    said = Message(role="user", content="1 + 1?")
    assert world.opening("1 + 1?")[-1] == said


def test_none_is_the_choice_of_a_setting_that_is_defined_later_in_its_module():
    world = make_math_world({"tool": "none", "num_tasks": 20}, ToolLimits())
    assert world.environment(world.tasks("train")[0]).tools == ()
