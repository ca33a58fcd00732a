"""Every setting of a run, with its default, its unit and its bounds.

A setting that is not here does not exist: an unknown key is an error that names the nearest one. Bad
combinations are refused here, before anything is loaded. `None` always means what the field's docstring
says it means.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from ludus.config.cluster import ClusterConfig
from ludus.config.mixture import MemberConfig, budget_fault, mixture_fault
from ludus.config.rewards import RewardModelConfig, RewardsConfig
from ludus.config.sandbox import SandboxConfig
from ludus.config.section import OptimiserSection, Section, Why
from ludus.config.staleness import StalenessConfig


class LoraConfig(Section):
    """Low-rank adapters (needs the `lora` extra); the base weights stay frozen."""

    rank: int = Field(16, ge=1)
    """Size of the low-rank update of each layer."""
    alpha: float = Field(32.0, gt=0)
    """The update is scaled by alpha / rank."""
    target_modules: list[str] | Literal["all-linear"] = "all-linear"
    """Which linear layers carry an adapter, by name."""


class ScratchConfig(Section):
    """The shape of the small model that is made on the spot when no checkpoint is given."""

    vocab_size: Annotated[int, Why("every byte and the special tokens need an entry")] = Field(2048, ge=300)
    """Tokens of the tokenizer that is trained for it, at most."""
    hidden_size: int = Field(128, ge=8)
    """Width of the residual stream."""
    intermediate_size: int = Field(384, ge=8)
    """Width inside the feed-forward layers."""
    num_layers: int = Field(4, ge=1)
    """Transformer blocks."""
    num_heads: int = Field(4, ge=1)
    """Attention heads; they divide hidden_size."""
    num_kv_heads: int = Field(4, ge=1)
    """Heads of keys and values; they divide num_heads."""
    context_tokens: int = Field(1024, ge=64)
    """Longest sequence that the model takes."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"model.scratch.hidden_size ({self.hidden_size}) must be a multiple of "
                f"model.scratch.num_heads ({self.num_heads})"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.scratch.num_heads ({self.num_heads}) must be a multiple of "
                f"model.scratch.num_kv_heads ({self.num_kv_heads})"
            )
        return self


class ModelConfig(Section):
    """The policy."""

    path: str | None = None
    """A checkpoint folder or model name. None is the recipe's own cold start, shipped in the package."""
    from_scratch: bool = False
    """Make tokenizer and model and run the cold start first, instead of loading a checkpoint."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Number format of the weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where model and engine run; `auto` takes the GPU where there is one."""
    lora: LoraConfig | None = None
    """Train low-rank adapters of this shape; none trains all weights."""
    master_weights: bool = True
    """With bfloat16 weights the optimiser keeps a float32 copy and moves that; off, small updates vanish."""
    activation_checkpointing: bool = False
    """Compute each layer's inner states again in the backward pass: less memory, a third more work."""
    scratch: ScratchConfig = ScratchConfig()

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if self.from_scratch and self.path is not None:
            raise ValueError(
                f'model.path ("{self.path}") and model.from_scratch (true) exclude each other: '
                "the model is either loaded or made"
            )
        return self


class EnvConfig(Section):
    """The world that the model acts in."""

    name: str = "search"
    """A registered world, `path/to/file.py` whose module registers one, or `mixture` for those of
    `env.mixture`."""
    rendering: Literal["chat", "tags", "code"] = "chat"
    """`chat`: the model's chat template with tool calls. Without a template: `tags`, the text protocol of
    Search-R1, for a world with a tool `search`, or `code`, that of ReTool, for one with a tool `python`."""
    tool_parser: Literal["auto", "hermes", "llama3", "pythonic"] = "auto"
    """How tool calls are written in `chat`; `auto` reads it off the chat template."""
    settings: dict[str, Any] = Field({})
    """The world's own settings; it checks them against its own schema."""
    check: bool = True
    """Before training, let scripted cheats play a few tasks, and refuse to train where one is paid."""
    mixture: dict[str, MemberConfig] = Field({})
    """Worlds that the run trains on together, by name, each with its weight and its own settings."""

    @model_validator(mode="after")
    def _one_world_or_several(self) -> Self:
        if fault := mixture_fault(self.name, self.settings, self.mixture):
            raise ValueError(fault)
        return self


