"""Evaluators of other projects against a server, in an environment with their packages: prints JSON.

python external_evaluators.py inspect URL FOLDER | lm-eval URL MODEL
"""

import json
import sys

CITY = "Hranice"
FACT = f"{CITY} is a city in the country of Czechia."
QUESTION = f"In which country is {CITY}?"
CONTINUATIONS = (" Czechia", " Poland")


def run_inspect(url, folder):
    """Let an Inspect agent with a tool answer two questions; print status, scores, tool calls and tokens."""
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate, system_message, use_tools
    from inspect_ai.tool import tool

    @tool
    def search():
        async def execute(query: str) -> str:
            """Search the encyclopedia.

            Args:
                query: what to search for.
            """
            return FACT

        return execute

    steps = [system_message("Answer the question. Search until you know."), use_tools(search()), generate()]
    samples = [Sample(input=QUESTION, target=target) for target in ("Czechia", "Atlantis")]
    where = {"model_base_url": url, "model_args": {"api_key": "none"}, "log_dir": folder}
    limits = {"temperature": 0.0, "max_tokens": 64, "display": "none"}
    (log,) = eval(Task(dataset=samples, solver=steps, scorer=includes()), "openai-api/ludus/policy", **where, **limits)
    found = [sample.scores["includes"].value for sample in log.samples or []]
    calls = [
        m.tool_calls[0].function
        for s in log.samples or []
        for m in s.messages
        if m.role == "assistant" and m.tool_calls
    ]
    usage = {name: one.output_tokens for name, one in log.stats.model_usage.items()}
    print(
        json.dumps(
            {"status": log.status, "error": str(log.error or ""), "scores": found, "calls": calls, "usage": usage}
        )
    )


def run_lm_eval(url, model):
    """Print the log-likelihoods of the continuations, and whether each is greedy."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    names = {"model": "policy", "base_url": f"{url}/completions", "tokenizer": model}
    evaluated = LocalCompletionsAPI(**names, tokenizer_backend="huggingface", num_concurrent=1, max_length=512)
    pairs = [(QUESTION, text) for text in CONTINUATIONS]
    requests = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    print(json.dumps(evaluated.loglikelihood(requests, disable_tqdm=True)))


if __name__ == "__main__":
    {"inspect": run_inspect, "lm-eval": run_lm_eval}[sys.argv[1]](*sys.argv[2:])
