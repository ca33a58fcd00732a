"""Past versions of the policy as opponents in games (`rollout.opponents`).

A snapshot of the trained weights is saved every few steps. In each step, the opponent is one of the newest snapshots:
uniformly at random, or with a probability proportional to `(1 - w)^2` for a mean reward `w` of the policy against it
(prioritised fictitious self-play, Vinyals et al. 2019, doi:10.1038/s41586-019-1724-z).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ludus.algorithms.advantages.running_baselines import RoleBaselines
from ludus.config.sections.rollout import OpponentsConfig
from ludus.engines.base import Engine, seed_for
from ludus.rollouts.agent_runs import OPPONENT_VERSION
from ludus.rollouts.episode import ChatSession, EngineChatSession
from ludus.rollouts.scheduler import Episode
from ludus.training.run.run_dir import list_checkpoints


@dataclass
class OpponentPool:
    """Snapshots of the trained weights in a folder, and an engine for the opponent of the current step."""

    folder: Path
    checkpoints: Path
    model: nn.Module
    engine: Engine
    settings: OpponentsConfig
    seed: int
    version: int = field(init=False, default=-1)
    """The step after which the opponent's weights were saved."""
    _loads: int = field(init=False, default=0)

    async def begin_step(self, step: int, results: RoleBaselines) -> None:
        """Save a snapshot if one is due, and load the opponent of the step."""
        if (step - 1) % self.settings.every == 0:
            self._save(step - 1)
        versions = [version for version in self._saved() if version < step][-self.settings.size :]
        rng = random.Random(seed_for(self.seed, "opponent", step))
        weights = [1.0] * len(versions)
        if self.settings.sampling == "win_rate":
            rewards = (results.means.get(_key(version), results.initial) for version in versions)
            weights = [max(1 - reward, 0.01) ** 2 for reward in rewards]
        (version,) = rng.choices(versions, weights)
        if version != self.version:
            self.version, self._loads = version, self._loads + 1
            await self.engine.load_weights(self._loads, load_file(self._path(version)))

    def chat(self, make_chat: Callable[[], ChatSession]) -> ChatSession:
        """Return a dialogue with the opponent, of the seed of the policy's dialogue."""
        chat = make_chat()
        assert isinstance(chat, EngineChatSession)
        return replace(chat, engine=self.engine, episode=f"{chat.episode}/past", seed=seed_for(chat.seed, "past"))

    def _save(self, version: int) -> None:
        self.folder.mkdir(exist_ok=True)
        trained = {name: p.detach().cpu().contiguous() for name, p in self.model.named_parameters() if p.requires_grad}
        temporary = self.folder / "new"
        save_file(trained, temporary)
        temporary.replace(self._path(version))
        saved, steps = self._saved(), (step for step, _ in list_checkpoints(self.checkpoints))
        pools = [[one for one in saved if one <= done][-self.settings.size :] for done in (version, *steps)]
        for old in {*saved}.difference(*pools):  # a resumed run needs those of its checkpoint
            self._path(old).unlink()

    def _saved(self) -> list[int]:
        return sorted(int(path.stem.removeprefix("step-")) for path in self.folder.glob("step-*.safetensors"))

    def _path(self, version: int) -> Path:
        return self.folder / f"step-{version:06d}.safetensors"


def updated_results(results: RoleBaselines, episodes: Iterable[Episode]) -> RoleBaselines:
    """Return the policy's mean reward against each version, after the episodes."""
    trajectories = (episode.trajectory for episode in episodes)
    played = [one for one in trajectories if OPPONENT_VERSION in one.tags and one.failure is None]
    keys = [_key(int(one.tags[OPPONENT_VERSION])) for one in played]
    return results.updated(keys, torch.tensor([one.reward for one in played], dtype=torch.float64))


def _key(version: int) -> tuple[str, str]:
    return ("opponent", str(version))