class RolloutConfig(Section):
    """How episodes are sampled, and their limits."""

    temperature: float = Field(1.0, ge=0)
    """Of sampling during training; 0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the likeliest tokens that make up this share; 1 cuts nothing."""
    top_k: int = Field(0, ge=0)
    """Sample from this many likeliest tokens; 0 cuts nothing."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Sample from tokens with at least this share of the likeliest one's probability; 0 cuts nothing."""
    guided_tools: bool = False
    """Sample only calls that can be executed. That changes the distribution, and training does not correct
    it. Needs the `guided` extra and a template with calls in Hermes' format."""
    max_turns: int = Field(6, ge=1)
    """Assistant turns of one episode."""
    max_new_tokens: int = Field(64, ge=1)
    """Tokens of one action."""
    max_tokens: int = Field(768, ge=16)
    """Tokens of a whole trajectory, prompt and observations included."""
    max_tool_errors: int = Field(3, ge=1)
    """Tool errors or malformed calls in a row that end an episode."""
    max_tool_output: int = Field(2000, ge=16)
    """Characters of one tool's output that the model sees; head and tail are kept."""
    tool_timeout_s: float = Field(20.0, gt=0)
    """Bound on a call of a tool that names none: instant tools have a quarter, slow ones thrice."""
    environment_timeout_s: float = Field(120.0, gt=0)
    """Bound on one start, step or close of an environment; longer counts as its failure. Waiting for a place
    of the sandbox does not count, here and in the bounds of tools."""
    reward_timeout_s: float = Field(120.0, gt=0)
    """Bound on computing the rewards of one episode; longer counts as an infrastructure failure."""
    reward_processes: int = Field(1, ge=0)
    """Processes that do nothing but compute rewards, each those of one episode at a time. 0: a thread of this
    process does."""
    episode_timeout_s: float | None = Field(None, gt=0)
    """Wall-clock limit of one episode; None is no limit. One that fires ends reproducibility, aloud."""
    concurrency: int = Field(128, ge=1)
    """Episodes in flight at once."""
    retries: int = Field(2, ge=0)
    """Fresh attempts after an infrastructure failure (never after a failure of the model)."""
    max_failure_rate: float = Field(0.2, ge=0, le=1)
    """Share of episodes of one step that may fail for good before the run stops."""
    reproducible: bool = True
    """The same settings give the same tokens again, bit for bit. Where an engine rounds otherwise in other
    company (docs/reproducibility.md), turns go in lock-step for it, and a slow tool holds all episodes up.
    An asynchronous run keeps no order."""


class EngineConfig(Section):
    """Where tokens are sampled: in this process, or by a server over HTTP."""

    url: str | None = None
    """Address of an inference server that samples; several replicas are separated by commas. None samples in
    this process."""
    dialect: Literal["vllm", "sglang"] = "vllm"
    """What the server speaks; `ludus serve` speaks as vLLM does."""
    timeout_s: float = Field(600.0, gt=0)
    """Deadline of one action, and of one transfer of weights to one replica."""
    patience_s: float = Field(60.0, ge=0)
    """How long a server that cannot be reached is asked again before that counts as a failure."""
    weights_folder: str | None = None
    """Where new weights are written; the server must see the same path. None takes a temporary folder, in
    shared memory where there is room."""
    broadcast_host: str | None = None
    """An address of this machine that its servers reach: `ludus serve`, and vLLM with the extension of its
    worker (docs/server.md), have new weights from here over a line of gloo, without a file. None writes them
    to the folder."""
    give_up_cache: bool = False
    """Give the memory of the embedded engine's cache back while the learner works: for both on one device."""
    cache_tokens: int | None = Field(None, ge=1)
    """Tokens whose keys and values an embedded engine keeps, those of all that runs included; one request of
    the longest always fits. None has room for all episodes at once: rollout.concurrency * (rollout.max_tokens
    + 16)."""
    max_requests: int = Field(0, ge=0)
    """Requests that an embedded engine has under way and waiting; more are put off, and asked again when some
    are done. 0 is no limit."""
    delta: bool = False
    """Over that line, send only what changed since the last weights; keeps a copy of these."""

    @model_validator(mode="after")
    def _has_a_line(self) -> Self:
        if self.delta and self.broadcast_host is None:
            raise ValueError("engine.delta needs engine.broadcast_host")
        return self


