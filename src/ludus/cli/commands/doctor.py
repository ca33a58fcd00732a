"""Check this machine, the problems of a run, or whether RL can start."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import resource
import shutil
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from pydantic import BaseModel

from ludus.cli.arguments import is_recipe, no_settings, raise_first
from ludus.cli.ui.terminal import load_libraries, make_console, print_text
from ludus.errors import LudusError
from ludus.recipes import recipe_folder
from ludus.training.run.run_dir import RunFolder

_REQUIRED_GB = 2.0
"""Memory and disk in GB that the search recipe needs, with a margin."""
_LOGPROB_TOLERANCE = 1e-3
_STYLES = {"fine": "green", "note": "yellow", "fault": "bold red"}
_WHICH_MODEL = "Add --model: a checkpoint, model, run or URL."
_TOKENS = 64
"""Tokens of the generation whose speed is measured."""
_PROMPT = tuple(range(4, 20))
_MIN_FILES = 4096
_MIN_PROCESSES = 1024
_MIN_LOCKED = 64 << 20


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """A checked subject, its state, and a description."""

    what: str
    state: Literal["fine", "note", "fault"]
    text: str


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print each finding; return 1 if there are faults."""
    target, model = args.target, args.model
    is_environment = target is not None and is_recipe(target)
    is_run = target is not None and (Path(target) / "config.toml").is_file()
    has_model = model is not None
    if not has_model:
        no_settings(overrides, "doctor")
    of_run = f"{target} is a run folder, whose check takes no --model."
    which = f"Write ./{target}, or add --model."
    raise_first(
        (has_model and target is None, "--model needs an environment.", "Write `ludus doctor ENV --model M`."),
        (has_model and is_run and not is_environment, of_run, "Remove --model, or name an ENV."),
        (not has_model and is_environment and is_run, f"{target!r} is an environment and a run folder.", which),
        (not has_model and is_environment, f"No model for the environment {target!r}.", _WHICH_MODEL),
    )
    if has_model:
        from ludus.cli.evaluate.readiness import check_readiness  # needs libraries that the machine may miss

        return check_readiness(args, overrides)
    if target is not None:
        return _print_findings(Path(target), args.steps, args.json)
    load_libraries()
    console, found = make_console(quiet=args.json), []
    for finding in examine(args.folder, args.engine or (), args.api, args.speed):
        found.append(finding)
        print_text(console, f"{finding.state:5}  {finding.what}: {finding.text}", _STYLES[finding.state])
    faults = sum(finding.state == "fault" for finding in found)
    print_text(console, "No faults: ready to train." if not faults else f"Faults: {faults}.")
    if args.json:
        print(json.dumps([asdict(finding) for finding in found], indent=1))
    return 1 if faults else 0


def _print_findings(folder: Path, steps: int, as_json: bool) -> int:
    """Print the findings about a run, the most severe first; return 1 if there are faults."""
    # imported here: the check of the machine must work without these libraries
    from ludus.diagnostics.trackers import read_metrics
    from ludus.evaluation.evaluate import load_evaluation
    from ludus.evaluation.run_findings import SEVERITIES, RunData, examine_run
    from ludus.rollouts.rollout_files import read_rollouts

    run = RunFolder(folder)
    config = run.load_config()  # raises UserError for another folder
    files = sorted(run.rollouts.glob("step-*.jsonl.gz"))[-steps:] if steps > 0 else []
    data = RunData(
        config,
        [row.metrics for row in read_metrics(run.metrics)] if run.metrics.is_file() else [],
        [record for file in files for record in read_rollouts(file)],
        [load_evaluation(file) for file in sorted(run.evaluations.glob("*.json"))],
    )
    console, found = make_console(quiet=as_json), examine_run(data)
    consequences: dict[str, list[str]] = {}
    for finding in found:
        if finding.follows_from:
            consequences.setdefault(finding.follows_from, []).append(finding.topic)
            continue
        style = {"fault": "bold red", "warn": "yellow", "note": "cyan"}[finding.severity]
        print_text(console, f"{finding.severity:5}  {finding.topic}: {finding.text}.", style)
        print_text(console, f"       {finding.remedy}")
    for cause, topics in consequences.items():
        names = ", ".join(dict.fromkeys(topics))
        follow = "1 finding follows" if len(topics) == 1 else f"{len(topics)} findings follow"
        print_text(console, f"{follow} from {cause} (--json has them in full): {names}.")
    numbers = f"{len(data.rows)} steps, {len(data.records)} rollouts of the last {min(steps, len(data.rows))}"
    read = f"{numbers}, {len(data.evaluations)} evaluations"
    counts = Counter(finding.severity for finding in found)
    summary = ", ".join(f"{counts[severity]} {severity}" for severity in SEVERITIES if counts[severity])
    print_text(console, f"Read {read}. Findings: {summary or 'none'}.")
    if as_json:
        print(json.dumps([asdict(finding) for finding in found], indent=1))
    return 1 if counts["fault"] else 0


