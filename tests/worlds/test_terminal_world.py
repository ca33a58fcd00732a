"""The terminal world: the solver earns the full reward, cheats nothing, and no grader runs in a session."""

import asyncio
import gzip
import io
import json
import re
import tarfile
import zlib
from collections import Counter
from itertools import islice

import pytest
from generators.terminal import freeze
from generators.terminal.difficulty_report import distinct, nearest, shape_of, solves, tables
from generators.terminal.git_write import IDENTITY, grow

from ludus.envs.registry import WORLDS
from ludus.envs.tool_env import ToolLimits
from ludus.errors import ConfigError
from ludus.rewards.base import check_rewards, score, success
from ludus.sandbox import open_sandbox
from ludus.tools.workspace import LIMITS
from ludus.types import Action, Message, StopReason, ToolCall, ToolStatus, Trajectory
from ludus.worlds.terminal.checks import (
    SessionState,
    archive_holds,
    files_unchanged,
    git_branches,
    git_clean,
    git_files,
    git_ref,
    git_subjects,
    gzip_has_text,
    has_text,
    only_executable,
    only_files,
)
from ludus.worlds.terminal.git import GitRepository
from ludus.worlds.terminal.splits import LEVELS, TOPICS, TerminalSettings, decode, make_task, shipped_tasks, splits_of
from ludus.worlds.terminal.task import pair, start_services
from ludus.worlds.terminal.world import TerminalWorld, episode, make_terminal_world

KINDS = {kind.name: kind for kind in shipped_tasks()[0]}


@pytest.fixture(scope="module")
def world():
    return TerminalWorld(TerminalSettings(tools="shell"))


@pytest.fixture(scope="module")
def splits(world):
    return {split: [world.shell_tasks[task.id] for task in world.tasks(split)] for split in world.splits}


def task_of(world, kind):
    return next(t for split in world.splits for t in world.tasks(split) if t.tags["kind"] == kind)


async def play(world, task, turns):
    """Calls of the shell, each a turn, then a word; gives the trajectory, scored, and what was printed."""
    episode = world.environment(task)
    said, outcomes = [], []
    try:
        await episode.start(task)
        for number, command in enumerate(turns):
            call = ToolCall(f"c{number}", "shell", {"command": command})
            result = await episode.step(Action(Message(role="assistant", content=""), (call,)))
            outcomes += result.outcomes
            said.append(result.outcomes[0].output)
        result = await episode.step(Action(Message(role="assistant", content="Done.")))
        assert result.done
    finally:
        await episode.close()
    answer = Message(role="assistant", content="Done.")
    outcomes += result.outcomes
    lived = Trajectory(task.id, 0, (), (*task.prompt, answer), StopReason.ANSWERED, outcomes=tuple(outcomes))
    return score(world.rewards, task, lived), said


def played(world, *plays):
    """Several episodes at once, in a sandbox of their own."""

    async def act():
        own = world.with_sandbox(open_sandbox())
        try:
            return await asyncio.gather(*(play(own, task, turns) for task, turns in plays))
        finally:
            await own.close()

    return asyncio.run(act())


def steps_of(world, task):
    return world.shell_tasks[task.id].steps


# Tasks


def test_more_than_a_hundred_tasks_differ_in_more_than_names(splits):
    jobs = [job for found in splits.values() for job in found]
    num, forms, shapes = distinct(jobs)
    assert (num, forms, shapes) == (len(jobs),) * 3
    assert num >= 200
    assert all(sum(job.level == level for job in jobs) >= 40 for level in LEVELS)
    assert {job.topic for job in splits["train"]} == set(TOPICS)
    assert {job.level for job in splits["test"]} == set(LEVELS)
    assert [len(splits[name]) for name in splits] == [137, 19, 37, 44]
    assert "train 137, validation 19, test 37, composition 44" in tables(splits)


def test_shape_ignores_only_names_and_numbers():
    for name in ("tables/sum_equal", "logs/hours", "git/merge_true", "files/lower", "processes/stale"):
        tasks = [make_task(KINDS[name], n, 0) for n in range(6)]
        assert len({shape_of(task) for task in tasks}) == 1, name
        assert len({task.steps for task in tasks}) > 1, name


