"""Ctrl-C during training: the first one is announced and logged, the second one ends the process at once."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from ludus.cli import signals
from ludus.cli.signals import INTERRUPTED, handle_interrupts
from ludus.cli.training.stages import describe_interrupt
from ludus.training.collection import rollout_collector
from ludus.training.run.run_dir import RunFolder, list_checkpoints
from tiny_run import copy_run, ludus

STUCK = """
import signal, time
from ludus.cli import signals
from ludus.cli.signals import handle_interrupts

signals._DUPLICATE_S = SAME_PRESS_S
signal.signal(signal.SIGINT, lambda number, frame: None)
with handle_interrupts("Resume the run with: ludus train --resume R"):
    print("begun", flush=True)
    while True:
        time.sleep(60)
"""


@pytest.fixture
def stuck(request):
    """A process that no interrupt stops by itself, inside the watch; a parameter is how soon is at once."""
    same_press_s = getattr(request, "param", signals._DUPLICATE_S)
    program = STUCK.replace("= SAME_PRESS_S", f"= {same_press_s}")
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    yield process
    process.kill()
    process.communicate()


def press(process, pause_s=0.0):
    time.sleep(pause_s)
    process.send_signal(signal.SIGINT)


def test_the_second_interrupt_ends_what_is_stuck_at_once_with_a_line_and_130(stuck):
    press(stuck)
    assert stuck.stderr.readline() == "\n"
    assert stuck.stderr.readline() == "Interrupted: stopping the run. Press Ctrl-C again to end it immediately.\n"
    assert stuck.poll() is None
    press(stuck, pause_s=0.4)
    assert stuck.wait(timeout=60) == INTERRUPTED
    said = stuck.stderr.read()
    assert said.endswith("\nEnded immediately. Resume the run with: ludus train --resume R\n")


@pytest.mark.parametrize("stuck", [60.0], indirect=True)
def test_an_interrupt_that_comes_twice_at_once_is_one(stuck):
    press(stuck)
    assert stuck.stderr.readline() == "\n"
    press(stuck)
    with pytest.raises(subprocess.TimeoutExpired):
        stuck.wait(timeout=0.5)


@pytest.fixture
def heard():
    """Interrupts as a shell's command has them; workers of parallel tests ignore them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupted_run_says_so_in_its_log(heard, tiny_run, tmp_path, monkeypatch, capfd):
    async def interrupt(*arguments, **options):
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)

    run = copy_run(tiny_run, tmp_path)
    monkeypatch.setattr(rollout_collector.RolloutCollector, "sample", interrupt)
    said = ludus("train", "--resume", run, "--training.steps", "3")
    assert said.code == INTERRUPTED
    where = f"The run resumes at step 3, from {list_checkpoints(run / 'checkpoints')[-1][1]}."
    assert said.err.endswith(f"Interrupted. {where} Resume the run with: ludus train --resume {run}\n")
    assert "Interrupted: stopping the run. Press Ctrl-C again to end it immediately." in capfd.readouterr().err
    noted = (run / "log.txt").read_text().splitlines()[-2:]
    assert noted[0].endswith("interrupted: stopping the run")
    assert noted[1].endswith("stopped by an interrupt")


def test_an_interrupt_names_the_steps_that_a_resume_repeats(tiny_run, tmp_path):
    run = RunFolder(copy_run(tiny_run, tmp_path))
    (_, first), (_, second) = list_checkpoints(run.checkpoints)
    shutil.rmtree(second)
    assert describe_interrupt(run) == f"The run resumes at step 2, from {first}. This step is repeated. "
    shutil.rmtree(first)
    assert describe_interrupt(run) == "The run starts at step 1: no checkpoint yet. Steps 1 to 2 are repeated. "


PRESS = """
import importlib.abc, os, signal, sys

class InterruptingFinder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == MODULE:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, InterruptingFinder())
sys.argv = ["ludus", "train", "search"]
from ludus.__main__ import main
sys.exit(main())
"""


MORE = ("torch.nn", "ludus.cli.main", "rich.table", "ludus.cli.training.stages")


@pytest.mark.parametrize("module", ["pydantic", *(pytest.param(name, marks=pytest.mark.fault) for name in MORE)])
def test_an_interrupt_while_modules_are_imported_is_one_line_and_130(module, tmp_path):
    program = PRESS.replace("MODULE", repr(module))
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert (said.returncode, said.stdout) == (INTERRUPTED, "")
    assert re.fullmatch(r"(.* \.\.\.\n)+\nInterrupted\.\n", said.stderr)
    assert list(tmp_path.iterdir()) == []


def test_after_the_watch_signals_are_as_before():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    with handle_interrupts(""):
        pass
    assert signal.set_wakeup_fd(before) == writer
    os.close(reader)
    os.close(writer)
