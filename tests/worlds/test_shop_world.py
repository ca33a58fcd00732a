"""The shop world: catalogue, search, pages, actions, score, checkpoints, splits, mistakes, and the browser."""

import asyncio
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import islice

import pytest

from ludus.config import load_config
from ludus.envs.registry import build_world
from ludus.envs.tool_env import ToolLimits
from ludus.errors import ConfigError, UserError
from ludus.evaluation.env_audit import CheckPlan, check_world, run_agent
from ludus.evaluation.scripted_agents import Agent, AgentKind, actions_of
from ludus.recipes import recipe_folder
from ludus.worlds.shop.catalogue import Product, catalogue, catalogue_data
from ludus.worlds.shop.pages import as_document, as_html, as_text, item_page, results_page
from ludus.worlds.shop.session import (
    SHAPES,
    ShopGoal,
    ShopSession,
    expert_turns,
    is_held_out,
    purchase_score,
    type_factor,
)
from ludus.worlds.shop.world import MAX_EXPERT_TURNS, _endless_goals, _task, make_shop_world

KETTLE = Product(
    "B234",
    "Alva",
    "tea kettle",
    "kitchen",
    ("rust free", "insulated", "leak proof", "stackable"),
    {"material": ("steel", "glass"), "pack": ("single",)},
    29,
    "gifts",
)
GOAL = ShopGoal("Buy it.", KETTLE.title, "tea kettle", ("rust free", "stackable"), (("material", "glass"),), 30)


@cache
def shop():
    return make_shop_world({"num_tasks": 200}, ToolLimits())


def simulator(task):
    made = shop().make(task)
    made.reset()
    return made


def played(task, texts):
    """The last observation and the simulator after some actions."""
    made = simulator(task)
    return [made.step(text) for text in texts][-1], made


def expert_texts(task, world=None):
    return [m["content"] for m in (world or shop()).expert(task).messages if m["role"] == "assistant"]


# Catalogue and search


def test_catalogue_has_10_000_products_that_differ_in_little():
    products = list(catalogue().products.values())
    assert len(products) >= 10_000
    data = catalogue_data()
    for product in products:
        category = data.categories[product.category]
        assert product.type in category.types
        assert len({*product.attributes} & {*category.attributes}) == 4
        assert all(1 <= len(values) < len(data.options[name]) for name, values in product.options.items())
        assert product.price % 10
    alike = Counter((one.type, one.attributes, str(one.options)) for one in products)
    assert sum(count >= 4 for count in alike.values()) >= 1_600


def test_a_click_has_one_meaning():
    data = catalogue_data()
    values = [value for values in data.options.values() for value in values]
    attributes = [one for category in data.categories.values() for one in category.attributes]
    assert max(Counter(values + attributes).values()) == 1
    types = [one for category in data.categories.values() for one in category.types]
    assert len(types) == len(set(types)) == 120


def test_search_ranks_products_with_all_words_first():
    found = catalogue().search("tea kettle, rust free and stackable?")
    assert len(found) == 50
    assert {"rust free", "stackable"} <= set(found[0].attributes)
    assert found[0].type == "tea kettle"
    assert list(found) == list(catalogue().search("STACKABLE tea kettle rust free and"))


@pytest.mark.parametrize(
    "query", ['"', "a AND", "NOT (", "text:x*", "'; DROP TABLE products; --", "\x00", "\ud800", "é" * 999]
)
def test_any_text_can_be_searched(query):
    assert isinstance(catalogue().search(query), list)
    assert catalogue().search("") == []
    assert catalogue().search("tea kettle")
    with pytest.raises(Exception, match="readonly"):
        catalogue()._database.execute("DELETE FROM products")


