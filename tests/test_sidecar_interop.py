"""cosmos-rl's clients against our server, our client against a server as cosmos-rl's: each written from what theirs
sends and expects on the wire (reward_service of nvidia-cosmos/cosmos-rl), without any of our protocol's code."""

import http.server
import io
import json
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("fastapi")

from ddrl_jax.rewards import ConfigurationFault, RewardClient  # noqa: E402
from tests.test_sidecar_server import Server  # noqa: E402

# Scorers named as ours; what they give is the mean of the video, so that anyone can check it.
STAND_INS = """
class Mean:
    batch_size, keys = 2, ("overall",)
    def load(self, weights, device):
        pass
    def score(self, videos, prompts):
        mean = videos.double().mean(dim=(1, 2, 3, 4)).tolist()
        return {key: mean for key in self.keys}
class Hps(Mean):
    name = "hps_v2"
class Pick(Mean):
    name = "pick_score"
class Align(Mean):
    name, keys = "video_align", ("vq", "mq", "ta", "overall")
class Reason(Mean):
    name, keys = "cosmos_reason1", ("overall", "yes_logit", "no_logit")
"""


class TheirClient:
    """Asks as image_client.py, video_client.py and latency_benchmark.py do: no token, one POST after the other."""

    def __init__(self, url):
        self.url = url

    def post(self, path, content, kind, **headers):
        request = urllib.request.Request(self.url + path, content, {"Content-Type": kind, **headers})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def form(self, path, fields, **headers):
        return self.post(path, urllib.parse.urlencode(fields).encode(), "application/x-www-form-urlencoded", **headers)

    def ask(self, metadata, content):
        """uuid and replica, then one answer for each reward type."""
        status, answer = self.form("/api/reward/ping", {"info_data": json.dumps(metadata)})
        assert (status, answer) == (200, {"message": "Ping request received"})
        payload = json.dumps(metadata).encode() + b"\n" + content
        status, taken = self.post("/api/reward/enqueue", payload, "application/octet-stream")
        assert status == 200, taken
        pin = {"X-Lepton-Replica-Target": taken["replica_id"]} if taken.get("replica_id") else {}
        answers = {}
        for kind in metadata["reward_fn"]:
            end = time.monotonic() + 30
            while True:
                status, answers[kind] = self.form("/api/reward/pull", {"uuid": taken["uuid"], "type": kind}, **pin)
                if status == 200:
                    break
                assert status == 400 and time.monotonic() < end, answers[kind]
                time.sleep(0.02)
        return answers


def saved(array):
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def torch_saved(tensor, **options):
    buffer = io.BytesIO()
    torch.save(tensor, buffer, **options)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    file = tmp_path_factory.mktemp("scorers") / "stand_ins.py"
    file.write_text(STAND_INS)
    names = [f"--scorer={file}:{name}" for name in ("Hps", "Pick", "Align", "Reason")]
    server = Server(*names, "--replica-id", "r1", token="")
    yield server
    assert "Traceback" not in server.stop()


def test_the_image_client(ours):
    images = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), np.uint8)
    data = {"media_type": "image", "prompts": ["a", "b"], "reward_fn": {"hpsv2": 1.0, "pickscore": 0.5}}
    answers = TheirClient(ours.url).ask(data, saved(images))
    means = images.reshape(2, -1).astype(float).mean(1) / 127.5 - 1
    np.testing.assert_allclose(answers["hpsv2"]["scores"]["hpsv2"], means, rtol=1e-5)
    np.testing.assert_allclose(answers["pickscore"]["scores"]["pickscore"], means / 26, rtol=1e-5)
    assert answers["hpsv2"]["type"] == "hpsv2"
    assert answers["hpsv2"]["input_info"]["shape"] == [2, 32, 32, 3]
    assert float(answers["hpsv2"]["duration"]) >= 0 and float(answers["hpsv2"]["decoded_duration"]) >= 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_video_client(ours, dtype):
    """A slice of bfloat16 latents by torch.save, whose file holds all of the batch that it is a slice of."""
    latents = torch.from_numpy(np.random.default_rng(1).random((2, 16, 3, 4, 6))).to(dtype)
    data = {
        "media_type": "latent",
        "prompts": ["a"],
        "reward_fn": {"cosmos_reason1": 1.0, "dance_grpo": 1.0},
        "video_infos": [{"video_fps": 16.0}],
    }
    answers = TheirClient(ours.url).ask(data, torch_saved(latents[1:2]))
    mean = latents[1].double().mean().item()  # no codec: latents are the video
    scores = answers["dance_grpo"]["scores"]
    for key in ("vq_reward", "mq_reward", "ta_reward", "overall_reward"):
        np.testing.assert_allclose(scores[key], [mean], rtol=1e-6)
    np.testing.assert_allclose(answers["cosmos_reason1"]["scores"]["no_score"], [mean], rtol=1e-6)
    assert answers["cosmos_reason1"]["input_info"]["shape"] == [1, 16, 3, 4, 6]