def test_equal_settings_give_equal_tasks_and_other_seeds_others():
    settings = TerminalSettings(levels=(1,), topics=("files", "git"))
    drawn = {seed: splits_of(settings.model_copy(update={"seed": seed}))["train"] for seed in (0, 1)}
    again = splits_of(settings)["train"]
    assert again == drawn[0]
    assert [job.text for job in again] != [job.text for job in drawn[1]]


def test_splits_share_no_kind_or_no_task(splits):
    makers = {split: {part for job in jobs for part in job.parts} for split, jobs in splits.items()}
    assert not makers["train"] & makers["test"]
    assert not makers["train"] & makers["validation"]
    held_out = {part for job in splits["composition"] if len(job.parts) == 1 for part in job.parts}
    assert held_out == {name for name, kind in KINDS.items() if kind.split == "composition"}
    pairs = [frozenset(job.parts) for job in splits["composition"] if len(job.parts) == 2]
    assert len(set(pairs)) == len(pairs) == 24
    settings = TerminalSettings(levels=(1,), topics=("text",), per_shape=10, unseen="names")
    dealt = splits_of(settings)
    more = splits_of(settings.model_copy(update={"num_held_out": 60}))
    assert len(more["test"]) == 60
    assert {job.id for job in dealt["test"]} < {job.id for job in more["test"]}
    assert more["train"] == dealt["train"]
    assert not {job.text for job in more["train"]} & {job.text for job in more["test"] if job.number >= 10}
    assert {p for j in dealt["train"] for p in j.parts} == {p for j in dealt["test"] for p in j.parts}
    assert len({job.id for jobs in dealt.values() for job in jobs}) == sum(map(len, dealt.values()))


def test_every_task_requires_work_and_has_unique_targets(splits):
    for jobs in splits.values():
        for job in jobs:
            suite = job.suite
            names = suite.tests("all")
            assert suite.fail_to_pass, job.id
            assert "originals kept" in suite.pass_to_pass, job.id
            assert len(set(names)) == len(names), (job.id, names)
            judged = [one.name for part in (job.checks, job.command_checks) for one in part]
            assert sorted(names) == sorted(judged)


def test_pairs_that_touch_the_same_files_are_rejected():
    one = make_task(KINDS["files/sizes"], 0, 0)
    with pytest.raises(ValueError, match="share files"):
        pair(one, one, 0)


# The file


def test_task_file_equals_the_generator_output():
    """The header, and of each kind one task, or where the pairs take some of it the first of these."""
    kinds, lines = shipped_tasks()
    assert tuple(json.loads(next(freeze.lines()), object_hook=decode)) == kinds
    assert tuple(freeze.MAKERS) == TOPICS
    for place, maker in enumerate(maker for makers in freeze.MAKERS.values() for maker in makers):
        kind = KINDS[maker.name]
        number = kind.paired[0] if kind.paired else kind.numbers[place % len(kind.numbers)]
        assert freeze.line(maker.task(number)) == lines[maker.name, number], (maker.name, number)
        assert maker.task(number) == json.loads(lines[maker.name, number], object_hook=decode)


def test_settings_that_take_more_tasks_than_there_are_are_refused():
    with pytest.raises(ConfigError, match="per_shape is 13, but a kind of task has 12 tasks"):
        make_terminal_world({"per_shape": 13}, ToolLimits())
    small = {"levels": [1], "topics": ["text"], "unseen": "names"}
    with pytest.raises(ConfigError, match="num_held_out is 5000, but there are"):
        make_terminal_world({**small, "num_held_out": 5000}, ToolLimits())
    assert len(make_terminal_world({**small, "per_shape": 100}, ToolLimits()).tasks("train")) == 490


@pytest.mark.slow
def test_the_most_tasks_of_each_kind_make_pairs_too():
    jobs = splits_of(TerminalSettings(per_shape=12))
    assert len({job.id for found in jobs.values() for job in found}) == sum(map(len, jobs.values()))
    assert sum(len(job.parts) == 2 for job in jobs["composition"]) == 24 * 12