@pytest.mark.slow
def test_catalogue_and_tasks_are_the_same_in_every_process():
    code = (
        "from ludus.worlds.shop.world import make_shop_world; from ludus.worlds.shop.catalogue import catalogue\n"
        "from ludus.envs.tool_env import ToolLimits; from itertools import islice; import hashlib\n"
        "world = make_shop_world({'num_tasks': 20}, ToolLimits())\n"
        "told = [list(catalogue().products.values()), [world.tasks(one) for one in world.splits]]\n"
        "told += [d.messages for d in islice(world.demonstrations(1), 5)]\n"
        "print(hashlib.sha256(repr(told).encode()).hexdigest())"
    )
    told = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        ).stdout
        for seed in ("1", "2")
    ]
    assert told[0] == told[1]
    assert len(told[0]) == 65


# Pages and actions


def test_the_renderings_of_a_page():
    page = item_page(KETTLE, {"material": "glass"})
    assert as_text(page) == (
        "Alva rust free insulated tea kettle\n$29\nmaterial (glass): steel, glass\npack: single\n"
        "Description | Features | < Prev | Back to Search | Buy Now"
    )
    assert page.clickable[:3] == ["steel", "glass", "single"]
    html = as_html(page)
    assert html.startswith("<h1>Alva rust free insulated tea kettle</h1>\n<p>$29</p>\n")
    assert "<button>steel</button>, <button>glass</button>" in html
    assert "<button>&lt; Prev</button>" in html
    assert '<button name="click" value="steel">steel</button>' in as_document(page)
    hostile = replace(KETTLE, brand="<b>x</b>")
    assert "<b>" not in as_html(results_page([("B1", hostile)], 0, 1))


def test_a_visit_through_all_pages():
    task = next(t for t in shop().tasks("train") if t.truth.options)
    made = simulator(task)
    assert made.actions() == []
    first = made.step(f"search[{task.truth.query}]").text.split("\n")
    assert first[0] == "page 1 of 5"
    assert len(first) == 12
    ids = [line.split()[-1] for line in first[1:-1]]
    assert made.actions() == [*(f"click[{id_}]" for id_ in ids), "click[Next >]", "click[Back to Search]"]
    second = made.step("click[Next >]").text
    assert second.startswith("page 2 of 5")
    assert second.endswith("Next > | < Prev | Back to Search")
    assert made.step("click[< Prev]").text.split("\n") == first
    item = made.step(f"click[{ids[0].lower()}]").text
    assert item.split("\n")[0] in first[1]
    assert "made this" in made.step("click[Description]").text
    assert made.step("click[< Prev]").text == item
    product = made.session.product
    features = made.step("click[Features]").text
    assert all(attribute in features for attribute in product.attributes)
    assert made.step("click[< Prev]").text == item
    name, values = next(iter(product.options.items()))
    assert f"{name} ({values[-1]}): " in made.step(f"click[{values[-1]}]").text
    assert f"{name} ({values[0]}): " in made.step(f"click[{values[0]}]").text
    assert made.step("click[< Prev]").text.split("\n") == first
    assert made.step(f"click[{ids[0]}]").text == item
    assert made.step("click[Back to Search]").text == f"{task.truth.instruction}\nSearch"
    made.step(f"search[{task.truth.query}]")
    made.step(f"click[{ids[0]}]")
    assert made.step("CLICK[buy now]").done


@pytest.mark.parametrize(
    "text", ["", "buy", "click[]", "click[Search]", "click[B000]", "click[Buy Now]", "search", "look[x]"]
)
def test_what_is_not_possible_changes_nothing_and_is_told(text):
    made = simulator(shop().tasks("train")[0])
    key = made.state_key()
    seen = made.step(text)
    assert (seen.valid, seen.done, seen.text) == (False, False, "Not possible on this page. Use search[words].")
    assert made.state_key() == key
    made.step("search[tea kettle]")
    assert made.step("search[again]").text.startswith("Not possible on this page. Click one of: B")
    assert "Next >, Back to Search." in made.step(text).text


