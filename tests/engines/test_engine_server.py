"""The engine behind HTTP: servers that fail, restart, send wrong data, and several servers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from ludus.engines.base import Request
from ludus.engines.models.fingerprint import compare_digests, tensor_digest
from ludus.engines.remote.api_adapters import SampledTokens, VersionRange
from ludus.engines.remote.engine import ServerEngine
from ludus.engines.remote.http_client import RemoteEngineSettings
from ludus.errors import EngineError, SyncError, UserError
from ludus.types import Guide, SamplingParams
from waiting import until

CONTEXT = 64
QUICK = RemoteEngineSettings(timeout_s=20, connect_timeout_s=2, backoff_s=0.01)


@dataclass
class Fake:
    """A server that speaks as vLLM does. `label` is its weight version, `asked` what came, in order.

    With `deaf_to` it samples until it is told to stop, and does not hear that so many times.
    """

    label: str = "default"
    tells_versions: bool = False
    mode: str = "raw"
    faults: list = field(default_factory=list)
    asked: list = field(default_factory=list)
    digests: dict = field(default_factory=dict)
    deaf_to: int | None = None
    url: str = ""
    metrics: str = ""

    def answer(self, path, body):
        path = path.partition("?")[0]
        if path == "/v1/completions" and self.faults:
            return self.faults.pop(0)
        if path == "/v1/completions":
            return 200, self.complete(body)
        if path == "/metrics" and self.metrics:
            return 200, self.metrics.encode()
        if path == "/update_weight_version":
            self.label = body["new_version"]
        return 200, {
            "/v1/models": {"data": [{"id": "m", "owned_by": "fake", "max_model_len": CONTEXT}]},
            "/weight_info": {"weight_version": self.label},
            "/weight_checker": {"checksums": self.digests},
        }.get(path, {})

    def complete(self, body):
        if body.get("echo"):
            rows = [None, *({str(t): {"logprob": -2.0}} for t in body["prompt"][1:])]
            return {"choices": [{"prompt_logprobs": rows}]}
        num, finish = body["max_tokens"], "length"
        if self.deaf_to is not None and self.is_stopped(body["request_id"]):
            num, finish = 2, "abort"
        tempered = body["temperature"] != 1 and self.mode == "processed"
        choice = {"token_ids": [7] * num, "finish_reason": finish, "prompt_token_ids": body["prompt"]}
        choice["logprobs"] = {"token_logprobs": [-5.0 if tempered else -2.0] * num}
        if self.tells_versions:
            choice["weight_versions"] = [{"version": self.label, "start": 0, "end": num}]
        return {"choices": [choice]}

    def is_stopped(self, name):
        """Wait for the orders to end a request; False where they do not come."""
        order, deadline = ("/abort_requests", {"request_ids": [f"cmpl-{name}-0"]}), time.monotonic() + 10
        while time.monotonic() < deadline:
            if self.asked.count(order) > self.deaf_to:
                return True
            time.sleep(0.002)
        return False

    def paths(self):
        return [path for path, _ in self.asked]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self):
        fake = self.server.fake
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.loads(raw or b"{}")
        if self.path != "/v1/models":
            fake.asked.append((self.path, body))
        status, reply = fake.answer(self.path, body)
        if status == "drop":
            self.close_connection = True
            return
        if status == "hang":
            self.server.over.wait(10)
        data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        self.send_response(status if isinstance(status, int) else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST

    def log_message(self, *_):
        pass


class QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        """A client that hangs up is no news."""


@contextmanager
def serving(*fakes):
    servers = []
    for fake in fakes:
        server = QuietServer(("127.0.0.1", 0), Handler)
        server.fake, server.over = fake, threading.Event()
        fake.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
    try:
        yield ServerEngine([fake.url for fake in fakes], settings=QUICK)
    finally:
        for server in servers:
            server.over.set()
            server.shutdown()
            server.server_close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_guide_is_rejected_when_server_returns_logprobs_of_guided_distribution(temperature):
    with serving(Fake()) as engine, pytest.raises(EngineError, match="of the guided distribution"):
        ask(engine, "a", temperature=temperature, guide=Guide("regex", "(yes|no)"))


def ask(engine, *episodes, **params):
    params = {"max_new_tokens": 3} | params

    async def run():
        try:
            requests = [Request(episode, (1, 2, 3), SamplingParams(**params)) for episode in episodes]
            return await engine.generate_batch(requests)
        finally:
            for replica in engine._replicas:
                await replica.close()

    return asyncio.run(run())


WEIGHTS = {"model.embed_tokens.weight": torch.arange(6.0).reshape(3, 2), "model.norm.weight": torch.ones(2)}


def load(engine, version, weights=WEIGHTS):
    async def run():
        try:
            await engine.load_weights(version, weights)
        finally:
            for replica in engine._replicas:
                await replica.close()

    asyncio.run(run())


def test_request_body_matches_the_sampling_parameters():
    fake = Fake()
    with serving(fake) as engine:
        params = {"temperature": 0.0, "stop": ("x",), "stop_token_ids": (9,), "seed": 2**70 + 5}
        ask(engine, "e", max_new_tokens=500, **params)
    ((path, body),) = fake.asked
    assert path == "/v1/completions"
    assert body["prompt"] == [1, 2, 3]
    assert (body["max_tokens"], body["seed"]) == (CONTEXT - 3, 5)
    assert (body["stop"], body["stop_token_ids"]) == (["x"], [9])
    for switch in ("ignore_eos", "include_stop_str_in_output", "return_token_ids"):
        assert body[switch] is True
    assert (body["min_p"], body["repetition_penalty"]) == (0.0, 1.0)


def test_dropped_or_busy_requests_are_retried_with_the_same_request_id():
    fake = Fake(faults=[("drop", b""), (503, {"error": "busy"}), (429, {})])
    with serving(fake) as engine:
        (done,) = ask(engine, "e")
    assert done.tokens == (7, 7, 7)
    assert len({body["request_id"] for _, body in fake.asked}) == 1
    assert len(fake.asked) == 4


def test_http_500_raises_with_the_server_message_without_retry():
    fake = Fake(faults=[(500, {"error": {"message": "CUDA out of memory, sorry"}})])
    with serving(fake) as engine, pytest.raises(EngineError, match="500: CUDA out of memory, sorry"):
        ask(engine, "e")
    assert len(fake.asked) == 1


def test_a_request_to_a_hanging_server_times_out_without_a_retry():
    fake = Fake(faults=[("hang", {})])
    settings = RemoteEngineSettings(timeout_s=1)
    with serving(fake) as first:
        engine = ServerEngine([fake.url], settings=settings)
        words = r"hangs: no response since .* UTC \(1 s ago\), 1 requests waiting .*/health still responds"
        with pytest.raises(EngineError, match=words):
            ask(engine, "e")
        assert first.version == 0
    assert fake.paths() == ["/v1/completions", "/health"]


def test_hung_replica_is_reported_with_time_and_slow_replica_is_not():
    """One of two answers nothing at all, not even how it is; the other answers others meanwhile."""
    hung, slow = Fake(faults=[("hang", {})] * 3), Fake()
    real = hung.answer
    hung.answer = lambda path, body: ("hang", {}) if path == "/health" else real(path, body)

    async def run():
        engine = ServerEngine([hung.url, slow.url], settings=RemoteEngineSettings(timeout_s=0.6))
        begin = time.time()
        asked = [Request(f"e{i}", (1, 2), SamplingParams(max_new_tokens=2)) for i in range(2)]
        found = await asyncio.gather(*map(engine.generate, asked), return_exceptions=True)
        slow.faults.append(("hang", {}))
        late = asyncio.create_task(engine.generate(replace(asked[1], episode="e1")))
        await asyncio.sleep(0.3)
        await engine.generate(asked[1])
        told = (await asyncio.gather(late, return_exceptions=True))[0]
        await engine.close()
        return begin, found, told

    with serving(hung, slow):
        begin, (broken, fine), told = asyncio.run(run())
    assert fine.tokens == (7, 7)
    since = time.strftime("%Y-%m-%d %H:%M", time.gmtime(begin))
    assert f"The replica {hung.url} hangs: no response since {since}" in broken.message
    assert "/health does not respond either" in broken.message
    assert "Decrease rollout.concurrency" not in broken.hint
    assert "hangs" not in told.message
    assert "Decrease rollout.concurrency" in told.hint


@pytest.mark.parametrize("timeout_s", [None, 0.0])
def test_abort_is_resent_until_the_request_ends(timeout_s):
    fake = Fake(deaf_to=2)

    async def run(engine):
        request = Request("e", (1, 2, 3), SamplingParams(max_new_tokens=9), timeout_s)
        running = asyncio.create_task(engine.generate(request))
        await asyncio.sleep(0)
        if timeout_s is None:
            engine.abort("e")
        done = await running
        await asyncio.sleep(0.1)  # what was on its way when the answer came
        told = fake.paths().count("/abort_requests")
        await asyncio.sleep(0.3)  # longer than the next wait
        assert fake.paths().count("/abort_requests") == told
        await engine.close()
        return done

    with serving(fake) as engine:
        done = asyncio.run(run(engine))
    assert (done.tokens, done.finish_reason) == ((7, 7), "abort")


def test_request_aborted_before_sending_is_not_sent():
    fake = Fake()

    async def run(engine):
        await engine.load_weights(1, WEIGHTS)
        fake.label = "default"  # started anew: the first turn finds it, and sends the weights again
        running = asyncio.create_task(engine.generate(Request("e", (1, 2, 3), SamplingParams())))
        await asyncio.sleep(0)
        engine.abort("e")
        part = await running
        whole = await engine.generate(Request("e", (1, 2, 3), SamplingParams(max_new_tokens=4)))
        await engine.close()
        return part, whole

    with serving(fake) as engine:
        part, whole = asyncio.run(run(engine))
    assert (part.tokens, part.finish_reason) == ((), "abort")
    assert (len(whole.tokens), whole.finish_reason) == (4, "length")
    assert fake.paths().count("/v1/completions") == 1


def test_unreachable_server_raises_after_retries_then_after_one_attempt():
    fake = Fake()
    with serving(fake) as engine:
        ask(engine, "e")
    for attempts in (r"\d+ attempts", "1 attempt"):
        with pytest.raises(EngineError, match=f"{fake.url} is unreachable .*{attempts}.*ConnectError") as info:
            ask(engine, "e")
    assert "restart it" in info.value.hint


def test_malformed_responses_raise_engine_error_with_an_excerpt():
    for reply in (b"<html>hello</html>", {"choices": []}, {"choices": [{"token_ids": [1]}]}):
        with serving(Fake(faults=[(200, reply)])) as engine, pytest.raises(EngineError, match=r"hello|choices|no"):
            ask(engine, "e")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"logprobs": {"token_logprobs": [-1.0]}}, "1 log-probabilities for 3 tokens"),
        ({"logprobs": {"token_logprobs": [None, -1.0, -1.0]}}, "2 log-probabilities for 3 tokens"),
        ({"finish_reason": "error"}, "aborted its response"),
        ({"prompt_token_ids": [1, 2]}, "different prompt"),
        ({"prompt_token_ids": None}, "no token ids of prompt"),
    ],
)
def test_inconsistent_response_raises_engine_error(wrong, words):
    right = {"prompt_token_ids": [1, 2, 3], "token_ids": [1, 2, 3], "finish_reason": "length"}
    right |= {"logprobs": {"token_logprobs": [-1.0] * 3}}
    fake = Fake(faults=[(200, {"choices": [right | wrong]})])
    with serving(fake) as engine, pytest.raises(EngineError, match=words):
        ask(engine, "e")


def test_episodes_are_distributed_over_replicas_and_stay_on_theirs():
    fakes = [Fake(), Fake()]
    with serving(*fakes) as engine:
        for _ in range(3):
            ask(engine, *(f"e{n}" for n in range(10)))
    for fake in fakes:
        assert len(fake.asked) == 15


def test_episode_moves_to_another_replica_after_its_replica_is_lost():
    gone, stays = Fake(), Fake()
    with serving(gone, stays) as engine:
        ask(engine, "e")
        assert len(gone.asked) == 1
        gone.faults = [("drop", b"")] * 99
        with pytest.raises(EngineError, match="is unreachable"):
            ask(engine, "e")
        ask(engine, "e")
    assert len(stays.asked) == 1


def test_weights_are_sent_to_every_replica_through_a_folder():
    fakes = [Fake(), Fake()]
    with serving(*fakes) as engine:
        load(engine, 3)
        assert engine.version == 3
        folder = fakes[0].asked[1][1]["kwargs"]["weights_path"]
        assert (Path(engine._weights._folder) / "model.safetensors").is_file()
        (done,) = ask(engine, "e")
        load(engine, 4)
        asyncio.run(engine.close())
    assert done.versions == (3, 3, 3)
    order = ["/pause?mode=keep", "/collective_rpc", "/reset_prefix_cache?reset_running_requests=true"]
    for fake in fakes:
        assert fake.paths()[:5] == [*order, "/update_weight_version", "/resume"]
        assert fake.label == "4"
    assert folder.endswith("-3")
    assert not engine._weights._folder


@pytest.mark.parametrize("tells", [False, True])
def test_restarted_server_receives_the_weights_again(tells):
    fake = Fake(tells_versions=tells)
    with serving(fake) as engine:
        load(engine, 3)
        ask(engine, "first")
        fake.label, fake.asked = "default", []  # as after a restart
        (done,) = ask(engine, "second")
    assert "/collective_rpc" in fake.paths()
    assert fake.paths()[-1] == "/v1/completions"
    assert done.versions == (3, 3, 3)


def test_concurrent_weight_checks_do_not_resend_weights(caplog):
    async def scenario(engine):
        weights, replica, sent = engine._weights, engine._replicas[0], asyncio.Event()
        await engine.load_weights(0, WEIGHTS)

        async def looks():
            while not sent.is_set():
                await asyncio.sleep(0)
                await weights.ensure_weights(replica, first_turn=False)

        looking = [asyncio.create_task(looks()) for _ in range(8)]
        for version in (1, 2, 3):
            await engine.load_weights(version, WEIGHTS)
        sent.set()
        await asyncio.gather(*looking)
        await engine.close()

    fake = Fake(tells_versions=True)
    with serving(fake) as engine:
        asyncio.run(scenario(engine))
    assert fake.paths().count("/update_weight_version") == 4
    assert "has lost" not in caplog.text


def test_other_servers_hold_new_weights_when_one_rejects_them():
    class RefusingServer(Fake):
        def answer(self, path, body):
            return (400, {"message": "No."}) if path == "/collective_rpc" else super().answer(path, body)

    class SlowServer(Fake):
        def answer(self, path, body):
            time.sleep(0.2 if path == "/collective_rpc" else 0)
            return super().answer(path, body)

    slow = SlowServer()
    with serving(RefusingServer(), slow) as engine:
        with pytest.raises(EngineError):
            load(engine, 5)
        assert slow.label == "5"


def test_weights_of_a_failed_transfer_are_removed_from_their_folder(tmp_path):
    class RefusingServer(Fake):
        num_refused = 0

        def answer(self, path, body):
            if path == "/collective_rpc" and self.num_refused == 1:
                self.num_refused += 1
                return 400, {"message": "No."}
            self.num_refused += path == "/collective_rpc"
            return super().answer(path, body)

    fake = RefusingServer()
    with serving(fake):
        engine = ServerEngine([fake.url], settings=replace(QUICK, weights_folder=str(tmp_path)))
        load(engine, 1)
        with pytest.raises(EngineError):
            load(engine, 2)
        load(engine, 2)
    assert [path.name.rpartition("-")[2] for path in tmp_path.iterdir()] == ["2"]


def test_samples_during_a_weight_broadcast_have_a_known_version():
    class Line:
        """A line on which a fast server has the weights, and samples from them, before the others."""

        async def send(self, version, state):
            spans = (VersionRange(str(version), 0, 1),)
            self.known = weights.accepts(SampledTokens((7,), (-1.0,), "length", spans), None)

        def close(self):
            pass

    with serving(Fake()) as engine:
        weights, line = engine._weights, Line()
        weights.broadcaster = line
        load(engine, 0)
        load(engine, 1)
    assert line.known


def test_weights_are_checked_after_a_dropped_connection_before_further_sampling():
    fake = Fake()
    with serving(fake) as engine:
        load(engine, 3)
        ask(engine, "e")
        fake.faults, fake.asked = [("drop", b"")], []
        ask(engine, "e")
        ask(engine, "e")
    assert fake.paths() == ["/v1/completions", "/weight_info", "/v1/completions", "/v1/completions"]


def test_server_updated_by_another_client_raises_error():
    class StubbornServer(Fake):
        def answer(self, path, body):
            answer = super().answer(path, body)
            self.label = "someone else's"
            return answer

    with serving(StubbornServer(tells_versions=True)) as engine:
        load(engine, 3)
        with pytest.raises(EngineError, match="samples from weights someone else's, but was sent 3"):
            ask(engine, "e")


def digests_of(weights):
    return {f"dp0:tp0:{name}": tensor_digest(tensor) for name, tensor in weights.items()}


def test_mismatched_weight_digests_raise_sync_error():
    right = digests_of(WEIGHTS)
    fake = Fake(digests=right)
    with serving(fake) as engine:
        load(engine, 1)
        fake.digests = right | {"dp0:tp0:model.norm.weight": tensor_digest(torch.zeros(2))}
        with pytest.raises(SyncError, match=r"version 2: 1 tensors differ, including model\.norm\.weight"):
            load(engine, 2)


def test_unverifiable_weights_are_reported_once(caplog):
    said = "reports no weight digests"
    with serving(Fake(digests=digests_of(WEIGHTS))) as engine:
        load(engine, 1)
    assert said not in caplog.text
    with serving(Fake()) as engine:
        load(engine, 1)
        load(engine, 2)
    assert caplog.text.count(said) == 1


def test_digests_verify_fused_padded_and_cast_tensors_but_not_empty_ones():
    q, k, v = (torch.randn(4, 3) for _ in range(3))
    embed = torch.randn(70, 3)
    sent = {f"a.{n}_proj.weight": t for n, t in (("q", q), ("k", k), ("v", v))} | {"embed_tokens.weight": embed}
    padded = torch.cat([embed, torch.zeros(58, 3)]).bfloat16()
    theirs = {
        "a.qkv_proj.weight": tensor_digest(torch.cat([q, k, v])),
        "embed_tokens.weight": tensor_digest(padded),
        "b.weight": "unknown",
        "a.q_proj.weight": hashlib.sha256(b"").hexdigest(),
    }
    proof = compare_digests(theirs, sent)
    assert (proof.proved, proof.wrong, proof.silent) == (2, (), 2)
    swapped = theirs | {"a.qkv_proj.weight": tensor_digest(torch.cat([k, q, v]))}
    assert compare_digests(swapped, sent).wrong == ("a.qkv_proj.weight",)
    two = {f"tp{n}:{name}": digest for n in range(2) for name, digest in theirs.items()}
    assert compare_digests(two, sent).proved == 0


@pytest.mark.parametrize(
    ("mode", "params", "is_refused"),
    [
        ("raw", {"temperature": 0.7}, True),
        ("raw", {"top_p": 0.9}, False),
        ("raw", {"temperature": 0.7, "top_k": 4}, True),
        ("processed", {"temperature": 0.7}, False),
        ("processed", {"top_k": 4}, True),
        ("processed", {}, False),
    ],
)
def test_log_probabilities_of_another_distribution_are_refused(mode, params, is_refused):
    with serving(Fake(mode=mode)) as engine:
        if is_refused:
            with pytest.raises(EngineError, match=f"{mode} log-probabilities"):
                ask(engine, "e", **params)
        else:
            assert len(ask(engine, "e", **params)) == 1


class AlternativesServer(Fake):
    """Gives `row` for the alternatives of each token but the first `silent`."""

    def __init__(self, row, silent=0):
        super().__init__()
        self.row, self.silent = row, silent

    def complete(self, body):
        answer = super().complete(body)
        num = body["max_tokens"]
        answer["choices"][0]["logprobs"]["top_logprobs"] = [None] * self.silent + [self.row] * (num - self.silent)
        return answer


def test_top_logprobs_are_requested_by_token_id_and_sorted():
    fake = AlternativesServer({"token_id:7": -2.0, "token_id:3": -0.5, "token_id:9": -1.0, "token_id:1": -0.5})
    with serving(fake) as engine:
        (done,) = ask(engine, "e", top_logprobs=3, max_new_tokens=2)
        (plain,) = ask(engine, "e", max_new_tokens=2)
    assert done.top_logprobs == (((1, -0.5), (3, -0.5), (9, -1.0)),) * 2
    assert plain.top_logprobs == ()
    asked, silent = (body for path, body in fake.asked if path == "/v1/completions")
    assert (asked["logprobs"], asked["return_tokens_as_token_ids"]) == (3, True)
    assert (silent["logprobs"], silent.get("return_tokens_as_token_ids")) == (0, None)


@pytest.mark.parametrize(
    ("fake", "words"),
    [
        (AlternativesServer({"token_id:7": -2.0}, silent=1), "returned top tokens for 2 of 3 tokens"),
        (Fake(), "returned top tokens for 0 of 3 tokens"),
        (AlternativesServer({"7": -2.0}), "returned top tokens as text"),
    ],
)
def test_server_returning_missing_or_textual_top_logprobs_raises_error(fake, words):
    with serving(fake) as engine, pytest.raises(EngineError, match=words):
        ask(engine, "e", top_logprobs=1)


def test_unreachable_or_invalid_server_addresses_raise_at_construction():
    with pytest.raises(EngineError, match="is unreachable") as info:
        ServerEngine(["http://127.0.0.1:9"])
    assert info.value.hint.endswith("ludus serve MODEL --port 9 --control")
    with pytest.raises(EngineError) as info:
        ServerEngine(["http://127.0.0.2:9/"])
    assert info.value.hint.endswith("ludus serve MODEL --host 127.0.0.2 --port 9 --control")
    for address in ("localhost:80", "ftp://a", ""):
        with pytest.raises(UserError):
            ServerEngine([address])


def test_sglang_requests_use_sglang_field_names():
    """Against a fake of what its documentation says; no real server has been met."""

    class Sglang(Fake):
        def answer(self, path, body):
            logprobs = [[-1.0, 7, None]] * 3
            meta = {"finish_reason": {"type": "length"}, "output_token_logprobs": logprobs}
            meta["input_token_logprobs"] = [[None, 1, None], [-0.5, 2, None]]
            meta["output_top_logprobs"] = [[[-0.5, 3, None], [-1.0, 7, None]]] * 3
            return 200, {
                "/v1/models": {"data": [{"id": "m", "max_model_len": CONTEXT}]},
                "/generate": {"output_ids": [7, 7, 7], "meta_info": meta},
                "/get_model_info": {"weight_version": self.label},
                "/update_weights_from_disk": {"success": self.label != "full", "message": "disk on fire"},
            }.get(path, {})

    fake = Sglang(label="1")

    async def run(engine):
        await engine.load_weights(1, WEIGHTS)
        params = SamplingParams(max_new_tokens=3, seed=4, top_logprobs=2)
        done = await engine.generate(Request("e", (1, 2), params))
        assert await engine.score((1, 2)) == [0.0, -0.5]
        fake.label = "full"
        with pytest.raises(EngineError, match="disk on fire"):
            await engine.load_weights(2, WEIGHTS)
        await engine.close()
        return done

    with serving(fake):
        done = asyncio.run(run(ServerEngine([fake.url], "sglang", QUICK)))
    assert (done.tokens, done.logprobs, done.finish_reason) == ((7, 7, 7), (-1.0,) * 3, "length")
    assert done.top_logprobs == (((3, -0.5), (7, -1.0)),) * 3
    assert [body.get("top_logprobs_num") for path, body in fake.asked if path == "/generate"] == [2, None]
    sampling = dict(fake.asked)["/generate"]
    assert sampling["return_logprob"] is True


def connections() -> int:
    """Those that servers of these tests hold open."""
    return sum("process_request" in thread.name for thread in threading.enumerate())


def test_connections_to_a_removed_server_are_closed():
    async def scenario(first, second):
        engine = ServerEngine([first.url], settings=QUICK)

        async def ask_four(name):
            requests = [Request(f"{name}-{i}", (1, 2), SamplingParams(max_new_tokens=2)) for i in range(4)]
            return await engine.generate_batch(requests)

        await ask_four("early")
        assert connections() == before + 4
        first.deaf_to = 0  # it answers when it is told to
        asked = asyncio.create_task(ask_four("late"))
        await until(lambda: sum("completions" in path for path in first.paths()) == 8, 10)
        engine.follow([second.url], None, None)
        await asyncio.sleep(0.05)
        assert connections() == before + 4
        for i in range(4):
            engine.abort(f"late-{i}")
        assert {done.finish_reason for done in await asked} == {"abort"}
        await until(lambda: connections() == before, 10)
        await engine.close()

    first, second, before = Fake(), Fake(), connections()
    with serving(first, second):
        asyncio.run(scenario(first, second))
