"""A thousand malformed requests: each is refused with a 4xx and one clear line; the server neither dies nor grows."""

import io
import json
import pickle
import socket
import zipfile
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

from tests.test_sidecar_server import TOKEN, Server  # noqa: E402

REQUESTS = 1000
LATENT = np.arange(2 * 4 * 2 * 3 * 2, dtype=np.float32).reshape(2, 4, 2, 3, 2)


def npy(array, **options):
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return buffer.getvalue()


def claimed(shape, descr="<f4"):
    """np.save's header of an array that does not follow."""
    header = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


def line(**fields):
    return json.dumps({"prompts": ["a", "b"], "reward_fn": {"brightness": 1.0}} | fields).encode() + b"\n"


def saved(value, **options):
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


class Evil:
    def __reduce__(self):
        return (Path.touch, (Path("a_pickle_was_read"),))


def repacked(content, edit=lambda name, data: data, compression=zipfile.ZIP_STORED):
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(out, "w", compression) as target:
        for entry in source.infolist():
            target.writestr(entry.filename, edit(entry.filename, source.read(entry)))
    return out.getvalue()


GOOD_TORCH = saved(torch.from_numpy(LATENT))


def bombs():
    """Archives that are small and claim to be large."""
    zeros = repacked(saved(torch.zeros(2, 4, 16, 64, 64)), compression=zipfile.ZIP_DEFLATED)
    lie = repacked(GOOD_TORCH, lambda name, data: data.replace(b"K\x60", b"J\xff\xff\xff\x7f"))
    wide = saved(torch.zeros(1).expand(2, 4, 64, 512, 512))
    return [zeros, lie, wide]


def enqueues(rng):
    """Kinds of bodies that are no requests; each gives another at every call."""
    array = rng.normal(size=LATENT.shape).astype(np.float32)
    good, objects = npy(array), np.empty(LATENT.shape, object)
    objects[:] = [[[[[Evil()]]]]]
    cut = int(rng.integers(1, len(good)))
    junk = rng.bytes(int(rng.integers(1, 400)))
    dims = ", ".join(str(int(n)) for n in rng.integers(1 << 10, 1 << 40, 5))
    bad = array.copy()
    bad.flat[rng.integers(array.size)] = rng.choice([np.nan, np.inf, -np.inf])
    dtype = rng.choice(["int8", "int64", "uint16", "complex64", "bool", "S5", "U3", "datetime64[s]"])
    axes = tuple(int(n) for n in rng.integers(1, 3, int(rng.choice([1, 2, 3, 4, 6, 7]))))
    name = "".join(rng.choice(list("abc/.\\%\x00 ddrl_0"), 40))
    field = str(rng.choice(["prompts", "reward_fn"]))
    whole = json.loads(line())
    yield line() + good[:-cut]
    yield line()[: int(rng.integers(1, len(line()) - 1))]
    yield line()[: int(rng.integers(1, len(line()) - 1))] + b"\n" + good
    yield junk.replace(b"\n", b"")
    yield line() + junk
    yield junk.replace(b"\n", b"") + b"\n" + good
    yield line() + good + junk
    yield line() + npy(array.astype(dtype))
    yield line() + npy(np.zeros(LATENT.shape, [("a", "f4"), ("b", "O")]))
    yield line() + npy(objects, allow_pickle=True)
    yield line() + pickle.dumps(Evil())
    yield line() + claimed(f"({dims})")
    yield line() + claimed(f"({rng.integers(-9, 0)}, 1, 1, 1, 1)")
    yield line() + claimed("(2, 1, 1, 1, 1)", "|O")
    yield line() + claimed("__import__('os').system('true')")
    yield line() + npy(bad)
    yield line() + npy(np.zeros(axes, np.float32))
    yield line(media_type=str(rng.choice(["video", "image"]))) + npy(array - 1000)
    yield line(media_type=name) + good
    yield json.dumps({k: v for k, v in whole.items() if k != field}).encode() + b"\n" + good
    yield json.dumps({**whole, field: [None, 3, {"a": []}, "x", [[]]][int(rng.integers(5))]}).encode() + b"\n" + good
    yield line(prompts=["a"] * int(rng.integers(3, 50))) + good
    yield line(prompts=["\ud800", "a"]) + good
    yield line(reward_fn={name: 1.0}) + good
    yield line(reward_fn={"brightness": float(rng.choice([0, -1, np.nan, np.inf]))}) + good
    yield line(video_infos=[{"video_fps": [0, -1, "x", None, 1e9][int(rng.integers(5))]}] * 2) + good
    yield line(video_infos=[{}] * 3) + good
    yield b"[" * int(rng.integers(1000, 100_000)) + b"\n" + good
    yield b"9" * 5000 + b"\n" + good
    yield line() + saved(Evil())
    yield line() + saved({"x": torch.from_numpy(array)})
    yield line() + saved([torch.from_numpy(array)] * 2)
    yield line() + saved(torch.nn.Linear(2, 2))
    yield line() + saved(torch.from_numpy(array), _use_new_zipfile_serialization=False)
    yield line() + saved(torch.from_numpy(bad))
    yield line() + saved(torch.from_numpy(array).to(torch.complex64))
    yield line() + saved(torch.from_numpy(array).to_sparse())
    yield line() + saved(torch.from_numpy(array)[0])
    yield line() + GOOD_TORCH[: int(rng.integers(5, len(GOOD_TORCH) - 30))]
    yield line() + bombs()[int(rng.integers(3))]
    yield line(shared={"name": name, "dtype": "float32", "shape": [2, 1, 1, 1, 1]})
    yield line(shared={"name": "ddrl_" + rng.bytes(16).hex(), "dtype": "float32", "shape": [2, 1, 1, 1, 1]})
    yield line(shared={"name": "ddrl_" + "0" * 32, "dtype": str(dtype), "shape": [2, 1, 1, 1, 1]})
    yield line(shared={"name": "ddrl_" + "0" * 32, "dtype": "uint8", "shape": [2, 1 << 60, 1, 1, 2]})
    yield line(shared=[junk.hex()]) + good