def test_a_search_without_results():
    seen, made = played(shop().tasks("train")[0], ["search[]"])
    assert (seen.valid, seen.text) == (True, "no results\nBack to Search")
    assert made.actions() == ["click[Back to Search]"]


def test_states_of_different_pages_have_different_keys():
    task = shop().tasks("train")[0]
    made, keys = simulator(task), []
    for text in expert_texts(task)[:-1]:
        keys.append(made.state_key())
        made.step(text)
    assert len(set(keys)) >= len(keys) - 1


# Score and success


def test_score_is_the_formula_of_webshop():
    assert purchase_score(GOAL, KETTLE, {"material": "glass"}) == 1.0
    assert purchase_score(GOAL, KETTLE, {"material": "steel"}) == 0.75
    assert purchase_score(GOAL, replace(KETTLE, price=31), {}) == 0.5
    assert purchase_score(GOAL, replace(KETTLE, attributes=("rust free", "insulated")), {"material": "glass"}) == 0.75
    assert purchase_score(GOAL, replace(KETTLE, type="coffee mug"), {"material": "glass"}) == 1.0


@pytest.mark.parametrize(
    ("title", "factor"),
    [
        (("Alva", "rust free", "insulated", "tea kettle"), 1.0),
        (("Orva", "cool touch", "stackable", "tea kettle"), 1.0),
        (("Orva", "cool touch", "insulated", "tea box"), 1.0),  # 2 of 6 words
        (("Orva", "cool touch", "stackable", "tea box"), 0.5),  # 1 of 6 words
        (("Orva", "cool touch", "stackable", "lunch box"), 0.0),
    ],
)
def test_type_factor_depends_on_the_words_of_the_titles(title, factor):
    brand, first, second, type_ = title
    assert type_factor(GOAL, replace(KETTLE, brand=brand, attributes=(first, second), type=type_)) == factor
    assert type_factor(replace(GOAL, title=f"{GOAL.title} with six more words in it"), KETTLE) == 1.0
    long = replace(GOAL, title="tea " + " ".join(map(str, range(10))))
    assert type_factor(long, replace(KETTLE, type="tea box")) == 0.1


def test_success_needs_every_constraint():
    for task in shop().tasks("train")[:40]:
        goal, texts = task.truth, expert_texts(task)
        seen, made = played(task, texts)
        assert (seen.done, seen.reward, made.success) == (True, 1.0, 1.0)
        assert len(made.reached) == int(task.tags["checkpoints"])
        for name, value in goal.options:
            less = [text for text in texts if text != f"click[{value}]"]
            seen, made = played(task, less)
            assert 0.5 <= seen.reward < 1.0
            assert made.success == 0.0
            assert f"chose {name}" not in made.reached
            assert "bought" not in made.reached


def test_expensive_products_are_no_success():
    session = ShopSession(GOAL, catalogue(), 10)
    assert GOAL.accepts(KETTLE)
    for wrong in (replace(KETTLE, price=31), replace(KETTLE, type="coffee mug"), replace(KETTLE, options={})):
        assert not GOAL.accepts(wrong)
    assert session.page.has_search


def test_partial_score_is_the_outcome_of_webshop():
    world = make_shop_world({"num_tasks": 40, "reward": "webshop"}, ToolLimits())
    task = world.tasks("train")[0]
    values = {f"click[{value}]" for _, value in task.truth.options}
    turns = actions_of([m for m in world.expert(task).messages if m["content"] not in values])
    agent = Agent("hasty", AgentKind.SHOWN, "", lambda task, tools: turns)
    rewards = {}
    for name, one in (("webshop", world), ("all", make_shop_world({"num_tasks": 40}, ToolLimits()))):
        rewards[name] = asyncio.run(run_agent(one, task, agent, CheckPlan())).trajectory
    share = 1 - len(values) / (len(task.truth.attributes) + len(values) + 1)
    assert rewards["webshop"].rewards["score"] == rewards["webshop"].reward == pytest.approx(share)
    assert rewards["all"].reward == 0.0
    assert rewards["all"].rewards["return"] == pytest.approx(share)
    assert check_world(world, CheckPlan(num_tasks=4)).problems == []


