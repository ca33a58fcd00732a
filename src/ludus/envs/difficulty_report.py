"""Difficulty reports: how many tasks of a world differ, and what baselines without skill solve."""

from __future__ import annotations

from importlib.resources import files

from ludus.envs.base import World


def shipped_report(world: World, is_default: bool) -> str:
    """Return the report that ships with the default tasks of a world; otherwise preceded by the sizes of its splits."""
    text = (files(f"ludus.worlds.{world.name}") / "data/difficulty_report.txt").read_text("utf-8").rstrip("\n")
    if is_default:
        return text
    sizes = "\n".join(f"{split:12} {len(world.tasks(split))} tasks" for split in world.splits)
    return f"{sizes}\n\nThe default tasks:\n{text}"
