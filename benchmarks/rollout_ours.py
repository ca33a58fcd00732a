"""The embedded engine, complete and with one feature off, and the lower bound of its matrix products alone."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

import rollout_work
from ludus.engines.base import Request
from ludus.engines.embedded.engine import EngineSettings, LocalEngine
from ludus.engines.embedded.model_runner import RaggedForward, use_onednn
from ludus.types import SamplingParams
from rollout_hf import load
from rollout_work import Clock, Episode, Work
from rollout_worker import Job, Result, Skipped, finish

FORGETFUL = "ours no-turn-cache"
UNSHARED = "ours no-shared-prefix"
LOCKSTEP = "ours no-continuous-batching"
VARIANT = "ours not-batch-invariant"
WITHOUT_KERNEL = "ours no-kernel"
BY_MKL = "ours no-onednn"
ONE_SHAPE = "ours one-shape"


@dataclass
class Player:
    """Runs episodes on an engine. `forgetful`: release an episode's cache after each turn."""

    engine: LocalEngine
    work: Work
    forgetful: bool = False

    async def play(self, plan: list[Episode]) -> list[list[int]]:
        """Run the episodes independently; return the generated tokens."""
        return list(await asyncio.gather(*(self._episode(i, episode) for i, episode in enumerate(plan))))

    async def record(self, plan: list[Episode]) -> list[tuple[list[int], list[float | None]]]:
        """Run the episodes; return all tokens, and the log-probabilities of sampled tokens (None at others)."""
        return list(await asyncio.gather(*(self._recorded(i, episode) for i, episode in enumerate(plan))))

    async def play_in_lockstep(self, plan: list[Episode]) -> list[list[int]]:
        """Run the episodes turn by turn: no turn begins before all episodes have finished the last one."""
        histories = [episode.prompt for episode in plan]
        generated: list[list[int]] = [[] for _ in plan]
        for turn in range(len(plan[0].lengths)):
            requests = [self._request(i, e, turn, histories[i]) for i, e in enumerate(plan)]
            for i, completion in enumerate(await self.engine.generate_batch(requests)):
                generated[i] += completion.tokens
                histories[i] += completion.tokens + (*plan[i].observations, ())[turn]
        return generated

    async def _episode(self, i: int, episode: Episode) -> list[int]:
        history, generated = episode.prompt, list[int]()
        for turn in range(len(episode.lengths)):
            request = self._request(i, episode, turn, history)
            completion = await self.engine.generate(request)
            generated += completion.tokens
            history += completion.tokens + (*episode.observations, ())[turn]
            if self.forgetful:
                self.engine.release(request.episode)
        self.engine.release(f"e{i}")
        return generated

    async def _recorded(self, i: int, episode: Episode) -> tuple[list[int], list[float | None]]:
        tokens = list(episode.prompt)
        found: list[float | None] = [None] * len(tokens)
        for turn in range(len(episode.lengths)):
            completion = await self.engine.generate(self._request(i, episode, turn, tuple(tokens)))
            seen = (*episode.observations, ())[turn]
            tokens += [*completion.tokens, *seen]
            found += [*completion.logprobs, *(None for _ in seen)]
        self.engine.release(f"e{i}")
        return tokens, found

    def _request(self, i: int, episode: Episode, turn: int, history: tuple[int, ...]) -> Request:
        params = SamplingParams(
            temperature=0.0 if self.work.greedy else 1.0,
            max_new_tokens=episode.lengths[turn],
            seed=(self.work.seed * 1009 + i) * 1009 + turn,
        )
        return Request(f"e{i}", history, params)


def settings(job: Job) -> EngineSettings:
    """Return the default settings with the context length of the workload."""
    return EngineSettings(
        context_tokens=job.work.longest + 1,
        max_batch=max(128, job.work.prompts * job.work.members),
        threads=job.threads,
        batch_invariant=job.system != VARIANT,
    )


def ours(job: Job) -> Result:
    """Run the embedded engine; the suffix after "ours" names the feature that is off."""
    plan = rollout_work.episodes(job.work)
    if job.system == UNSHARED:
        plan = rollout_work.unshareable(plan, job.work)
    return asyncio.run(_ours(job, plan))