class PartOptions(Section):
    """Numbers and words that one part of an algorithm has to itself; `ludus algorithms` lists them."""

    advantage: dict[str, float | str] = Field({})
    """Of the advantage, such as turn_grpo's outcome_weight."""
    loss: dict[str, float | str] = Field({})
    """Of the loss, such as sapo's tau_neg."""
    correction: dict[str, float | str] = Field({})
    """Of the correction, such as icepop's low and high."""
    kl: dict[str, float | str] = Field({})
    """Of the KL term: granularity."""
    terms: dict[str, float | str] = Field({})
    """Coefficients of terms beside the policy loss: echo, positive_nll."""


class AlgorithmParts(Section):
    """A preset by name, and its parts with their bounds; None keeps the preset's value."""

    preset: str = "grpo"
    """The algorithm that the other settings start from; `ludus algorithms` lists them."""
    group_size: int = Field(8, ge=1)
    """Trajectories per task (G); at least 2 where the attempts of a group are compared."""
    advantage: str | None = None
    """How rewards become advantages; none keeps the preset's."""
    loss: str | None = None
    """The loss per token; none keeps the preset's."""
    aggregation: str | None = None
    """How the losses of tokens become one number; none keeps the preset's."""
    eps_low: float | None = Field(None, ge=0)
    """The ratio is clipped below 1 - eps_low; none keeps the preset's."""
    eps_high: float | None = Field(None, ge=0)
    """The ratio is clipped above 1 + eps_high; none keeps the preset's."""
    dual_clip: float | None = Field(None, gt=1)
    """Bound on the loss of a token with a negative advantage, in multiples of it; none keeps the preset's."""
    kl: str | None = None
    """Estimator: k1, k2, k3, abs, k3_k2grad, full_reverse, full_forward; none keeps the preset's."""
    kl_coef: float | None = Field(None, ge=0)
    """Weight of the KL term, 0 for no term; none keeps the preset's."""
    kl_placement: Literal["loss", "reward", "advantage"] | None = None
    """Where the KL term goes: into the loss, or detached into the reward or the advantage; none keeps the
    preset's."""
    correction: str | None = Field(None, examples=["none", "tis"])
    """Off-policy correction between engine and learner: tis, icepop, decoupled, reject_sequence, or "none",
    which is no correction. Left out, it is the preset's."""
    tis_cap: float | None = Field(None, gt=0)
    """Largest importance weight between engine and learner (with tis); none keeps the preset's."""


class AlgorithmConfig(AlgorithmParts):
    """A preset by name and what to change in it; None keeps the preset's value."""

    zero_variance: bool | None = None
    """Drop groups whose rewards are all equal; none keeps the preset's."""
    resample_rounds: int | None = Field(None, ge=0)
    """Further rounds of sampling to replace dropped groups; none keeps the preset's."""
    variance_top: float | None = Field(None, gt=0, le=1)
    """Share of a step's groups that train, those whose rewards deviate most, 1 for all; none keeps the
    preset's."""
    greso: bool | None = None
    """Skip tasks whose last groups had equal rewards, before they are played; none keeps the preset's."""
    overlong_mask: bool | None = None
    """Truncated trajectories do not train; none keeps the preset's."""
    std_ddof: Literal[0, 1] | None = None
    """Divisor n - std_ddof of the standard deviation in a group; none keeps the preset's."""
    entropy_coef: float | None = Field(None, ge=0)
    """Weight of the entropy bonus, 0 for no bonus; none keeps the preset's."""
    overlong_cache: float | None = Field(None, ge=0, le=1)
    """Soft overlong punishment: the reward falls by up to 1 over this last share of the action tokens that an
    episode may have, 0 for no punishment; none keeps the preset's."""
    options: PartOptions = PartOptions()


