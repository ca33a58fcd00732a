"""Self-play on tic-tac-toe and Kuhn poker: train with several seeds, and measure the policies before and after.

    python benchmarks/self_play.py --game tictactoe --seeds 3

Prints, for each seed, the shares of tic-tac-toe games that are lost and drawn, against random moves and against perfect
play, greedy and sampled; or the exploitability of the Kuhn strategy, computed exactly from the policy's probabilities.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from contextlib import aclosing
from pathlib import Path

import ludus
from ludus.api import Run, configuration
from ludus.cli.ui.load_run import LoadedRun, open_weights
from ludus.config.schema import Config
from ludus.evaluation.stats import wilson
from ludus.training.run.run_dir import RunFolder
from ludus.worlds.games.kuhn import DEALS, INFORMATION_SETS, Kuhn, exploitability, information_set
from ludus.worlds.games.world import asked, rules_of

GAMES_PER_OPPONENT = 500


Row = dict[str, float | str]


def tic_tac_toe(source: Config | Run) -> list[Row]:
    """Return the results of a policy by opponent and temperature."""
    tasks = {"tasks": 2 * GAMES_PER_OPPONENT, "temperatures": [0.0, 1.0]}
    found = ludus.evaluate(source, progress=False, evaluation=tasks).rollouts
    rows: list[Row] = []
    for place, sampling in enumerate(("greedy", "sampled")):
        played = found[place * len(found) // 2 : (place + 1) * len(found) // 2]
        for opponent in ("random", "expert"):
            own = [one.rewards for one in played if one.tags["opponent"] == opponent]
            row: Row = {"sampling": sampling, "opponent": opponent, "games": len(own)}
            for part in ("lost", "drawn"):
                num = round(sum(rewards[part] for rewards in own))
                interval = wilson(num, len(own))
                row |= {part: num / len(own), f"{part}_low": interval.low, f"{part}_high": interval.high}
            rows.append(row)
    return rows


async def kuhn_strategy(config: Config, folder: RunFolder | None) -> dict[str, float]:
    """Return the probability of a bet in each information set, among the legal moves."""
    async with aclosing(await open_weights(config, folder)) as opened:
        return {one: await _bet(opened, one) for one in INFORMATION_SETS}


async def _bet(opened: LoadedRun, wanted: str) -> float:
    game, renderer = Kuhn(), opened.session.renderer
    position = next(deal + wanted[1:] for deal in DEALS if information_set(deal + wanted[1:]) == wanted)
    prompt = list(renderer.prompt([rules_of(game), asked(game, position)], ()))
    weights = {}
    for move in ("bet", "check"):
        reply = renderer.tokenizer.encode(move, add_special_tokens=False)
        scores = await opened.engine.score([*prompt, *reply])
        weights[move] = math.exp(sum(scores[len(prompt) :]))
    return weights["bet"] / sum(weights.values())


def kuhn(source: Config | Run) -> list[Row]:
    """Return the exploitability of a policy, in chips per game."""
    folder = RunFolder(source.path) if isinstance(source, Run) else None
    bets = asyncio.run(kuhn_strategy(source.config if isinstance(source, Run) else source, folder))
    return [{"exploitability": exploitability(bets), **{f"bet {name}": value for name, value in bets.items()}}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--game", choices=["tictactoe", "kuhn"], default="tictactoe")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/self-play"))
    parser.add_argument("--set", default="{}", help="more settings, as JSON by section")
    args = parser.parse_args()
    measure = {"tictactoe": tic_tac_toe, "kuhn": kuhn}[args.game]
    game = {"game": args.game, "num_games": GAMES_PER_OPPONENT}
    more = json.loads(args.set)
    env = {"settings": game | more.pop("env", {}).get("settings", {})}
    for row in measure(configuration("games", env=env, run={"threads": 1})):
        print(json.dumps({"seed": None, "step": 0, **row}), flush=True)
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        folder = {"dir": str(args.out / f"{args.game}-{seed}"), "seed": seed, "threads": 1}
        run = ludus.train("games", progress=False, env=env, run=folder, **more)
        for row in measure(run):
            print(json.dumps({"seed": seed, "step": len(run.metrics), **row}), flush=True)


if __name__ == "__main__":
    main()