# Tasks


def test_splits_hold_out_pairs_and_composition_has_more_constraints():
    assert [len(shop().tasks(split)) for split in shop().splits] == [120, 20, 40, 20]
    prompts = [task.prompt[-1]["content"] for split in shop().splits for task in shop().tasks(split)]
    assert len(set(prompts)) == len(prompts)
    for split in shop().splits:
        for task in shop().tasks(split):
            goal = task.truth
            held_out = [one for one in goal.attributes if is_held_out(goal.type, one)]
            assert bool(held_out) == (split == "test")
            level = int(task.tags["family"].split()[1])
            assert (level == 4) == (split == "composition")
            assert (len(goal.attributes), len(goal.options)) == SHAPES[level]
            for word in (goal.type, *goal.attributes, *(value for _, value in goal.options), str(goal.price)):
                assert word in task.prompt[-1]["content"]
    told = {task.tags["family"] for task in shop().tasks("train")}
    assert told == {"level 1", "level 2", "level 3"}


def test_expert_solves_every_task_and_the_truth_is_not_shown():
    for split in shop().splits:
        for task in shop().tasks(split):
            assert expert_turns(task.truth, catalogue(), 10, MAX_EXPERT_TURNS)
            assert task.truth.title not in str(task.prompt)


def test_observations_are_short():
    sizes = Counter()
    for dialogue in islice(shop().demonstrations(0), 50):
        for message in dialogue.messages[2:]:
            kind = "item" if "Buy Now" in message["content"] else message["content"][:4]
            sizes[kind] = max(sizes[kind], len(message["content"].split()))
    assert sizes["item"] < 60
    assert sizes["page"] < 140


def test_flawed_demonstrations_fail_in_the_way_of_the_flaw():
    def success(**settings):
        world = make_shop_world({"num_tasks": 60, **settings}, ToolLimits())
        drawn = islice(_endless_goals(world.settings, "0/3"), 100)
        by_prompt = {str(task.prompt): task for task in (_task("train-0", *one, world.settings) for one in drawn)}
        ended = []
        for dialogue in islice(world.demonstrations(3), 30):
            task = by_prompt[str(dialogue.messages[:2])]
            texts = [message["content"] for message in dialogue.messages if message["role"] == "assistant"]
            made = world.make(task)
            made.reset()
            seen = [made.step(text) for text in texts]
            assert seen[-1].done
            assert all(one.valid for one in seen)
            ended.append(made.success)
        return sum(ended) / len(ended)

    assert success(forgets_option=0.0, takes_first=0.0) == 1.0
    assert success(forgets_option=1.0, takes_first=0.0) == 0.0
    assert 0.2 < success(forgets_option=0.0, takes_first=1.0) < 0.8
    assert 0.3 < success() < 0.9


def test_ids_of_products_differ_between_instructions_and_demonstrations_are_not_of_held_out_tasks():
    by_product = {}
    for task in shop().tasks("train")[:20]:
        session = ShopSession(task.truth, catalogue(), 10)
        for product in catalogue().search(task.truth.query)[:10]:
            label = session.label(product)
            assert label == session.label(product)
            by_product.setdefault(product.id, []).append(label)
    repeated = [labels for labels in by_product.values() if len(labels) > 1]
    assert repeated
    assert all(len(set(labels)) == len(labels) for labels in repeated)
    held_out = {task.prompt[-1]["content"] for split in shop().splits[1:] for task in shop().tasks(split)}
    assert not held_out & {shown.messages[1]["content"] for shown in islice(shop().demonstrations(0), 100)}