class KlControlConfig(Section):
    """How algorithm.kl_coef changes over a run, and when the KL pauses it; None is what each field says."""

    kind: Literal["constant", "linear", "cosine", "adaptive", "pid"] = "constant"
    """linear and cosine go from algorithm.kl_coef to `end`; adaptive and pid hold the KL at `target`."""
    end: float | None = Field(None, ge=0)
    """Of linear and cosine: the last coefficient; none is 0."""
    steps: int | None = Field(None, ge=1)
    """Of linear and cosine: training steps until `end`; none is training.steps."""
    target: float | None = Field(None, gt=0)
    """Of adaptive and pid, which need it: the KL to hold, nats per token; none is for the other kinds."""
    horizon: float | None = Field(None, gt=0)
    """Of adaptive: trajectories in which the coefficient changes by a fifth at most; none is 10000."""
    kp: float | None = Field(None, ge=0)
    """Of pid: gain on the error; none is 0."""
    ki: float | None = Field(None, ge=0)
    """Of pid: gain on the sum of errors; none is 0."""
    kd: float | None = Field(None, ge=0)
    """Of pid: gain on the change of the error; none is 0."""
    most: float | None = Field(None, gt=0)
    """Of pid: the largest coefficient; none is 1."""
    guard_factor: float = Field(0.0, ge=0)
    """A step whose KL exceeds this many times the expected one pauses the run (2 is usual); 0 is no guard."""
    guard_expected: float | None = Field(None, gt=0)
    """The KL that the guard expects, nats per token; none follows the run."""
    guard_decay: float | None = Field(None, ge=0, lt=1)
    """How slowly the expected KL follows the run; none is 0.9."""


class TeacherConfig(Section):
    """The teacher of on-policy distillation (the preset distill)."""

    path: str | None = None
    """A model folder or name with the policy's tokenizer; none is no teacher."""


class ExpertsConfig(Section):
    """Expert trajectories that join the groups of their tasks (the preset mixed_policy)."""

    path: str | None = None
    """A file of dialogues that name their task; none asks the world to show the task."""
    per_group: int = Field(1, ge=1)
    """Most experts of one task; they come on top of algorithm.group_size."""


class LearnerConfig(Section):
    """How the learner works through a batch: what it computes again, and what that takes."""

    old_logprobs: Literal["recomputed", "engine"] = "recomputed"
    """The log-probabilities that ratios divide by: computed by the learner, or as the engine recorded them,
    where both agree to 1e-3 nats; that saves a pass in steps of several updates."""
    replay_routing: bool = False
    """Mixtures of experts: record which experts each token takes at the start of a step of several updates,
    and keep to them in all of its passes."""
    dry_run: Literal["auto", "always", "never"] = "auto"
    """Try the longest microbatch before step 1 and report the memory it takes; `auto` does so on a GPU."""
    halve_on_oom: bool = True
    """Where memory runs out, do the update again with half of training.microbatch_tokens, and go on so."""
    ranks: int = Field(1, ge=1)
    """Processes of the learner on this machine, a GPU each; under torchrun its number counts instead."""
    shard: bool = False
    """Split weights, gradients and moments between the processes (FSDP2); otherwise each holds all."""
    rank_timeout_s: float = Field(600.0, gt=0)
    """Several processes: the longest that one waits for another, while they meet, load or work together; then
    the run stops, and names one that is stopped or gone."""

    @model_validator(mode="after")
    def _for_one_process(self) -> Self:
        if self.ranks > 1 and self.replay_routing:
            raise ValueError(
                "training.learner.replay_routing needs one process, and "
                f"training.learner.ranks is {self.ranks}"
            )
        return self


