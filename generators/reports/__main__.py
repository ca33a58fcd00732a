"""Write the difficulty reports of functions, math and sql with their default settings: python -m generators.reports."""

from __future__ import annotations

from pathlib import Path

from generators.reports import functions, math, sql
from ludus.config.load import load_config
from ludus.envs.registry import build_world

OUT = Path(__file__).parents[2] / "src/ludus/worlds"
REPORTS = {"functions": functions.report, "math": math.report, "sql": sql.report}


def report(name: str) -> str:
    """Return the report on a world with its default settings."""
    config = load_config(None, ["--env.name", name])
    return REPORTS[name](build_world(config.env, config.rollout, config.sandbox)) + "\n"


if __name__ == "__main__":
    for name in REPORTS:
        (OUT / name / "data/difficulty_report.txt").write_text(report(name), "utf-8")
