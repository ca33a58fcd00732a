"""Episodes, worlds and judges for the tests of LLM judges."""

import json
from dataclasses import replace

from chat_server import Reply, say
from ludus.config.sections.parts.judges import JudgeConfig
from ludus.envs.tool_env import ToolLimits
from ludus.envs.tool_world import ToolWorld
from ludus.judges.client import EndpointJudge, JudgeClient
from ludus.judges.grading import Grader
from ludus.rewards.base import Reward
from ludus.rewards.exact_match import ExpectedAnswers, exact_match
from ludus.rewards.rubric import rubric_of
from ludus.rollouts.ledger import RolloutKey
from ludus.rollouts.openai_client import OpenAIClient, OpenAIClientSettings
from ludus.rollouts.scheduler import Episode
from ludus.types import Message, Segment, StopReason, Task, Trajectory

RUBRIC = rubric_of(
    "prices",
    {
        "price": {"weight": 3, "text": "The text states the price."},
        "style": {"polite": {"text": "The text is polite."}, "short": {"text": "Short.", "pattern": r"\A.{0,40}\Z"}},
    },
)


class RubricWorld(ToolWorld):
    """Questions about prices, with a rubric; the rule of `price` is the exact answer."""

    def rubric(self, task):
        return RUBRIC

    def rubric_checks(self, task, trajectory):
        return {"price": task.truth.accepted[0] in trajectory.answer}


def task(number=0):
    prompt = (Message(role="system", content="Be brief."), Message(role="user", content=f"What costs item {number}?"))
    return Task(f"t{number}", prompt, ExpectedAnswers(("7",)))


def world():
    rewards = (Reward("exact_match", exact_match, outcome=True),)
    return RubricWorld("prices", {"train": [task(n) for n in range(8)]}, (), rewards, ToolLimits())


def episode(answer, number=0, sample=0, rewards=None, **changes):
    messages = (*task(number).prompt, Message(role="assistant", content=answer))
    segments = (Segment("prompt", (1,)), Segment("action", (2, sample), 0, logprobs=(-1.0, -1.0), versions=(0, 0)))
    parts = {"exact_match": 0.0} if rewards is None else rewards
    trajectory = Trajectory(f"t{number}", sample, segments, messages, StopReason.ANSWERED, rewards=parts)
    return Episode(RolloutKey(1, f"t{number}", sample), task(number), replace(trajectory, **changes))


def settings(**changes):
    client = {"retries": 1, "timeout_s": 5.0, "deadline_s": 5.0} | changes.pop("client", {})
    return JudgeConfig(**({"models": ["m"], "url": "http://x/v1"} | changes), client=client)


def grader(server, config, folder=None, names=("m",)):
    limits = config.client
    url = server if isinstance(server, str) else server.url
    one = OpenAIClientSettings(url, "m", "", limits.timeout_s, limits.concurrency, retries=0)
    judges = [EndpointJudge(OpenAIClient(replace(one, model=name))) for name in names]
    return Grader(config, JudgeClient(judges, limits, 0, folder), world())


def text_in(body, label="text"):
    """Return the judged text in a request."""
    content = body["messages"][1]["content"]
    start = content.index(">\n", content.index(f"<{label}-")) + 2
    return content[start : content.index(f"\n</{label}-")]


def scoring(score_of):
    """Return the script of a judge that scores each text by a function."""
    return lambda body: Reply(say(json.dumps({"reason": "", "score": score_of(text_in(body))})))