class TrainingConfig(OptimiserSection):
    """Training and its loop."""

    mode: Literal["sync", "one_step", "async"] = "sync"
    """`sync`: sample, then learn, bit for bit repeatable. `one_step`: sample the next batch while learning on
    this one. `async`: episodes stream, and the learner takes a batch when one is ready."""
    steps: int = Field(40, ge=1)
    """Steps of the whole run: each samples, learns and sends the weights."""
    tasks_per_step: int = Field(12, ge=1)
    """Tasks of one step; each is played algorithm.group_size times."""
    epochs: int = Field(1, ge=1)
    """Passes over one batch of rollouts."""
    minibatches: int = Field(1, ge=1)
    """Optimiser steps in one pass."""
    microbatch_tokens: int = Field(4096, ge=1)
    """Padded tokens per forward pass; the gradient does not depend on it."""
    mask_observations: bool = True
    """False trains on tool output as if the model had written it: for comparison only; it warns."""
    report_kl: bool = True
    """Score each batch under the initial policy to report the KL, also where no KL term is used."""
    checkpoint_every: int = Field(10, ge=1)
    """Steps between checkpoints."""
    keep_checkpoints: int = Field(2, ge=1)
    """The newest ones that are kept."""
    sync_tolerance: float = Field(1e-3, gt=0)
    """Largest difference of probe log-probabilities between learner and engine after an update."""
    sync_timeout_s: float = Field(300.0, gt=0)
    """Seconds that new weights may take to the engine, with its answer to the probe; then the run stops."""
    learner: LearnerConfig = LearnerConfig()


class PrimeConfig(Section):
    """The process reward model of prime."""

    learning_rate: float = Field(3e-4, gt=0)
    """Of its own AdamW."""
    epochs: int = Field(1, ge=1)
    """Passes over the rollouts of one step."""


class CriticConfig(Section):
    """The critic of the algorithms that have one (ppo and its kin, starpo, coderl)."""

    model: Literal["separate", "head"] = "separate"
    """`separate`: a copy of the policy's body that learns with its head. `head`: a head alone, on the states
    of the policy itself; it needs no second model, and its loss does not move the policy."""
    learning_rate: float = Field(1e-3, gt=0)
    """Of its own AdamW."""
    epochs: int = Field(1, ge=1)
    """Passes over the rollouts of one step."""
    clip: float = Field(0.2, ge=0)
    """How far a value may move in one step; 0 is not bounded. Not of coderl, whose critic has no values."""
    warmup_steps: int | None = Field(None, ge=0)
    """First steps in which the critic alone learns. None is 0, and a tenth of training.steps for vapo."""
    prime: PrimeConfig = PrimeConfig()
    """Of the algorithm prime, which has it in the place of a critic."""


class SftConfig(OptimiserSection):
    """Supervised fine-tuning on demonstrations."""

    steps: int = Field(2000, ge=1)
    """Optimiser steps of the fine-tuning or cold start."""
    batch_size: int = Field(48, ge=1)
    """Dialogues per optimiser step."""
    microbatch_tokens: int = Field(16384, ge=1)
    """Padded tokens per forward pass; the gradient does not depend on it."""
    learning_rate: float = Field(2e-3, gt=0)
    """Of AdamW, after the warm-up."""
    warmup_steps: int = Field(50, ge=0)
    """Optimiser steps in which the learning rate rises from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """How the learning rate goes on after the warm-up."""
    weight_decay: float = Field(0.01, ge=0)
    """Of AdamW."""
    beta2: float = Field(0.98, ge=0, lt=1)
    """Of AdamW: decay of the mean of squared gradients."""
    checkpoint_every: int = Field(250, ge=1)
    """Steps between checkpoints."""
    keep_checkpoints: int = Field(1, ge=1)
    """The newest ones that are kept."""
    dialogues: str | None = None
    """A JSON-lines file of dialogues (`{"messages": [...]}`); None uses the world's own demonstrations."""


