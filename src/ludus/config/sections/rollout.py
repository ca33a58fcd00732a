"""Settings of rollouts: the environment, its limits and the engine."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from ludus.config.sections.mixture import MemberConfig, mixture_fault
from ludus.config.sections.section import Section


class EnvConfig(Section):
    """The world that the model acts in."""

    name: str = "search"
    """A registered world, `path/to/file.py` that defines `make_world`, `path/to/file.py:name`, or `mixture`
    for those of `env.mixture`."""
    rendering: Literal["chat", "tags", "code"] = "chat"
    """`chat`: the model's chat template with tool calls. Without a template: `tags`, the text protocol of
    Search-R1, for a world with a tool `search`, or `code`, that of ReTool, for one with a tool `python`."""
    tool_parser: Literal["auto", "hermes", "llama3", "pythonic"] = "auto"
    """How tool calls are written in `chat`; `auto` reads it off the chat template."""
    settings: dict[str, Any] = Field({})
    """The world's own settings; it checks them against its own schema."""
    tools: list[str] = Field([])
    """Tools of your own that every episode has besides, `path/to/file.py:name` (docs/extend/plugins.md)."""
    check: bool = True
    """Before training, let scripted cheats play a few tasks, and refuse to train where one is paid."""
    mixture: dict[str, MemberConfig] = Field({})
    """Worlds that the run trains on together, by name, each with its weight and its own settings."""

    @model_validator(mode="after")
    def _one_world_or_several(self) -> Self:
        if fault := mixture_fault(self.name, self.settings, self.mixture):
            raise ValueError(fault)
        return self


class PartialConfig(Section):
    """The budget of a step, after which unfinished episodes wait and go on in the next step.

    For training.mode sync and one_step. A group trains when all of its episodes have ended, at the latest
    when its oldest token is staleness.max_staleness versions old: then its episodes do not wait any more.
    """

    tokens: int = Field(0, ge=0)
    """Tokens sampled in one step; 0 is no budget. Shared equally among the unfinished episodes, again and
    again, so that it repeats bit for bit."""
    seconds: float = Field(0.0, ge=0)
    """Seconds of sampling in one step; 0 is no budget. If it fires, the run is flagged as not
    reproducible."""

    @property
    def is_set(self) -> bool:
        """Whether there is a budget."""
        return self.tokens > 0 or self.seconds > 0


class BranchConfig(Section):
    """Branches of training episodes: an episode becomes a tree, whose leaves each have a reward.

    A branch shares the tokens before its fork, and goes on from there with other random numbers, in an
    environment in which the recorded actions are done again.
    """

    branches: int = Field(0, ge=0)
    """Further ways on from each turn that is forked; 0: episodes do not branch."""
    turns: list[int] = Field([])
    """Turns that are forked, from 0: of the episode, and of each branch those after its own fork."""
    entropy_turns: int = Field(0, ge=0)
    """In place of `turns`: this many turns of each path, those of the highest mean `-logprob` of the action's
    tokens."""
    max_leaves: int = Field(8, ge=2)
    """Leaves of one tree. The forks of the episode come first, then those of its branches."""

    @model_validator(mode="after")
    def _forks_somewhere(self) -> Self:
        if any(turn < 0 for turn in self.turns):
            raise ValueError("rollout.branch.turns holds a number below 0")
        if self.turns and self.entropy_turns:
            raise ValueError("rollout.branch takes turns or entropy_turns, not both")
        if self.branches and not (self.turns or self.entropy_turns):
            raise ValueError("rollout.branch.branches needs turns or entropy_turns: where to fork")
        if not self.branches and (self.turns or self.entropy_turns):
            raise ValueError("rollout.branch forks nothing while branches is 0")
        return self


class SamplingSection(Section):
    """How a token is drawn."""

    temperature: float = Field(1.0, ge=0)
    """Of sampling during training; 0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the likeliest tokens that make up this share; 1 cuts nothing."""
    top_k: int = Field(0, ge=0)
    """Sample from this many likeliest tokens; 0 cuts nothing."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Sample from tokens with at least this share of the likeliest one's probability; 0 cuts nothing."""


class RolloutConfig(SamplingSection):
    """How episodes are sampled, and their limits."""

    guided_tools: bool = False
    """Sample only calls that can be executed. That changes the distribution, and training does not correct
    it. Needs the `guided` extra and a template with calls in Hermes' format."""
    max_turns: int = Field(6, ge=1)
    """Assistant turns of one episode."""
    max_tokens_per_turn: int = Field(64, ge=1)
    """Tokens of one action."""
    max_seq_len: int = Field(768, ge=16)
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
    company (docs/understand/reproducibility.md), turns go in lock-step for it, and a slow tool holds all
    episodes up. An asynchronous run keeps no order."""
    partial: PartialConfig = PartialConfig()
    branch: BranchConfig = BranchConfig()


class EngineConfig(Section):
    """Where tokens are sampled: in this process, or by a server over HTTP."""

    plugin: str | None = None
    """An engine of your own, `path/to/file.py:name` (docs/extend/plugins.md).
    None takes the embedded engine, or the server at `url`."""
    url: str | None = None
    """Address of an inference server that samples; several replicas are separated by commas. None samples in
    this process."""
    api: Literal["vllm", "sglang"] = "vllm"
    """What the server speaks; `ludus serve` speaks as vLLM does."""
    timeout_s: float = Field(600.0, gt=0)
    """Deadline of one action, and of one transfer of weights to one replica."""
    token_file: str | None = None
    """A file with the control token of the servers, which `ludus serve --control` prints at its start.
    None takes the one that a server of the same user on this machine has left."""
    connect_timeout_s: float = Field(60.0, ge=0)
    """How long a server that cannot be reached is asked again before that counts as a failure."""
    weights_folder: str | None = None
    """Where new weights are written; the server must see the same path. None takes a temporary folder, in
    shared memory where there is room."""
    broadcast_host: str | None = None
    """An address of this machine that its servers reach: `ludus serve`, and vLLM with the extension of its
    worker (docs/use/server.md), have new weights from here over a line of gloo, without a file. None writes
    them to the folder."""
    sleep: bool = False
    """Give the memory of the embedded engine's cache back while the learner works: for both on one device."""
    kv_cache_tokens: int | None = Field(None, ge=1)
    """Tokens whose keys and values an embedded engine keeps, those of all that runs included; one request of
    the longest always fits. None has room for all episodes at once: rollout.concurrency *
    (rollout.max_seq_len + 16)."""
    max_requests: int = Field(0, ge=0)
    """Requests that an embedded engine has under way and waiting; more are put off, and asked again when some
    are done. 0 is no limit."""
    weight_delta: bool = False
    """Over that line, send only what changed since the last weights; keeps a copy of these."""

    @property
    def is_external(self) -> bool:
        """Whether servers at `url` sample, which Ludus did not start."""
        return bool(self.url)

    @property
    def urls(self) -> list[str]:
        """The addresses of the external servers."""
        return (self.url or "").split(",")

    @model_validator(mode="after")
    def _has_a_line(self) -> Self:
        if self.weight_delta and self.broadcast_host is None:
            raise ValueError("engine.weight_delta needs engine.broadcast_host")
        return self
