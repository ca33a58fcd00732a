"""Show an environment, or check that it rewards only solutions of its tasks."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from threading import Thread

from rich.console import Console

from ludus.cli.arguments import environment_config, is_recipe, no_settings, raise_first
from ludus.cli.serving.serve import needs_serve_extra
from ludus.cli.ui.fitted_table import FittedTable, TableColumn, make_table
from ludus.cli.ui.terminal import PhaseBar, announce, bars, make_console, print_line, print_text
from ludus.cli.ui.transcripts import describe_tool, message_text, print_transcript
from ludus.config.load import load_config
from ludus.config.schema import Config
from ludus.engines.control_tokens import token_of
from ludus.envs.base import World
from ludus.envs.mixture import worlds_in
from ludus.envs.registry import FACTORIES, build_world, check_sandbox
from ludus.errors import LudusError, UserError
from ludus.evaluation.env_audit import AuditProgress, AuditRow, CheckPlan, CheckReport, check_world
from ludus.evaluation.evaluate import check_evaluation
from ludus.evaluation.scripted_agents import AgentKind
from ludus.evaluation.stats import wilson
from ludus.evaluation.verifier_report import scorecard
from ludus.recipes import list_recipes
from ludus.rewards.registry import added_parts, check_task_fits, has_extra_rewards
from ludus.rollouts.reward_executor import ProcessRewardExecutor


class AuditBar(PhaseBar, AuditProgress):
    """A progress bar for the phases of an environment audit."""


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """List, show, check, prepare or serve. Raises UserError if a check fails."""
    console = make_console()
    if args.act == "list":
        no_settings(overrides, "env list")
        console.print(_worlds_table())
        return
    raise_first(
        (not args.name, "Name an environment.", "`ludus env list` lists them."),
        (args.tasks < 1, f"--tasks is {args.tasks}.", "Set 1 or more."),
    )
    if args.act == "serve":
        serve(args, overrides)
        return
    config = environment_config(args.name, overrides)
    announce(f"Building the world {config.env.name} and its tasks ...")
    world = build_world(config.env, config.rollout, config.sandbox)
    if args.act != "prepare":
        check_sandbox(config.sandbox, world)
        _print_settings(console, args.name, config)
    failed = []
    for one, own in worlds_in(world, config):
        try:
            _process_world(args, console, one, own)
        except UserError as error:
            if world is one:
                raise
            failed.append(str(error))
    if args.act == "check":
        _warn_of_refusal(console, config, world)
    if failed:
        raise UserError(" ".join(failed), "Remove a world with --env.mixture.NAME none.")


def _warn_of_refusal(console: Console, config: Config, world: World) -> None:
    try:
        check_evaluation(config, world)
    except LudusError as error:
        print_text(console, f"! A training run would be refused: {error}", "yellow")


def _print_settings(console: Console, name: str, config: Config) -> None:
    if config.env.settings:
        origin = f" of {name} and the command line" if is_recipe(name) else ""
        text = ", ".join(f"{key} = {value!r}" for key, value in config.env.settings.items())
        print_text(console, f"Settings{origin}: {text}")


def _process_world(args: argparse.Namespace, console: Console, world: World, config: Config) -> None:
    if args.act == "prepare":
        world.prepare(lambda text: print_text(console, text))
        print_text(console, f"The world {world.name!r} is ready.")
        return
    num = args.tasks if args.act == "check" else 1
    scoring = ProcessRewardExecutor.of(config)
    plan = CheckPlan(args.split, num, args.seed, limits=config.rollout, scoring=scoring)
    if args.act == "show":
        show(console, check_world(world, plan), config, scoring)
        _print_difficulty(console, world)
        return
    with bars(console, transient=True) as progress:
        plan = replace(plan, watch=AuditBar(progress))
        report = check_world(world, plan)
        numbers = (TableColumn("mean reward", 2), TableColumn("max shaping", 3), "success", TableColumn("tasks", 1))
        columns = ("agent", *numbers, TableColumn("no-op tasks", 4), TableColumn("verdict", wrap=True))
        title = f"{report.world.name}: rewards of scripted agents, with 95 % intervals"
        console.print(make_table(columns, map(_cells, report.rows), title))
        rows = asyncio.run(scorecard(report, plan))
    cells = ((row.name, row.found, f"{row.mark}: {row.why}" if row.why else row.mark) for row in rows)
    found, verdict = (TableColumn(name, wrap=True) for name in ("found", "verdict"))
    console.print(make_table(("property", found, verdict), cells, "Verifier"))
    _print_difficulty(console, world)
    if report.shaped:
        most = ", ".join(f"{name} {value:g}" for name, value in report.shaped.items())
        print_text(console, f"Largest shaping rewards of agents that do not attempt the task: {most}.")
    if problems := [*report.problems, *(row.why for row in rows if row.mark == "fail")]:
        text = f"The world {world.name!r} failed its check. {' '.join(problems)}"
        raise UserError(text, "docs/extend/environment.md describes each agent.")
    print_text(console, f"The world {world.name!r} rewards no agent that does not solve its tasks.")


def _worlds_table() -> FittedTable:
    recipes = {load_config(recipe.config).env.name: recipe for recipe in list_recipes()}
    found = ((name, recipes.get(name)) for name in sorted(FACTORIES))
    rows = ((name, one and one.name, one and one.title.removeprefix(f"{one.name}: ")) for name, one in found)
    return make_table(("world", "recipe", TableColumn("description", wrap=True)), rows)


def _cells(row: AuditRow) -> tuple[str, ...]:
    if not row.counted:
        return (row.agent.name, "", "", "", "0", "", "broke" if row.problem else "not applicable")
    rate, interval = row.num_successes / len(row.counted), wilson(row.num_successes, len(row.counted))
    success = f"{rate:.0%} [{interval.low:.0%}, {interval.high:.0%}]"
    excused = f"{sum(play.succeeded for play in row.excused)} of {len(row.excused)}" if row.excused else ""
    verdict: str = row.mark
    if row.mark == "fail":
        verdict = f"fail: {'REWARDED' if row.agent.kind in (AgentKind.CHEAT, AgentKind.CHANCE) else 'NOT REWARDED'}"
    elif row.mark == "doubtful" and not row.failures:
        verdict = "doubtful: rewarded on more than a quarter of the tasks"
    if row.failures:
        verdict += f", {len(row.failures)} broke"
    rewards = (f"{row.mean_reward:.3f}", f"{row.max_shaping:.3f}")
    return row.agent.name, *rewards, success, str(len(row.counted)), excused, verdict


def show(console: Console, report: CheckReport, config: Config, scoring: ProcessRewardExecutor) -> None:
    """Print splits, tools, rewards, a task, and an episode of an agent that solves it, scored as in training."""
    world, task, added = report.world, report.tasks[0], added_parts(config.rewards)
    check_task_fits(config.rewards.extra, task, len(world.environment(task).tools))
    print_text(console, f"World: {world.name}")
    for split in world.splits:
        print_text(console, f"  split {split}: {len(world.tasks(split)):,} tasks")
    for tool in world.environment(task).tools:
        print_text(console, f"  tool {describe_tool(tool)}")
    for reward in (*world.rewards, *added):
        kind = "outcome" if reward.outcome else "shaping" if reward.weight else "reported"
        where = ", only in evaluations" if config.rewards.preset and reward in world.rewards else ""
        print_text(console, f"  reward {reward.name}: weight {reward.weight:g}, {kind}{where}")
    print_text(console, f"  cold start: {_cold_start(world)}")
    print_text(console, f"\nTask {task.id}   {'  '.join(f'{name} {tag}' for name, tag in task.tags.items())}")
    solver_kinds = (AgentKind.ORACLE, AgentKind.SHOWN)
    solver = next((row for row in report.rows if row.agent.kind in solver_kinds and row.plays), None)
    if solver is None or solver.plays[0].trajectory is None:
        for message in task.prompt:
            print_text(console, f"[{message['role']}] {message_text(message)}")
        print_text(console, "The world provides no solution of this task.")
        return
    print_text(console, f"An episode of the agent {solver.agent.name} ({solver.agent.what}):\n")
    trajectory = solver.plays[0].trajectory
    if has_extra_rewards(config.rewards):  # the reward used in training
        found = asyncio.run(scoring.with_added(world, task, trajectory))
        trajectory = replace(found, reward=(0.0 if config.rewards.preset else trajectory.reward) + found.reward)
    print_transcript(console, trajectory)


def _cold_start(world: World) -> str:
    expert = "" if world.implements("expert") else " (the world has no expert)"
    return f"demonstrations{expert}" if world.implements("demonstrations") else "none"


def _print_difficulty(console: Console, world: World) -> None:
    found = world.difficulty_report()
    if not found:
        print_text(console, "\nThe world has no difficulty report for these tasks.")
        return
    print_text(console, "\nDistinct tasks (solutions without names and numbers) and baselines:")
    print_text(console, found)


_LOCAL = ("127.0.0.1", "localhost", "::1")


def serve(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Serve the environment `args.name` until interrupted. On addresses of other hosts, clients need a token."""
    raise_first(
        (args.max_episodes < 1, f"--max-episodes is {args.max_episodes}.", "Set 1 or more."),
        (args.idle_s <= 0, f"--idle-s is {args.idle_s:g}.", "Set more than 0."),
    )
    with needs_serve_extra():
        from ludus.envs.remote.server import MAX_BODY_BYTES, EnvServerSettings, make_app
        from ludus.gateway.limits import MIB, HttpLimits, http_server, open_socket, url_of
        from ludus.untrusted.json_service import error_response
    console = make_console()
    config = environment_config(args.name, overrides)
    needs_token = args.host not in _LOCAL or args.token_file is not None
    token = token_of(args.token_file) if needs_token else ""
    with open_socket(args.host, args.port) as listener:
        world = build_world(config.env, config.rollout, config.sandbox)
        check_sandbox(config.sandbox, world)
        app = make_app(world, EnvServerSettings(token, args.max_episodes, args.idle_s))
        if needs_token and args.token_file is None:
            print_line(console, f"Token: {token}")
        print_line(console, f"Serving the world {world.name} at {url_of(listener)}")
        limits = HttpLimits(body_bytes=MAX_BODY_BYTES, buffered_bytes=512 * MIB)
        server = http_server(app, limits, error_response, lifespan=True)
        if args.until_eof:

            def stop_at_eof() -> None:
                while os.read(sys.stdin.fileno(), 4096):
                    pass
                server.should_exit = True

            Thread(target=stop_at_eof, daemon=True).start()
        asyncio.run(server.serve(sockets=[listener]))
