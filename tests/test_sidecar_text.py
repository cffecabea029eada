"""The sidecar's text tower: the same features as the trainer's, over HTTP as over a function call, and its refusals."""

import http.server
import io
import json
import os
import shutil
import signal
import sys
import threading
import time

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("fastapi")

from ddrl_jax.checkpoint import load_pretrained  # noqa: E402
from ddrl_jax.models import text_encoder  # noqa: E402
from ddrl_jax.models.qwen_text import STRATEGIES, QwenTextConfig, embedding_width  # noqa: E402
from ddrl_jax.rewards import ConfigurationFault, SidecarText, TextUnavailable, embed_captions, launch  # noqa: E402
from ddrl_jax.rewards import text as rewards_text  # noqa: E402
from ddrl_jax.sidecar import protocol, text  # noqa: E402
from tests.paths import GOLDEN  # noqa: E402
from tests.qwen_tokenizer import write_tower  # noqa: E402
from tests.test_sidecar_server import TOKEN, Server, fails  # noqa: E402

torch.set_num_threads(1)
FOLDER = GOLDEN / "text_encoder"
HUB = FOLDER / "hf_hub_layout_prefix_model"
TOLERANCE = 5e-5  # golden/README.md
CAPTIONS = ["a red fox runs", "Café, 東京 🦊", "<|im_end|> cafe\u0301 " * 30]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tower(tmp_path_factory.mktemp("tower") / "folder")


@pytest.fixture(scope="module")
def trainers(folder):
    """What the trainer computes: (3, 40, 192)."""
    return text_encoder.TextEncoder(*load_pretrained(folder), folder, length=40).embed(CAPTIONS)


