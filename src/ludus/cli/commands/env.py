"""Look at an environment, and check that it pays for what it is about.

    ludus env list                     the worlds there are
    ludus env show search              splits, tools, rewards, a task and how it is solved, baselines
    ludus env check examples/stock.py  cheats and guessers play it, then its scorecard
    ludus env prepare swe              fetch what the world needs and does not ship

NAME is a recipe or .toml file (its environment, settings and limits), a world, or the .py file of one.
Settings follow as --env.settings '{...}' and the like. A check that finds a paid cheat, or a row of the
scorecard that fails, exits with 2.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from ludus.cli.arguments import no_settings
from ludus.cli.ui.terminal import CheckBar, bars, make_console, say
from ludus.config.load import load_config
from ludus.config.schema import Config
from ludus.envs.base import World
from ludus.envs.mixture import worlds_in
from ludus.envs.registry import WORLDS, build_world, check_sandbox
from ludus.errors import UserError
from ludus.evaluation.env_audit import AuditRow, CheckPlan, CheckReport, check_world
from ludus.evaluation.scripted_agents import AgentKind
from ludus.evaluation.verdicts import ScorecardVerdict, problems_in, verdicts
from ludus.evaluation.verifier_report import scorecard
from ludus.recipes import list_recipes
from ludus.rewards.registry import added_parts, check_fed, judges_more
from ludus.rollout.reward_executor import ProcessRewardExecutor
from ludus.rollout.scheduler import episode_limits
from ludus.types import Task, Trajectory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument("act", choices=("list", "show", "check", "prepare"), help="what to do")
    parser.add_argument("name", nargs="?", metavar="NAME", help="a recipe, a world, or a .toml or .py file")
    parser.add_argument("--split", default="train", help="tasks of this split (train)")
    parser.add_argument("--tasks", type=int, default=50, metavar="N", help="tasks for each agent (50)")
    parser.add_argument("--survey", action="store_true", help="measure baselines that take minutes, too")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of tasks and of what is random")


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print what was asked for. Raises UserError where a check finds a problem."""
    console = make_console()
    if args.act == "list":
        no_settings(overrides, "env list")
        console.print(worlds_table())
        return 0
    if not args.name:
        raise UserError("Name an environment.", "`ludus env list` lists them.")
    if args.tasks < 1:
        raise UserError(f"--tasks is {args.tasks}.", "Give 1 or more.")
    config = config_of(args.name, overrides)
    world = build_world(config.env, config.rollout, config.sandbox)
    if args.act != "prepare":
        check_sandbox(config.sandbox, world)
        tell_settings(console, args.name, config)
    broken = []
    for one, own in worlds_in(world, config):
        try:
            look_at(args, console, one, own)
        except UserError as error:
            if world is one:
                raise
            broken.append(str(error))
    if broken:
        raise UserError(" ".join(broken), "Take a world out with --env.mixture.NAME none.")
    return 0


def look_at(args: argparse.Namespace, console: Console, world: World, config: Config) -> None:
    """Show or check one world, by settings that are its own. Raises UserError where its check finds a
    problem."""
    if args.act == "prepare":
        prepare(console, world)
        return
    num = args.tasks if args.act == "check" else 1
    limits, scoring = episode_limits(config.rollout), ProcessRewardExecutor.of(config)
    plan = CheckPlan(args.split, num, args.seed, limits=limits, scoring=scoring)
    if args.act == "show":
        show(console, check_world(world, plan), config, scoring)
        tell_survey(console, world, args.survey)
        return
    with bars(console, passing=True) as progress:
        plan = replace(plan, watch=CheckBar(progress))
        report = check_world(world, plan)
        console.print(agents_table(report))
        rows = verdicts(scorecard(report, plan))
    console.print(scorecard_table(rows))
    tell_survey(console, world, args.survey)
    if report.shaped:
        most = ", ".join(f"{name} {value:g}" for name, value in report.shaped.items())
        say(console, f"Shaping alone pays agents that do nothing of the task, at most: {most}.")
    if problems := [*report.problems, *problems_in(rows)]:
        raise UserError(
            f"The world {world.name!r} has failed its check. {' '.join(problems)}",
            "docs/extend/environment.md says what each agent tries.",
        )
    say(console, f"The world {world.name!r} pays none of the agents that do not do its tasks.")


def prepare(console: Console, world: World) -> None:
    """Fetch what the world needs. Raises UserError where it cannot be had."""
    world.prepare(lambda said: say(console, said))
    say(console, f"The world {world.name!r} has all that it needs.")


def config_of(name: str, overrides: Sequence[str]) -> Config:
    """The configuration in which an environment is looked at. Raises ConfigError for an unknown name."""
    if name.endswith(".toml") or is_recipe(name):
        return load_config(name, overrides)
    return load_config(None, ["--env.name", name, *overrides])


def tell_settings(console: Console, name: str, config: Config) -> None:
    """Which settings of the world hold, since a recipe narrows its world down."""
    if config.env.settings:
        file = name.endswith(".toml") or is_recipe(name)
        told = ", ".join(f"{key} = {value!r}" for key, value in config.env.settings.items())
        say(console, f"Settings{f' of {name} and the command line' if file else ''}: {told}")