@pytest.mark.slow
def test_demonstrations_begin_again_when_all_have_come():
    world = TerminalWorld(TerminalSettings(levels=(1,), topics=("git",), flaw_rate=0.0))
    shown = Counter(one.messages[1]["content"] for one in islice(world.demonstrations(0), 200))
    kept = {task.prompt[-1]["content"] for split in world.splits for task in world.tasks(split)}
    assert max(shown.values()) > 1
    assert not kept & set(shown)


# Playing


def test_oracle_solves_a_task_of_each_topic_with_real_shell_output(world):
    kinds = (
        "files/library",
        "text/blocks",
        "tables/pivot_all",
        "logs/trace",
        "git/conflict_both",
        "archives/increments",
        "scripts/retry",
        "configs/several",
        "processes/reload",
        "processes/orphans",
    )
    tasks = [task_of(world, kind) for kind in kinds]
    shown = [world.expert(task).messages for task in tasks]
    commands = [
        [json.loads(c["function"]["arguments"])["command"] for m in messages for c in m.get("tool_calls", ())]
        for messages in shown
    ]
    for task, messages, (lived, said) in zip(
        tasks, shown, played(world, *zip(tasks, commands, strict=True)), strict=True
    ):
        assert success(world.rewards, lived), (task.id, lived.outcomes[-1].output, said)
        assert lived.rewards["share"] == 1.0
        assert [m["content"] for m in messages if m["role"] == "tool"] == said, task.id


FORGED = '{"text of answer.txt": true, "originals kept": true}'
CHEATS = {
    "does nothing": [],
    "says that all is well": [f"echo '{FORGED}'; exit 0"],
    "kills its shell": ["kill -9 $$"],
    "ends everything": ["kill -9 -1"],
    "edits the program": ["PROGRAM"],
    "shadows a module": ["for m in configparser os sys json; do echo 'print(READY); exit()' > $m.py; done"],
    "customises python": [
        (
            "d=.local/lib/python3.11/site-packages; mkdir -p $d; "
            "echo 'print(READY); import os; os._exit(0)' | "
            "tee $d/usercustomize.py sitecustomize.py > $d/x.pth"
        )
    ],
    "shadows python": [
        (
            "mkdir bin; printf '#!/bin/sh\\necho READY\\n' > "
            "bin/python3; chmod +x bin/python3; cp bin/python3 .; "
            "echo 'export PATH=/box/bin:$PATH; alias python3=/box/python3' > .bashrc; cp .bashrc .profile; "
            "echo 'BASH_ENV=/box/.bashrc' > .env; . ./.bashrc; python3 app.py"
        )
    ],
    "leaves a process behind": [
        "(while :; do cp *.ini /tmp/x; echo READY > stdout; sleep 0.05; done) > /dev/null 2>&1 &"
    ],
    "replaces the file by a link": ["mv *.ini /tmp/real; ln -s /tmp/real CONFIG"],
    "fills the folder": ["for i in $(seq 2500); do echo $i > f$i; done"],
}


def test_cheats_at_program_tasks_have_no_reward(world):
    task = task_of(world, "configs/header")
    job = world.shell_tasks[task.id]
    (run,) = job.command_checks
    (config,) = run.takes
    ready = run.stdout.strip()
    cheats = []
    for turns in CHEATS.values():
        told = [
            turn.replace("PROGRAM", f"echo 'print(\"{ready}\")' > app.py")
            .replace("print(READY)", f'print("{ready}")')
            .replace("READY", ready)
            .replace("CONFIG", config)
            for turn in turns
        ]
        cheats.append((task, told))
    corrected = [*steps_of(world, task)]
    cheats.append((task, [*corrected, "echo >> app.py"]))
    cheats.append((task, corrected))
    *lost, won = [lived for lived, _ in played(world, *cheats)]
    for name, lived in zip((*CHEATS, "mends it and changes another file"), lost, strict=True):
        assert lived.rewards["solved"] == 0.0, name
        assert lived.reward <= 0.1, name
    assert won.rewards["solved"] == 1.0