def test_settings_are_checked_and_select_tasks():
    one = make_shop_world({"num_tasks": 20, "categories": ["drinks"], "levels": [2], "page_size": 5}, ToolLimits())
    assert {task.tags["family"] for task in one.tasks("train")} == {"level 2"}
    assert {task.truth.type for task in one.tasks("test")} <= set(catalogue_data().categories["drinks"].types)
    for settings, word in (({"categories": ["cars"]}, "unknown category 'cars'"), ({"reward": "half"}, "reward")):
        with pytest.raises(ConfigError, match=word):
            make_shop_world(settings, ToolLimits())


def test_too_few_distinct_instructions_are_an_error(monkeypatch):
    monkeypatch.setattr("ludus.worlds.shop.session.MAX_REPEATED", 1)
    with pytest.raises(ConfigError, match="has only"):
        make_shop_world({"categories": ["drinks"], "levels": [1], "num_tasks": 1000}, ToolLimits())


def test_html_world_shows_the_same_pages():
    world = make_shop_world({"num_tasks": 20, "observation": "html"}, ToolLimits())
    task = world.tasks("train")[0]
    shown = world.expert(task)
    texts = [m["content"] for m in shop().expert(replace(task, prompt=shop().tasks("train")[0].prompt)).messages]
    assert [m["content"] for m in shown.messages if m["role"] == "assistant"] == texts[2::2]
    assert task.prompt[-1]["content"].endswith('<p><input name="query"><button>Search</button></p>')
    assert "<button>Buy Now</button>" in shown.messages[5]["content"]


def test_the_transcript_of_the_page_is_a_real_episode():
    page = (recipe_folder("shop") / "README.md").read_text("utf-8")
    config = load_config("shop", ["--env.settings.num_tasks", "200"])
    world = build_world(config.env, config.rollout)
    task = next(task for task in world.tasks("train") if task.truth.instruction in page)
    for message in world.expert(task).messages:
        assert message["content"].replace("\n", "\n" + " " * 11) in page


# The browser


def test_missing_playwright_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "playwright.async_api", None)
    world = make_shop_world({"num_tasks": 10, "observation": "browser"}, ToolLimits())
    with pytest.raises(UserError, match="needs the package playwright") as refusal:
        world.expert(world.tasks("train")[0])
    assert "ludus[browser]" in refusal.value.hint


@pytest.mark.browser
def test_browser_shows_the_text_of_the_pages_and_is_clicked():
    browser = make_shop_world({"num_tasks": 20, "observation": "browser"}, ToolLimits())
    assert (browser.episodes_at_once, browser.blocks, shop().episodes_at_once) == (8, True, None)
    text = make_shop_world({"num_tasks": 20}, ToolLimits())

    async def episode(task):
        environment = browser.environment(task)
        shown = [environment_message["content"] for environment_message in await environment.start(task)]
        for action in actions_of(text.expert(task).messages):
            result = await environment.step(action)
            shown += [action.message["content"], *(message["content"] for message in result.messages)]
        assert result.done
        await environment.close()
        return shown

    async def everyone():
        try:
            return await asyncio.gather(*(episode(task) for task in browser.tasks("train")[:4]))
        finally:
            await browser.close()

    for task, shown in zip(text.tasks("train"), asyncio.run(everyone()), strict=False):
        assert shown == [message["content"] for message in text.expert(task).messages]
    task = browser.tasks("train")[0]
    made, plain = browser.make(task), text.make(task)
    assert made.reset() == plain.reset() == task.prompt[-1]["content"]
    for action in (
        "click[x]",
        'search[<b>red & "tea"</b>]',
        "search[x]",
        "click[nothing]",
        "click[next >]",
        "click[back to search]",
    ):
        assert made.step(action) == plain.step(action)
    made.close()
    asyncio.run(browser.close())


@pytest.mark.browser
def test_a_browser_that_does_not_start_is_told():
    world = make_shop_world({"num_tasks": 10, "observation": "browser", "chromium": "/no/chromium"}, ToolLimits())
    with pytest.raises(UserError, match="Chromium does not start"):
        world.expert(world.tasks("train")[0])
