"""The sections about rollouts: environment, sampling limits and engine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from ludus.config.sections.section import Section

MIXTURE = "mixture"
"""Value of `env.name` for a mixture."""
CEILINGS = ("max_turns", "max_tokens_per_turn", "max_seq_len")
"""Limits of a world that must not exceed those of `rollout`, which determine memory use."""
BUDGETS = (*CEILINGS, "max_tool_errors", "max_tool_output", "tool_timeout_s")
"""Limits that a world may override; the defaults are the fields of `rollout` with the same names."""

_NAME = re.compile(r"[A-Za-z0-9_-]+")


class MemberConfig(Section):
    """Settings of one world of a mixture; an unset limit defaults to that of `rollout`."""

    world: str | None = None
    """A registered world or the path of a .py file; if unset, the name of the table."""
    weight: float = Field(1.0, gt=0)
    """Sampling weight: the fraction of the tasks of each step is this weight divided by the sum of all weights."""
    weight_end: float | None = Field(None, ge=0)
    """The weight after the last step, approached linearly; if unset, the weight is constant."""
    settings: dict[str, object] = Field({})
    """The world's own settings, validated by the world."""
    max_turns: int | None = Field(None, ge=1)
    """Assistant turns per episode; if unset, rollout.max_turns."""
    max_tokens_per_turn: int | None = Field(None, ge=1)
    """Tokens per action; if unset, rollout.max_tokens_per_turn."""
    max_seq_len: int | None = Field(None, ge=16)
    """Tokens of a trajectory, prompt and observations included; if unset, rollout.max_seq_len."""
    max_tool_errors: int | None = Field(None, ge=1)
    """Consecutive tool errors or malformed calls that end an episode; if unset, rollout.max_tool_errors."""
    max_tool_output: int | None = Field(None, ge=16)
    """Characters of a tool output that the model sees; if unset, rollout.max_tool_output."""
    tool_timeout_s: float | None = Field(None, gt=0)
    """Timeout of a tool call, seconds; if unset, rollout.tool_timeout_s."""


def check_budgets(rollout: Section, mixture: Mapping[str, MemberConfig]) -> None:
    """Raise ValueError for the first limit of a world that exceeds the run's."""
    limits = rollout.model_dump()
    for name, member in mixture.items():
        own = {key: value for key, value in member.model_dump().items() if value is not None}
        for key in CEILINGS:
            if own.get(key, 0) > limits[key]:
                above = f"is above rollout.{key} ({limits[key]}), the limit of the run"
                raise ValueError(f"env.mixture.{name}.{key} ({own[key]}) {above}")
        tokens, total = ((limits | own)[key] for key in ("max_tokens_per_turn", "max_seq_len"))
        if tokens >= total:
            below = f"must be below max_seq_len ({total})"
            raise ValueError(f"env.mixture.{name}: max_tokens_per_turn ({tokens}) {below}")