async def _ours(job: Job, plan: list[Episode]) -> Result:
    if job.system == BY_MKL:
        torch.backends.mkldnn.enabled = False
    if job.system == ONE_SHAPE:
        RaggedForward.block_for = lambda self, largest: largest  # as on processors whose results depend on the shape
    model = load(job)
    engine = LocalEngine(model, settings=settings(job), copy=False)
    compiled = job.device == "cpu" and job.dtype == "float32"
    if engine.batch_invariant != (compiled and job.system not in (VARIANT, WITHOUT_KERNEL)):
        raise Skipped("the compiled kernel is unavailable, or cannot be disabled")
    player = Player(engine, job.work, forgetful=job.system == FORGETFUL)
    await engine.generate(Request("warm", tuple(range(20)), SamplingParams(max_new_tokens=2)))
    engine.release("warm")
    engine.stats(reset=True)
    loaded_mb = rollout_work.memory_mb(job.device)
    clock = Clock()
    if job.system == LOCKSTEP:
        generated = await player.play_in_lockstep(plan)
    else:
        generated = await player.play(plan)
    result = finish(job, clock, loaded_mb, generated)
    stats = engine.stats()
    await engine.close()
    steps_s = stats.schedule_s + stats.model_s + stats.sample_s
    note = (
        f"{stats.steps} steps of {stats.batch_tokens / stats.steps:.0f} tokens; "
        f"model {stats.model_s:.2f} s, sampling {stats.sample_s:.2f} s, scheduling {stats.schedule_s:.2f} s"
    )
    if job.device != "cpu":
        share = read_s(model, plan, stats.steps) / steps_s
        note += f"; reading weights, keys and values for decoding takes {share:.0%} of it"
    cached = stats.cached_tokens
    return replace(result, cached_tokens=cached, scheduling=stats.schedule_s / steps_s, note=note)


def read_s(model: PreTrainedModel, plan: list[Episode], steps: int) -> float:
    """Return a lower bound of the decoding time: the memory reads of decoding at the bandwidth of a large copy.

    Each step reads all weights; each generated token reads the keys and values of all tokens before it.
    """
    read = steps * weight_bytes(model) + rollout_work.num_context(plan) * token_bytes(model)
    return read / bytes_per_second(model.device.type)


def weight_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of all weights; tied ones count once."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def token_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of one token's keys and values in all layers."""
    config = model.config
    width = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * width * model.dtype.itemsize)


def bytes_per_second(device: str, num_bytes: int = 2**30) -> float:
    """Return the bytes per second read and written by a copy of a large tensor, the best of several."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target, best = torch.empty_like(source), 0.0
    for _ in range(8):
        wait(device)
        begin = time.perf_counter()
        target.copy_(source)
        wait(device)
        best = max(best, 2 * num_bytes / (time.perf_counter() - begin))
    return best


def wait(device: str) -> None:
    """Wait until the device has finished."""
    if device != "cpu":
        torch.cuda.synchronize()


def floor(job: Job) -> Result:
    """Run only the linear layers, on as many rows as the engine's passes have."""
    model = load(job)
    sizes = asyncio.run(_pass_sizes(job, model))
    model = load(job)
    use_onednn(model)
    layers, head = _linear_layers(model)
    shapes = {(rows, layer.in_features) for rows, _ in sizes for layer in layers}
    shapes |= {(kept, head.in_features) for _, kept in sizes}
    inputs = {shape: torch.randn(*shape, dtype=model.dtype, device=job.device) for shape in shapes}
    _multiply(sizes[:2], layers, head, inputs)
    wait(job.device)
    loaded_mb = rollout_work.memory_mb(job.device)
    clock = Clock()
    _multiply(sizes, layers, head, inputs)
    wait(job.device)
    result = finish(job, clock, loaded_mb, [])
    products = sum(rows * sum(la.weight.numel() for la in layers) + kept * head.weight.numel() for rows, kept in sizes)
    speed = products_per_second(model.dtype, job.device)
    note = f"computed: {2e-9 * products:.0f} GFLOP, {products / speed:.2f} s at {2e-9 * speed:.0f} GFLOP/s"
    tokens = rollout_work.num_generated(rollout_work.episodes(job.work))
    return replace(result, tokens=tokens, digest="", note=note)


async def _pass_sizes(job: Job, model: PreTrainedModel) -> list[tuple[int, int]]:
    """Return the rows of each pass of the engine and the rows of its logits, padding included."""
    engine = LocalEngine(model, settings=settings(job), copy=False)
    sizes: list[tuple[int, int]] = []

    def note(_: object, __: object, inputs: dict[str, torch.Tensor]) -> None:
        sizes.append((inputs["input_ids"].shape[1], len(inputs["logits_to_keep"])))

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    await Player(engine, job.work).play(rollout_work.episodes(job.work))
    hook.remove()
    await engine.close()
    return sizes


def _linear_layers(model: PreTrainedModel) -> tuple[list[torch.nn.Linear], torch.nn.Linear]:
    head = model.get_output_embeddings()
    return [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head], head


@torch.inference_mode()
def _multiply(
    sizes: list[tuple[int, int]],
    layers: list[torch.nn.Linear],
    head: torch.nn.Linear,
    inputs: dict[tuple[int, int], torch.Tensor],
) -> None:
    for rows, kept in sizes:
        for layer in layers:
            layer(inputs[rows, layer.in_features])
        head(inputs[kept, head.in_features])


@torch.inference_mode()
def products_per_second(dtype: torch.dtype, device: str) -> float:
    """Return the multiply-adds per second of a large matrix product, the best of several."""
    size = 1024 if device == "cpu" else 8192
    left, right = (torch.randn(size, size).to(device, dtype) for _ in range(2))
    best = 0.0
    for _ in range(8):
        wait(device)
        begin = time.perf_counter()
        left @ right
        wait(device)
        best = max(best, size**3 / (time.perf_counter() - begin))
    return best