class PreferenceConfig(OptimiserSection):
    """Training on pairs of a better and a worse trajectory."""

    loss: Literal["dpo", "simpo", "ipo", "kto"] = "dpo"
    """What is made of a pair; `simpo` needs no reference model."""
    beta: float | None = Field(None, gt=0)
    """How strongly the policy is held to the reference; for simpo the scale of the margin. None is 0.1, for
    simpo 2."""
    gamma: float | None = Field(None, ge=0)
    """The margin that simpo asks for; none is 1."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Share of pairs that are taken to be the wrong way round (dpo, simpo)."""
    undesirable_weight: float = Field(1.0, gt=0)
    """What the rejected of a pair counts in kto, where the chosen counts 1."""
    learning_rate: float = Field(1e-4, gt=0)
    """Of AdamW, after the warm-up."""
    epochs: int = Field(1, ge=1)
    """Passes over all pairs, where `steps` is none."""
    steps: int | None = Field(None, ge=1)
    """Optimiser steps; none takes as many as `epochs` need."""
    batch_size: int = Field(16, ge=1)
    """Pairs of one optimiser step."""
    microbatch_tokens: int = Field(16384, ge=1)
    """Tokens per forward pass (or one pair); the gradient does not depend on it."""
    min_reward_gap: float = Field(0.0, ge=0)
    """A group whose best and worst reward differ by less gives no pair; nor do equal rewards, ever."""
    run: str | None = None
    """A run folder: its rollouts give the pairs. None takes them from `data`, or from the model itself."""
    pairs: Literal["groups", "steps"] = "groups"
    """Of a run: the best attempt of each group against the worst, or at each step of a group's tree the best
    action against the worst, by the mean reward of what came of it."""
    data: str | None = None
    """A file of pairs instead (docs/data.md); none takes no file."""
    tasks: int = Field(64, ge=1)
    """Without `run` and `data` the model plays this many training tasks itself, or all if there are fewer."""
    samples: int = Field(8, ge=2)
    """Attempts at each of them, at rollout.temperature."""
    checkpoint_every: int = Field(50, ge=1)
    """Steps between checkpoints."""
    keep_checkpoints: int = Field(1, ge=1)
    """The newest ones that are kept."""

    @model_validator(mode="after")
    def _fits_the_loss(self) -> Self:
        if self.run is not None and self.data is not None:
            raise ValueError(f'preference.run ("{self.run}") and preference.data exclude each other')
        if (self.pairs != "groups" or self.min_reward_gap) and self.data is not None:
            key = "pairs" if self.pairs != "groups" else "min_reward_gap"
            raise ValueError(f"preference.{key} is for rollouts, and preference.data is set")
        if (self.tasks, self.samples) != (64, 8) and (self.run or self.data) is not None:
            raise ValueError("preference.tasks and samples are for attempts of the model, and it plays none")
        if self.gamma is not None and self.loss != "simpo":
            raise ValueError(f'preference.gamma belongs to the loss simpo, not to "{self.loss}"')
        if self.label_smoothing > 0 and self.loss not in ("dpo", "simpo"):
            raise ValueError(f'preference.label_smoothing has no meaning with the loss "{self.loss}"')
        if self.undesirable_weight != 1 and self.loss != "kto":
            raise ValueError(f'preference.undesirable_weight belongs to the loss kto, not to "{self.loss}"')
        return self