class EnvConfig(Section):
    """The environment."""

    name: str = "search"
    """A registered world, `path/to/file.py` (defines `make_world`) or `path/to/file.py:name`, or `mixture`."""
    rendering: Literal["chat", "tags", "code"] = "chat"
    """`chat`: the model's chat template with tool calls. Without a template: `tags`, the text protocol of Search-R1,
    for worlds with the tool `search`, or `code`, that of ReTool, for worlds with the tool `python`."""
    tool_parser: Literal[
        "auto", "hermes", "llama3", "pythonic", "qwen3_coder", "glm45", "kimi_k2", "deepseek_v3", "gemma4", "harmony"
    ] = "auto"
    """Format of tool calls in `chat` (docs/understand/chat_formats.md); `auto` derives it from the chat template."""
    settings: dict[str, Any] = Field({})
    """The world's own settings, validated by the world."""
    tools: list[str] = Field([])
    """Additional tools of every episode, `path/to/file.py:name` (docs/extend/plugins.md)."""
    check: bool = True
    """Before training, run scripted cheats on a few tasks, and refuse to train if one is rewarded."""
    mixture: dict[str, MemberConfig] = Field({})
    """Worlds that the run trains on together, by name, each with its weight and settings."""
    necessity: str | None = None
    """A file of `ludus necessity`; training uses only its tasks of at least `min_necessity`. If unset, all tasks."""
    min_necessity: float = Field(0.0, ge=-1, le=1)
    """necessity: smallest success with tools minus success without them."""

    @model_validator(mode="after")
    def _one_world_or_several(self) -> Self:
        name, mixture = self.name, self.mixture
        if name == MIXTURE and not mixture:
            example = "add a table for each, such as env.mixture.math.weight = 1"
            raise ValueError(f"env.name is mixture, but env.mixture has no worlds: {example}")
        if mixture and name != MIXTURE:
            worlds = ", ".join(mixture)
            raise ValueError(f'env.mixture has worlds ({worlds}), but env.name is "{name}": set it to "mixture"')
        if mixture and self.settings:
            raise ValueError("env.settings applies to a single world: in a mixture use env.mixture.NAME.settings")
        if self.min_necessity and self.necessity is None:
            raise ValueError("env.min_necessity needs env.necessity, which is unset")
        if mixture and self.necessity is not None:
            raise ValueError("env.necessity selects the tasks of a single world, and env.mixture has several")
        if invalid := [one for one in mixture if not _NAME.fullmatch(one)]:
            raise ValueError(f'env.mixture has a world "{invalid[0]}": names may contain only letters, digits, - and _')
        if mixture and not any(one.weight if one.weight_end is None else one.weight_end for one in mixture.values()):
            raise ValueError("every weight_end in env.mixture is 0: no worlds remain at the end")
        return self


class PartialConfig(Section):
    """The sampling budget of a step; unfinished episodes are paused and continue in the next step.

    For training.mode sync and one_step. A group trains once all of its episodes have ended; once its oldest token is
    staleness.max_staleness versions old, its episodes are no longer paused.
    """

    tokens: int = Field(0, ge=0)
    """Tokens sampled per step, divided among the unfinished episodes bit-reproducibly; 0 is unlimited."""
    seconds: float = Field(0.0, ge=0)
    """Seconds of sampling per step; 0 is unlimited. If it fires, the run is flagged as not reproducible."""

    @property
    def is_set(self) -> bool:
        return self.tokens > 0 or self.seconds > 0


class BranchConfig(Section):
    """Branching of training episodes: an episode becomes a tree, and each leaf has a reward.

    A branch shares the tokens before its fork and continues with another seed, in an environment that replays the
    recorded actions.
    """

    branches: int = Field(0, ge=0)
    """Additional branches at each fork; 0 disables branching."""
    turns: list[int] = Field([])
    """Turns to fork at, from 0: those of the episode, and of each branch those after its own fork."""
    entropy_turns: int = Field(0, ge=0)
    """Instead of `turns`: fork each path at this many turns with the highest mean `-logprob` of their action tokens."""
    max_leaves: int = Field(8, ge=2)
    """Maximum leaves per tree. Forks of the episode come first, then those of its branches."""

    @model_validator(mode="after")
    def _forks_somewhere(self) -> Self:
        if any(turn < 0 for turn in self.turns):
            raise ValueError("rollout.branch.turns contains a negative number")
        if self.turns and self.entropy_turns:
            raise ValueError("rollout.branch.turns and entropy_turns are mutually exclusive")
        if self.branches and not (self.turns or self.entropy_turns):
            raise ValueError("rollout.branch.branches needs turns or entropy_turns")
        if not self.branches and (self.turns or self.entropy_turns):
            raise ValueError("rollout.branch.turns and entropy_turns have no effect while branches is 0")
        return self


