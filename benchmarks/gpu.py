"""Check and measure engine, learner, training, weight transfer and sleep on a GPU, without network.

    python benchmarks/gpu.py                                  # all parts, some minutes each
    python benchmarks/gpu.py --parts engine learner --size 0.5b
    python benchmarks/gpu.py --device cpu --size tiny         # the same code without a GPU, in a minute

conformance  all checks of tests/engine_conformance.py on the packaged cold start in float32, the engine on the device
             and the reference on the CPU
engine       seconds per decode step of a full batch, and the fraction of it that reading weights, keys and values
             takes at the memory bandwidth of a large copy on this device (1: bandwidth-bound)
learner      seconds per optimizer step, and model FLOPs utilization: 6 FLOPs per weight and token plus causal
             attention, divided by the listed peak of the card or the measured speed of a large matrix product
train        some steps of the recipe `search` from its cold start, and held-out success before and after
transfer     weights from the learner to the engine: seconds to copy and to verify; the digests must be equal
sleep        memory that `engine.sleep` frees, and the seconds of a request before it, of the first one after it, and
             of the second

The models of engine, learner, transfer and sleep are Qwen3 with random weights in bfloat16 (float32 on a CPU). A part
that fails is reported, the others run, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

import rollout_work
from ludus.engines.models.loading import fuse_norms, hide_progress
from pages import check_place, fill
from rollout_models import SHAPES
from rollout_ours import bytes_per_second, products_per_second, token_bytes, wait, weight_bytes

HERE = Path(__file__).parent
PEAKS = {"H100": 989e12, "H200": 989e12, "GH200": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}
"""Dense bfloat16 FLOP/s with float32 accumulation, from the vendor's data sheets (SXM for H100)."""
COARSE_TOLERANCE = 0.5
"""Nats by which two attention implementations may differ in bfloat16, as at the start of the engine."""

Row = dict[str, float | str]


@dataclass(frozen=True)
class Load:
    """Work of all parts at one size of model; lengths in tokens.

    Prompts of the engine have one token more than whole pages, so that a cached prompt needs a single decode step.
    """

    batches: tuple[int, ...] = (1, 32, 256)
    prompt: int = 513
    new: int = 128
    rows: int = 16
    length: int = 1024
    microbatches: tuple[int, ...] = (4096, 16384)
    repeats: int = 3
    kv_cache_tokens: int = 262_144
    copy_bytes: int = 2**30
    training: dict[str, int] = field(default_factory=lambda: {"steps": 20})
    evaluation: dict[str, object] = field(default_factory=lambda: {"tasks": 512, "splits": ["test"], "every": 20})


TINY = Load(
    batches=(1, 4),
    prompt=33,
    new=8,
    rows=4,
    length=32,
    microbatches=(128,),
    repeats=1,
    kv_cache_tokens=4096,
    copy_bytes=2**24,
    training={"steps": 1, "prompts_per_step": 2},
    evaluation={"tasks": 8, "splits": ["test"], "every": 1, "tasks_during": 8},
)