def examine(
    folder: Path, engines: Sequence[str] = (), api: str = "vllm", speed: bool = False
) -> Iterator[DoctorFinding]:
    """Yield all findings; those that need a missing library are skipped."""
    yield DoctorFinding("python", "fine", ".".join(map(str, sys.version_info[:3])))
    libraries = list(check_libraries(metadata.requires("ludus") or [], locked_versions()))
    yield from libraries
    yield from _extras(metadata.requires("ludus") or [])
    yield _disk(folder)
    yield _memory()
    yield from check_ulimits(has_gpu=shutil.which("nvidia-smi") is not None)
    if any(finding.state == "fault" for finding in libraries):
        return
    yield _hardware()
    yield _threads()
    yield _kernel()
    yield examine_sandbox()
    checks = {"the shipped model": _sample_and_score} | ({"embedded engine": measure_embedded} if speed else {})
    for what, check in checks.items():
        try:
            yield asyncio.run(check())
        except LudusError as error:
            yield DoctorFinding(what, "fault", str(error))
    for url in engines:
        yield from check_server(url, api)


def locked_versions() -> dict[str, str]:
    """Return the tested versions in constraints.txt by package."""
    lines = files("ludus").joinpath("constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if "==" in line)
    return {canonicalize_name(name): version for name, version in pairs}


def check_libraries(requirements: Sequence[str], tested: dict[str, str]) -> Iterator[DoctorFinding]:
    """Yield one finding for all required libraries with tested versions, and one for each other library."""
    reported = False
    for wanted in map(Requirement, requirements):
        if wanted.marker is not None:  # of an extra
            continue
        name, installed = canonicalize_name(wanted.name), _installed(wanted.name)
        if installed is None:
            yield DoctorFinding(name, "fault", f"not installed; pip install '{wanted}'")
        elif not wanted.specifier.contains(installed, prereleases=True):
            minimum = ", ".join(part.version for part in wanted.specifier)
            yield DoctorFinding(name, "fault", f"{installed} is older than {minimum}; pip install '{wanted}'")
        elif (known := tested.get(name)) and Version(installed.partition("+")[0]) != Version(known):
            text = f"{installed}; the tests pass with {known} (pip install -c constraints.txt)"
            yield DoctorFinding(name, "note", text)
        else:
            continue
        reported = True
    if not reported:
        yield DoctorFinding("libraries", "fine", "the versions that the tests pass with")


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _extras(requirements: Sequence[str]) -> Iterator[DoctorFinding]:
    wanted = [one for one in map(Requirement, requirements) if one.marker is not None and one.name != "ludus"]
    for extra in metadata.metadata("ludus").get_all("Provides-Extra") or []:
        own = [one.name for one in wanted if one.marker is not None and one.marker.evaluate({"extra": extra})]
        missing = [name for name in own if _installed(name) is None]
        text = f"pip install 'ludus[{extra}]' (lacks {', '.join(missing)})" if missing else "installed"
        if extra != "dev":
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
    needs = f"; the search recipe needs up to {_REQUIRED_GB:g}" if free < _REQUIRED_GB else ""
    return DoctorFinding("memory", "note" if needs else "fine", f"{free:.1f} GB free{needs}")


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

    cores, busy = usable_cores(), os.getloadavg()[0]
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


def examine_sandbox() -> DoctorFinding:
    """Run a program in a sandbox with the default settings; a note if that fails."""
    from ludus.config.sections.rollout import SandboxConfig
    from ludus.envs.registry import try_sandbox

    begin = time.perf_counter()
    try:
        version = asyncio.run(try_sandbox(SandboxConfig(), sessions=True))
    except LudusError as error:
        return DoctorFinding("sandbox", "note", f"environments that run programs do not work here: {error}")
    seconds = time.perf_counter() - begin
    return DoctorFinding("sandbox", "fine", f"a program (Python {version}) and a session in {seconds:.1f} s")


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
        completion = await engine.generate(Request("doctor", _PROMPT, SamplingParams(max_new_tokens=16)))
    finally:
        await engine.close()
    tokens = torch.tensor([_PROMPT + completion.tokens], device=next(model.parameters()).device)
    with torch.no_grad():
        scores = LogprobScorer(model).score(tokens, torch.ones_like(tokens, dtype=torch.bool)).logprobs[0]
    sampled = torch.tensor(completion.logprobs, device=scores.device)
    gap = float((scores[len(_PROMPT) :] - sampled).abs().max())
    if not gap <= _LOGPROB_TOLERANCE:
        return DoctorFinding("the shipped model", "fault", f"engine and learner differ by {gap:.2g} nats per token")
    return DoctorFinding("the shipped model", "fine", f"engine and learner agree to {gap:.1g} nats per token")


def check_ulimits(has_gpu: bool) -> Iterator[DoctorFinding]:
    """Yield a finding for each resource limit that Ludus or its engines need."""
    files = "every connection to an engine, tool server or sandbox session is an open file"
    processes = "reward workers, sandboxes and compute threads are counted as processes"
    locked = "vLLM, SGLang and NCCL pin host memory for transfers to GPUs and network cards"
    limits = [
        ("open files", "ulimit -n", resource.RLIMIT_NOFILE, _MIN_FILES, files),
        ("processes", "ulimit -u", resource.RLIMIT_NPROC, _MIN_PROCESSES, processes),
        ("locked memory", "ulimit -l", resource.RLIMIT_MEMLOCK, _MIN_LOCKED, locked),
    ]
    for name, command, kind, least, why in limits if has_gpu else limits[:2]:
        soft, _ = resource.getrlimit(kind)
        is_low = soft != resource.RLIM_INFINITY and soft < least
        shown = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}"
        text = f"{shown}, below {least:,}: {why}; raise it with {command}" if is_low else shown
        yield DoctorFinding(f"limit of {name}", "note" if is_low else "fine", text)