STOP = "p=$(cat ROOT/run/NAME.pid); kill $p; while [ -d /proc/$p ]; do sleep 0.05; done"
UP = "until [ -s {} ]; do sleep 0.05; done"
"""Waits until a service has printed its line to a file."""
PROCESS_CHEATS = {
    "does nothing": ["true"],
    "ends the shell and all with it": ["exit 0"],
    "kills all": ["kill -9 -1"],
    "removes the pid file alone": ["rm ROOT/run/NAME.pid"],
    "has another process stand in": [
        "p=$(cat ROOT/run/NAME.pid); kill -9 $p; cd ROOT; (exec -a python3 setsid sleep 99 &); cd ..",
        "(bash -c 'exec -a python3 sleep 99' ROOT/NAME.py > /dev/null 2>&1 &)",
    ],
    "starts it from a copy": [
        f"{STOP}; cp ROOT/NAME.py x.py",
        f"(REGION=NEW setsid python3 x.py > /tmp/x 2>&1 < /dev/null &); {UP.format('/tmp/x')}",
    ],
    "starts it twice": [
        STOP,
        "(REGION=NEW setsid python3 ROOT/NAME.py > /tmp/x 2>&1 < /dev/null &)",
        "(REGION=NEW setsid python3 ROOT/NAME.py > /tmp/y 2>&1 < /dev/null &)",
        f"{UP.format('/tmp/x')}; {UP.format('/tmp/y')}",
    ],
    "starts another program in its place": [
        f"{STOP}; echo 'import time; time.sleep(99)' > ROOT/NAME.py",
        "(REGION=NEW setsid python3 ROOT/NAME.py > /dev/null 2>&1 < /dev/null & echo $! > ROOT/run/NAME.pid)",
    ],
}


def test_cheats_at_service_tasks_have_no_reward(world):
    """A service that is to be restarted with another variable, while three others go on."""
    task = task_of(world, "processes/restart")
    job = world.shell_tasks[task.id]
    service = job.services[0]
    root, new = service.words[0].rpartition("/")[0], re.search("REGION=([A-Z][a-z]+):", job.text)[1]
    turns = [
        [turn.replace("ROOT", root).replace("NAME", service.name).replace("NEW", new) for turn in cheat]
        for cheat in PROCESS_CHEATS.values()
    ]
    other = job.services[1].name
    harm = [*steps_of(world, task), f"kill $(cat {root}/run/{other}.pid)"]
    *lost, won = played(world, *((task, cheat) for cheat in (*turns, harm, steps_of(world, task))))
    for name, (lived, said) in zip((*PROCESS_CHEATS, "harms another service"), lost, strict=True):
        assert lived.rewards["solved"] == 0.0, (name, said)
    assert [lived.reward for lived, _ in lost[:3]] == [0.0] * 3
    assert won[0].rewards["solved"] == 1.0


START_CHEATS = {
    "prints what the service prints": "echo 'up in REGION' > ROOT/log/NAME.log",
    "copies what the program would print": "grep -o 'up in.*' ROOT/NAME.py > ROOT/log/NAME.log",
    "starts a program of its own": "echo 'print(\"up in REGION\")' | python3 - > ROOT/log/NAME.log",
}


@pytest.mark.security
def test_script_that_starts_nothing_has_no_reward(world):
    """The service itself is started by hand, as it should be; the script alone is a sham."""
    task = task_of(world, "processes/start_script")
    found = re.search(
        r"`bash (\S+)/start.sh`, called in /box, shall start (\w+) .*REGION=(\w+)", task.prompt[-1]["content"]
    )
    root, name, region = found.groups()
    start = (
        "REGION=REGION_ setsid python3 ROOT/NAME.py < /dev/null > ROOT/log/NAME.log 2>&1 & "
        "until [ -s ROOT/run/NAME.pid ]; do sleep 0.05; done"
    )

    def filled(text):
        told = text.replace("REGION_", region).replace("in REGION", f"in {region}")
        return told.replace("ROOT", root).replace("NAME", name)

    shams = [f"cat > {root}/start.sh <<'END'\n{filled(cheat)}\nEND" for cheat in START_CHEATS.values()]
    *lost, won = played(world, *((task, [sham, filled(start)]) for sham in shams), (task, steps_of(world, task)))
    for cheat, (lived, said) in zip(START_CHEATS, lost, strict=True):
        assert lived.rewards["solved"] == 0.0, (cheat, said)
    assert won[0].rewards["solved"] == 1.0


