"""A chat-completions server that replays a script and validates the message history.

with serving([Reply(say(None, call("Paris"))), Reply(say("France"))]) as server:
    ...  # send requests to server.url
server.requests  # the received bodies
"""

import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

DROP = object()


@dataclass(frozen=True)
class Reply:
    """A response: status and body, sent `delay_s` after the request, with `drip` byte by byte."""

    body: object = ""
    status: int = 200
    headers: dict = field(default_factory=dict)
    delay_s: float = 0.0
    drip: bool = False


class Server(ThreadingHTTPServer):
    """Replays `script`: a list of replies, or a function of the request body."""

    daemon_threads = True

    def __init__(self, script):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script = script
        self.requests, self.raw, self.headers, self.paths = [], [], [], []
        self.lock = threading.Lock()
        self.active = self.most_active = 0
        self.over = threading.Event()

    def handle_error(self, request, client_address):
        """Ignore clients that disconnect: tests read the standard error."""

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"

    def reply(self, raw, headers, path):
        with self.lock:
            body = json.loads(raw)
            self.raw.append(raw)
            self.requests.append(body)
            self.headers.append(headers)
            self.paths.append(path)
            wrong = fault_in(body["messages"])
            if wrong:
                return Reply(error(wrong), 400)
            return self.script(body) if callable(self.script) else self.script[len(self.requests) - 1]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self):
        server = self.server
        with server.lock:
            server.active += 1
            server.most_active = max(server.most_active, server.active)
        try:
            self._answer(server.reply(self.rfile.read(int(self.headers["Content-Length"])), self.headers, self.path))
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            with server.lock:
                server.active -= 1

    def _answer(self, reply):
        if reply is DROP:
            self.close_connection = True
            return
        self.server.over.wait(reply.delay_s)
        data = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        self.send_response(reply.status)
        for name, value in ({"Content-Length": len(data)} | reply.headers).items():
            self.send_header(name, str(value))
        self.end_headers()
        for byte in data if reply.drip else ():
            self.wfile.write(bytes([byte]))
            self.server.over.wait(0.02)
        if not reply.drip:
            self.wfile.write(data)

    def log_message(self, *_):
        pass


def fault_in(messages):
    """Return the error in a message history: unanswered or unknown calls, or arguments that are not JSON."""
    open_ids = []
    for message in messages:
        if message["role"] == "tool":
            if message["tool_call_id"] not in open_ids:
                return f"tool message answers no call: {message['tool_call_id']}"
            open_ids.remove(message["tool_call_id"])
            continue
        if open_ids:
            return f"calls without an answer: {open_ids}"
        for call in message.get("tool_calls", ()):
            try:
                fine = isinstance(json.loads(call["function"]["arguments"]), dict)
            except ValueError:
                fine = False
            if not fine:
                return f"arguments are no JSON object: {call['function']['arguments']}"
            open_ids.append(call["id"])
    return ""


@contextmanager
def serving(script):
    with Server(script) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.over.set()
            server.shutdown()
            thread.join()


def error(message, **more):
    return {"error": {"message": message, "type": "invalid_request_error", **more}}


def say(content=None, *calls, finish="stop", prompt=10, completion=5, **more):
    message = {"role": "assistant", "content": content, **more}
    if calls:
        message["tool_calls"] = list(calls)
    return {
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion},
    }


def call(query, call_id="a", arguments=None):
    text = json.dumps({"query": query, "k": 1}) if arguments is None else arguments
    function = {"name": "search", "arguments": text}
    return {"type": "function", "function": function} | ({"id": call_id} if call_id else {})
