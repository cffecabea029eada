"""The client against servers that misbehave, each a real process; and its own arithmetic."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from ddrl_jax.rewards import ConfigurationFault, RewardClient, Scores, joined, total_reward, weighted_names
from ddrl_jax.rewards import client as client_module
from ddrl_jax.sidecar import protocol

# A server in the standard library that speaks the protocol, but for one fault. A sample's score is its mean.
SERVER = """
import http.server, io, json, os, signal, sys, time, urllib.parse
import numpy as np
fault = sys.argv[1]
seen = {"enqueue": 0, "pull": 0}
batches = {}
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *args): pass
    def reply(self, status, content, **headers):
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for k, v in headers.items(): self.send_header(k.replace("_", "-"), v)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
    def do_GET(self):
        if self.path == "/seen": return self.reply(200, seen)
        if fault == "foreign": return self.reply(404, {})
        self.reply(200, {"status": "ok", "scorers": ["other"] if fault == "other scorer" else ["s"]})
    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if fault in ("401", "403"): return self.reply(int(fault), {"message": "no"})
        if self.path.endswith("ping"):
            return self.reply(404 if fault == "not ours" else 200, {"message": "ok"})
        what = self.path.rsplit("/", 1)[1]
        seen[what] += 1
        n = seen[what]
        if fault == what + " hangs": time.sleep(600)
        if fault == what + " dies": os.kill(os.getpid(), signal.SIGKILL)
        if fault == what + " garbage": return self.reply(200, b"<html>\\x00\\xff")
        if fault == what + " list": return self.reply(200, [1, 2])
        if fault == what + " 500": return self.reply(500, b"Internal\\nServer Error")
        if fault == what + " 500 twice" and n <= 2: return self.reply(500, {"message": "busy"})
        if fault == what + " 422": return self.reply(422, {"message": "task failed: out of memory"})
        if fault == what + " 413": return self.reply(413, {"message": "too large"})
        if fault == what + " 429 twice" and n <= 2: return self.reply(429, {"message": "full"}, Retry_After="0.1")
        if fault == what + " 429": return self.reply(429, {"message": "full"}, Retry_After="0.1")
        if fault == what + " cut":
            self.send_response(200); self.send_header("Content-Length", "1000"); self.end_headers()
            self.wfile.write(b"{"); self.close_connection = True; return
        if fault == what + " drips":
            self.send_response(200); self.send_header("Content-Length", "100000"); self.end_headers()
            for _ in range(6000): self.wfile.write(b" "); self.wfile.flush(); time.sleep(0.1)
        if fault == what + " no http":
            self.wfile.write(b"what?\\n"); self.close_connection = True; return
        if what == "enqueue":
            line, _, array = body.partition(b"\\n")
            x = np.load(io.BytesIO(array))
            seen["header"] = json.loads(line)
            seen["shape"], seen["dtype"] = x.shape, str(x.dtype)
            batches[str(n)] = x.reshape(len(x), -1).astype(float).mean(1).tolist()
            return self.reply(200, {"uuid": str(n), "replica_id": "r7"})
        form = urllib.parse.parse_qs(body.decode())
        seen["replica"] = self.headers.get("X-Lepton-Replica-Target")
        seen["type"] = form["type"]
        if fault == "judge fails" and form["type"] == ["j"]: return self.reply(422, {"message": "no judge today"})
        if fault == "lost once" and n == 1: return self.reply(404, {"message": "unknown uuid"})
        if fault == "pending" or n < 3: return self.reply(400, {"message": "pending"})
        overall = batches[form["uuid"][0]]
        scores = {"overall": overall, "b": [1.0] * len(overall)}
        if fault == "one NaN": scores["overall"] = [float("nan")] + overall[1:]
        if fault == "one null": scores["overall"] = [None] + overall[1:]
        if fault == "all NaN": scores["overall"] = [float("nan")] * len(overall)
        if fault == "infinite": scores["overall"] = [float("-inf")] + [1e300] + overall[2:]
        if fault == "huge int": scores["overall"] = [10**400] + overall[1:]
        if fault == "short": scores["overall"] = overall[:-1]
        if fault == "long": scores["overall"] = overall + [0.0]
        if fault == "text": scores["overall"] = ["Good"] * len(overall)
        if fault == "bools": scores["overall"] = [True] * len(overall)
        if fault == "nested": scores["overall"] = [[v] for v in overall]
        if fault == "missing": del scores["overall"]
        if fault == "no scores": scores = {}
        if fault == "null scores": scores = None
        if fault == "foreign": scores["prediction"] = ["Good"] * len(overall); scores["group"] = {"a": [1.0]}
        self.reply(200, {"scores": scores, "input_info": {"shape": [1]}, "duration": "0.35",
                         "decoded_duration": "0.00", "type": form["type"][0]})
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
server.daemon_threads = True
print(server.server_address[1], flush=True)
server.serve_forever()
"""

X = np.arange(4 * 3, dtype=np.float32).reshape(4, 3, 1, 1, 1)
PROMPTS = ["a", "b", "c", "d"]
MEANS = X.reshape(4, 3).mean(1)


@pytest.fixture
def start(tmp_path):
    processes = []
    (tmp_path / "server.py").write_text(SERVER)

    def start(fault, **options):
        process = subprocess.Popen(
            [sys.executable, str(tmp_path / "server.py"), fault], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        processes.append(process)
        port = int(process.stdout.readline())
        options = {"timeout_s": 20.0, "retries": 2, "poll_s": 0.01} | options
        weights = options.pop("reward_fn", {"s": 1.0})
        client = RewardClient(f"http://127.0.0.1:{port}", "t", weights, **options)
        client.process = process
        return client

    yield start
    for process in processes:
        process.kill()
        process.wait()


def seen(client):
    return client._http.get(client.url + "/seen").json()


def test_the_whole_way(start):
    client = start("none", fps=8.0)
    client.ping()
    assert client.health()["status"] == "ok"
    out = client.submit(X, PROMPTS).result()
    assert out.valid.all() and out.reason == "" and out.attempts == 1 and out.seconds > 0
    assert set(out.scores) == {"s/overall", "s/b"}
    np.testing.assert_allclose(out.scores["s/overall"], MEANS)
    assert out.scores["s/overall"].dtype == np.float32 and out.valid.dtype == bool
    fields = seen(client)
    assert fields["header"] == {"prompts": PROMPTS, "reward_fn": {"s": 1.0}, "media_type": "latent",
                                "video_infos": [{"video_fps": 8.0}] * 4}  # fmt: skip
    assert fields["shape"] == [4, 3, 1, 1, 1] and fields["dtype"] == "float32"
    assert fields["replica"] == "r7" and fields["type"] == ["s"]


def test_a_large_batch_goes_in_several_requests_and_comes_back_whole(start, monkeypatch):
    sizes = []
    collect = RewardClient._collect

    def counted(self, array, prompts):
        sizes.append((len(array), len(prompts)))
        return collect(self, array, prompts)

    monkeypatch.setattr(RewardClient, "_collect", counted)
    monkeypatch.setattr(client_module, "_REQUEST_BYTES", X[:2].nbytes)
    array = np.arange(7 * 3, dtype=np.float32).reshape(7, 3, 1, 1, 1)
    array[4] = np.nan
    client = start("none")
    out = client.submit(array, list("abcdefg")).result()
    assert sum(n for n, _ in sizes) == 7 and len(sizes) == 4 and all(n == m for n, m in sizes)
    means = array.reshape(7, 3).mean(1)
    np.testing.assert_allclose(out.scores["s/overall"], np.where(np.isnan(means), np.nan, means))
    np.testing.assert_array_equal(out.valid, ~np.isnan(means))
    assert "not finite" in out.reason and seen(client)["enqueue"] >= 3

    # A request that is lost masks its own samples only.
    out = joined([out, Scores({}, np.zeros(2, bool), "lost", 1.0, 3)])
    assert out.valid.sum() == 6 and len(out.valid) == 9 and np.isnan(out.scores["s/overall"][7:]).all()
    assert out.reason.endswith("; lost") and out.attempts == 3


def test_submit_returns_before_the_scores_are_there(start):
    client = start("enqueue hangs", timeout_s=1.5)
    ticket = client.submit(X, PROMPTS)
    assert not ticket.done()
    assert not ticket.result().valid.any()


def test_bfloat16_on_the_wire(start):
    client = start("none", wire="bfloat16")
    assert client.submit(X, PROMPTS).result().valid.all()
    assert seen(client)["dtype"] == "uint8" and seen(client)["shape"] == [4, 3, 1, 1, 2]


def test_scores_of_a_foreign_server(start):
    """Labels and nested groups, as cosmos-rl's scorers return beside the numbers, are no scores."""
    client = start("foreign")
    client.ping()
    out = client.submit(X, PROMPTS).result()
    assert out.valid.all() and set(out.scores) == {"s/overall", "s/b"}


