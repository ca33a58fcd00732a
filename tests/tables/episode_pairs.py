"""Episodes: (statuses of calls, how it ended, well_formed, format_kept, valid_calls).

Statuses: o ok, m malformed, u unknown tool, b bad arguments, r raised, t timed out.
"""

from ludus.types import StopReason

_ENDED, _EMPTY, _TURNS = StopReason.ANSWERED, StopReason.EMPTY_ANSWER, StopReason.MAX_TURNS
_TOKENS, _CUT, _ERRORS = StopReason.MAX_TOKENS, StopReason.TRUNCATED, StopReason.TOOL_ERRORS
_LONG = StopReason.PROMPT_TOO_LONG

EPISODES = [
    ("", _ENDED, 1, 1, 0.0),
    ("o", _ENDED, 1, 1, 1.0),
    ("oo", _ENDED, 1, 1, 1.0),
    ("o" * 100, _ENDED, 1, 1, 1.0),
    ("r", _ENDED, 0, 1, 1.0),
    ("t", _ENDED, 0, 1, 1.0),
    ("u", _ENDED, 0, 1, 0.0),
    ("b", _ENDED, 0, 1, 0.0),
    ("m", _ENDED, 0, 0, 0.0),
    ("or", _ENDED, 0, 1, 1.0),
    ("ro", _ENDED, 0, 1, 1.0),
    ("ot", _ENDED, 0, 1, 1.0),
    ("ou", _ENDED, 0, 1, 0.5),
    ("bo", _ENDED, 0, 1, 0.5),
    ("om", _ENDED, 0, 0, 0.5),
    ("mo", _ENDED, 0, 0, 0.5),
    ("mooo", _ENDED, 0, 0, 0.75),
    ("ooom", _ENDED, 0, 0, 0.75),
    ("rt", _ENDED, 0, 1, 1.0),
    ("ub", _ENDED, 0, 1, 0.0),
    ("mub", _ENDED, 0, 0, 0.0),
    ("murt", _ENDED, 0, 0, 0.5),
    ("ubrt", _ENDED, 0, 1, 0.5),
    ("o" * 9 + "r", _ENDED, 0, 1, 1.0),
    ("o" * 9 + "u", _ENDED, 0, 1, 0.9),
    ("o" * 9 + "m", _ENDED, 0, 0, 0.9),
    ("", _EMPTY, 0, 0, 0.0),
    ("o", _EMPTY, 0, 0, 1.0),
    ("", _TURNS, 0, 0, 0.0),
    ("oooooo", _TURNS, 0, 0, 1.0),
    ("oooooo", _TOKENS, 0, 0, 1.0),
    ("", _TOKENS, 0, 0, 0.0),
    ("", _CUT, 0, 0, 0.0),
    ("o", _CUT, 0, 0, 1.0),
    ("ob", _CUT, 0, 0, 0.5),
    ("mmm", _ERRORS, 0, 0, 0.0),
    ("uuu", _ERRORS, 0, 0, 0.0),
    ("rrr", _ERRORS, 0, 0, 1.0),
    ("ommm", _ERRORS, 0, 0, 0.25),
    ("", _LONG, 0, 0, 0.0),
    ("om", _TURNS, 0, 0, 0.5),
]
