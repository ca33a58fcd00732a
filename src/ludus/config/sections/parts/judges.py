"""The section `rewards.judge`: a reward part of language models that grade."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, Self

from pydantic import Field, model_validator

from ludus.config.sections.section import Section, check_choice

POLICY_JUDGE: Final = "policy"
"""Name of the current policy in `rewards.judge.models`."""
PRESETS: Final[Mapping[str, Mapping[str, object]]] = {
    "k2_self_critique": {"models": [POLICY_JUDGE], "kind": "pairwise", "rubrics": ["core", "prescriptive", "written"]},
    "self_rewarding": {"models": [POLICY_JUDGE], "kind": "score", "rubrics": ["self_rewarding"], "scale": 5},
    "small_rubric": {"kind": "rubric", "rubrics": ["written"], "rubric_rules": True},
}
"""Settings of each preset; settings that are set in addition take precedence."""


class JudgeClientConfig(Section):
    """Requests to the judge: sampling, limits, and the value of episodes that it does not judge."""

    temperature: float = Field(0.0, ge=0)
    """Sampling temperature of the judge; several `samples` need one above 0."""
    max_tokens: int = Field(512, ge=16)
    """Tokens of a reply."""
    context_tokens: int = Field(4096, ge=128)
    """Context of a judge that is loaded from a folder, at most that of the model."""
    max_chars: int = Field(12_000, ge=100)
    """Characters of a judged text; the middle of a longer one is left out."""
    structured: bool = True
    """Constrain replies to a JSON schema if the backend can: an endpoint with `response_format`, or the embedded engine
    with the extra `guided`. Replies are validated in any case."""
    timeout_s: float = Field(60.0, gt=0)
    """Time limit of a request."""
    deadline_s: float = Field(120.0, gt=0)
    """Longest wait of a step for its judges; afterwards the remaining episodes take the default."""
    retries: int = Field(2, ge=0)
    """Further attempts after a failed request or an invalid reply, but not after a timeout."""
    concurrency: int = Field(8, ge=1)
    """Concurrent requests to the judges, apart from those of the policy."""
    key_file: str | None = None
    """A file with the API key of `url`; if unset, no key is sent."""
    default: Literal["group_mean", "neutral"] = "group_mean"
    """Value of an episode that is not judged: the mean of the judged members of its group (`neutral` without one), or
    `neutral`."""
    neutral: float = Field(0.5, ge=0, le=1)
    """The neutral value."""


class JudgeConfig(Section):
    """LLM judges as a reward part (docs/use/judges.md). Without `models` the part is not added."""

    preset: Literal["k2_self_critique", "self_rewarding", "small_rubric"] | None = None
    """Published settings, which other settings of the section override; if unset, none."""
    models: list[str] = Field([])
    """The judges: `policy` (the current policy), a model folder, a run folder or one of its checkpoints; with `url`,
    the names of models that it serves. Several are an ensemble."""
    url: str | None = None
    """Base URL of an OpenAI-compatible endpoint; if unset, models are loaded here."""
    weight: float = Field(0.2, ge=0)
    """Weight of the part `judge`."""
    kind: Literal["score", "correct", "reference", "pairwise", "rubric"] = "score"
    """`score`: a number from 0 to `scale`. `correct`: yes or no. `reference`: the same, by a reference answer.
    `pairwise`: comparison with other members of the group. `rubric`: weighted yes/no items with quoted evidence."""
    sees: Literal["answer", "transcript"] = "answer"
    """The judged text: the final answer, or all messages of the episode after the prompt."""
    rubrics: list[str] = Field([])
    """Criteria: `task` (the world's rubric of the task), `written` (written by the judge from the task), a name in
    src/ludus/judges/rubrics.toml, or a TOML file. Several are the parts of one tree."""
    rubric_rules: bool = True
    """rubric: leaves with a rule are decided by it, so that the judge decides only the others."""
    scale: int = Field(10, ge=1, le=100)
    """score: largest number."""
    opponents: int = Field(4, ge=1)
    """pairwise: number of opponents of each member, at most all others; each pair is compared in both orders."""
    pairwise: Literal["win_rate", "bradley_terry"] = "win_rate"
    """pairwise: the mean result against the opponents, or the probability of winning against an average member."""
    samples: int = Field(1, ge=1, le=32)
    """Replies per judge and question."""
    combine: Literal["mean", "majority"] = "mean"
    """Several judges or samples: their mean minus `std_coef` times their standard deviation, or whether more than half
    of the values are at least 0.5."""
    std_coef: float = Field(0.0, ge=0)
    """mean: penalty on disagreement."""
    rule: str | None = None
    """A part that may abstain: the judge decides only where it does, and its value becomes that of the part; if unset,
    every episode is judged and the value is the part `judge`."""
    audit: float = Field(0.0, ge=0, le=1)
    """rule: share of the decided episodes that are judged as well, to measure the agreement; the part is unchanged."""
    gate: str | None = None
    """A part: episodes in which it is below 1 have the value 0 and are not judged; if unset, none is skipped."""
    calibration: str | None = None
    """A file of `ludus rewards judge`; a run with `min_kappa` starts only if it is of this judge; if unset, none."""
    min_kappa: float = Field(0.0, ge=0, le=1)
    """Smallest Cohen's kappa with the verifier in `calibration`; 0 requires no calibration."""
    client: JudgeClientConfig = JudgeClientConfig()

    @model_validator(mode="before")
    @classmethod
    def _preset_fills(cls, given: object) -> object:
        if not isinstance(given, dict):
            return given
        settings: dict[str, object] = given
        return {**PRESETS.get(str(settings.get("preset")), {}), **settings}

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if not self.models:
            if any(value != type(self).model_fields[name].default for name, value in self):
                raise ValueError("rewards.judge has settings but no judge; set rewards.judge.models")
            return self
        needed = {
            "scale": ("score",),
            "opponents": ("pairwise",),
            "pairwise": ("pairwise",),
            "rubric_rules": ("rubric",),
        }
        check_choice(self, "rewards.judge", "kind", needed)
        check_choice(self, "rewards.judge", "combine", {"std_coef": ("mean",)})
        for broken, text in self._conflicts():
            if broken:
                raise ValueError(f"rewards.judge: {text}")
        return self

    def _conflicts(self) -> list[tuple[bool, str]]:
        served = [name for name in self.models if name != POLICY_JUDGE]
        ensemble, loads = len(self.models) * self.samples, self.url is None and served
        return [
            (self.url is not None and not served, "url has no effect: no model is served there"),
            (len(set(self.models)) < len(self.models), "models names a judge twice"),
            (self.client.key_file is not None and self.url is None, "client.key_file is for url, which is unset"),
            (
                self.client.context_tokens != 4096 and not loads,
                "client.context_tokens is for models loaded from folders",
            ),
            (self.samples > 1 and self.client.temperature == 0, "samples are equal at client.temperature 0"),
            (ensemble == 1 and self.std_coef > 0, "std_coef needs several models or samples"),
            (ensemble == 1 and self.combine != "mean", "combine needs several models or samples"),
            (self.kind == "rubric" and not self.rubrics, "the kind rubric needs rubrics"),
            (self.kind == "reference" and bool(self.rubrics), "rubrics have no effect on the kind reference"),
            (self.kind == "pairwise" and self.rule is not None, "rule needs a kind that judges single texts"),
            (self.rule is not None and self.weight != 0.2, "weight has no effect: the part of rule keeps its weight"),
            (self.audit > 0 and self.rule is None, "audit needs rule"),
            (self.min_kappa > 0 and self.calibration is None, "min_kappa needs calibration"),
            (self.min_kappa == 0 and self.calibration is not None, "calibration needs min_kappa"),
        ]

    @property
    def is_on(self) -> bool:
        """Whether there is a judge."""
        return bool(self.models)

    @property
    def num_replies(self) -> int:
        """Replies per question, over all judges."""
        return len(self.models) * self.samples