def test_the_trainers_request(ours):
    """RemoteRewardCalculator: float16 latents by np.save, `score_key` a sum of keys."""
    latents = np.random.default_rng(2).normal(size=(3, 16, 2, 4, 4)).clip(-1, 1).astype(np.float16)
    data = {"prompts": ["a", "b", "c"], "reward_fn": {"dance_grpo": 2.0}, "video_infos": [{"video_fps": 24.0}] * 3}
    scores = TheirClient(ours.url).ask(data, saved(latents))["dance_grpo"]["scores"]
    total = np.add(scores["vq_reward"], scores["mq_reward"])
    np.testing.assert_allclose(total, 2 * latents.reshape(3, -1).astype(float).mean(1), rtol=1e-5)


def test_bfloat16_bytes_and_torch_save_are_the_same_latents(ours):
    latents = torch.from_numpy(np.random.default_rng(3).random((2, 4, 2, 4, 6))).bfloat16()
    data = {"prompts": ["a", "b"], "reward_fn": {"dance_grpo": 1.0}, "media_type": "LATENT"}
    client = TheirClient(ours.url)
    by_bytes = client.ask(data, saved(latents.view(torch.uint8).numpy()))["dance_grpo"]["scores"]
    by_torch = client.ask(data, torch_saved(latents.requires_grad_()))["dance_grpo"]["scores"]
    assert by_bytes == by_torch


def test_scores_pushed_by_their_workers_can_be_pulled(ours):
    client, name = TheirClient(ours.url), uuid.uuid4().hex
    scores = {"scores": {"overall_reward": [0.5, float("nan")], "prediction": ["Good", "Bad"]}, "duration": "0.35"}
    form = {"uuid": name, "scores": json.dumps(scores), "type": "dance_grpo"}
    assert client.form("/api/reward/push", form, Authorization="Bearer None")[0] == 200
    status, answer = client.form("/api/reward/pull", {"uuid": name, "type": "dance_grpo"})
    assert status == 200 and answer["duration"] == "0.35"
    assert answer["scores"] == {"overall_reward": [0.5, None], "prediction": ["Good", "Bad"]}
    form["scores"] = json.dumps({"scores": {"overall_reward": [9.0, 9.0]}})
    assert client.form("/api/reward/push", form)[0] == 200
    assert client.form("/api/reward/pull", {"uuid": name, "type": "dance_grpo"})[1] == answer  # the first stay


def test_latent_attr_takes_no_file_from_a_request(ours):
    client = TheirClient(ours.url)

    def tell(**fields):
        return client.form("/api/reward/latent_attr", {"fields": json.dumps(fields)})

    status, answer = tell(chunk_duration=81, load_mean_std=False, temporal_window=16, fps=24, height=432, width=768)
    assert status == 200 and "24 frames a second" in answer["message"]
    for field in ({"vae_pth": "/etc/passwd"}, {"device": "cuda:7"}, {"fps": 0}, {"load_mean_std": True}, {"x": 1}):
        status, answer = tell(fps=16, **field) if "fps" not in field else tell(**field)
        assert status == 422 and next(iter(field)) in answer["message"], answer


def test_another_replicas_request_is_asked_again(ours):
    form = {"uuid": uuid.uuid4().hex, "type": "hpsv2"}
    status, answer = TheirClient(ours.url).form("/api/reward/pull", form, **{"X-Lepton-Replica-Target": "r2"})
    assert status == 421 and "this is r1" in answer["message"]
    assert TheirClient(ours.url).form("/api/reward/pull", form)[0] == 404


