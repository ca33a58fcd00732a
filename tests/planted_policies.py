"""Scripted policies for the world of the tiny run, as engine plug-ins: `planted_policies.py:noise`."""

import re

from scripted_engine import ScriptedEngine
from tiny_world import NAMES, PRICES


def asked_in(text):
    return next(name for name in NAMES if f"does {name} cost" in text)


def policy(script):
    """Return an engine plug-in; `script` maps the prompt and the begun action to a text."""

    def make(session):
        def play(request, _turn):
            ids = list(request.token_ids)
            split = len(ids) - request.begun
            return script(session.tokenizer.decode(ids[:split]), session.tokenizer.decode(ids[split:]))

        return ScriptedEngine(play, session.tokenizer, session.renderer.stop_token_ids[0])

    return make


@policy
def noise(prompt, begun):
    """Reason, and take the price from the prompt anyway."""
    price = PRICES[asked_in(prompt)]
    return (begun or f"<think>The price must be {price}</think>") + price


@policy
def needed(prompt, begun):
    """Answer the number in the reasoning."""
    begun = begun or f"<think>The price must be {PRICES[asked_in(prompt)]}</think>"
    return begun + (re.findall(r"\d", begun) or ["none"])[-1]
