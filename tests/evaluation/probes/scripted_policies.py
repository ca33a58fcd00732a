"""Schedulers of scripted policies, and tasks that ask for their own number."""

from ludus.evaluation.probes.common import ProbePlan
from ludus.types import Message, Task
from small_worlds import RecordingWorld, make_scheduler, renderer, scripted

NUMBERS = {f"t{i}": f"4{i}" for i in range(6)}
TASKS = [Task(name, (Message(role="user", content=f"Say {n}."),), n) for name, n in NUMBERS.items()]
PLAN = ProbePlan(TASKS, 1, 0.0, 0)


def text_of(request):
    """Return the prompt and the text of the action so far."""
    ids = list(request.token_ids)
    split = len(ids) - request.begun
    decode = renderer().tokenizer.decode
    return decode(ids[:split]), decode(ids[split:])


def maker(script, world=None):
    """Return a `MakeScheduler` of a scripted policy, a function of the prompt and the begun action."""
    made = world or RecordingWorld()

    def make(sampling):
        engine = scripted(lambda request, turn: script(*text_of(request), turn))
        return make_scheduler(engine, made)

    return make


def number_in(text):
    return next((n for n in NUMBERS.values() if n in text), "0")