class _ServerVersion(BaseModel):
    version: str


def check_server(url: str, api: str) -> Iterator[DoctorFinding]:
    """Yield findings about an OpenAI-compatible server: models, version, latency, speed, and the requirements of RL."""
    from ludus.engines.remote.api_adapters import ModelList
    from ludus.engines.remote.http_client import get_once

    base = url.rstrip("/").removesuffix("/v1")
    what = f"engine {base}"
    try:
        models = get_once(base, "/v1/models", ModelList).data
    except LudusError as error:
        yield DoctorFinding(what, "fault", str(error))
        return
    version = "unknown"
    with suppress(LudusError):
        version = get_once(base, "/version", _ServerVersion).version
    names = ", ".join(one.id for one in models)
    context = f"context {models[0].max_model_len} tokens" if models[0].max_model_len else "context length unknown"
    yield DoctorFinding(what, "fine", f"serves {names}; {context}; version {version}")
    try:
        yield DoctorFinding(what, "fine", asyncio.run(_token_speed(base, api)))
        yield DoctorFinding(what, "fine", "returns token ids and log-probabilities, as RL needs")
    except LudusError as error:
        reason = f"no token ids with log-probabilities: it can be evaluated, but RL needs them. {error.message}"
        yield DoctorFinding(what, "note", reason)
        try:
            yield DoctorFinding(what, "fine", asyncio.run(_chat_speed(base, models[0].id)))
        except LudusError as error:
            yield DoctorFinding(what, "fault", str(error))


