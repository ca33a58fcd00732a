"""Tasks about running services: stop, suspend, restart, reload and find them without affecting others."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from generators.terminal.draw import SERVICES, TOWNS, text_of, words
from generators.terminal.makers import TaskMaker

from ludus.worlds.terminal.checks import Check, has_text, only_files, processes_run, service_ended, service_lives
from ludus.worlds.terminal.task import TerminalService, TerminalTask

_BEGIN: Final = """import os, signal, sys, time

PID_FILE = "PATH"

"""
_WRITE: Final = """with open(PID_FILE, "w") as file:
    print(os.getpid(), file=file)
print("up", flush=True)
while True:
    time.sleep(1)
"""
_STOP: Final = """
def stop(*_):
    if os.path.exists(PID_FILE):
        os.remove(PID_FILE)
    sys.exit(0)


signal.signal(signal.SIGTERM, stop)
"""
PLAIN: Final = _BEGIN + _STOP + _WRITE
"""Has a pid file, which it removes on SIGTERM."""
STUBBORN: Final = _BEGIN + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + _WRITE
BARE: Final = 'import time\n\nprint("up", flush=True)\nwhile True:\n    time.sleep(1)\n'
"""Has no pid file."""
LOADED: Final = """
def load(*_):
    with open("CONF") as file:
        level = file.read().partition("=")[2].strip()
    with open("/proc/self/comm", "w") as file:
        file.write(f"NAME-{level}")


signal.signal(signal.SIGHUP, load)
load()
"""
RELOADS: Final = _BEGIN + _STOP + LOADED + _WRITE
"""Reads its settings on SIGHUP; the process title shows them."""
COUNTS: Final = (
    _BEGIN
    + """import json

counters = {"done": int(os.environ["DONE"]) * 7 + 1, "failed": int(os.environ["DONE"]) % 5}


def save(*_):
    with open("STATE.new", "w") as file:
        json.dump(counters, file)
    os.rename("STATE.new", "STATE")


signal.signal(signal.SIGUSR1, save)
"""
    + _STOP
    + _WRITE
)
"""Keeps counters in memory, and saves them on SIGUSR1."""

COUNTING: Final = " What counts in the end is what runs and what lies in the files."


@dataclass(frozen=True)
class ServiceFolder:
    """A folder with services: their programs, pid files and logs."""

    root: str
    names: tuple[str, ...]

    def script(self, name: str) -> str:
        """Return the path of a service's program."""
        return f"{self.root}/{name}.py"

    def pid_file(self, name: str) -> str:
        """Return the path of its pid file."""
        return f"{self.root}/run/{name}.pid"

    def log(self, name: str) -> str:
        """Return the path of its log."""
        return f"{self.root}/log/{name}.log"

    def service(self, name: str) -> TerminalService:
        """Return the service as it runs."""
        return TerminalService(name, (self.script(name),), self.log(name))

    def program(self, name: str, text: str = PLAIN) -> dict[str, str]:
        """Return its program, which writes a pid file, by path."""
        return {self.script(name): text.replace("PATH", self.pid_file(name), 1)}

    @property
    def changing(self) -> tuple[str, ...]:
        """The files that services write."""
        return f"{self.root}/run/*", f"{self.root}/log/*"


def yard_of(rng: random.Random, num: int = 4) -> ServiceFolder:
    """Return a folder with `num` services."""
    return ServiceFolder(words(rng, 1)[0], tuple(rng.sample(SERVICES, num)))


def others(names: Sequence[str]) -> tuple[Check, ...]:
    """Return checks that all these services run and are not suspended."""
    return tuple(map(service_lives, names))


def gone(pid: str) -> str:
    """Return the command that waits until a process has ended."""
    return f"while [ -d /proc/{pid} ]; do sleep 0.05; done"


def each(test: str, act: str) -> str:
    """Return the command that runs `act` for each process ($p, its folder in /proc: $d) that satisfies `test`."""
    return f"for d in /proc/[0-9]*; do p=${{d#/proc/}}; if {test}; then {act}; fi; done"


def is_command(line: str) -> str:
    """Return the test whether a process ($d) has this command line."""
    return f"[ \"$(cat $d/cmdline 2> /dev/null | tr '\\0' ' ')\" = '{line} ' ]"


def started(yard: ServiceFolder, name: str, values: str = "") -> str:
    """Return the command that starts a service detached from the shell, and waits until it runs."""
    before = f"{values} setsid" if values else "setsid"
    command = f"({before} python3 {yard.script(name)} < /dev/null > {yard.log(name)} 2>&1 &)"
    return f"{command}; until [ -s {yard.pid_file(name)} ]; do sleep 0.05; done"


def of_yard(yard: ServiceFolder, text: str, steps: tuple[str, ...], watched: tuple[Check, ...]) -> TerminalTask:
    """Return a task with the plain services of a folder."""
    programs = {path: program for name in yard.names for path, program in yard.program(name).items()}
    made = [place(name) for place in (yard.log, yard.pid_file) for name in yard.names]
    return TerminalTask(
        text + COUNTING,
        {**programs, **dict.fromkeys(made, "")},
        steps,
        changes=yard.changing,
        services=tuple(map(yard.service, yard.names)),
        process_checks=watched,
    )


