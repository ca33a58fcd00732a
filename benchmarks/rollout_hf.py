"""Rollouts with transformers: `generate` on the padded batch at every turn, and its continuous batching."""

from __future__ import annotations

import torch
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

import rollout_work
from rollout_work import Clock, Episode
from rollout_worker import Job, Result, Skipped, finish


def load(job: Job) -> PreTrainedModel:
    """Return the model without an end-of-text token: the workload sets the number of generated tokens."""
    torch.set_num_threads(job.threads)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[job.dtype]
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype, attn_implementation="sdpa")
    model.to(job.device)
    model.generation_config = GenerationConfig(pad_token_id=0)
    model.config.eos_token_id = None
    return model.eval()


def sampling(job: Job) -> dict[str, object]:
    """Return the sampling arguments: greedy, or temperature 1."""
    return {"do_sample": False} if job.work.greedy else {"do_sample": True, "top_k": 0, "temperature": 1.0}


class Lengths(StoppingCriteria):
    """Stop each row after its number of tokens, and the batch after the longest."""

    def __init__(self, width: int, lengths: list[int]) -> None:
        self._lengths = torch.tensor(lengths) + width

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        return input_ids.shape[1] >= self._lengths.to(input_ids.device)


def generate_padded(
    model: PreTrainedModel, histories: list[list[int]], lengths: list[int], how: dict[str, object]
) -> list[list[int]]:
    """Run one turn the naive way: pad on the left, prefill the whole batch, decode until the longest row ends."""
    width = max(map(len, histories))
    ids = torch.tensor([[0] * (width - len(h)) + h for h in histories], device=model.device)
    mask = torch.tensor([[0] * (width - len(h)) + [1] * len(h) for h in histories], device=model.device)
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=max(lengths),
        stopping_criteria=StoppingCriteriaList([Lengths(width, lengths)]),
        **how,
    )
    return [row[width : width + n].tolist() for row, n in zip(out, lengths, strict=True)]


def play_naive(
    model: PreTrainedModel, plan: list[Episode], how: dict[str, object], budget_s: float = float("inf")
) -> list[list[int]]:
    """Run all episodes turn by turn; no turn begins after the time limit."""
    histories = [list(episode.prompt) for episode in plan]
    generated: list[list[int]] = [[] for _ in plan]
    clock = Clock()
    for turn in range(len(plan[0].lengths)):
        if clock.wall_s > budget_s:
            break
        new = generate_padded(model, histories, [episode.lengths[turn] for episode in plan], how)
        for i, (episode, tokens) in enumerate(zip(plan, new, strict=True)):
            generated[i] += tokens
            histories[i] += tokens
            if turn < len(episode.observations):
                histories[i] += episode.observations[turn]
    return generated


@torch.inference_mode()
def naive(job: Job) -> Result:
    """Run the workload with `generate` at every turn."""
    model, plan, how = load(job), rollout_work.episodes(job.work), sampling(job)
    torch.manual_seed(job.work.seed)
    generate_padded(model, [list(plan[0].prompt)], [2], how)
    loaded_mb = rollout_work.memory_mb(job.device)
    clock = Clock()
    return finish(job, clock, loaded_mb, play_naive(model, plan, how))


@torch.inference_mode()
def continuous(job: Job) -> Result:
    """Run the workload with transformers' continuous batching: episodes are independent, prefix blocks are shared."""
    model, plan = load(job), rollout_work.episodes(job.work)
    num_tokens = sum(episode.num_tokens + 32 for episode in plan)
    config = ContinuousBatchingConfig(
        page_size=16, num_blocks=num_tokens // 16, max_batch_tokens=512, seed=job.work.seed
    )
    how = GenerationConfig(pad_token_id=0, eos_token_id=-1, max_new_tokens=8, **sampling(job))
    try:
        manager = model.init_continuous_batching(generation_config=how, continuous_batching_config=config)
        manager.start()
        loaded_mb = rollout_work.memory_mb(job.device)
        clock = Clock()
        generated = _play_continuous(manager, plan)
        result = finish(job, clock, loaded_mb, generated)
        manager.stop(block=True, timeout=30)
    except (RuntimeError, ValueError, TypeError, ImportError, AttributeError, IndexError) as error:
        raise Skipped(f"{type(error).__name__}: {error}") from error
    return result


def _play_continuous(manager: object, plan: list[Episode]) -> list[list[int]]:
    histories = [list(episode.prompt) for episode in plan]
    generated: list[list[int]] = [[] for _ in plan]
    turns = [0] * len(plan)

    def ask(i: int) -> None:
        manager.add_request(
            histories[i], request_id=f"{i}-{turns[i]}", max_new_tokens=plan[i].lengths[turns[i]], eos_token_id=-1
        )

    for i in range(len(plan)):
        ask(i)
    running, last = len(plan), Clock()
    while running:
        output = manager.get_result(timeout=1.0)
        if output is None:
            if last.wall_s > 120 or not manager.is_running():
                raise RuntimeError("it stopped answering")
            continue
        if output.error:
            raise RuntimeError(output.error)
        last = Clock()
        i = int(output.request_id.split("-")[0])
        generated[i] += output.generated_tokens
        histories[i] += output.generated_tokens
        turns[i] += 1
        if turns[i] == len(plan[i].lengths):
            running -= 1
            continue
        histories[i] += plan[i].observations[turns[i] - 1]
        ask(i)
    return generated