class TheirServer(http.server.BaseHTTPRequestHandler):
    """Answers as reward_serve.py does: 400 until scores are there, 500 for what it cannot do, no /health, no check of
    anything; scores are the mean of the latents after bfloat16, by names of its own, some of them no numbers."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def reply(self, status, fields):
        content = json.dumps(fields).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self):
        self.reply(404, {"detail": "Not Found"})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        name, kept = self.path.removeprefix("/api/reward/"), self.server.kept
        if name == "enqueue":
            line, _, content = body.partition(b"\n")
            try:
                array = np.load(io.BytesIO(content))
                tensor = torch.from_numpy(array)
                tensor = tensor.view(torch.bfloat16) if array.dtype == np.uint8 else tensor.bfloat16()
            except Exception:
                tensor = torch.load(io.BytesIO(content), weights_only=True).bfloat16()
            key = str(uuid.uuid4())
            kept[key] = {"asked": json.loads(line), "x": tensor, "polls": 0}
            return self.reply(200, {"uuid": key, "replica_id": "lepton-7"})
        form = {k: v[0] for k, v in urllib.parse.parse_qs(body.decode()).items()}
        if name == "ping":
            return self.reply(200 if "info_data" in form else 422, {"message": "Ping request received"})
        if name == "latent_attr":
            kept["latent_attr"] = json.loads(form["fields"])
            return self.reply(200, {"message": "Latent attributes set successfully"})
        if name == "push":
            kept[form["uuid"], form["type"]] = json.loads(form["scores"])
            return self.reply(200, {"message": "Scores received and stored successfully"})
        if self.headers.get("X-Lepton-Replica-Target") != "lepton-7":
            return self.reply(400, {"message": f"Not found scores for {form['uuid']}"})  # it is another replica
        task = kept[form["uuid"]]
        task["polls"] += 1
        if task["polls"] < 3 or task["asked"]["reward_fn"].get(form["type"], 0) <= 0:
            return self.reply(400, {"message": f"Not found scores for {form['uuid']}"})
        mean = task["x"].double().flatten(1).mean(1).tolist()
        scores = {"overall_reward": mean, "vq_reward": [-m for m in mean], "prediction": ["Good"] * len(mean)}
        scores["gen_eval_group"] = {"counting": mean}
        self.reply(200, {"scores": scores, "input_info": {}, "duration": "0.77", "decoded_duration": "2.02",
                         "type": form["type"]})  # fmt: skip


@pytest.fixture
def theirs():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), TheirServer)
    server.kept = {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_our_client_and_their_server(theirs, wire):
    weights = {"dance_grpo/overall_reward": 1.0, "cosmos_reason1/vq_reward": 0.5}
    url = f"http://127.0.0.1:{theirs.server_port}"
    client = RewardClient(url, "t", weights, wire=wire, poll_s=0.01, timeout_s=20, fps=24.0)
    client.ping()
    latents = np.random.default_rng(4).normal(size=(3, 16, 2, 4, 6)).astype(np.float32)
    out = client.submit(latents, ["a", "b", "c"]).result()
    assert out.valid.all() and out.attempts == 1, out.reason
    expected = torch.from_numpy(latents).bfloat16().double().flatten(1).mean(1).numpy()
    np.testing.assert_allclose(out.scores["dance_grpo/overall_reward"], expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(out.scores["cosmos_reason1/vq_reward"], -expected, rtol=1e-5, atol=1e-7)
    assert not any("prediction" in name or "group" in name for name in out.scores)
    [task] = theirs.kept.values()
    assert task["asked"]["reward_fn"] == {"dance_grpo": 1.0, "cosmos_reason1": 1.0}
    assert task["asked"]["video_infos"] == [{"video_fps": 24.0}] * 3 and task["asked"]["media_type"] == "latent"
    assert "shared" not in task["asked"]  # nothing of ours that it would not know
    client.close()


def test_our_client_pushes_and_tells_their_server(theirs):
    client = RewardClient(f"http://127.0.0.1:{theirs.server_port}", "t", {"s": 1.0})
    client.push("u1", "s", {"overall": [1.0, None]})
    assert theirs.kept["u1", "s"]["scores"] == {"overall": [1.0, None]}
    client.latent_attr(fps=24, height=432)
    assert theirs.kept["latent_attr"] == {"fps": 24, "height": 432}
    client.close()


def test_our_client_pushes_to_our_server(ours):
    client = RewardClient(ours.url, "", {"elsewhere": 1.0})
    client.push("u-1", "elsewhere", {"elsewhere/overall": [1.0, None]})
    assert ours.pull("u-1", "elsewhere").json()["scores"] == {"elsewhere/overall": [1.0, None]}
    with pytest.raises(ConfigurationFault, match=re.escape("uuid: '../x'")):
        client.push("../x", "elsewhere", {"elsewhere/overall": [1.0]})
    client.close()


def test_our_client_and_our_server_know_one_set_of_names(ours):
    """Scores come by cosmos-rl's keys too when asked for by its name; our client keeps one column for each."""
    client = RewardClient(ours.url, "", {"cosmos_reason1": 1.0})
    out = client.submit(np.full((2, 3, 1, 2, 2), 0.5, np.float32), ["a", "b"]).result()
    assert set(out.scores) == {f"cosmos_reason1/{key}" for key in ("overall", "yes_logit", "no_logit")}
    assert out.valid.all()
    client.close()