class ContextConfig(Section):
    """Management of a dialogue that exceeds a budget: it is rewritten, and the episode continues in a new row."""

    max_tokens: int = Field(0, ge=0)
    """Tokens of a dialogue above which it is rewritten; 0 never rewrites it. Rows may have rollout.max_seq_len tokens,
    so leave room for the prompt below, a summary, and tool output."""
    strategy: Literal["drop", "summarize", "both"] = "summarize"
    """`drop` removes old tool outputs; with `summarize` the policy writes a summary that replaces the messages; `both`
    drops outputs, and summarizes if that is not enough."""
    keep_turns: int = Field(1, ge=0)
    """Last turns that stay as they are."""
    prompt: str = (
        "Summarize the work so far for yourself: what is asked, what you know, and what remains to be done. "
        "The messages above will be removed. Do not call a tool."
    )
    """Message that asks for the summary."""
    train_summary: bool = True
    """Whether the tokens of summaries are in the loss."""


class AgentConfig(Section):
    """An external agent that runs the episodes: a program for each episode, or clients that request tasks.

    It gets the messages of the environment, calls the policy under a base URL, and ends with an answer, which the
    rewards of the environment score, or with a reward (docs/use/agents.md).
    """

    command: list[str] = Field([])
    """Program and arguments. It reads the task as JSON from standard input, finds the policy at OPENAI_BASE_URL and
    ANTHROPIC_BASE_URL with the key in OPENAI_API_KEY and ANTHROPIC_API_KEY, and prints the answer."""
    timeout_s: float = Field(600.0, gt=0)
    """Timeout of the program; after it the agent has failed, with reward 0."""
    remote: bool = False
    """Offer the tasks to clients at GET /tasks instead; they need the token in `token_file`."""
    host: str = "127.0.0.1"
    """Address on which requests are accepted."""
    port: int = Field(0, ge=0, lt=65536)
    """Port on which requests are accepted; 0 is a free one, for programs only."""
    token_file: str | None = None
    """File with the token of clients that request tasks; if unset, no client may."""
    lease_s: float = Field(120.0, gt=0)
    """Seconds without a request after which a task is offered to another client."""

    @property
    def is_set(self) -> bool:
        return bool(self.command) or self.remote

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.command and self.remote:
            raise ValueError("rollout.agent.command and rollout.agent.remote are mutually exclusive")
        if self.remote and self.token_file is None:
            raise ValueError("rollout.agent.remote needs rollout.agent.token_file")
        if self.remote and not self.port:
            raise ValueError("rollout.agent.remote needs rollout.agent.port for its clients")
        return self


class OpponentsConfig(Section):
    """Past versions of the policy as opponents, in environments that play against one."""

    every: int = Field(0, ge=0)
    """Number of steps between two saved versions; 0 disables opponents."""
    size: int = Field(5, ge=1)
    """Number of versions of which one is the opponent of a step."""
    sampling: Literal["win_rate", "uniform"] = "win_rate"
    """`win_rate` prefers versions against which the policy has a low reward."""


class SubagentsConfig(Section):
    """Sub-agents: the tool `delegate` runs the policy on a subtask, in a separate dialogue of the same rollout.

    For environments with `start` and `step`. All dialogues of a rollout share its reward.
    """

    max_depth: int = Field(0, ge=0, le=4)
    """Levels of sub-agents: with 1 the policy may delegate, with 2 its sub-agents too; 0 disables the tool."""
    max_per_agent: int = Field(4, ge=1)
    """Subtasks that an agent may delegate in an episode; more are tool errors."""
    max_turns: int = Field(4, ge=1)
    """Assistant turns per sub-agent. A sub-agent that ends without an answer is a tool error."""
    tools: list[str] = Field([])
    """Names of the environment's tools that sub-agents have; empty: all."""
    exclusive: bool = False
    """Whether the policy itself lacks these tools, so that it plans and sub-agents work."""
    prompt: str = ""
    """System message of sub-agents; empty: that of the task."""


class NotesConfig(Section):
    """Notes: the tools `note_write`, `note_read` and `note_search`."""

    scope: Literal["none", "episode", "task", "run"] = "none"
    """`episode`: notes are lost at its end. `task`: training episodes start with the notes that episodes of the same
    task wrote in earlier steps; for training.mode sync. `run`: with those of all tasks. Episodes of evaluations start
    without notes."""
    max_notes: int = Field(32, ge=1)
    """Maximum number of notes; with the scopes `task` and `run`, the oldest are dropped after a step, in an episode a
    new one is a tool error."""
    max_chars: int = Field(2000, ge=1)
    """Maximum characters of a note."""

    @property
    def persists(self) -> bool:
        """Whether later episodes start with them."""
        return self.scope in ("task", "run")


