"""The world web: a shop, a forum, a wiki and a calendar, and tasks that span them."""

import asyncio
import random
from collections import Counter

import pytest

from ludus.config.sections.rollout import RolloutConfig
from ludus.envs.tool_env import ToolLimits
from ludus.evaluation.env_audit import CheckPlan, check_world
from ludus.recipes import recipe_folder
from ludus.types import Action
from ludus.worlds.apps.pages import as_tree
from ludus.worlds.apps.site import SiteStep
from ludus.worlds.apps.tasks import HOSTILE, draw_tables, site_spec
from ludus.worlds.apps.world import make_web_world
from tests.worlds.apps_episodes import expert_texts, follow, number_of, success_of

WORLD = make_web_world({"num_tasks": 150}, ToolLimits())


def task_with(words, split="train"):
    return next(task for task in WORLD.tasks(split) if words in task.truth.instruction)


def test_families_and_splits():
    assert [len(WORLD.tasks(split)) for split in WORLD.splits] == [90, 15, 30, 15]
    families = Counter(task.tags["family"] for task in WORLD.tasks("train"))
    single = {"shop", "forum", "wiki", "calendar"}
    assert set(families) == {*single, "forum to calendar", "wiki to shop", "shop to forum", "shop and wiki"}
    for task in WORLD.tasks("composition"):
        assert len({step.place[0] for step in task.truth.steps}) >= 2


def test_expert_solves_every_task_on_short_pages():
    sizes = []
    for split in WORLD.splits:
        for task in WORLD.tasks(split):
            shown = WORLD.expert(task).messages
            assert success_of(WORLD, task, [m["content"] for m in shown if m["role"] == "assistant"]) == 1.0
            sizes += [len(m["content"]) for m in shown[2:] if m["role"] == "user"]
    assert max(sizes) < 500
    assert sum(sizes) / len(sizes) < 240


def test_an_order_from_a_wiki_article_follows_its_link():
    task = task_with("of the product in the wiki article")
    article, order = task.truth.steps
    made = WORLD.make(task)
    made.reset()
    made.step(f"click {number_of(made, 'Wiki')}")
    title = task.truth.tables["articles"][article.path.split("/")[2]]["title"]
    if title not in [one.name for one in made.visit.items]:
        made.step(f"type {number_of(made, 'Search', 'textbox')} {title}")
        made.step(f"click {number_of(made, 'Search', 'button')}")
    assert "Product: [" in made.step(f"click {number_of(made, title)}").text
    name = task.truth.tables["products"][order.path.split("/")[2]]["name"]
    assert name not in task.prompt[-1]["content"]
    made.step(f"click {number_of(made, name, 'link')}")
    made.step(f"click {number_of(made, 'Order', 'link')}")
    made.step(f"select {number_of(made, 'Quantity')} {order.fields['quantity']}")
    made.step(f"type {number_of(made, 'City')} {order.fields['city']}")
    assert "Saved." in made.step(f"click {number_of(made, 'Buy')}").text
    assert made.step("done").reward == 1.0


def test_only_the_wanted_change_succeeds():
    for task in WORLD.tasks("train")[:40]:
        goal = task.truth
        assert follow(WORLD, task, goal.steps) == 1.0
        assert follow(WORLD, task, (*goal.steps, SiteStep("/posts/new"))) == 0.0
        assert follow(WORLD, task, goal.steps[:-1]) == 0.0
        assert not goal.wrong or follow(WORLD, task, goal.wrong) == 0.0
        assert success_of(WORLD, task, expert_texts(WORLD, task)[:-1]) == 0.0


@pytest.mark.slow
def test_cheats_are_not_rewarded():
    report = check_world(WORLD, CheckPlan(num_tasks=6, limits=RolloutConfig(max_turns=16)))
    assert report.problems == []


def test_hostile_posts_do_not_change_the_solution():
    world = make_web_world({"num_tasks": 20, "hostile": 1.0}, ToolLimits())
    for split in world.splits:
        for task in world.tasks(split):
            assert any(evil in str(task.truth.tables["posts"]) for evil in HOSTILE)
            assert success_of(world, task, expert_texts(world, task)) == 1.0


def test_lists_show_few_rows_and_a_search():
    spec = site_spec("web")
    site = spec.site(draw_tables(spec, random.Random(0)))
    page = site.page("/articles")
    tree = as_tree(page, page.items)
    assert '[6] textbox "Search" value "" [7] button "Search"' in tree
    title = site.tables["articles"]["9"]["title"]
    target = site.submit("/articles", {"do": "Search", "Search": title[:4].upper()})
    assert f'link "{title}"' in as_tree(site.page(target), site.page(target).items)
    assert "Nothing here." in as_tree(site.page("/articles?q=%00"), site.page("/articles?q=%00").items)


@pytest.mark.slow
def test_the_transcript_of_the_page_is_a_real_episode():
    page = (recipe_folder("web") / "README.md").read_text("utf-8")
    world = make_web_world({"levels": [1, 2]}, ToolLimits())
    task = next(
        task for task in world.tasks("train") if task.prompt[-1]["content"].replace("\n", "\n           ") in page
    )
    for message in world.expert(task).messages:
        assert message["content"].replace("\n", "\n" + " " * 11) in page


@pytest.mark.browser
def test_browser_has_the_observations_and_rewards_of_the_tree():
    browser = make_web_world({"num_tasks": 10, "observation": "browser", "hostile": 1.0}, ToolLimits())
    tree = make_web_world({"num_tasks": 10, "hostile": 1.0}, ToolLimits())

    async def episode(split):
        one, other = browser.tasks(split)[0], tree.tasks(split)[0]
        environment, plain = browser.environment(one), tree.make(other)
        shown = await environment.start(one)
        assert shown[-1]["content"] == plain.reset()
        for message in tree.expert(other).messages[2:]:
            if message["role"] == "assistant":
                result, expected = await environment.step(Action(message)), plain.step(message["content"])
                assert [m["content"] for m in result.messages] == ([] if expected.done else [expected.text])
        assert (result.done, result.reward) == (True, 1.0)
        await environment.close()

    async def everyone():
        try:
            await asyncio.gather(*map(episode, ("train", "composition")))
        finally:
            await browser.close()

    asyncio.run(everyone())
