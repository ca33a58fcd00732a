"""The forked child that becomes the program: drop privileges, then run code or a command."""

from __future__ import annotations

import fcntl
import gc
import os
import struct
import sys

from ludus.sandbox.guest.syscalls import (
    LIBC,
    ResourceLimits,
    Suppress,
    check_result,
    install_seccomp,
    set_dumpable,
    set_rlimits,
    signal,
    write_text,
)
from ludus.sandbox.guest.wire import Disconnected, receive_exactly

BOX = "/box"


def become_program(limits: ResourceLimits, seccomp: bytes, fds: list[int]) -> None:
    """Turn a fork into an unprivileged process; `fds` become descriptors 0, 1, 2, ..."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 32) for fd in fds]
    for number, fd in enumerate(high):
        os.dup2(fd, number)
    os.closerange(len(fds), 65536)
    os.chdir(BOX)
    set_dumpable(1)
    write_text("/proc/self/oom_score_adj", "1000")
    set_rlimits(limits, in_session=len(fds) > 3)
    check_result(LIBC.capset(struct.pack("=Ii", 0x20080522, 0), bytes(24)), "capset")  # no capabilities
    install_seccomp(seccomp)


def _reset_main() -> dict[str, object]:
    main = type(sys)("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"], __file__="main.py")
    for name in [name for name in sys.modules if name.partition(".")[0] == "ludus"]:
        del sys.modules[name]
    sys.modules["__main__"], sys.argv = main, ["main.py"]
    sys.path.insert(0, BOX)
    gc.enable()
    return main.__dict__


def run_python(source: str) -> int:
    """Run a program and return its exit code, without `shut_down`."""
    names = _reset_main()
    if "linecache" in sys.modules:
        _register_source(source, "main.py")
    try:
        exec(compile(source, "main.py", "exec"), names)
    except SystemExit as stop:
        return _exit_code(stop)
    except BaseException as error:  # boundary: any exception of the program is printed
        _print_exception(error, source)
        return 1
    return 0


def _register_source(source: str, name: str) -> None:
    import linecache

    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    print(stop.code, file=sys.stderr)
    return 1


def _print_exception(error: BaseException, source: str = "") -> None:
    """Print a traceback that begins at the program's frames. Pass `source` if it is not registered."""
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    try:
        import traceback

        if source:
            _register_source(source, "main.py")
        if sys.excepthook is sys.__excepthook__:
            traceback.print_exception(type(error), error, frames)
        else:
            sys.excepthook(type(error), error, frames)
    except BaseException as second:  # boundary: printing an exception runs the program's code again
        sys.stderr.write(f"{type(error).__name__} (and printing it: {type(second).__name__})\n")


def shut_down(status: int) -> int:
    """Shut down as the interpreter does, without tearing down modules; return the exit code."""
    try:
        if "threading" in sys.modules:
            sys.modules["threading"].__dict__["_shutdown"]()
        if "atexit" in sys.modules:
            sys.modules["atexit"].__dict__["_run_exitfuncs"]()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # boundary: exit hooks are the program's code
        return status or 120
    return status


def run_command(argv: list[str]) -> int:
    """Exec a command. Returns 127 if it does not exist."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)
    except (OSError, ValueError) as error:
        os.write(2, f"{argv[0]}: {error}\n".encode(errors="replace"))
    return 127


def serve_python() -> int:
    """Run a session's interpreter: receive code (4-byte length first) on descriptor 3, then write a status to 4."""
    names, count = _reset_main(), 0
    while True:
        try:
            source = receive_exactly(3, struct.unpack(">I", receive_exactly(3, 4))[0])
        except Disconnected:
            return 0
        count += 1
        status = _run_call(source.decode("utf-8", "surrogatepass"), f"<call {count}>", names)
        with Suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()
            sys.stderr.flush()
        os.write(4, bytes([status]))


def _run_call(source: str, name: str, names: dict[str, object]) -> int:
    """Run a call of a Python session and print the value of a final expression. `sys.exit` ends the call."""
    import ast

    _register_source(source, name)
    try:
        tree = ast.parse(source, name)
        last = tree.body[-1] if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        if last is not None:
            tree.body.pop()
        exec(compile(tree, name, "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), name, "eval"), names)
            if value is not None:
                print(repr(value))
    except SystemExit as stop:
        return _exit_code(stop)
    except BaseException as error:  # boundary: any exception of the call is printed
        _print_exception(error)
        return 1
    return 0


SHELL_LOOP = r"""
while IFS= command read -r -d '' __call <&3; do
  command eval "$__call" </dev/null 3<&- 4>&-
  command printf "\\x$(command printf %x $?)" >&4
done
"""
"""Loop of a bash session. `command` bypasses functions, which a call may define under any name."""
