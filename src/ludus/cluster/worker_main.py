"""Entry point of a local worker process: `python -m ludus.cluster.worker_main DESCRIPTOR`.

Exits when the parent closes the socket: a separate thread reads it, so this works even if the event loop
hangs.
"""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import sys
import threading

from ludus.cluster.log_forwarding import listen
from ludus.cluster.pickle_rpc import Frame, RpcCall, RpcCancel, RpcHello, RpcReply, UnreadableMessage, pack, read_frame
from ludus.cluster.protocol import failed
from ludus.cluster.workers import WorkerServer
from ludus.engines.models.loading import hide_progress

_HERE = "127.0.0.1"


def main() -> None:
    """Run a worker until the parent is gone."""
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    line = socket.socket(fileno=descriptor)
    hello = read_frame(line)
    if isinstance(hello, RpcHello):
        hide_progress()
        asyncio.run(_serve(line, WorkerServer(hello.spec, _HERE, listen())))


async def _serve(line: socket.socket, host: WorkerServer) -> None:
    loop, inbox = asyncio.get_running_loop(), asyncio.Queue[Frame]()
    outbox = queue.SimpleQueue[bytes]()
    threading.Thread(target=_read, args=(line, loop, inbox), daemon=True).start()
    threading.Thread(target=_write, args=(line, outbox), daemon=True).start()
    await attend(inbox, outbox, host)


async def attend(inbox: asyncio.Queue[Frame], outbox: queue.SimpleQueue[bytes], host: WorkerServer) -> None:
    """Handle incoming messages with `host` and put packed responses into `outbox`. Never returns."""
    calls: set[asyncio.Task[None]] = set()

    async def answer(call: RpcCall) -> None:
        outbox.put(pack(RpcReply(call.number, await host.call(call.number, call.message))))

    while True:
        match await inbox.get():
            case RpcCall() as call:
                task = asyncio.create_task(answer(call))
                calls.add(task)
                task.add_done_callback(calls.discard)
                await asyncio.sleep(0)  # started before the next message, which may cancel it
            case UnreadableMessage(number, error):
                outbox.put(pack(RpcReply(number, failed(error))))
            case RpcCancel(number=number):
                host.cancel(number)


def _read(line: socket.socket, loop: asyncio.AbstractEventLoop, inbox: asyncio.Queue[Frame]) -> None:
    while (frame := read_frame(line)) is not None:
        loop.call_soon_threadsafe(inbox.put_nowait, frame)
    os._exit(0)


def _write(line: socket.socket, outbox: queue.SimpleQueue[bytes]) -> None:
    while True:
        line.sendall(outbox.get())


if __name__ == "__main__":
    main()