@pytest.fixture(scope="module")
def sidecar(folder, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "sidecar.log"
    with launch("this", {}, text_encoder=folder, text_length=40, text_dtype="float32", log_path=log) as sidecar:
        yield sidecar
    assert "fox" not in log.read_text()  # no caption


# ---- the tower -------------------------------------------------------------------------------------------------------


def test_golden_hidden_states():
    with np.load(FOLDER / "io.npz") as io_:
        ids, wanted = io_["input_ids_BS"], [io_[name] for name in sorted(io_) if name.startswith("hidden_state/")]
    tower = text.load_tower(HUB, torch.float32, "cpu")
    states = tower(input_ids=torch.from_numpy(ids), output_hidden_states=True, use_cache=False).hidden_states
    assert len(states) == len(wanted)
    for got, want in zip(states, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("strategy", ["full_concat", "mean_pooling", "pool_every_3_layers_and_concat"])
def test_features_are_the_trainers(folder, strategy):
    ours = text_encoder.TextEncoder(*load_pretrained(folder), folder, length=40, strategy=strategy)
    theirs = text.TextEncoder(str(folder), length=40, strategy=strategy, dtype="float32")
    assert (theirs.length, theirs.dim) == (ours.length, ours.dim)
    got = theirs.embed(CAPTIONS)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, ours.embed(CAPTIONS), rtol=0, atol=TOLERANCE)


def test_tokens_are_the_trainers(folder):
    tokens, pad_id = text.load_tokenizer(folder)
    ours = text_encoder.load_tokenizer(folder)
    assert pad_id == ours.pad_id
    for length in (17, 300):
        theirs = [text.tokenize(tokens, pad_id, caption, length) for caption in CAPTIONS]
        assert theirs == text_encoder.tokenize(ours, CAPTIONS, length).tolist()


@pytest.mark.parametrize("layers", [1, 4, 28])
@pytest.mark.parametrize("strategy", [*STRATEGIES, "pool_every_3_layers_and_concat"])
def test_strategies_are_the_trainers(strategy, layers):
    parts = -(-layers // text.group_size(strategy, layers))
    assert embedding_width(QwenTextConfig(depth=layers), strategy) == 3584 * parts


def test_the_eps_is_1e_6_whatever_config_json_says(folder, tmp_path):
    shutil.copytree(HUB, tmp_path / "t")
    config = json.loads((HUB / "config.json").read_text())
    (tmp_path / "t/config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    tower = text.load_tower(tmp_path / "t", torch.float32, "cpu")
    assert tower.norm.variance_epsilon == 1e-6
    assert {layer.input_layernorm.variance_epsilon for layer in tower.layers} == {1e-6}


def test_angles_stay_float32_in_a_bfloat16_tower():
    tower = text.load_tower(HUB, torch.bfloat16, "cpu")
    assert tower.rotary_emb.inv_freq.dtype == torch.float32
    assert {p.dtype for p in tower.parameters()} == {torch.bfloat16}


def test_bfloat16_features_are_bits(folder, trainers):
    bits = text.TextEncoder(str(folder), length=40, dtype="bfloat16").embed(CAPTIONS)
    assert bits.dtype == np.uint16
    off = bits.view(ml_dtypes.bfloat16).astype(np.float32) - trainers
    assert np.sqrt(np.mean(off**2)) < 0.03  # of a deviation of 1; measured .012


# ---- over HTTP -------------------------------------------------------------------------------------------------------


def test_embed_captions(sidecar, trainers):
    got = embed_captions(sidecar.url, sidecar.token, [CAPTIONS[1], CAPTIONS[0], CAPTIONS[1], CAPTIONS[2]])
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, trainers[[1, 0, 1, 2]], rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(got[0], got[2])
    np.testing.assert_array_equal(embed_captions(sidecar.url, sidecar.token, [CAPTIONS[0]])[0], got[1])


def test_sidecar_text(sidecar, trainers):
    client = sidecar.client({"brightness": 1.0})
    features = SidecarText(length=40, dim=192)
    with pytest.raises(ValueError, match="before `connect`"):
        features.embed(CAPTIONS)
    features.connect(client)
    np.testing.assert_allclose(features.embed(CAPTIONS), trainers, rtol=0, atol=TOLERANCE)
    with pytest.raises(ConfigurationFault, match=r"^text\.length=41: the text encoder of http.* has 40$"):
        SidecarText(length=41, dim=192).connect(client)
    with pytest.raises(ConfigurationFault, match=r"^text\.dim=48: the text encoder of http.* has 192$"):
        SidecarText(length=40, dim=48).connect(client)
    client.close()


def test_a_sidecar_that_dies_is_started_again(folder, trainers):
    with launch("this", {}, text_encoder=folder, text_length=40, text_dtype="float32") as sidecar:
        client = sidecar.client({"brightness": 1.0})
        features = SidecarText(length=40, dim=192)
        features.connect(client)
        os.kill(sidecar.pid, signal.SIGKILL)
        np.testing.assert_allclose(features.embed(CAPTIONS[:1]), trainers[:1], rtol=0, atol=TOLERANCE)
        assert sidecar.generation == 2
        client.close()


@pytest.fixture(scope="module")
def server(folder):
    server = Server("--scorer", "brightness", "--text-encoder", folder, "--text-length", 24)
    yield server
    assert "Traceback" not in server.stop()


def test_the_answer_in_the_protocols_form(server, folder):
    answer = server.http.post("/api/text/embed", json={"captions": CAPTIONS[:2]})
    assert answer.status_code == 200
    assert answer.headers["x-ddrl-dtype"] == "bfloat16" and answer.headers["x-ddrl-shape"] == "2,24,192"
    bits = np.load(io.BytesIO(answer.content), allow_pickle=False)
    assert bits.dtype == np.uint16
    np.testing.assert_array_equal(bits, text.TextEncoder(str(folder), length=24).embed(CAPTIONS[:2]))
    health = server.http.get("/health").json()
    assert health["scorers"] == ["brightness"]
    assert health["text_encoder"] == {
        "length": 24, "dim": 192, "strategy": "full_concat", "dtype": "bfloat16", "pending": 0
    }  # fmt: skip


def test_bfloat16_arrives_as_such(server):
    got = embed_captions(server.url, TOKEN, CAPTIONS[:1])
    assert got.dtype == ml_dtypes.bfloat16 and got.shape == (1, 24, 192)


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [
        (b"", 422, "a JSON object"),
        (b"[]", 422, "a JSON object"),
        (b'{"captions": "one"}', 422, "a list of at least one text"),
        (b'{"captions": []}', 422, "a list of at least one text"),
        (b'{"captions": ["a", 3]}', 422, "a list of at least one text"),
        (b'{"captions": ["\\ud800"]}', 422, "half a surrogate pair"),
        (json.dumps({"captions": ["a"] * 9}).encode(), 413, "9 of them; at most 8"),
        (json.dumps({"captions": ["a" * 65537]}).encode(), 413, "65537 characters; at most 65536"),
        (b" " * ((4 << 20) + 1), 413, "larger than the limit of 4194304 bytes"),
    ],
)
def test_refusals(server, content, status, message):
    answer = server.http.post("/api/text/embed", content=content)
    assert answer.status_code == status and message in answer.json()["message"]


def test_it_takes_the_token(server, sidecar):
    answer = server.http.post("/api/text/embed", json={"captions": ["a"]}, headers={"Authorization": "Bearer no"})
    assert answer.status_code == 401
    with pytest.raises(ConfigurationFault, match=r"^reward\.token: http://\S+ refuses it \(401\)"):
        embed_captions(sidecar.url, "no", ["a"])


def test_a_server_without_one():
    server = Server("--scorer", "brightness", token="")
    try:
        assert server.http.get("/health").json()["text_encoder"] is None
        with pytest.raises(ConfigurationFault, match=r"has no text encoder; start it with --text-encoder FOLDER"):
            embed_captions(server.url, "", ["a"])
    finally:
        server.stop()


def test_health_answers_while_it_computes():
    """The tower's thread is not the server's."""
    from fastapi.testclient import TestClient

    from ddrl_jax.sidecar.codec import parse_codec
    from ddrl_jax.sidecar.server import Draining, make_app
    from ddrl_jax.sidecar.worker import Worker

    class Slow:
        length, dim, strategy, dtype = 1, 1, "full_concat", "float32"
        begun, go = threading.Event(), threading.Event()

        def embed(self, captions):
            self.begun.set()
            if not self.go.wait(30) or captions == ["bad"]:
                raise MemoryError("no room")
            return np.ones((len(captions), 1, 1), np.float32)

    limits = protocol.Limits()
    slow = Slow()
    worker = text.TextWorker(slow, most=2)
    rewards = Worker({}, parse_codec("identity"), limits)
    app = make_app(rewards.queue, rewards, limits, "", Draining(), text=worker)
    with TestClient(app) as client:
        answers = {}

        def ask(caption):
            answers[caption] = client.post("/api/text/embed", json={"captions": [caption]})

        threads = [threading.Thread(target=ask, args=(c,)) for c in ("a", "bad")]
        threads[0].start()
        assert slow.begun.wait(30)
        threads[1].start()
        while worker.account["pending"] < 2:
            time.sleep(0.01)
        assert client.get("/health").json()["text_encoder"]["pending"] == 2
        full = client.post("/api/text/embed", json={"captions": ["c"]})
        assert full.status_code == 429 and full.headers["retry-after"] == "1"
        slow.go.set()
        for thread in threads:
            thread.join()
        assert answers["a"].status_code == 200
        assert answers["bad"].status_code == 500
        assert answers["bad"].json()["message"] == "text: MemoryError: no room"
        assert client.post("/api/text/embed", json={"captions": ["a"]}).status_code == 200
        worker.drain(30)
        assert worker.account["pending"] == 0


class Answers:
    """A server that gives one answer after the other."""

    def __init__(self, *answers):
        left = list(answers)
        asked = self.asked = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                status, body, headers = left.pop(0)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def features(array, dtype="float32"):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return 200, buffer.getvalue(), {protocol.DTYPE_HEADER: dtype}


GOOD = np.arange(6, dtype=np.float32).reshape(1, 2, 3)


def test_faults_that_may_pass_are_asked_again():
    fake = Answers((503, b"{}", {}), (429, b"", {}), features(GOOD[0]), features(GOOD, "bfloat16"),
                   (200, b"PK\x05\x06" + b"\0" * 18, {}), features(GOOD))  # fmt: skip
    np.testing.assert_array_equal(embed_captions(fake.url, "", ["a"], retries=5), GOOD)
    assert fake.asked == [{"captions": ["a"]}] * 6


def test_one_caption_a_request_and_equal_ones_once():
    fake = Answers(features(GOOD), features(GOOD + 1))
    got = embed_captions(fake.url, "", ["a", "b", "a"])
    np.testing.assert_array_equal(got, np.concatenate([GOOD, GOOD + 1, GOOD]))
    assert fake.asked == [{"captions": ["a"]}, {"captions": ["b"]}]


def header_of(shape, dtype="<f4"):
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": dtype, "fortran_order": False, "shape": shape})
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            header_of((1, 1 << 20, 1 << 20)),
            r"0 bytes of features where \(1, 1048576, 1048576\) float32 needs 4398046511104",
        ),
        (header_of((1, 2, 3)) + bytes(25), "25 bytes of features where"),
        (header_of((1, 2, 3), "|O") + bytes(48), "said to be 'float32'"),
        (header_of((1, 0, 3)), r"features of \(1, 0, 3\)"),
        (header_of((2, 2, 3)) + bytes(48), r"features of \(2, 2, 3\) float32 for one caption"),
        (b"\x93NUMPY\x01\x00\xff\xff{", "garbage"),
    ],
)
def test_what_an_answer_claims_is_checked_before_anything_is_allocated(content, words, monkeypatch):
    monkeypatch.setattr(np, "load", lambda *_, **__: pytest.fail("allocates what the header says"))
    answer = (200, content, {protocol.DTYPE_HEADER: "float32"})
    with pytest.raises(TextUnavailable, match=words):
        embed_captions(Answers(answer).url, "", ["a"], retries=0)


