"""Measure the sandbox: fresh runs of `print(1)`, calls in a session and a cold start, against a bare subprocess.

    python benchmarks/sandbox.py [--repeats 200] [--page docs/use/sandbox.md]

Bare subprocess and sandbox alternate within a measurement, so that the load of the machine affects both. Times
are the median and the 90th percentile in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
import time
from pathlib import Path

from ludus.sandbox import NamespacesSandbox, SandboxSettings
from ludus.sandbox.local.namespaces import find_python

PROGRAM = "print(1)"
COLD = 15
MARK = re.compile(r"(<!-- figures -->\n).*?(<!-- end -->)", re.S)


def quantile(seconds: list[float], share: float) -> float:
    """Return a quantile in milliseconds."""
    return 1000 * sorted(seconds)[int(share * (len(seconds) - 1))]


def bare(python: str) -> float:
    """Return the seconds of a fresh interpreter without isolation."""
    begin = time.perf_counter()
    subprocess.run([python, "-c", PROGRAM], capture_output=True, check=True)
    return time.perf_counter() - begin


async def fresh(sandbox: NamespacesSandbox, program: str | list[str]) -> float:
    """Return the seconds of one run in the sandbox."""
    begin = time.perf_counter()
    outcome = await sandbox.run(program)
    assert outcome.stdout == b"1\n", outcome
    return time.perf_counter() - begin


async def cold() -> float:
    """Return the seconds from the creation of a sandbox to its first result."""
    sandbox = NamespacesSandbox(SandboxSettings(concurrency=1))
    seconds = await fresh(sandbox, PROGRAM)
    await sandbox.close()
    return seconds


async def calls(sandbox: NamespacesSandbox, repeats: int) -> list[float]:
    """Return the seconds of each call in a session; the calls increment a counter."""
    session, taken = await sandbox.session(), []
    await session.run("x = 0")
    for n in range(repeats):
        begin = time.perf_counter()
        outcome = await session.run("x += 1\nx")
        taken.append(time.perf_counter() - begin)
        assert outcome.text == f"{n + 1}\n"
    await session.close()
    return taken


async def throughput(sandbox: NamespacesSandbox, repeats: int) -> float:
    """Return the runs per second, two at once."""
    begin = time.perf_counter()
    await asyncio.gather(*(sandbox.run(PROGRAM) for _ in range(repeats)))
    return repeats / (time.perf_counter() - begin)


def bare_throughput(python: str, repeats: int) -> float:
    """Return the bare interpreters per second, two at once."""
    begin = time.perf_counter()
    for _ in range(repeats // 2):
        pair = [subprocess.Popen([python, "-c", PROGRAM], stdout=subprocess.PIPE) for _ in range(2)]
        for process in pair:
            process.communicate()
    return repeats / (time.perf_counter() - begin)


async def measure(repeats: int) -> list[str]:
    """Return the lines of the table."""
    python = find_python("")
    sandbox = NamespacesSandbox(SandboxSettings(concurrency=2))
    await sandbox.warm()
    rows: dict[str, list[float]] = {"bare": [], "python": [], "true": []}
    for _ in range(repeats):
        rows["bare"].append(bare(python))
        rows["python"].append(await fresh(sandbox, PROGRAM))
        rows["true"].append(await fresh(sandbox, ["echo", "1"]))
    rows["cold"] = [await cold() for _ in range(COLD)]
    rows["call"] = await calls(sandbox, 5 * repeats)
    rates = bare_throughput(python, repeats), await throughput(sandbox, repeats)
    await sandbox.close()
    names = {
        "bare": f'bare `subprocess.run(["{Path(python).name}", "-c", "{PROGRAM}"])`',
        "python": "a fresh Python run in the default sandbox",
        "true": 'the command `["echo", "1"]` in the default sandbox',
        "cold": "the first run, including the start of a zygote",
        "call": "a call in a Python session",
    }
    lines = ["| | median | 90 % |", "|---|---|---|"]
    lines += [f"| {names[k]} | {quantile(v, 0.5):.2f} ms | {quantile(v, 0.9):.2f} ms |" for k, v in rows.items()]
    ratio = quantile(rows["bare"], 0.5) / quantile(rows["python"], 0.5)
    lines += ["", f"A fresh run takes 1/{ratio:.1f} of a bare interpreter's time. Two at once: {rates[1]:.0f} runs"]
    lines[-1] += f" a second, {rates[0]:.0f} bare ones."
    return lines


def main() -> None:
    """Measure, print the table and write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--page", type=Path)
    given = parser.parse_args()
    text = "\n".join(asyncio.run(measure(given.repeats)))
    print(text)
    if given.page:
        page = given.page.read_text("utf-8")
        if not MARK.search(page):
            sys.exit(f"{given.page} has no place for the figures")
        given.page.write_text(MARK.sub(lambda m: m[1] + text + "\n" + m[2], page), "utf-8")


if __name__ == "__main__":
    main()