# fault -> (what the reason says, attempts)
MASKED_WHOLE = {
    "enqueue dies": ("ConnectError|ReadError|RemoteProtocol", 3),
    "pull dies": ("ConnectError|ReadError|RemoteProtocol", 3),
    "enqueue garbage": ("garbage instead of a uuid", 3),
    "enqueue list": ("garbage instead of a uuid", 3),
    "pull garbage": ("garbage instead of scores", 3),
    "pull list": ("garbage instead of scores", 3),
    "null scores": ("garbage instead of scores", 3),
    "enqueue 500": ("server error: 500 Internal Server Error", 3),
    "pull 500": ("server error: 500 Internal Server Error", 3),
    "enqueue 422": ("refused the batch: 422 task failed: out of memory", 1),
    "enqueue 413": ("refused the batch: 413 too large", 1),
    "pull 422": ("scoring failed: 422 task failed: out of memory", 1),
    "enqueue cut": ("RemoteProtocolError", 3),
    "pull cut": ("RemoteProtocolError", 3),
    "enqueue no http": ("RemoteProtocolError", 3),
    "short": ("s/overall has 3 values for 4 samples", 1),
    "long": ("s/overall has 5 values for 4 samples", 1),
    "missing": ("no score 's/overall' among s/b", 1),
    "text": ("no score 's/overall' among s/b", 1),
    "bools": ("no score 's/overall' among s/b", 1),
    "nested": ("no score 's/overall' among s/b", 1),
    "no scores": ("no scores of s in the answer", 1),
}