def test_an_answer_is_bounded():
    """It is not read to its end."""
    endless = Endless()
    with pytest.raises(TextUnavailable, match=r"an answer of more than 100000 bytes$"):
        embed_captions(endless.url, "", ["a"], retries=0, limit=100_000)
    assert endless.stopped.wait(30)
    with pytest.raises(TextUnavailable, match=r"took longer than 0\.2 s|no answer within 0\.2 s"):
        embed_captions(Endless(pause_s=0.05).url, "", ["a"], retries=0, timeout_s=0.2)


class Endless:
    """A server whose answer has no end."""

    def __init__(self, pause_s=0.0):
        stopped = self.stopped = threading.Event()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                self.rfile.read(int(self.headers["content-length"]))
                self.send_response(200)
                self.end_headers()
                try:
                    while True:
                        self.wfile.write(bytes(10_000 if not pause_s else 10))
                        time.sleep(pause_s)
                except OSError:
                    stopped.set()

            def log_message(self, *args):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


class Client:
    """What `SidecarText` is connected to."""

    sidecar, token = None, ""

    def __init__(self, url, **account):
        self.url, self.account = url, {"length": 2, "dim": 3, "dtype": "float32"} | account

    def health(self):
        return {"text_encoder": self.account}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_answer_has_no_more_bytes_than_the_features_need(dtype):
    wide = np.zeros((1, 2, 3 + 4096), np.float32 if dtype == "float32" else np.uint16)
    fake = Answers(*[features(wide, dtype)] * 4, features(wide[..., :3], dtype))
    embedder = SidecarText(length=2, dim=3)
    embedder.connect(Client(fake.url, dtype=dtype))
    with pytest.raises(
        TextUnavailable, match=f"an answer of more than {4096 + 6 * (4 if dtype == 'float32' else 2)} bytes"
    ):
        embedder.embed(["a"])
    assert embedder.embed(["a"]).shape == (1, 2, 3)


