"""Transcripts: (said, calls, truth, how it ended, think_format, format_score, tool_use, extra_turns(1, 3)).

Said: pairs of a thought and a content, after the calls. Calls, a turn each but for m: l look, s look in
another shop, b buy, u unknown tool, m malformed. Truths: a an answer, n a number, c a call of buy, 0 no call.
"""

from ludus.types import StopReason

_ENDED, _CUT, _TURNS = StopReason.ANSWERED, StopReason.TRUNCATED, StopReason.MAX_TURNS
_PLAIN, _THOUGHT = ("", "4"), ("2 + 2", "4")
_BOXED, _BOTH = ("", r"\boxed{4}"), ("2 + 2", r"\boxed{4}")

TRANSCRIPTS = [
    ([_PLAIN], "", "a", _ENDED, 0, 0.0, 0.0, 0.0),
    ([_THOUGHT], "", "a", _ENDED, 1, 0.3, 0.0, 0.0),
    ([_THOUGHT], "", "n", _ENDED, 1, 0.3, 0.0, 0.0),
    ([_BOXED], "", "n", _ENDED, 0, 0.2, 0.0, 0.0),
    ([_BOXED], "", "a", _ENDED, 0, 0.0, 0.0, 0.0),
    ([_BOTH], "", "n", _ENDED, 1, 0.5, 0.0, 0.0),
    ([_BOTH], "", "a", _ENDED, 1, 0.3, 0.0, 0.0),
    ([("", r"\boxed{}")], "", "n", _ENDED, 0, 0.0, 0.0, 0.0),
    ([("", r"\boxed{4")], "", "n", _ENDED, 0, 0.0, 0.0, 0.0),
    ([("2 + 2", r"\boxed{ }")], "", "n", _ENDED, 1, 0.3, 0.0, 0.0),
    ([("2 + 2", "")], "", "a", _ENDED, 0, 0.0, 0.0, 0.0),
    ([(" ", "4")], "", "a", _ENDED, 0, 0.0, 0.0, 0.0),
    ([("2 + 2", "<think>more</think> 4")], "", "a", _ENDED, 0, 0.0, 0.0, 0.0),
    ([("", "4 <think>2 + 2</think>")], "", "a", _ENDED, 0, 0.0, 0.0, 0.0),
    ([("<think>2 + 2", "4")], "", "a", _ENDED, 0, 0.0, 0.0, 0.0),
    ([("2 + 2</think>", "4")], "", "a", _ENDED, 0, 0.0, 0.0, 0.0),
    ([("2 + 2", "The answer is 4")], "", "0", _ENDED, 1, 0.3, 0.0, 0.0),
    ([_THOUGHT], "", "a", _CUT, 0, 0.3, 0.0, 0.0),
    ([_THOUGHT], "", "a", _TURNS, 0, 0.3, 0.0, 0.0),
    ([_THOUGHT, _PLAIN], "", "a", _ENDED, 1, 0.3, 0.0, -0.5),
    ([_THOUGHT, _THOUGHT], "", "a", _ENDED, 1, 0.3, 0.0, -0.5),
    ([("2 + 2", ""), _PLAIN], "", "a", _ENDED, 0, 0.0, 0.0, -0.5),
    ([_THOUGHT, ("", "</think>4")], "", "a", _ENDED, 0, 0.3, 0.0, -0.5),
    ([("", "4</think>"), _THOUGHT], "", "a", _ENDED, 0, 0.3, 0.0, -0.5),
    ([_THOUGHT], "l", "a", _ENDED, 1, 0.4, 0.1, -0.5),
    ([_PLAIN], "l", "a", _ENDED, 0, 0.1, 0.1, -0.5),
    ([_PLAIN], "ll", "a", _ENDED, 0, 0.2, 0.05, -1.0),
    ([_PLAIN], "lb", "a", _ENDED, 0, 0.2, 0.1, -1.0),
    ([_PLAIN], "lsl", "a", _ENDED, 0, 0.3, 0.1, -1.0),
    ([_PLAIN], "lbl", "a", _ENDED, 0, 0.3, 0.1, -1.0),
    ([_PLAIN], "lll", "a", _ENDED, 0, 0.3, 0.0, -1.0),
    ([_PLAIN], "m", "a", _ENDED, 0, 0.0, 0.0, 0.0),
    ([_THOUGHT], "m", "a", _ENDED, 1, 0.1, 0.0, 0.0),
    ([_THOUGHT], "mm", "a", _ENDED, 1, 0.0, 0.0, 0.0),
    ([_THOUGHT], "lm", "a", _ENDED, 1, 0.2, 0.1, -0.5),
    ([_THOUGHT], "lbm", "a", _ENDED, 1, 0.3, 0.1, -1.0),
    ([_PLAIN], "u", "a", _ENDED, 0, 0.1, -0.3, -0.5),
    ([_PLAIN], "lu", "a", _ENDED, 0, 0.2, -0.2, -1.0),
    ([_PLAIN], "llu", "a", _ENDED, 0, 0.3, -0.25, -1.0),
    ([_PLAIN], "uu", "a", _ENDED, 0, 0.2, -0.65, -1.0),
    ([_PLAIN], "uuu", "a", _ENDED, 0, 0.3, -1.0, -1.0),
    ([_PLAIN], "uuuu", "a", _ENDED, 0, 0.4, -1.0, -1.0),
    ([_PLAIN], "um", "a", _ENDED, 0, 0.0, -0.3, -0.5),
    ([_PLAIN], "b", "c", _ENDED, 0, 0.1, 0.1, -0.5),
    ([_PLAIN], "b", "0", _ENDED, 0, 0.1, 0.0, -0.5),
    ([_PLAIN], "bb", "0", _ENDED, 0, 0.2, -0.05, -1.0),
    ([_PLAIN], "u", "0", _ENDED, 0, 0.1, -0.3, -0.5),
    ([_BOTH], "lblblb", "n", _ENDED, 1, 1.0, 0.1, -1.0),
    ([_PLAIN], "", "c", _ENDED, 0, 0.0, 0.0, 0.0),
]