@dataclass(frozen=True)
class Setup:
    """The device and the size of the models that a part uses."""

    device: str
    size: str

    @property
    def load(self) -> Load:
        """Return the work at this size."""
        return TINY if self.size == "tiny" else Load()

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of the weights."""
        return torch.float32 if self.device == "cpu" else torch.bfloat16

    def model(self) -> PreTrainedModel:
        """Build the model with random weights, deterministic on one kind of device."""
        torch.manual_seed(0)
        with torch.device(self.device):
            model = Qwen3ForCausalLM(Qwen3Config(**SHAPES[self.size], attn_implementation="sdpa"))
        model = model.to(self.dtype).eval()
        if self.device != "cpu":  # as `load_model` does
            fuse_norms(model)
        return model

    def prompts(self, count: int, length: int) -> list[tuple[int, ...]]:
        """Return random prompts without shared prefixes."""
        source, vocabulary = torch.Generator().manual_seed(1), int(SHAPES[self.size]["vocab_size"])
        table = torch.randint(vocabulary, (count, length), generator=source)
        table[:, 0] = torch.arange(count)
        return [tuple(row) for row in table.tolist()]


class Stopwatch:
    """Measures the seconds of a `with` block until the device has finished."""

    def __init__(self, device: str) -> None:
        self._device, self.seconds = device, 0.0

    def __enter__(self) -> Stopwatch:
        wait(self._device)
        self._begin = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        wait(self._device)
        self.seconds = time.perf_counter() - self._begin


def conformance(setup: Setup) -> list[Row]:
    """Run each check of the suite; return one row for all checks, and one for each failed check."""
    sys.path.append(str(HERE.parent / "tests"))
    import engine_conformance as suite
    from ludus.config import load_config
    from ludus.engines.embedded.engine import EngineSettings, LocalEngine
    from ludus.engines.models.loading import load_model, load_tokenizer
    from ludus.training.run.session import model_path

    path = model_path(load_config("search"))
    model, tokenizer = load_model(path, device="cpu"), load_tokenizer(path)
    served = load_model(path).to(setup.device)
    engine = LocalEngine(served, tokenizer, EngineSettings(context_tokens=768), copy=False)
    case = suite.Case(engine, model, tokenizer, lambda: engine.stats().decode_tokens)
    failed: list[Row] = []
    with Stopwatch(setup.device) as watch:
        for check in suite.CHECKS:
            try:
                asyncio.run(asyncio.wait_for(check(case), 120))
            except Exception as error:  # boundary: reported, and the other checks run
                failed.append({"check": check.__name__, "error": describe(error)})
    asyncio.run(engine.close())
    if failed:
        raise PartFailed(f"{len(failed)} of {len(suite.CHECKS)} checks failed", failed)
    return [{"checks": len(suite.CHECKS), "failed": 0, "seconds": watch.seconds}]


def engine(setup: Setup) -> list[Row]:
    """Measure decode steps by batch size."""
    return asyncio.run(_engine(setup))


async def _engine(setup: Setup) -> list[Row]:
    from ludus.engines.base import Request
    from ludus.engines.embedded.engine import EngineSettings, LocalEngine
    from ludus.types import SamplingParams

    load, model = setup.load, setup.model()
    bandwidth = bytes_per_second(setup.device, load.copy_bytes)
    longest, most = load.prompt + load.new, max(load.batches)
    pages = most * (longest + 16)
    local = LocalEngine(
        model, settings=EngineSettings(context_tokens=longest, max_batch=most, kv_cache_tokens=pages), copy=False
    )
    prompts, rows = setup.prompts(most, load.prompt), list[Row]()
    for batch in load.batches:

        def requests(new: int, count: int = batch) -> list[Request]:
            params = [SamplingParams(max_new_tokens=new, seed=i) for i in range(count)]
            return [Request(f"e{i}", prompts[i], params[i]) for i in range(count)]

        with Stopwatch(setup.device) as prefill:
            await local.generate_batch(requests(1))
        await local.generate_batch(requests(4))
        local.stats(reset=True)
        with Stopwatch(setup.device) as watch:
            await local.generate_batch(requests(load.new))
        steps = local.stats().steps
        context = batch * (load.prompt + load.new / 2)
        read = weight_bytes(model) + context * token_bytes(model)
        rows.append(
            {
                "model": setup.size,
                "batch": batch,
                "prefill, s": prefill.seconds,
                "decode step, ms": 1e3 * watch.seconds / steps,
                "tokens/s": batch * load.new / watch.seconds,
                "read per step, MB": read / 1e6,
                "copy, GB/s": bandwidth / 1e9,
                "share of the bound": read / bandwidth * steps / watch.seconds,
            }
        )
    await local.close()
    return rows


def learner(setup: Setup) -> list[Row]:
    """Measure optimizer steps over rows of equal length without shared prefixes."""
    from ludus.algorithms.spec.resolve import PRESETS
    from ludus.training.learner.learner import Learner, LearnerSettings
    from ludus.training.learner.logprobs import LogprobScorer
    from ludus.training.learner.optimizer import Optimizer, OptimizerSettings
    from ludus.training.rl.memory_check import longest_rows

    load, model, found = setup.load, setup.model(), list[Row]()
    rows = longest_rows(load.rows, load.length, int(SHAPES[setup.size]["vocab_size"]))
    flops = model_flops(model, load.rows, load.length)
    peak, source = peak_flops(setup)
    for microbatch in load.microbatches:
        optimizer = Optimizer(model, OptimizerSettings(learning_rate=1e-6, total_steps=load.repeats + 1))
        settings = LearnerSettings(microbatch_tokens=microbatch)
        trainer = Learner(LogprobScorer(model), optimizer, PRESETS["grpo"], settings)
        seconds = []
        for step in range(load.repeats + 1):
            with Stopwatch(setup.device) as watch:
                trainer.train(rows, seed=step)
            seconds.append(watch.seconds)
        typical = median(seconds[1:])
        found.append(
            {
                "model": setup.size,
                "rows": load.rows,
                "tokens per row": load.length,
                "tokens per pass": microbatch,
                "step, s": typical,
                "tokens/s": load.rows * load.length / typical,
                "TFLOP/s": flops / typical / 1e12,
                "MFU": flops / typical / peak,
                "of": f"{peak / 1e12:,.3g} TFLOP/s, {source}",
                "peak memory, MB": rollout_work.peak_mb(setup.device),
            }
        )
    return found


def model_flops(model: PreTrainedModel, rows: int, length: int) -> float:
    """Return the FLOPs of forward and backward passes, without recomputation.

    The embedding counts as the tied output layer; a token attends to half of its row on average.
    """
    config = model.config
    weights = sum(p.numel() for p in model.parameters())
    attended = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * length / 2
    return 6.0 * rows * length * (weights + attended)


def peak_flops(setup: Setup) -> tuple[float, str]:
    """Return the listed peak of the card, or the measured speed of a large matrix product, and the source."""
    name = device_name(setup.device)
    for card, peak in PEAKS.items():
        if setup.device != "cpu" and card in name:
            return peak, "listed"
    return 2 * products_per_second(setup.dtype, setup.device), "measured"


def train(setup: Setup) -> list[Row]:
    """Train the recipe `search` on the device."""
    import ludus

    load = setup.load
    with tempfile.TemporaryDirectory() as folder, Stopwatch(setup.device) as watch:
        settings = {"model": {"device": setup.device}, "run": {"dir": f"{folder}/run"}}
        run = ludus.train("search", progress=False, training=load.training, evaluation=load.evaluation, **settings)
        greedy = sorted((e for e in run.evaluations if e.plan.temperature == 0), key=lambda e: e.plan.step)
        rewards = [step["reward/mean"] for step in run.metrics]
    row: Row = {"steps": len(rewards), "seconds": watch.seconds}
    row |= {"reward, first step": rewards[0], "reward, last step": rewards[-1]}
    for name, found in (("before", greedy[0]), ("after", greedy[-1])):
        interval = found.interval
        row[f"success {name} (95 %)"] = f"{found.rate:.3f} ({interval.low:.3f} to {interval.high:.3f})"
    return [row]


def transfer(setup: Setup) -> list[Row]:
    """Send changed weights to the engine and verify them."""
    return asyncio.run(_transfer(setup))


async def _transfer(setup: Setup) -> list[Row]:
    from ludus.engines.embedded.engine import EngineSettings, LocalEngine
    from ludus.engines.models.fingerprint import fingerprint_module
    from ludus.training.rl.weight_sync import WeightSync

    model, probe = setup.model(), setup.prompts(1, 64)[0]
    local = LocalEngine(model, settings=EngineSettings(context_tokens=128, kv_cache_tokens=4096))
    tolerance = 1e-3 if setup.dtype == torch.float32 else COARSE_TOLERANCE
    sync, state = WeightSync(model, local, probe, tolerance), dict(model.named_parameters())
    await sync.publish(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    before = await local.fingerprint()
    with Stopwatch(setup.device) as copied:
        await local.load_weights(2, state)
    with Stopwatch(setup.device) as verified:
        gap = await sync.publish(3)
    with Stopwatch(setup.device) as digested:
        ours = fingerprint_module(model)
    theirs = await local.fingerprint()
    await local.close()
    if not before != ours == theirs:
        raise PartFailed(f"The digests differ: learner {ours}, engine {theirs}, before {before}.")
    return [
        {
            "model": setup.size,
            "weights, MB": weight_bytes(model) / 1e6,
            "copy, s": copied.seconds,
            "copy and verification, s": verified.seconds,
            "one digest, s": digested.seconds,
            "digests": "equal",
            "largest difference on the probe, nats": gap,
        }
    ]


def sleep(setup: Setup) -> list[Row]:
    """Put the engine to sleep and wake it by a request."""
    return asyncio.run(_sleep(setup))


async def _sleep(setup: Setup) -> list[Row]:
    from ludus.engines.base import Request
    from ludus.engines.embedded.engine import EngineSettings, LocalEngine
    from ludus.types import SamplingParams

    load, model = setup.load, setup.model()
    cache = token_bytes(model) * load.kv_cache_tokens
    settings = EngineSettings(context_tokens=load.prompt + load.new, kv_cache_tokens=load.kv_cache_tokens)
    local = LocalEngine(model, settings=settings, copy=False)
    asked = Request("e", setup.prompts(1, load.prompt)[0], SamplingParams(max_new_tokens=load.new, temperature=0.0))
    seconds, tokens = list[float](), list[tuple[int, ...]]()

    async def ask() -> None:
        with Stopwatch(setup.device) as watch:
            tokens.append((await local.generate(asked)).tokens)
        local.release("e")
        seconds.append(watch.seconds)

    await ask()  # loads kernels
    await ask()
    held = free_mb(setup.device)
    with Stopwatch(setup.device) as slept:
        await local.sleep()
    freed = free_mb(setup.device) - held
    await ask()
    await ask()
    await local.close()
    if len(set(tokens)) > 1:
        raise PartFailed("The tokens after sleep differ from those before.")
    names = ("request before, s", "first request after, s", "second request after, s")
    row: Row = {"model": setup.size, "cache, MB": cache / 1e6, "freed, MB": freed, "sleep, s": slept.seconds}
    return [row | dict(zip(names, seconds[1:], strict=True)) | {"tokens": "equal"}]


def free_mb(device: str) -> float:
    """Return the free memory of the GPU as other processes see it; of a CPU, minus the memory of this process."""
    if device == "cpu":
        return -rollout_work.memory_mb()
    return torch.cuda.mem_get_info()[0] / 1e6


class PartFailed(Exception):
    """The result of a part is wrong; `rows` has details."""

    def __init__(self, message: str, rows: Sequence[Row] = ()) -> None:
        super().__init__(message)
        self.rows = list(rows)


PARTS: dict[str, Callable[[Setup], list[Row]]] = {
    "conformance": conformance,
    "engine": engine,
    "learner": learner,
    "train": train,
    "transfer": transfer,
    "sleep": sleep,
}
ONCE = ("conformance", "train")
"""Parts that use the packaged model, so that `--size` matters only for the amount of work."""


@dataclass(frozen=True)
class PartReport:
    """Rows and error of one part over all sizes."""

    name: str
    seconds: float
    rows: list[Row]
    error: str = ""

    def markdown(self) -> str:
        """Return the rows as tables, one for each set of columns."""
        lines = [f"**{self.name}** ({self.seconds:.0f} s)" + (f": failed: {self.error}" if self.error else ""), ""]
        columns: list[str] = []
        for row in self.rows:
            if list(row) != columns:
                columns = list(row)
                lines += [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
            lines.append(f"| {' | '.join(map(cell, row.values()))} |")
        return "\n".join(lines)


def cell(value: float | str) -> str:
    """Return a value as text with three significant digits."""
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if value == round(value) or abs(value) >= 100 else f"{value:.3g}"


def describe(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    return f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}"


def run_part(name: str, setups: Sequence[Setup]) -> PartReport:
    """Run a part at each size; an error ends only the part."""
    rows, error, begin = list[Row](), "", time.perf_counter()
    try:
        for setup in setups[:1] if name in ONCE else setups:
            if setup.device != "cpu":
                torch.cuda.reset_peak_memory_stats()
            rows += PARTS[name](setup)
            gc.collect()
    except Exception as failure:  # boundary: the time on a card is scarce, so the other parts still run
        error = describe(failure)
        rows += failure.rows if isinstance(failure, PartFailed) else []
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return PartReport(name, time.perf_counter() - begin, rows, error)


def device_name(device: str) -> str:
    """Return the name of the card, or of the CPU's architecture."""
    return torch.cuda.get_device_name() if device != "cpu" else f"CPU, {torch.get_num_threads()} threads"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, print the report and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--size", nargs="+", choices=tuple(SHAPES), help="default: 0.5b 1.5b, on a CPU tiny")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=tuple(PARTS))
    parser.add_argument("--json", type=Path, help="write the report to this file after each part")
    parser.add_argument("--page", type=Path, help="insert the report into this page")
    args = parser.parse_args(arguments)
    if args.page:
        check_place(args.page, "gpu")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    setups = [Setup(device, size) for size in args.size or (["tiny"] if device == "cpu" else ["0.5b", "1.5b"])]
    hide_progress()
    head = f"{device_name(device)}, {datetime.datetime.now(datetime.UTC):%Y-%m-%d}, torch {torch.__version__}"
    print(head, flush=True)
    reports: list[PartReport] = []
    for name in args.parts:
        reports.append(run_part(name, setups))
        print(f"\n{reports[-1].markdown()}", flush=True)
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps({"on": head, "parts": [asdict(r) for r in reports]}, indent=1) + "\n")
    if args.page:
        fill(args.page, "gpu", "\n\n".join([f"{head}.", *(report.markdown() for report in reports)]))
    return 1 if any(report.error for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