def is_recipe(name: str) -> bool:
    """Whether a recipe has this name."""
    return any(name == recipe.name for recipe in list_recipes())


def worlds_table() -> Table:
    """The registered worlds, with the recipes that train on them."""
    table = Table()
    for column in ("world", "recipe", "made by"):
        table.add_column(column, no_wrap=True)
    recipes = {load_config(recipe.config).env.name: recipe.name for recipe in list_recipes()}
    for name, factory in sorted(WORLDS.items()):
        table.add_row(name, recipes.get(name, ""), factory)
    return table


def agents_table(report: CheckReport) -> Table:
    """What each agent got."""
    table = Table(title=f"{report.world.name}: what scripted agents earn, with 95 % intervals")
    for column in ("agent", "mean reward", "most shaping", "success", "tasks", "where nothing is right", "verdict"):
        table.add_column(column)
    for row in report.rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: AuditRow) -> tuple[str, ...]:
    if not row.counted:
        return (row.agent.name, "", "", "", "0", "", "broke" if row.problem else "nothing to do here")
    rate, interval = row.num_successes / len(row.counted), row.interval
    told = f"{rate:.0%} [{interval.low:.0%}, {interval.high:.0%}]"
    apart = f"{sum(play.succeeded for play in row.excused)} of {len(row.excused)}" if row.excused else ""
    verdict: str = row.mark
    if row.mark == "fail":
        verdict = f"fail: {'PAID' if row.agent.kind in (AgentKind.CHEAT, AgentKind.CHANCE) else 'NOT PAID'}"
    elif row.mark == "doubtful" and not row.failures:
        verdict = "doubtful: paid on more than a quarter of the tasks"
    if row.failures:
        verdict += f", {len(row.failures)} broke"
    rewards = (f"{row.mean_reward:.3f}", f"{row.most_shaping:.3f}")
    return row.agent.name, *rewards, told, str(len(row.counted)), apart, verdict


def scorecard_table(rows: Sequence[ScorecardVerdict]) -> Table:
    """The scorecard of the verifier's rule, with a verdict for each row."""
    table = Table(title="The verifier")
    for column in ("what", "found", "verdict"):
        table.add_column(column)
    for row in rows:
        table.add_row(row.what, row.found, f"{row.mark}: {row.why}" if row.why else row.mark)
    return table


def show(console: Console, report: CheckReport, config: Config, scoring: ProcessRewardExecutor) -> None:
    """Splits, tools, rewards, a task, and an episode of who knows how, scored as in training.

    Raises ConfigError for parts of the settings that the world cannot feed.
    """
    from ludus.cli.ui.transcripts import message_text, print_transcript

    world, task, added = report.world, report.tasks[0], added_parts(config.rewards)
    check_fed(config.rewards.extra, task, len(world.environment(task).tools))
    say(console, f"World: {world.name}")
    for split in world.splits:
        say(console, f"  split {split}: {len(world.tasks(split)):,} tasks")
    for tool in world.environment(task).tools:
        parameters = tool.schema["function"]["parameters"]
        say(console, f"  tool {tool.name}({', '.join(parameters['properties'])}): {tool.description}")
    for reward in (*world.rewards, *added):
        what = "outcome" if reward.outcome else "shaping" if reward.weight else "reported"
        where = ", in evaluations alone" if config.rewards.preset and reward in world.rewards else ""
        say(console, f"  reward {reward.name}: weight {reward.weight:g}, {what}{where}")
    say(console, f"  cold start: {_cold_start(world)}")
    say(console, f"\nTask {task.id}   {'  '.join(f'{name} {tag}' for name, tag in task.tags.items())}")
    knowing = (AgentKind.ORACLE, AgentKind.SHOWN)
    knows = next((row for row in report.rows if row.agent.kind in knowing and row.plays), None)
    if knows is None or knows.plays[0].trajectory is None:
        for message in task.prompt:
            say(console, f"[{message['role']}] {message_text(message)}")
        say(console, "The world shows nobody who solves this task.")
        return
    say(console, f"As the agent {knows.agent.name} plays it:\n")
    print_transcript(console, as_trained(world, task, knows.plays[0].trajectory, config, scoring))


def as_trained(
    world: World, task: Task, trajectory: Trajectory, config: Config, scoring: ProcessRewardExecutor
) -> Trajectory:
    """With the parts that the settings add, and the sum of those that train. Raises WorldError."""
    if not judges_more(config.rewards):
        return trajectory
    found = asyncio.run(scoring.with_added(world, task, trajectory))
    own = 0.0 if config.rewards.preset else trajectory.reward
    return replace(found, reward=own + found.reward)


def tell_survey(console: Console, world: World, measure: bool) -> None:
    """How many tasks of the world differ, and what its baselines solve."""
    found = world.survey(measure)
    if not found:
        say(console, "\nThe world does not survey these tasks: how many differ, what takes no skill.")
        return
    say(console, "\nHow many tasks differ (solutions without names and numbers), and what baselines solve:")
    say(console, found)


def _cold_start(world: World) -> str:
    """Whether it shows how it is done; without `expert(task)` what it shows is drawn at random."""
    if not world.implements("demonstrations"):
        return "none"
    if world.implements("expert"):
        return "demonstrations"
    return "demonstrations drawn at random, right or not, as the one below (there is no expert)"