@pytest.mark.parametrize("fault", MASKED_WHOLE)
def test_faults_mask_the_batch_and_tell_why(start, fault):
    import re

    expected, attempts = MASKED_WHOLE[fault]
    client = start(fault, reward_fn={"s/overall": 1.0})
    out = client.submit(X, PROMPTS).result()
    assert not out.valid.any() and out.valid.shape == (4,)
    assert re.search(expected, out.reason), out.reason
    assert "\n" not in out.reason
    assert out.attempts == attempts


@pytest.mark.parametrize("fault", ["enqueue hangs", "pull hangs", "pending", "enqueue 429", "pull drips"])
def test_waiting_is_bounded(start, fault):
    client = start(fault, timeout_s=1.0)
    out = client.submit(X, PROMPTS).result()
    assert not out.valid.any()
    assert out.reason.startswith("no scores within 1 s ("), out.reason
    assert out.attempts == 1


def test_a_stopped_server_process_is_a_hang(start):
    client = start("none", timeout_s=1.0)
    os.kill(client.process.pid, signal.SIGSTOP)
    out = client.submit(X, PROMPTS).result()
    assert not out.valid.any() and "Timeout" in out.reason
    os.kill(client.process.pid, signal.SIGCONT)
    assert client.submit(X, PROMPTS).result().valid.all()  # and it is well again afterwards


@pytest.mark.parametrize(
    "fault, attempts",
    [
        ("enqueue 500 twice", 3),
        ("pull 500 twice", 3),
        ("enqueue 429 twice", 1),
        ("pull 429 twice", 1),
        ("lost once", 2),
    ],
)
def test_passing_faults_are_survived(start, fault, attempts):
    out = start(fault).submit(X, PROMPTS).result()
    assert out.valid.all() and out.reason == ""
    assert out.attempts == attempts
    np.testing.assert_allclose(out.scores["s/overall"], MEANS)


@pytest.mark.parametrize(
    "fault, bad", [("one NaN", 1), ("one null", 1), ("infinite", 2), ("huge int", 1), ("all NaN", 4)]
)
def test_single_samples_are_masked_never_zero(start, fault, bad):
    out = start(fault).submit(X, PROMPTS).result()
    assert out.valid.tolist() == [False] * bad + [True] * (4 - bad)
    assert out.reason == f"{bad} of 4 scores s/overall are not finite"
    np.testing.assert_array_equal(np.isnan(out.scores["s/overall"]), ~out.valid)
    np.testing.assert_allclose(out.scores["s/overall"][bad:], MEANS[bad:])
    reward, valid = total_reward(out.scores, {"s": 2.0})
    np.testing.assert_array_equal(valid, out.valid)
    np.testing.assert_allclose(reward, np.where(out.valid, 2 * MEANS, np.nan), rtol=1e-6)


def test_unweighted_scores_do_not_invalidate(start):
    out = start("all NaN", reward_fn={"s/b": 1.0}).submit(X, PROMPTS).result()
    assert out.valid.all() and out.reason == ""


def test_a_gate_is_asked_for_and_needed(start):
    client = start("one NaN", reward_fn={"s/b": 1.0}, gates=("s/overall",))
    assert client.submit(X, PROMPTS).result().valid.tolist() == [False, True, True, True]
    assert start("none", gates=("other/safe",)).scorers == ("s", "other")


def test_judges_are_asked_only_when_judging_and_a_failing_one_costs_no_reward(start):
    client = start("judge fails", reward_fn={"s": 1.0, "j": 0.0})
    assert client.scorers == ("s",) and client.with_judges().scorers == ("s", "j")
    out = client.with_judges().submit(X, PROMPTS).result()
    assert out.valid.all() and out.reason == "" and set(out.scores) == {"s/overall", "s/b"}
    both = start("none", reward_fn={"s": 1.0, "j": 0.0}).with_judges().submit(X, PROMPTS).result()
    assert {"j/overall", "s/overall"} <= set(both.scores)