class SamplingSection(Section):
    """Sampling parameters."""

    temperature: float = Field(1.0, ge=0)
    """Sampling temperature during training; 0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the most likely tokens with this total probability; 1 disables it."""
    top_k: int = Field(0, ge=0)
    """Sample from this many most likely tokens; 0 disables it."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Sample from tokens with at least this fraction of the highest probability; 0 disables it."""


class DialoguesSection(SamplingSection):
    """Episodes of several dialogues."""

    agent: AgentConfig = AgentConfig()
    context: ContextConfig = ContextConfig()
    opponents: OpponentsConfig = OpponentsConfig()
    subagents: SubagentsConfig = SubagentsConfig()
    notes: NotesConfig = NotesConfig()


class RolloutConfig(DialoguesSection):
    """Sampling and limits of episodes."""

    guided_tools: bool = False
    """Constrain decoding to valid tool calls. This changes the sampling distribution, and training does not correct for
    it. Needs the `guided` extra and a template with calls in Hermes format."""
    hide_tools: bool = False
    """Offer no tools, to measure what the policy solves without them (`ludus necessity`). A call ends the episode."""
    max_turns: int = Field(6, ge=1)
    """Assistant turns per episode."""
    max_tokens_per_turn: int = Field(64, ge=1)
    """Tokens per action."""
    max_seq_len: int = Field(768, ge=16)
    """Tokens of a trajectory, prompt and observations included."""
    max_tool_errors: int = Field(3, ge=1)
    """Consecutive tool errors or malformed calls that end an episode."""
    max_tool_output: int = Field(2000, ge=16)
    """Characters of a tool output that the model sees; the middle is cut."""
    tool_timeout_s: float = Field(20.0, gt=0)
    """Timeout of a call to a tool without its own: instant tools have a quarter of it, slow ones three times."""
    environment_timeout_s: float = Field(120.0, gt=0)
    """Timeout of a start, step or close of an environment; after it the environment has failed. The wait for a sandbox
    slot does not count, here and for tools."""
    reward_timeout_s: float = Field(120.0, gt=0)
    """Timeout for computing the rewards of an episode; after it the attempt has failed in the infrastructure."""
    reward_processes: int = Field(1, ge=0)
    """Processes that compute rewards, each for one episode at a time. 0 uses a thread of this process."""
    episode_timeout_s: float | None = Field(None, gt=0)
    """Wall-clock limit of an episode; if unset, there is none. If it fires, the run is flagged as not reproducible."""
    concurrency: int = Field(128, ge=1)
    """Concurrent episodes."""
    retries: int = Field(2, ge=0)
    """Retries after an infrastructure failure (never after a failure of the model)."""
    max_failure_rate: float = Field(0.2, ge=0, le=1)
    """Fraction of the episodes of a step that may fail after all retries before the run stops."""
    reproducible: bool = True
    """Sample the same tokens for the same settings, bit for bit. If the engine is not batch-invariant
    (docs/understand/reproducibility.md), episodes advance turn by turn in lockstep, and a slow tool delays all of them.
    Asynchronous runs have no fixed order."""
    partial: PartialConfig = PartialConfig()
    branch: BranchConfig = BranchConfig()