def test_a_server_restarted_with_another_shape():
    embedder = SidecarText(length=2, dim=3)
    embedder.connect(Client(Answers(features(GOOD.reshape(1, 3, 2))).url))
    with pytest.raises(
        TextUnavailable, match=r"gave \(3, 2\) float32, not \(2, 3\): it was restarted with other settings"
    ):
        embedder.embed(["a"])


def test_a_server_of_another_dtype():
    with pytest.raises(ConfigurationFault, match=r"computes in int8; one of float32, bfloat16 is needed$"):
        SidecarText(length=2, dim=3).connect(Client("http://127.0.0.1:9", dtype="int8"))


def test_how_long_is_waited_is_the_callers(monkeypatch):
    seen = []
    monkeypatch.setattr(rewards_text, "embed_captions", lambda *_, **options: seen.append(options["timeout_s"]))
    for options in ({}, {"timeout_s": 7.0}):
        embedder = SidecarText(length=2, dim=3, **options)
        embedder.connect(Client("http://127.0.0.1:9"))
        embedder.embed(["a"])
    assert seen == [600.0, 7.0]


def test_what_is_not_had_is_raised():
    with pytest.raises(TextUnavailable, match=r"gave no features in 2 attempts: server error: 500 oh$"):
        embed_captions(Answers((500, b"oh", {}), (500, b"oh", {})).url, "", ["a"], retries=1)
    with pytest.raises(TextUnavailable, match="ConnectError"):
        embed_captions("http://127.0.0.1:9", "", ["a"], retries=0)
    with pytest.raises(TextUnavailable, match="not finite"):
        embed_captions(Answers(features(GOOD * np.nan)).url, "", ["a"])
    with pytest.raises(TextUnavailable, match="other settings"):
        embed_captions(Answers(features(GOOD), features(GOOD[:, :1])).url, "", ["a", "b"])
    with pytest.raises(ConfigurationFault, match="refuses a caption of 3 characters: 413"):
        embed_captions(Answers((413, b"{}", {})).url, "", ["abc"])
    with pytest.raises(ConfigurationFault, match=r"^reward\.url: 'nowhere'"):
        embed_captions("nowhere", "", ["a"])
    with pytest.raises(ValueError, match="empty"):
        embed_captions("http://127.0.0.1:9", "", [])


