"""Read a run folder and print the findings about it: `ludus doctor RUN`."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from ludus.cli.arguments import run_config
from ludus.cli.ui.terminal import make_console, print_text
from ludus.diagnostics.trackers import read_metrics
from ludus.evaluation.evaluate import load_evaluation
from ludus.evaluation.run_findings import SEVERITIES, RunData, examine_run
from ludus.rollouts.rollout_files import read_rollouts
from ludus.training.run.run_dir import RunFolder


def print_findings(folder: Path, steps: int, *, as_json: bool = False) -> int:
    """Print the findings about a run, the most severe first; return 1 if there are faults."""
    run = RunFolder(folder)
    config = run_config(run, ())  # raises UserError for another folder
    files = sorted(run.rollouts.glob("step-*.jsonl.gz"))[-steps:] if steps > 0 else []
    data = RunData(
        config,
        [row.metrics for row in read_metrics(run.metrics)] if run.metrics.is_file() else [],
        [record for file in files for record in read_rollouts(file)],
        [load_evaluation(file) for file in sorted(run.evaluations.glob("*.json"))],
    )
    console, found = make_console(quiet=as_json), examine_run(data)
    for finding in found:
        style = {"fault": "bold red", "warn": "yellow", "note": "cyan"}[finding.severity]
        print_text(console, f"{finding.severity:5}  {finding.topic}: {finding.text}.", style)
        print_text(console, f"       {finding.remedy}")
    numbers = f"{len(data.rows)} steps, {len(data.records)} rollouts of the last {min(steps, len(data.rows))}"
    read = f"{numbers}, {len(data.evaluations)} evaluations"
    counts = Counter(finding.severity for finding in found)
    summary = ", ".join(f"{counts[severity]} {severity}" for severity in SEVERITIES if counts[severity])
    print_text(console, f"Read {read}. Findings: {summary or 'none'}.")
    if as_json:
        print(json.dumps([asdict(finding) for finding in found], indent=1))
    return 1 if counts["fault"] else 0