def forms(rng):
    """Malformed questions: path, form."""
    junk, key = rng.bytes(30).hex(), rng.bytes(16).hex()
    yield "/api/reward/pull", {"uuid": junk, "type": "brightness"}
    yield "/api/reward/pull", {"type": "brightness"}
    yield "/api/reward/pull", {"uuid": "x" * 3000}
    yield "/api/reward/push", {"uuid": key, "scores": junk, "type": "s"}
    yield "/api/reward/push", {"uuid": "../" + junk, "scores": '{"scores": {"a": [1]}}', "type": "s"}
    yield "/api/reward/push", {"uuid": key, "scores": '{"scores": {"a": 1}}', "type": "s"}
    yield "/api/reward/push", {"uuid": key, "scores": '{"scores": {"a": [1]}}'}
    yield "/api/reward/push", {"uuid": key}
    yield "/api/reward/latent_attr", {"fields": junk}
    yield "/api/reward/latent_attr", {"fields": json.dumps({"vae_pth": "/tmp/" + junk})}
    yield "/api/reward/latent_attr", {"fields": json.dumps({"fps": "x" + junk})}
    yield "/api/reward/ping", {}
    yield f"/{junk}", {"uuid": key}


def resident(server):
    text = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0]) / 1024  # MiB


@pytest.mark.slow
def test_a_thousand_malformed_requests(tmp_path):
    rng = np.random.default_rng(0)
    server = Server("--scorer", "brightness", "--max-body-mib", 4)
    wrong = (
        {},
        {"Authorization": "Bearer"},
        {"Authorization": f"Bearer {TOKEN}x".encode()},
        {"Authorization": "Basic x"},
    )
    done, statuses, middle = 0, {}, 0.0
    try:

        def refused(answer, what):
            nonlocal done
            assert 400 <= answer.status_code < 500, (answer.status_code, what)
            if answer.status_code == 400:
                raise AssertionError(f"400 means pending: {what}")
            message = answer.json()["message"]
            assert message and message.isprintable() and len(message) <= 300, (message, what)
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            done += 1

        while done < REQUESTS:
            for body in enqueues(rng):
                refused(server.http.post("/api/reward/enqueue", content=body), body[:200])
            for path, form in forms(rng):
                refused(server.http.post(path, data=form), (path, form))
            for headers in wrong:
                with httpx.Client(base_url=server.url, trust_env=False, headers=headers) as stranger:
                    refused(stranger.post("/api/reward/enqueue", content=line() + npy(LATENT)), headers)
            refused(server.http.post("/api/reward/enqueue", content=b"x" * (5 << 20)), "5 MiB")
            refused(server.http.post("/api/reward/ping", content=b"info_data=" + b"x" * (5 << 20),
                    headers={"Content-Type": "application/x-www-form-urlencoded"}), "a form of 5 MiB")  # fmt: skip
            with socket.create_connection(("127.0.0.1", server.ready["port"])) as raw:  # gone in the middle of a body
                head = f"POST /api/reward/enqueue HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
                raw.sendall(head.encode() + b"Content-Length: 100000\r\n\r\n" + line() + npy(LATENT))
            middle = middle or (resident(server) if done > REQUESTS // 2 else 0.0)
        assert set(statuses) <= {401, 404, 413, 422}, statuses
        # The server is well: it takes and scores a request, and has nothing left of the others.
        health = server.http.get("/health").json()
        assert health["pending"] == health["scored"] == health["failed"] == 0
        uuid = server.enqueue(LATENT).json()["uuid"]
        assert server.wait(uuid).status_code == 200
        assert resident(server) - middle < 16, "MiB more after the second half of the requests"
        assert not Path("a_pickle_was_read").exists()
    finally:
        log = server.stop()
    assert "Traceback" not in log, log[-3000:]
    assert TOKEN not in log