class EngineConfig(Section):
    """The engine that samples: in this process, or a server over HTTP."""

    plugin: str | None = None
    """A custom engine, `path/to/file.py:name` (docs/extend/plugins.md); if unset, the embedded engine or `url`."""
    url: str | None = None
    """Address of an inference server; several replicas are separated by commas. If unset, this process samples."""
    api: Literal["vllm", "sglang"] = "vllm"
    """API of the server; `ludus serve` has vLLM's."""
    timeout_s: float = Field(600.0, gt=0)
    """Timeout of one action, and of one weight transfer to one replica."""
    token_file: str | None = None
    """A file with the control token of the servers, which `ludus serve --control` prints. If unset, the token that a
    server of the same user on this machine has published is used."""
    connect_timeout_s: float = Field(60.0, ge=0)
    """How long to retry an unreachable server."""
    weights_folder: str | None = None
    """Folder for new weights, at the same path on the server; if unset, a temporary one (shared memory if it fits)."""
    broadcast_host: str | None = None
    """An address of this machine that the servers can reach: weights are sent over a gloo process group instead of
    files, to `ludus serve` and to vLLM with the worker extension (docs/use/server.md). If unset, files are written."""
    sleep: bool = False
    """Free the KV cache of the embedded engine while the learner trains, if both share one device."""
    kv_cache_tokens: int | None = Field(None, ge=1)
    """Tokens in the KV cache of an embedded engine, running requests included; one request of maximum length always
    fits. If unset, it fits all episodes: rollout.concurrency * (rollout.max_seq_len + 16)."""
    max_requests: int = Field(0, ge=0)
    """Running and waiting requests of an embedded engine; more are rejected and retried later. 0 is unlimited."""
    draft_tokens: int | None = Field(None, ge=0, le=64)
    """Maximum number of draft tokens of a request in one pass of the embedded engine on a CPU (speculative decoding
    from earlier text); 0: none. If unset, 8; but 0 for reproducible runs of an engine that is not batch-invariant,
    where a resumed run would sample other tokens than one that was not interrupted."""
    weight_delta: bool = False
    """With broadcast_host, send only changed weights; this keeps a copy of the last ones."""

    @property
    def is_external(self) -> bool:
        """Whether servers at `url` sample, which Ludus did not start."""
        return bool(self.url)

    @property
    def urls(self) -> list[str]:
        return (self.url or "").split(",")

    @model_validator(mode="after")
    def _delta_needs_broadcast(self) -> Self:
        if self.weight_delta and self.broadcast_host is None:
            raise ValueError("engine.weight_delta needs engine.broadcast_host")
        return self


class SandboxConfig(Section):
    """The sandbox in which tools run programs. See docs/use/sandbox.md."""

    backend: Literal["namespaces", "docker", "podman", "remote", "sandbox_fusion", "piston", "process"] = "namespaces"
    """Isolation of programs from the host; a weaker backend is never used instead."""
    concurrency: int = Field(0, ge=0)
    """namespaces: concurrent runs outside sessions; 0 is one per processor, at least 2."""
    sessions: int = Field(0, ge=0)
    """namespaces, docker and podman: concurrent sessions of episodes (`terminal`, `swe`); more episodes wait. 0 is as
    many as fit into half of the memory at 512 MiB each."""
    python: str = ""
    """namespaces: the interpreter inside; empty is this one, otherwise the system's."""
    binds: list[str] = Field([])
    """namespaces: host folders that programs may read, as `folder` or `folder:place`."""
    paths: list[str] = Field([])
    """namespaces: additions to `sys.path` inside."""
    image: str = "python:3.12-slim"
    """docker and podman: the image, which must be present."""
    runtime: str = ""
    """docker and podman: the runtime, `runsc` for gVisor; empty is the engine's default."""
    url: str = ""
    """remote: address of `ludus sandbox serve`; sandbox_fusion and piston: address of the service."""
    token_file: str | None = None
    """A file with the server's token, so that the token is not stored in the run folder; if unset, no token is sent."""
    unsafe: bool = False
    """process, required: confirm that programs may do everything that your user may."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.backend == "remote" and not (self.url and self.token_file):
            raise ValueError("sandbox.backend remote needs sandbox.url and sandbox.token_file")
        if self.backend in ("sandbox_fusion", "piston") and not self.url:
            raise ValueError(f"sandbox.backend {self.backend} needs sandbox.url")
        if self.backend == "process" and not self.unsafe:
            raise ValueError("sandbox.backend process isolates nothing and needs sandbox.unsafe = true")
        return self