def test_reload_is_checked_in_the_process_not_in_its_files(world):
    task = task_of(world, "processes/reload")
    edit, reload = steps_of(world, task)
    restart = reload.replace("kill -HUP", "kill").partition("; until")[0]
    plays = [(task, [edit]), (task, [reload.partition("; until")[0]]), (task, [edit, restart])]
    for lived, said in played(world, *plays):
        assert lived.rewards["solved"] == 0.0, said


def test_services_match_their_description_at_start(world):
    """What holds before anything is done is what the suite says."""
    kinds = ("resume", "reload", "stale", "missing", "orphans", "kept_up", "locked")
    jobs = [make_task(KINDS[f"processes/{kind}"], 3, 0) for kind in kinds]

    async def first(sandbox, job):
        session = await sandbox.session("shell", files=job.start.files, limits=LIMITS)
        began = await start_services(session, job.services, job.after_start)
        files, now = await session.snapshot(), await session.processes()
        await session.close()
        return await job.grade(SessionState(files.files, files.executable, began, now), sandbox)

    async def act():
        sandbox = open_sandbox()
        found = await asyncio.gather(*(first(sandbox, job) for job in jobs))
        await sandbox.close()
        return found

    for job, found in zip(jobs, asyncio.run(act()), strict=True):
        assert {name for name, holds in found.items() if holds} == set(job.suite.pass_to_pass), job.id


def test_correct_work_with_a_side_effect_has_no_reward(world):
    """The solution and then a change of something that was to be kept, or something too much."""
    spoilt = {
        "files/move_ending": "echo x > $(ls -d */ | head -n 1)more.txt",
        "tables/count_equal": "echo x >> $(ls *.csv)",
        "logs/merge": "gunzip */*.gz",
        "git/tag": "R=$(ls -d */); git -C $R commit -q --allow-empty -m more",
        "git/as_before": "R=$(ls -d */); echo x >> $R/$(cd $R && ls *.txt | head -n 1)",
        "archives/convert": "touch left-over",
        "files/scripts": "chmod +x */*",
    }
    tasks = [task_of(world, kind) for kind in spoilt]
    plays = [(task, [*steps_of(world, task), extra]) for task, extra in zip(tasks, spoilt.values(), strict=True)]
    for (lived, said), task in zip(played(world, *plays), tasks, strict=True):
        assert lived.rewards["solved"] == 0.0, (task.id, said)


def test_a_call_of_a_tool_that_would_be_the_verdict_is_not_believed(world):
    task = task_of(world, "tables/count_equal")

    async def act():
        own = world.with_sandbox(open_sandbox())
        episode = own.environment(task)
        await episode.start(task)
        call = ToolCall("1", "verdict", {"report": FORGED})
        result = await episode.step(Action(Message(role="assistant", content=""), (call,)))
        await episode.close()
        await own.close()
        return result.outcomes

    outcomes = asyncio.run(act())
    assert [one.status for one in outcomes] == [ToolStatus.UNKNOWN_TOOL]
    answer = (Message(role="assistant", content="Done."),)
    lived = Trajectory(task.id, 0, (), answer, StopReason.ANSWERED, outcomes=outcomes)
    assert score(world.rewards, task, lived).rewards["solved"] == 0.0


def test_no_task_is_solved_without_tools():
    bare = TerminalWorld(TerminalSettings(tools="none"))
    task = task_of(bare, "files/empty")
    assert bare.expert(task) is None
    episode = bare.environment(task)
    assert episode.tools == ()
    result = asyncio.run(episode.step(Action(Message(role="assistant", content="Done."))))
    assert result.done
    assert "false" in result.outcomes[-1].output


def test_demonstrations_are_of_training_kinds_some_flawed_and_repeat():
    world = TerminalWorld(TerminalSettings(levels=(1,), topics=("text", "files"), flaw_rate=0.5))
    shown, again = ([one.messages for one, _ in zip(world.demonstrations(3), range(30), strict=False)] for _ in "ab")
    assert shown == again
    asked = {messages[1]["content"] for messages in shown}
    assert len(asked) >= 28
    only_looked = [m for m in shown if json.dumps(m).count("tool_call_id") == json.dumps(m).count("head -n 4") + 1]
    assert 3 < len(only_looked) < 27