def with_files(draft: TerminalTask, files: Mapping[str, str], changing: bool = False) -> TerminalTask:
    """Return the task with added or replaced files; the last one is part of the preview."""
    changes = (*draft.changes, *files) if changing else draft.changes
    return replace(draft, files={**draft.files, **files}, changes=changes, preview=tuple(files)[-1:])


def without(draft: TerminalTask, paths: Sequence[str]) -> TerminalTask:
    """Return the task without some files."""
    return replace(draft, files={path: data for path, data in draft.files.items() if path not in paths})


def with_service(draft: TerminalTask, service: TerminalService) -> TerminalTask:
    """Return the task with the service of that name replaced."""
    own = tuple(service if one.name == service.name else one for one in draft.services)
    return replace(draft, services=own)


def pids_left(yard: ServiceFolder, names: Sequence[str]) -> Check:
    """Return the check that exactly these services have pid files."""
    return only_files(f"{yard.root}/run/*", frozenset(map(yard.pid_file, names)))


def _pid_file(rng: random.Random) -> TerminalTask:
    yard = yard_of(rng)
    name, *rest = yard.names
    path = yard.pid_file(name)
    text = (
        f"The services of {yard.root} run. Stop {name} with SIGTERM, on which it removes its pid file, "
        f"{path}; the others go on."
    )
    steps = (f"p=$(cat {path}); kill $p; {gone('$p')}",)
    draft = of_yard(yard, text, steps, (service_ended(name), *others(rest)))
    return replace(draft, file_checks=(pids_left(yard, rest),))


def _resume(rng: random.Random) -> TerminalTask:
    yard = yard_of(rng)
    name, *rest = yard.names
    text = (
        f"The services of {yard.root} run, but {name} (its number is in {yard.pid_file(name)}) was "
        "suspended. Have it go on, without a restart; the others go on too."
    )
    steps = (f"kill -CONT $(cat {yard.pid_file(name)})",)
    draft = of_yard(yard, text, steps, (service_lives(name), *others(rest)))
    return with_service(draft, replace(yard.service(name), first_signal="STOP"))


def _suspend(rng: random.Random) -> TerminalTask:
    yard = yard_of(rng)
    name, *rest = yard.names
    text = (
        f"The services of {yard.root} run, their numbers are in {yard.root}/run. Suspend {name}, so that it "
        "can go on later from where it is, and leave the others alone."
    )
    steps = (f"kill -STOP $(cat {yard.pid_file(name)})",)
    return of_yard(yard, text, steps, (service_lives(name, suspended=True), *others(rest)))


def _listed(rng: random.Random) -> TerminalTask:
    yard = yard_of(rng, 5)
    ending, rest = yard.names[:2], yard.names[2:]
    path = f"{yard.root}/stop.txt"
    text = (
        f"{path} names services of {yard.root}, one a line. Stop these with SIGTERM, on which they remove "
        f"their pid files, {yard.root}/run/NAME.pid. The others go on."
    )
    steps = (f"for n in $(cat {path}); do p=$(cat {yard.root}/run/$n.pid); kill $p; {gone('$p')}; done",)
    draft = of_yard(yard, text, steps, (*map(service_ended, ending), *others(rest)))
    return replace(with_files(draft, {path: text_of(ending)}), file_checks=(pids_left(yard, rest),))


def _by_script(rng: random.Random) -> TerminalTask:
    yard = yard_of(rng)
    name, *rest = yard.names
    text = (
        f"Several programs of {yard.root} run, none with a pid file. Stop the one that runs "
        f"{yard.script(name)}; the others go on."
    )
    steps = (each(is_command(f"python3 {yard.script(name)}"), f"kill $p; {gone('$p')}"),)
    draft = of_yard(yard, text, steps, (service_ended(name), *others(rest)))
    bare = with_files(draft, {yard.script(one): BARE for one in yard.names})
    return without(bare, list(map(yard.pid_file, yard.names)))


def workers(
    yard: ServiceFolder, sets: Sequence[tuple[tuple[str, ...], Mapping[str, str]]]
) -> tuple[TerminalService, ...]:
    """Return services that run the same program with different arguments and variables."""
    script = yard.script("worker")
    return tuple(
        TerminalService(f"worker{number}", (script, *arguments), yard.log(f"worker{number}"), values)
        for number, (arguments, values) in enumerate(sets, 1)
    )


def of_workers(
    yard: ServiceFolder, text: str, steps: tuple[str, ...], services: tuple[TerminalService, ...], ending: Sequence[str]
) -> TerminalTask:
    """Return a task about several processes of one program, of which some must end and the others must not."""
    names = [service.name for service in services]
    script = yard.script("worker")
    return TerminalTask(
        text + COUNTING,
        {script: BARE, **{service.log: "" for service in services}},
        steps,
        changes=yard.changing,
        preview=(script,),
        services=services,
        process_checks=(*map(service_ended, ending), *others([name for name in names if name not in ending])),
    )