def test_samples_that_are_not_finite_are_not_sent(start):
    client = start("none")
    broken = X.copy()
    broken[1, 0] = np.nan
    broken[3] = np.inf
    out = client.submit(broken, PROMPTS).result()
    assert out.valid.tolist() == [True, False, True, False]
    assert out.reason == "2 of 4 samples are not finite"
    np.testing.assert_allclose(out.scores["s/overall"], [MEANS[0], np.nan, MEANS[2], np.nan])
    out = client.submit(np.full_like(X, np.nan), PROMPTS).result()
    assert not out.valid.any() and out.reason == "no sample is finite" and out.attempts == 0


@pytest.mark.parametrize("status", ["401", "403"])
def test_a_refused_token_is_the_users_fault(start, status):
    client = start(status)
    with pytest.raises(ConfigurationFault, match=r"^reward\.token: .* refuses it"):
        client.ping()
    with pytest.raises(ConfigurationFault, match=r"^reward\.token: "):
        client.submit(X, PROMPTS).result()
    assert issubclass(ConfigurationFault, ValueError)


def test_ping_finds_what_is_wrong_before_the_run(start):
    with pytest.raises(ConfigurationFault, match=r"^reward\.scorers: s not served by .*; it has other$"):
        start("other scorer").ping()
    with pytest.raises(ConfigurationFault, match=r"^reward\.url: .* is no reward server \(ping: status 404\)"):
        start("not ours").ping()
    client = start("none")
    client.process.kill()
    client.process.wait()
    with pytest.raises(ConfigurationFault, match=r"^reward\.url: no reward server at .* reward\.launch = True"):
        client.ping()
    assert client.health()["status"] == "unreachable"


def test_bad_settings():
    def client(url="http://127.0.0.1:1", weights=None, **options):
        return RewardClient(url, "t", {"s": 1.0} if weights is None else weights, **options)

    for url in ("", "localhost:80", "ftp://x", "http://"):
        with pytest.raises(ConfigurationFault, match=r"^reward\.url: "):
            client(url)
    for weights in ({}, {"s": 0.0}, {"s": float("nan")}):
        with pytest.raises(ConfigurationFault, match=r"^reward\.scorers: "):
            client(weights=weights)
    for options in ({"timeout_s": 0}, {"retries": -1}, {"wire": "bfloat16", "media_type": "video"}):
        with pytest.raises(ConfigurationFault, match=r"^reward"):
            client(**options)
    with pytest.raises(ValueError, match="prompts: 1 of them"):
        client().submit(X, ["a"])


def test_many_tickets_at_once(start):
    client = start("none")
    tickets = [client.submit(X + i, PROMPTS) for i in range(8)]
    for i, ticket in enumerate(tickets):
        np.testing.assert_allclose(ticket.result().scores["s/overall"], MEANS + i, rtol=1e-6)


# --- mixing ---


def test_total_reward():
    scores = {"d/overall": np.float32([1, 2, np.nan]), "d/a": np.float32([1, np.nan, 1]), "e/x": np.float32([4, 4, 4])}
    reward, valid = total_reward(scores, {"d": 1.0, "e": -0.5, "d/a": 0.0})
    np.testing.assert_array_equal(reward, np.float32([-1, 0, np.nan]))
    assert reward.dtype == np.float32 and valid.tolist() == [True, True, False]
    reward, valid = total_reward(scores, {"d/a": 2.0})
    assert valid.tolist() == [True, False, True]
    assert weighted_names({"d": 1.0, "d/overall": 1.0}, scores) == {"d/overall": 2.0}
    for weights in ({"f": 1.0}, {"d/b": 1.0}, {}, {"d": 0.0}):
        with pytest.raises(KeyError):
            total_reward(scores, weights)
    with pytest.raises(KeyError):  # several, and none is called overall
        total_reward({"d/a": reward, "d/b": reward}, {"d": 1.0})


def test_the_trainers_side_needs_neither_torch_nor_jax():
    code = (
        "import sys, ddrl_jax.rewards; "
        "bad = {m.split('.')[0] for m in sys.modules} & {'torch', 'jax', 'flax', 'fastapi', 'uvicorn'}; "
        "own = [m for m in sys.modules if m.startswith('ddrl_jax.')]; "
        "import json; print(json.dumps([sorted(bad), sorted(own)]))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    bad, own = json.loads(done.stdout)
    assert bad == []
    assert {m for m in own if "rewards" not in m} == {
        f"ddrl_jax.sidecar{module}" for module in ("", ".protocol", ".shared")
    }
    assert protocol.ENQUEUE == "/api/reward/enqueue"
