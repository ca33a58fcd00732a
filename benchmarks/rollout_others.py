"""Other systems, each in a separate environment: TRL's trainer with its tool loop, and vLLM on the CPU."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version

import torch

import rollout_work
from rollout_work import Clock, Episode
from rollout_worker import Job, Result, Skipped, finish

END = 1
"""Token id that ends a turn for TRL: forced at the length of the turn, never sampled before."""


class _Ends:
    """A logits processor: the `lengths[i]`-th token of row `i`, and no earlier one, is `END`."""

    def __init__(self, width: int, lengths: list[int]) -> None:
        self._last = torch.tensor(lengths) + width - 1

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, END] = -torch.inf
        over = input_ids.shape[1] >= self._last
        scores[over] = -torch.inf
        scores[over, END] = 0.0
        return scores


def trl(job: Job) -> Result:
    """Run `_generate_single_turn` and `_tool_call_loop` of TRL's `GRPOTrainer`, with generation by transformers.

    Parsing and rendering of text are replaced: each completion parses to one call, and the token ids of the
    tool message are the workload's observation.
    """
    if job.device != "cpu":
        raise Skipped("compared on the CPU only")
    torch.set_num_threads(job.threads)
    plan = rollout_work.episodes(job.work)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(job, plan, folder, lambda completions, **_: [0.0] * len(completions))
        feed_lengths(trainer, plan)
        loaded_mb = rollout_work.memory_mb()
        clock = Clock()
        played = play_trl(trainer, plan)
        both = zip(played["completion_ids"], played["env_mask"], strict=True)
        generated = [[t for t, m in zip(row, keep, strict=True) if m] for row, keep in both]
        result = finish(job, clock, loaded_mb, generated)
    return replace(result, note=f"TRL {version('trl')}, transformers {version('transformers')}")


def make_trainer(  # noqa: ANN201 (a type of the other environment)
    job: Job, plan: list[Episode], folder: str, rewards: Callable[..., list[float]], max_steps: int = 1
):
    """Return a `GRPOTrainer` whose batch is the whole plan; `train()` takes `max_steps` steps."""
    import datasets
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    words = {"<pad>": 0, "<end>": END} | {f"t{i}": i for i in range(2, job.work.vocab)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")), pad_token="<pad>", eos_token="<end>"
    )
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    config = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=len(plan),
        num_generations=job.work.members,
        max_completion_length=job.work.longest,
        temperature=1.0,
        seed=job.work.seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        max_steps=max_steps,
        learning_rate=1e-6,
        save_strategy="no",
        disable_tqdm=True,
    )
    rows = datasets.Dataset.from_dict({"prompt": ["t20"] * len(plan) * max_steps})
    return GRPOTrainer(model=model, args=config, processing_class=tokenizer, reward_funcs=[rewards], train_dataset=rows)


def feed_lengths(trainer, plan: list[Episode]) -> None:  # noqa: ANN001
    """Patch the trainer so that each call of `generate` ends its rows at the lengths of the workload."""
    from transformers import LogitsProcessorList

    plain, turns = trainer.model.generate, itertools.count()

    def generate(input_ids: torch.Tensor, **options: object) -> torch.Tensor:
        turn = next(turns) % len(plan[0].lengths)
        lengths = [episode.lengths[turn] for episode in plan]
        ends = LogitsProcessorList([_Ends(input_ids.shape[1], lengths)])
        return plain(input_ids=input_ids, logits_processor=ends, **options)

    trainer.model.generate = generate


def play_trl(trainer, plan: list[Episode]) -> dict[str, list[list[float]]]:  # noqa: ANN001
    """Run all episodes with the trainer's methods; return them in the format of its `rollout_func`.

    `env_mask` is 1 on sampled tokens.
    """
    from trl.trainer import grpo_trainer

    turns = len(plan[0].lengths)

    def parse_response(*_: object, **__: object) -> dict[str, object]:
        call = {"type": "function", "function": {"name": "look", "arguments": {}}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    asked = itertools.count()

    def suffix_ids(_: object) -> list[int]:
        turn, i = divmod(next(asked), len(plan))
        return list(plan[i].observations[turn])

    grpo_trainer.parse_response = parse_response
    trainer._get_tool_suffix_ids = suffix_ids
    trainer.max_tool_calling_iterations = turns - 1
    trainer._sync_tool_dicts = [{"look": lambda: "seen"}] * len(plan)
    trainer._async_tool_dicts = [{}] * len(plan)
    trainer.tools = []
    prompt_ids = [list(episode.prompt) for episode in plan]
    completion_ids, logprobs = trainer._generate_single_turn(prompt_ids, None, {}, trainer.num_generations)
    if turns == 1:
        mask = [[1] * len(row) for row in completion_ids]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs, "env_mask": mask}
    completions = [[parse_response()] for _ in plan]
    prompts = [[{"role": "user", "content": ""}] for _ in plan]
    mask, _, ids, logprobs, *_ = trainer._tool_call_loop(
        prompts, prompt_ids, completion_ids, completions, logprobs, None, {}
    )
    return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": logprobs, "env_mask": mask}


def vllm(job: Job) -> Result:
    """Run the workload with vLLM's engine in this process: independent requests, prefix caching on."""
    if job.device != "cpu":
        raise Skipped("compared on the CPU only")
    return asyncio.run(_vllm(job))


async def _vllm(job: Job) -> Result:
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    plan = rollout_work.episodes(job.work)
    arguments = AsyncEngineArgs(
        model=job.model,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
        max_model_len=job.work.longest + 1,
        max_num_seqs=len(plan),
        seed=job.work.seed,
    )
    engine = AsyncLLM.from_engine_args(arguments)

    async def ask(name: str, history: list[int], length: int) -> list[int]:
        params = SamplingParams(
            temperature=0.0 if job.work.greedy else 1.0,
            max_tokens=length,
            min_tokens=length,
            ignore_eos=True,
            logprobs=0,  # no per-request seed: with many such requests the CPU build fails
            detokenize=False,
        )
        tokens: list[int] = []
        async for output in engine.generate({"prompt_token_ids": history}, params, name):
            tokens = list(output.outputs[0].token_ids)
        return tokens

    async def play(i: int, episode: Episode) -> list[int]:
        history, generated = list(episode.prompt), []
        for turn, length in enumerate(episode.lengths):
            new = await ask(f"{i}-{turn}", history, length)
            generated += new
            history += [*new, *(*episode.observations, ())[turn]]
        return generated

    await ask("warm", list(range(20, 40)), 2)
    loaded_mb = rollout_work.memory_mb()
    clock = Clock()
    generated = await asyncio.gather(*(play(i, episode) for i, episode in enumerate(plan)))
    result = finish(job, clock, loaded_mb, list(generated))
    engine.shutdown()
    return replace(result, note=f"vLLM {version('vllm')}; the memory of its engine process is not counted")