def _by_argument(rng: random.Random) -> TerminalTask:
    yard, queues = yard_of(rng), words(rng, 4)
    services = workers(yard, [(("--queue", queue), {}) for queue in queues])
    place = rng.randrange(4)
    text = (
        f"{yard.script('worker')} runs four times, each with another --queue. Stop the one of the queue "
        f"{queues[place]}; the others go on."
    )
    line = f"python3 {yard.script('worker')} --queue {queues[place]}"
    steps = (each(is_command(line), f"kill -TERM $p; {gone('$p')}"),)
    return of_workers(yard, text, steps, services, [services[place].name])


def _stubborn(rng: random.Random) -> TerminalTask:
    yard = yard_of(rng)
    name, *rest = yard.names
    path = yard.pid_file(name)
    text = (
        f"The services of {yard.root} run. {name} is to end, but it ignores SIGTERM: end it all the same, "
        f"and remove its pid file, {path}. The others go on."
    )
    steps = (f"p=$(cat {path}); kill -9 $p; {gone('$p')}", f"rm {path}")
    draft = of_yard(yard, text, steps, (service_ended(name), *others(rest)))
    return replace(with_files(draft, yard.program(name, STUBBORN)), file_checks=(pids_left(yard, rest),))


def _restart(rng: random.Random) -> TerminalTask:
    yard, (old, new) = yard_of(rng), rng.sample(TOWNS, 2)
    name, *rest = yard.names
    path = yard.pid_file(name)
    text = (
        f"The service {name} of {yard.root} has REGION={old} in its environment. Restart it with "
        f"REGION={new}: stop it with SIGTERM, then start it in /box as `python3 {yard.script(name)}`, away "
        f"from your shell. It writes its number to {path} itself. The others go on."
    )
    steps = (f"p=$(cat {path}); kill $p; {gone('$p')}", started(yard, name, f"REGION={new}"))
    runs = processes_run((yard.script(name),), 1, {"REGION": new}, path)
    draft = of_yard(yard, text, steps, (service_ended(name), runs, *others(rest)))
    return with_service(draft, replace(yard.service(name), environment={"REGION": old}))


def _reload(rng: random.Random) -> TerminalTask:
    yard, (old, new) = yard_of(rng), rng.sample(range(10, 99), 2)
    name, *rest = yard.names
    conf = f"{yard.root}/{name}.conf"
    text = (
        f"The service {name} of {yard.root} reads {conf} when it starts and when it gets SIGHUP. Set the "
        f"level there to {new} and have it read the file; it must not be restarted (its number is in "
        f"{yard.pid_file(name)}, its title in /proc tells the level that it uses). The others go on."
    )
    wait = f"until grep -q '^{name}-{new}$' /proc/$p/comm; do sleep 0.05; done"
    steps = (f"sed -i 's/^level=.*/level={new}/' {conf}", f"p=$(cat {yard.pid_file(name)}); kill -HUP $p; {wait}")
    draft = of_yard(yard, text, steps, (service_lives(name, f"{name}-{new}"), *others(rest)))
    program = RELOADS.replace("CONF", conf).replace("NAME", name)
    draft = with_files(with_files(draft, yard.program(name, program)), {conf: f"level={old}\n"}, changing=True)
    draft = with_service(draft, replace(yard.service(name), title=f"{name}-{old}"))
    return replace(draft, file_checks=(has_text(conf, f"level={new}\n"),))


def _drain(rng: random.Random) -> TerminalTask:
    yard, done = yard_of(rng), rng.randint(1000, 9000)
    name, *rest = yard.names
    state, path = f"{yard.root}/{name}.json", yard.pid_file(name)
    text = (
        f"The service {name} of {yard.root} keeps counters in memory, and writes them to {state} when it "
        f"gets SIGUSR1. Have it write them, and stop it then with SIGTERM (its number is in {path}). "
        "The others go on."
    )
    saved = f"until [ -e {state} ]; do sleep 0.05; done"
    steps = (f"p=$(cat {path}); kill -USR1 $p; {saved}; kill $p; {gone('$p')}",)
    draft = of_yard(yard, text, steps, (service_ended(name), *others(rest)))
    draft = with_files(draft, yard.program(name, COUNTS.replace("STATE", state)))
    draft = with_service(draft, replace(yard.service(name), environment={"DONE": str(done)}))
    due = json.dumps({"done": done * 7 + 1, "failed": done % 5})
    return replace(draft, file_checks=(has_text(state, due, "json"), pids_left(yard, rest)))


MAKERS: Final = (
    TaskMaker("processes/pid_file", 1, _pid_file),
    TaskMaker("processes/resume", 1, _resume),
    TaskMaker("processes/suspend", 1, _suspend),
    TaskMaker("processes/listed", 2, _listed),
    TaskMaker("processes/by_script", 2, _by_script),
    TaskMaker("processes/by_argument", 2, _by_argument),
    TaskMaker("processes/stubborn", 2, _stubborn),
    TaskMaker("processes/restart", 2, _restart),
    TaskMaker("processes/reload", 2, _reload),
    TaskMaker("processes/drain", 2, _drain),
)