async def _token_speed(base: str, api: str) -> str:
    """Sample token ids; return latency and speed. Raises EngineError if ids or log-probabilities are missing."""
    from ludus.engines.base import Request
    from ludus.engines.remote.engine import APIS
    from ludus.engines.remote.http_client import RemoteEngineSettings, Replica
    from ludus.types import SamplingParams

    server = APIS[api]()
    server.facts = await asyncio.to_thread(server.describe, base)
    replica = Replica(base, RemoteEngineSettings(timeout_s=60.0, connect_timeout_s=0.0))

    async def sample(num: int, name: str) -> int:
        request = Request(name, _PROMPT, SamplingParams(max_new_tokens=num, seed=1))
        return len((await server.generate(replica, name, request, "")).tokens)

    try:
        return await _measure_speed(sample)
    finally:
        await replica.close()


async def _chat_speed(base: str, model: str) -> str:
    from ludus.rollouts.openai_client import OpenAIClient, OpenAIClientSettings
    from ludus.types import Message, SamplingParams

    message = Message(role="user", content="Count from 1 to 30.")
    async with OpenAIClient(OpenAIClientSettings(f"{base}/v1", model, timeout_s=60.0, retries=0)) as client:

        async def sample(num: int, name: str) -> int:
            answer = await client.chat([message], (), SamplingParams(max_new_tokens=num), 0)
            return answer.usage.completion_tokens or 0 if answer else 0

        return await _measure_speed(sample)


async def _measure_speed(sample: Callable[[int, str], Awaitable[int]]) -> str:
    """Describe latency and speed; `sample(maximum, name)` requests tokens and returns their number."""
    await sample(1, "doctor-warm-up")
    begin = time.perf_counter()
    await sample(1, "doctor-latency")
    between = time.perf_counter()
    num = await sample(_TOKENS, "doctor-speed")
    seconds = time.perf_counter() - between
    speed = f"{num / seconds:,.0f} tokens/s in one request of {num} tokens" if num else "speed unknown"
    return f"latency {1000 * (between - begin):.0f} ms for one token; {speed}"


async def measure_embedded() -> DoctorFinding:
    """Measure the speed of the embedded engine with the shipped model."""
    from ludus.engines.base import Request
    from ludus.engines.embedded.engine import EngineSettings, LocalEngine
    from ludus.engines.models.loading import load_model
    from ludus.types import SamplingParams

    model = load_model(str(recipe_folder("search") / "cold_start"))
    engine = LocalEngine(model, settings=EngineSettings(context_tokens=128, max_batch=32, kv_cache_tokens=32 * 128))
    params, speeds = SamplingParams(max_new_tokens=_TOKENS), []
    try:
        for num in (1, 1, 32):  # the first is a warm-up
            requests = [Request(f"speed-{num}-{i}", _PROMPT, params) for i in range(num)]
            begin = time.perf_counter()
            done = await engine.generate_batch(requests)
            speeds.append(sum(len(one.tokens) for one in done) / (time.perf_counter() - begin))
    finally:
        await engine.close()
    text = f"{speeds[1]:,.0f} tokens/s with 1 request, {speeds[2]:,.0f} with 32, for the shipped model"
    return DoctorFinding("embedded engine", "fine", text)
