"""Arrays by shared memory between a trainer and a sidecar on one host; nothing stays there when either is killed."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ddrl_jax.sidecar import shared

if not shared.available():
    pytest.skip("this system has no /dev/shm with O_TMPFILE", allow_module_level=True)

from ddrl_jax.rewards import RewardClient
from ddrl_jax.sidecar.protocol import EnqueueHeader, Limits, ProtocolError, SharedArray, decode_request, encode_request

ROOT = Path(__file__).parents[1]
X = np.arange(2 * 3 * 2 * 4 * 4, dtype=np.float32).reshape(2, 3, 2, 4, 4)


def there(name):
    return Path("/dev/shm", name).exists()


def naming(segment, shape=X.shape, dtype="float32", **fields):
    claim = SharedArray(name=segment if isinstance(segment, str) else segment.name, shape=list(shape), dtype=dtype)
    fields = {"prompts": ["a", "b"], "reward_fn": {"s": 1.0}} | fields
    return encode_request(EnqueueHeader(shared=claim, **fields), None)


def test_an_array_is_mapped_and_its_name_gone():
    with shared.Segment(X) as segment:
        header, out = decode_request(naming(segment))
        assert not there(segment.name)
    assert header.shared is None
    np.testing.assert_array_equal(out, X)  # the maker has closed it, the mapping stays
    assert not out.flags.writeable
    with shared.Segment(X.transpose(4, 3, 2, 1, 0)) as segment:
        _, out = decode_request(naming(segment, (4, 4, 2, 3, 2), prompts=["a"] * 4))
    np.testing.assert_array_equal(out, X.transpose(4, 3, 2, 1, 0))


def test_a_segment_nobody_takes_goes_with_its_maker():
    with shared.Segment(X) as segment:
        assert there(segment.name)
        assert Path("/dev/shm", segment.name).stat().st_mode & 0o777 == 0o600
    assert not there(segment.name)


BAD = {
    "path": ("../../etc/passwd", X.shape, "float32", "no name of ours"),
    "absolute": ("/dev/shm/x", X.shape, "float32", "no name of ours"),
    "newline": ("ddrl_" + "0" * 32 + "\n", X.shape, "float32", "no name of ours"),
    "proof": ("ddrl_here_" + "0" * 32, X.shape, "float32", "no name of ours"),
    "not there": ("ddrl_" + "0" * 32, X.shape, "float32", "cannot be had"),
    "too many elements": ("ddrl_" + "0" * 32, (2, 1 << 40, 1, 1, 1), "float32", "elements"),
    "more than a body": ("ddrl_" + "0" * 32, (2, 1 << 27, 1, 1, 1), "float64", "larger than the limit"),
    "rank": ("ddrl_" + "0" * 32, (2, 2), "float32", "B,C,T,h,w is needed"),
    "negative": ("ddrl_" + "0" * 32, (2, -1, 1, 1, 1), "float32", "empty axis"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_claims(case):
    name, shape, dtype, expected = BAD[case]
    with pytest.raises(ProtocolError, match=re.escape(expected)) as caught:
        decode_request(naming(name, shape, dtype), Limits())
    assert "\n" not in str(caught.value)


def test_a_claim_of_another_size_or_with_values_that_are_wrong_is_refused():
    with shared.Segment(X) as segment:
        with pytest.raises(ProtocolError, match="768 bytes where shape and dtype need 1536"):
            decode_request(naming(segment, dtype="float64"))
        assert there(segment.name)
        with pytest.raises(ProtocolError, match="bytes follow the JSON line"):
            decode_request(naming(segment) + b"x")
    with shared.Segment(X * np.nan) as segment, pytest.raises(ProtocolError, match="not finite"):
        decode_request(naming(segment))
    assert not there(segment.name)


def test_someone_elses_link_is_not_followed(tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(X.tobytes())
    link = Path("/dev/shm", "ddrl_" + "a" * 32)
    link.symlink_to(secret)
    try:
        with pytest.raises(ProtocolError, match="cannot be had"):
            decode_request(naming(link.name))
        assert secret.exists()
    finally:
        link.unlink()


def test_the_proof():
    segment, proof = shared.prove()
    with segment:
        assert shared.same_host(proof)
        assert not shared.same_host({**proof, "sha256": hashlib.sha256(b"other").hexdigest()})
        for wrong in (None, "x", {}, {"name": "../x"}, {**proof, "name": "ddrl_here_" + "0" * 32}):
            assert not shared.same_host(wrong)
    assert not shared.same_host(proof)


MAKER = """
import sys, time
import numpy as np
from ddrl_jax.sidecar import shared
segment = shared.Segment(np.zeros(1000, np.float32))
print(segment.name, flush=True)
time.sleep(600)
"""


def test_sweeping_takes_what_the_dead_left_and_nothing_else():
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", MAKER], stdout=subprocess.PIPE, text=True, env=env)
    try:
        name = process.stdout.readline().strip()
        shared.sweep()
        assert there(name)  # its maker lives
    finally:
        process.kill()  # SIGKILL
        process.wait()
    assert there(name)
    assert shared.sweep() >= 1
    assert not there(name)


# --- a real server ---


@pytest.fixture
def server(tmp_path):
    pytest.importorskip("torch")
    from tests.test_sidecar_server import SLOW_SCORER, Server

    (tmp_path / "slow.py").write_text(SLOW_SCORER)
    server = Server("--scorer", f"{tmp_path}/slow.py:Slow", token="")
    server.proof = server.http.get("/health").json()["shared"]["name"]
    yield server
    server.stop()


def sent(client, monkeypatch):
    """The bodies that a client sends, as they go."""
    bodies, post = [], client._post

    def spy(path, timeout, **request):
        if "content" in request:
            bodies.append(request["content"])
        return post(path, timeout, **request)

    monkeypatch.setattr(client, "_post", spy)
    return bodies


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_scores_are_the_same_either_way(server, monkeypatch, wire):
    outs, lengths = [], []
    for transport in ("auto", "http"):
        client = RewardClient(server.url, "", {"slow": 1.0}, wire=wire, transport=transport)
        bodies = sent(client, monkeypatch)
        outs.append(client.submit(X, ["0", "0"]).result())
        lengths.append(len(bodies[0]))
        client.close()
    assert all(o.valid.all() for o in outs)
    np.testing.assert_array_equal(outs[0].scores["slow/overall"], outs[1].scores["slow/overall"])
    assert lengths[0] < 400 < lengths[1]  # by name, and with the array
    assert there(server.proof)


def test_a_server_that_cannot_see_it_gets_it_by_http(server, monkeypatch):
    """A restart behind the same address, in a container of its own: the client asked another server."""
    client = RewardClient(server.url, "", {"slow": 1.0})
    bodies = sent(client, monkeypatch)
    monkeypatch.setattr(client, "_shares_memory", lambda deadline: client._shares)
    client._shares = True
    taken = shared.Segment.__init__

    def vanish(self, content, prefix="ddrl_"):
        taken(self, content, prefix)
        os.unlink(f"/dev/shm/{self.name}")

    monkeypatch.setattr(shared.Segment, "__init__", vanish)
    out = client.submit(X, ["0", "0"]).result()
    assert out.valid.all() and out.attempts == 1
    assert len(bodies) == 2 and len(bodies[1]) > X.nbytes and not client._shares


def test_no_room_in_shared_memory_is_no_fault(server, monkeypatch):
    def full(self, content, prefix="ddrl_"):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared.Segment, "__init__", full)
    client = RewardClient(server.url, "", {"slow": 1.0})
    assert client.submit(X, ["0", "0"]).result().valid.all()


def test_nothing_is_left_when_the_server_is_killed(server):
    client = RewardClient(server.url, "", {"slow": 1.0}, timeout_s=5.0, retries=0)
    ticket = client.submit(X, ["60", "60"])
    end = time.monotonic() + 20
    while server.http.get("/health").json()["pending"] == 0 and time.monotonic() < end:
        time.sleep(0.02)
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    assert not ticket.result().valid.any()
    assert there(server.proof)
    client.close()  # sweeps
    assert not there(server.proof)


TRAINER = """
import sys, json, os, time
import numpy as np
from ddrl_jax.rewards import RewardClient
from ddrl_jax.sidecar import shared
segment = shared.Segment(np.zeros(1000, np.float32))  # made, and not yet sent
client = RewardClient(sys.argv[1], "", {"slow": 1.0})
ticket = client.submit(np.zeros((2, 3, 1, 2, 2), np.float32), ["60", "60"])
while client.health()["pending"] == 0:
    time.sleep(0.02)
print(json.dumps(segment.name), flush=True)
time.sleep(600)
"""


def test_nothing_is_left_when_the_trainer_is_killed(server):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", TRAINER, server.url], stdout=subprocess.PIPE, env=env)
    try:
        name = json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
    shared.sweep()  # as the server does every half a minute
    mine = [n for n in os.listdir("/dev/shm") if n == name]
    assert not mine and there(server.proof)
