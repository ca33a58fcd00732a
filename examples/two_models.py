"""Two separate models play Kuhn poker against each other, and each is trained: python examples/two_models.py

Each model has a run: engine, learner, optimizer and checkpoints. With equal seeds the runs have the same tasks in the
same order, and an attempt of one meets an attempt of the other at the same task.
"""

import asyncio
from importlib import resources
from threading import Condition

import ludus
from ludus.worlds.games.kuhn import Kuhn
from ludus.worlds.games.world import asked, rules_of

GAME = Kuhn()
DEALS = [{"deal": deal} for deal in GAME.openings()]
WAIT_S = 120.0
"""Seconds after which a player leaves a game whose other player does not come or move."""


class Tables:
    """Games that the agents of both runs play."""

    def __init__(self):
        self.changed, self.open = Condition(), {}

    def join(self, deal, seat):
        """Return a game with a free seat: its moves so far, the deal included."""
        with self.changed:
            free = self.open.setdefault((deal, seat), [])
            if free:
                return free.pop(0)
            game = [deal]
            self.open.setdefault((deal, 1 - seat), []).append(game)
            return game

    def play(self, task, policy, seat):
        """Play one seat of a game to its end; return the payoff of the seat."""
        game = self.join(task["deal"], seat)
        while True:
            with self.changed:
                if not self.changed.wait_for(lambda: is_over(game) or GAME.to_move("".join(game)) == seat, WAIT_S):
                    raise TimeoutError("the other player did not move")
                position = "".join(game)
            if is_over(game):
                return payoffs(game)[seat]
            move = ""
            try:
                move = policy.chat([rules_of(GAME), asked(GAME, position)])["content"].strip()
            finally:  # a limit ends the rollout: the move is empty
                with self.changed:
                    game.append(move[0] if move in GAME.legal(position) else f"!{seat}")
                    self.changed.notify_all()


def is_over(game):
    return payoffs(game) is not None


def payoffs(game):
    """Return the payoffs of both seats: 0 for an illegal move and a draw for the other; None before the end."""
    if game[-1].startswith("!"):
        return (0.0, 0.5) if game[-1] == "!0" else (0.5, 0.0)
    return GAME.payoffs("".join(game))


async def train(models, steps=20, folder="runs/two-models", group_size=16):
    """Train both models at the same time; return their runs."""
    tables = Tables()

    def player(seat):
        return lambda task, policy: tables.play(task, policy, seat)

    def run(seat):
        return ludus.train_async(
            player(seat),
            {"train": DEALS * 10, "validation": DEALS, "test": DEALS},
            lambda task, payoff: payoff,
            model=models[seat],
            training={"steps": steps, "prompts_per_step": 6, "learning_rate": 1e-4},
            # Dropped groups would be replaced, and the tasks of the runs would differ.
            algorithm={"group_size": group_size, "filter_zero_variance": False},
            evaluation={"tasks_before": 0, "every": steps, "tasks": 6, "temperatures": [1.0]},
            run={"dir": f"{folder}/seat-{seat}", "threads": 1},
            progress=False,
        )

    return await asyncio.gather(run(0), run(1))


if __name__ == "__main__":
    start = str(resources.files("ludus.recipes") / "games" / "cold_start")
    for seat, run in enumerate(asyncio.run(train([start, start]))):
        print(f"seat {seat}: {run.checkpoint}, mean payoff", *(f"{row['reward/mean']:.2f}" for row in run.metrics))
