"""Check this machine, or find the problems of a run.

Without RUN: versions, hardware, the compiled kernel, free memory and disk, and sampling with a model. Each line has the
state fine, note or fault, with a remedy. --url also checks an inference server.

With RUN: rewards, loss mask, advantages, sampling, groups, failures and held-out success, from the files of a run
folder, also of a run that is not finished. Findings are sorted by severity.

Exits with 1 if there is a fault.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Literal

from ludus.cli.arguments import no_settings
from ludus.cli.ui.terminal import load_libraries, make_console, print_text
from ludus.errors import LudusError
from ludus.recipes import recipe_folder

_REQUIRED_GB = 2.0
"""Memory and disk in GB that the search recipe needs, with a margin."""
_LOGPROB_TOLERANCE = 1e-3
_STYLES = {"fine": "green", "note": "yellow", "fault": "bold red"}


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """A checked subject, its state, and a description."""

    what: str
    state: Literal["fine", "note", "fault"]
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("--steps", type=int, default=5, help="with RUN: read the rollouts of this many last steps (5)")
    parser.add_argument("--url", help="also check this inference server")
    parser.add_argument("--api", default="vllm", choices=("vllm", "sglang"), help="its API (vllm)")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="folder of runs (runs)")


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print each finding; return 1 if there are faults."""
    no_settings(overrides, "doctor")
    if args.run is not None:
        from ludus.cli.ui.findings import print_findings  # needs libraries that the check of the machine may miss

        return print_findings(args.run, args.steps)
    load_libraries()
    console = make_console()
    faults = 0
    for finding in examine(args.folder, args.url, args.api):
        faults += finding.state == "fault"
        print_text(console, f"{finding.state:5}  {finding.what}: {finding.text}", _STYLES[finding.state])
    print_text(console, "No faults: ready to train." if not faults else f"Faults: {faults}.")
    return 1 if faults else 0


def examine(folder: Path, url: str | None = None, api: str = "vllm") -> Iterator[DoctorFinding]:
    """Yield all findings; those that need a missing library are skipped."""
    yield DoctorFinding("python", "fine", ".".join(map(str, sys.version_info[:3])))
    libraries = list(check_libraries(metadata.requires("ludus") or [], locked_versions()))
    yield from libraries
    yield from _extras(metadata.requires("ludus") or [])
    yield _disk(folder)
    yield _memory()
    if any(finding.state == "fault" for finding in libraries):
        return
    yield _hardware()
    yield _threads()
    yield _kernel()
    yield _checked("the shipped model", lambda: asyncio.run(_sample_and_score()))
    if url is not None:
        yield _checked("the server", lambda: _server(url, api))