@pytest.mark.scale
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_oracle_solves_every_task(seed):
    world = TerminalWorld(TerminalSettings(tools="shell", seed=seed))
    for split in world.splits:
        tasks = world.tasks(split)
        for number in range(0, len(tasks), 8):
            some = tasks[number : number + 8]
            plays = played(world, *((task, steps_of(world, task)) for task in some))
            idle = played(world, *((task, []) for task in some))
            for task, (lived, said), (nothing, _) in zip(some, plays, idle, strict=True):
                assert success(world.rewards, lived), (task.id, lived.outcomes[-1].output, said)
                assert set(said) <= {"[no output]"}, (task.id, said)
                assert nothing.rewards["solved"] == 0.0, task.id


@pytest.mark.scale
def test_solution_steps_of_every_task_solve_it():
    async def act():
        sandbox, room = open_sandbox(), asyncio.Semaphore(4)

        async def missed(kind, number):
            async with room:
                job = make_task(kind, number, 0)
                return None if await solves(job, job.steps, sandbox) else job.id

        found = await asyncio.gather(*(missed(kind, n) for kind in KINDS.values() for n in kind.numbers))
        await sandbox.close()
        return [job for job in found if job]

    assert asyncio.run(act()) == []


def test_the_difficulty_report_ships_with_the_default_tasks(splits):
    """All of it but *majority*, which has to run commands."""
    told = TerminalWorld().difficulty_report()
    assert told == f"{tables(splits)}\nmajority: test 0 of 37"
    other = TerminalWorld(TerminalSettings(levels=(1,), topics=("text",))).difficulty_report()
    assert other.startswith("train ")
    assert other.endswith(f"The default tasks:\n{told}")


# Checks


def tar_of(members, mode="w:gz"):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def test_checks_accept_right_results_and_reject_near_misses():
    state = SessionState(
        {"a.txt": b"one \ntwo\n\n", "d/x": b"1", "j.json": b'{"b": 1, "a": [true]}'}, frozenset({"d/x"})
    )
    right = (
        has_text("a.txt", "one\ntwo\n"),
        has_text("a.txt", "two\none\n", "unordered"),
        has_text("j.json", '{"a": [true], "b": 1}', "json"),
        only_files("d/*", frozenset({"d/x"})),
        only_executable("*", frozenset({"d/x"})),
        files_unchanged({"d/x": b"1", "gone": b""}, ("gone",), frozenset({"d/x"})),
    )
    wrong = (
        has_text("a.txt", "one\ntwo\n", "bytes"),
        has_text("a.txt", "one\nTwo\n"),
        has_text("a.txt", "two\none\n"),
        has_text("j.json", '{"a": [1], "b": 1}', "json"),
        has_text("b.txt", ""),
        only_files("*", frozenset({"d/x"})),
        only_executable("*", frozenset()),
        files_unchanged({"d/x": b"1"}),
        files_unchanged({"d/x": b"2"}, (), frozenset({"d/x"})),
    )
    assert [check.holds(state) for check in right] == [True] * len(right)
    assert [check.holds(state) for check in wrong] == [False] * len(wrong)


def test_archives_are_read_with_bounds_and_links_are_refused():
    members = {"r/a": b"1", "r/b": b"22"}
    good = SessionState({"x.tar.gz": tar_of([("./r/a", b"1"), ("r/b", b"22")])})
    assert archive_holds("x.tar.gz", members).holds(good)
    link = tarfile.TarInfo("r/b")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.addfile(link)
    bomb = gzip.compress(bytes(17 * 2**20), 1)
    for odd in (buffer.getvalue(), bomb, b"", b"\x1f\x8b no", tar_of([("r/a", b"1")])):
        assert not archive_holds("x.tar.gz", members).holds(SessionState({"x.tar.gz": odd})), odd[:20]
    assert gzip_has_text("x.gz", "a\n").holds(SessionState({"x.gz": gzip.compress(b"a\n")}))
    assert not gzip_has_text("x.gz", "").holds(SessionState({"x.gz": bomb}))
    assert not gzip_has_text("x.gz", "").holds(SessionState({}))