# ---- mistakes at the start -------------------------------------------------------------------------------------------


def test_mistakes_are_one_line_and_exit_2(folder, tmp_path):
    assert "scorer: none; name one" in fails()
    assert "has no tokenizer.json" in fails("--text-encoder", HUB)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "text-length: 0; must be at least 1"),
        ({"strategy": "last"}, "text-strategy: 'last'"),
        ({"dtype": "int8"}, "text-dtype: 'int8'"),
    ],
)
def test_bad_options(folder, options, message):
    with pytest.raises(ValueError, match=message):
        text.TextEncoder(str(folder), **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"text_config": 3}, "hidden_size|vocab_size is None"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_type is 'yarn'"),
        ({"num_hidden_layers": 5}, r"12 missing: model\.layers\.4\."),
        ({"num_hidden_layers": 3}, r"12 unexpected: model\.layers\.3\."),
        ({"vocab_size": 191}, r"1 misshapen: model\.embed_tokens\.weight"),
        ({"num_attention_heads": 5}, "num_heads|num_attention_heads|divisible"),
    ],
)
def test_a_folder_that_does_not_fit(tmp_path, changes, message):
    shutil.copytree(HUB, tmp_path / "t")
    config = json.loads((HUB / "config.json").read_text())
    (tmp_path / "t/config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=message):
        text.load_tower(tmp_path / "t", torch.float32, "cpu")


@pytest.mark.parametrize("name", ["../t/model.safetensors", "/model.safetensors", "..", "a\\b"])
def test_an_index_names_files_of_its_folder_only(tmp_path, name):
    shutil.copytree(HUB, tmp_path / "t")
    (index,) = (tmp_path / "t").glob("*.index.json")
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": weight_map | {next(iter(weight_map)): name}}))
    with pytest.raises(ValueError, match=r"^text-encoder: .*, which is no file of its folder") as error:
        text.load_tower(tmp_path / "t", torch.float32, "cpu")
    assert repr(name) in str(error.value)


def test_without_transformers(monkeypatch, folder):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match="this environment lacks transformers; pip install"):
        text.load_tower(folder, torch.float32, "cpu")