class RftConfig(OptimiserSection):
    """Rejection-sampling fine-tuning: rounds of sampling, keeping what succeeded, and training on it."""

    rounds: int = Field(3, ge=1)
    """Rounds of the whole run."""
    tasks_per_round: int = Field(64, ge=1)
    """Tasks that a round samples."""
    samples: int = Field(8, ge=1)
    """Attempts at each of them, at rollout.temperature."""
    max_per_task: int | None = Field(None, ge=1)
    """Most attempts at one task that a round trains on, the first ones; none is no limit."""
    epochs: int = Field(1, ge=1)
    """Passes over what a round kept."""
    batch_size: int = Field(16, ge=1)
    """Trajectories of one optimiser step."""
    microbatch_tokens: int = Field(16384, ge=1)
    """Padded tokens per forward pass; the gradient does not depend on it."""
    learning_rate: float = Field(3e-4, gt=0)
    """Of AdamW, after the warm-up. Each round begins with a fresh optimiser."""
    warmup_steps: int = Field(0, ge=0)
    """Optimiser steps of each round in which the learning rate rises from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes on after the warm-up, to the end of the round."""
    keep_checkpoints: int = Field(2, ge=1)
    """The newest ones that are kept; each round ends with one."""


class EvaluationConfig(Section):
    """Held-out evaluation, before, during and after training and offline: one path for all."""

    splits: list[str] = Field(["test"])
    """Evaluated before and after training, and by `ludus eval`."""
    temperatures: list[float] = Field([0.0, 1.0])
    """Each split is played once with each of these; 0 is greedy."""
    tasks: int = Field(512, ge=1)
    """Tasks of each split, the first of them."""
    samples: int = Field(1, ge=1)
    """Attempts per task; pass@k needs k of them."""
    every: int = Field(10, ge=1)
    """Training steps between evaluations during training."""
    split_during: str = "validation"
    """The split of evaluations during training."""
    tasks_during: int = Field(96, ge=1)
    """Tasks of an evaluation during training (the same ones each time)."""


class RunConfig(Section):
    """The run folder and the machine."""

    folder: str | None = None
    """Where the run is written; None makes `runs/NAME-N`."""
    seed: int = Field(0, ge=0)
    """All that is random follows from it."""
    threads: int = Field(0, ge=0)
    """Compute threads of the learner; 0 takes one per core (or OMP_NUM_THREADS), at most 4. Beside other busy
    processes one is faster. The embedded engine takes as many, but only one for a model below 20 million
    parameters."""
    trackers: list[str] = Field(["jsonl"])
    """Where metrics go: jsonl, tensorboard."""
    save_rollouts: bool = True
    """Keep every episode of training in rollouts/."""


class Config(Section):
    """A whole run."""

    model: ModelConfig = ModelConfig()
    env: EnvConfig = EnvConfig()
    rollout: RolloutConfig = RolloutConfig()
    sandbox: SandboxConfig = SandboxConfig()
    engine: EngineConfig = EngineConfig()
    cluster: ClusterConfig = ClusterConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    kl_control: KlControlConfig = KlControlConfig()
    teacher: TeacherConfig = TeacherConfig()
    experts: ExpertsConfig = ExpertsConfig()
    training: TrainingConfig = TrainingConfig()
    staleness: StalenessConfig = StalenessConfig()
    rewards: RewardsConfig = RewardsConfig()
    critic: CriticConfig = CriticConfig()
    sft: SftConfig = SftConfig()
    preference: PreferenceConfig = PreferenceConfig()
    rft: RftConfig = RftConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    run: RunConfig = RunConfig()

    @model_validator(mode="after")
    def _budgets_fit(self) -> Self:
        if self.rollout.max_new_tokens >= self.rollout.max_tokens:
            raise ValueError(
                f"rollout.max_new_tokens ({self.rollout.max_new_tokens}) must be below "
                f"rollout.max_tokens ({self.rollout.max_tokens})"
            )
        if fault := budget_fault(self.rollout, self.env.mixture):
            raise ValueError(fault)
        if self.training.mode == "async" and self.staleness.in_flight > self.rollout.concurrency:
            raise ValueError(
                f"staleness.in_flight ({self.staleness.in_flight}) must not be above rollout.concurrency "
                f"({self.rollout.concurrency})"
            )
        return self