# Git


def small_repository():
    return grow("r", [("one", {"a.txt": "1\n", "s/b.txt": "2\n"}), ("two", {"a.txt": "3\n"})])


def test_a_written_repository_is_read_back_and_forged_objects_are_refused():
    git, shas = small_repository()
    files = git.files()
    state = SessionState(files)
    due = {"a.txt": "3\n", "s/b.txt": "2\n"}
    checks = (
        git_files("r", "main", due),
        git_subjects("r", "main", ("two", "one")),
        git_clean("r"),
        git_branches("r", frozenset({"main"}), head="main"),
        git_ref("r", "main", shas[1]),
    )
    assert all(check.holds(state) for check in checks)
    assert not git_files("r", "main", {**due, "a.txt": "1\n"}).holds(state)
    assert not git_clean("r").holds(SessionState({**files, "r/a.txt": b"dirty\n"}))
    path = f"r/.git/objects/{shas[1][:2]}/{shas[1][2:]}"
    body = zlib.decompress(files[path]).replace(b"two", b"six")
    forged = {**files, path: zlib.compress(body)}
    with pytest.raises(match="does not match its hash"):
        GitRepository(forged, "r").commit(shas[1])
    for broken in (forged, {**files, path: b""}, {**files, path: zlib.compress(bytes(2**25))}):
        assert not git_subjects("r", "main", ("six", "one")).holds(SessionState(broken))


def test_loose_and_packed_git_objects_are_read(world):
    git, _ = small_repository()
    script = (
        "cd r && git status --porcelain && for i in 1 2 3; do "
        "seq 1 200 > long.txt; echo $i >> long.txt; git add -A; "
        'git commit -q -m "step $i"; done && git tag -a -m x '
        "v1 && git branch side HEAD~1 && git gc -q && git fsck"
    )

    async def act():
        sandbox = open_sandbox()
        session = await sandbox.session("shell", files={**git.files(), ".gitconfig": IDENTITY.encode()}, limits=LIMITS)
        before = await session.snapshot()
        outcome = await session.run(script)
        after = await session.snapshot()
        await sandbox.close()
        return before, outcome, after

    before, outcome, after = asyncio.run(act())
    assert (outcome.exit, outcome.text) == (0, ""), outcome.error_text
    assert any(path.endswith(".pack") for path in after.files)
    assert git_clean("r").holds(before)
    long = "".join(f"{n}\n" for n in range(1, 201)) + "3\n"
    assert git_files("r", "main", {"a.txt": "3\n", "s/b.txt": "2\n", "long.txt": long}).holds(after)
    assert git_subjects("r", "main", ("step 3", "step 2", "step 1", "two", "one")).holds(after)
    assert git_branches("r", frozenset({"main", "side"}), head="main").holds(after)
    tip = GitRepository(after.files, "r").resolve("main")
    assert git_ref("r", "v1", tip, annotated=True).holds(after)
    assert git_clean("r").holds(after)


# The world


def test_world_is_registered_and_its_settings_are_checked():
    assert WORLDS["terminal"].endswith(":make_terminal_world")
    world = make_terminal_world({"levels": [1], "topics": ["git"], "tools": "shell"}, ToolLimits())
    check_rewards(world.rewards)
    assert {task.tags["family"] for task in world.tasks("train")} == {"git"}
    with pytest.raises(ConfigError, match=r"env\.settings\.topics\.0"):
        make_terminal_world({"topics": ["gti"]}, ToolLimits())
    with pytest.raises(ConfigError, match="levels"):
        make_terminal_world({"levels": [7]}, ToolLimits())


def test_the_nearest_training_task_is_of_the_same_topic(splits):
    job = splits["test"][0]
    same = [one for one in splits["train"] if one.topic == job.topic]
    found = nearest(job, [*splits["train"][:50], *same[:50]])
    assert found.topic == job.topic
    assert episode(found, found.steps)[-1]["content"].startswith("Done")