def locked_versions() -> dict[str, str]:
    """Return the tested versions in constraints.txt by package."""
    lines = files("ludus").joinpath("constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if "==" in line)
    return {_canonical(name): version for name, version in pairs}


def check_libraries(requirements: Sequence[str], tested: dict[str, str]) -> Iterator[DoctorFinding]:
    """Yield one finding for all required libraries with tested versions, and one for each other library."""
    reported = False
    for requirement in requirements:
        if ";" in requirement:  # of an extra
            continue
        name, minimum = _parse_requirement(requirement)
        installed = _installed(name)
        if installed is None:
            yield DoctorFinding(name, "fault", f"not installed; pip install '{requirement}'")
        elif _version_tuple(installed) < _version_tuple(minimum):
            yield DoctorFinding(name, "fault", f"{installed} is older than {minimum}; pip install '{requirement}'")
        elif (known := tested.get(name)) and _version_tuple(installed) != _version_tuple(known):
            text = f"{installed}; the tests pass with {known} (pip install -c constraints.txt)"
            yield DoctorFinding(name, "note", text)
        else:
            continue
        reported = True
    if not reported:
        yield DoctorFinding("libraries", "fine", "the versions that the tests pass with")


def _parse_requirement(requirement: str) -> tuple[str, str]:
    """Return name and lowest version of `name>=version`."""
    name, _, minimum = requirement.partition(";")[0].strip().partition(">=")
    return _canonical(re.split(r"[\[(< ]", name)[0]), minimum.strip(" )") or "0"


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def _version_tuple(version: str) -> tuple[int, ...]:
    """Return `2.13.0+cpu` as (2, 13)."""
    parts = [int(part) for part in re.findall(r"\d+", version.partition("+")[0])]
    while parts and parts[-1] == 0:
        parts.pop()
    return tuple(parts)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _extras(requirements: Sequence[str]) -> Iterator[DoctorFinding]:
    wanted: dict[str, list[str]] = {}
    for requirement in requirements:
        if found := re.search(r"extra == ['\"](\w+)['\"]", requirement):
            wanted.setdefault(found[1], []).append(_parse_requirement(requirement)[0])
    for extra, names in wanted.items():
        missing = [name for name in names if name != "ludus" and _installed(name) is None]
        if extra != "dev":
            text = f"pip install 'ludus[{extra}]' (lacks {', '.join(missing)})" if missing else "installed"
            yield DoctorFinding(f"extra {extra}", "note" if missing else "fine", text)


def _disk(folder: Path) -> DoctorFinding:
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(place).free / 1e9
    if not os.access(place, os.W_OK):
        return DoctorFinding("disk", "fault", f"{place} cannot be written; choose another folder with --run.dir")
    state: Literal["fine", "note"] = "fine" if free >= _REQUIRED_GB else "note"
    return DoctorFinding("disk", state, f"{free:.1f} GB free at {place}")


def _memory() -> DoctorFinding:
    file = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", file.read_text(encoding="utf-8")) if file.is_file() else None
    if found is None:
        return DoctorFinding("memory", "note", "the free memory is unknown on this system")
    free = int(found[1]) / 1e6
    if free < _REQUIRED_GB:
        return DoctorFinding("memory", "note", f"{free:.1f} GB free; the search recipe needs up to {_REQUIRED_GB:g}")
    return DoctorFinding("memory", "fine", f"{free:.1f} GB free")


def _hardware() -> DoctorFinding:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return DoctorFinding("device", "fine", f"{', '.join(names)}; torch {torch.__version__}")
    if shutil.which("nvidia-smi"):
        text = f"torch {torch.__version__} finds no GPU although nvidia-smi is installed; install a CUDA build of torch"
        return DoctorFinding("device", "note", text)
    return DoctorFinding("device", "fine", f"CPU; torch {torch.__version__}")


def _threads() -> DoctorFinding:
    from ludus.training.run.session import MAX_LOAD, usable_cores

    cores = usable_cores()
    busy = os.getloadavg()[0]
    text = f"{cores} for this process; the machine's load is {busy:.1f}"
    if busy > MAX_LOAD * cores:
        return DoctorFinding("cores", "note", f"{text}: competing threads are slow; use --run.threads 1")
    return DoctorFinding("cores", "fine", text)


def _kernel() -> DoctorFinding:
    from ludus.engines.embedded.attention import available

    if available():
        return DoctorFinding("attention kernel", "fine", "compiled")
    text = "no working C compiler: rollouts take 1.2 to 1.6 times as long; apt-get install gcc"
    return DoctorFinding("attention kernel", "note", text)


def _checked(what: str, check: Callable[[], DoctorFinding]) -> DoctorFinding:
    try:
        return check()
    except LudusError as error:
        return DoctorFinding(what, "fault", str(error))


async def _sample_and_score() -> DoctorFinding:
    """Sample from the shipped cold start, and compare the log-probabilities with those of a forward pass."""
    import torch

    from ludus.engines.base import Request
    from ludus.engines.embedded.engine import EngineSettings, LocalEngine
    from ludus.engines.models.loading import load_model
    from ludus.training.learner.logprobs import LogprobScorer
    from ludus.types import SamplingParams

    model = load_model(str(recipe_folder("search") / "cold_start"))
    engine = LocalEngine(model, settings=EngineSettings(context_tokens=64, max_batch=1, kv_cache_tokens=256))
    try:
        prompt = tuple(range(4, 20))
        completion = await engine.generate(Request("doctor", prompt, SamplingParams(max_new_tokens=16)))
    finally:
        await engine.close()
    tokens = torch.tensor([prompt + completion.tokens], device=next(model.parameters()).device)
    with torch.no_grad():
        scores = LogprobScorer(model).score(tokens, torch.ones_like(tokens, dtype=torch.bool)).logprobs[0]
    sampled = torch.tensor(completion.logprobs, device=scores.device)
    gap = float((scores[len(prompt) :] - sampled).abs().max())
    if not gap <= _LOGPROB_TOLERANCE:
        return DoctorFinding("the shipped model", "fault", f"engine and learner differ by {gap:.2g} nats per token")
    return DoctorFinding("the shipped model", "fine", f"engine and learner agree to {gap:.1g} nats per token")


def _server(url: str, api: str) -> DoctorFinding:
    from ludus.engines.remote.engine import APIS

    facts = APIS[api].describe(url.rstrip("/"))
    text = f"{url} ({api} API) serves {facts.model}, context {facts.context_tokens} tokens"
    return DoctorFinding("the server", "fine", text)
