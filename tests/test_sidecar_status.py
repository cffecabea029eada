"""What is seen of a server: health, metrics, the page (in a real Chromium where there is one) and the logs."""

import io
import json
import logging
import os
import time
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the sidecar's own environment has it; the test extra installs it")
pytest.importorskip("prometheus_client", reason="as above")

from fastapi import FastAPI
from fastapi.testclient import TestClient
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from ddrl_jax.sidecar import logs, status, status_page
from ddrl_jax.sidecar.protocol import ENQUEUE, PULL

from . import browser

TOKEN = "a long secret"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
LOCAL = "http://127.0.0.1:8080"
RNG = np.random.default_rng(0)
PICTURE = RNG.integers(0, 256, (20, 30, 3), np.uint8)
PROMPT = "a <script>alert(1)</script> & a cat"


def make(token=TOKEN, **queue):
    """A client of the router on accounts that are made up."""
    account = {"kind": "embedded", "pending": 3, "bytes": 4096, "oldest_seconds": 1.5, "scored": 40, "failed": 2,
               "replicas": 1, "reachable": True, **queue}  # fmt: skip
    scorer = {"state": "ready", "scored": 80, "failed": 1, "seconds": 4.0, "last_error": "ValueError"}
    now = time.monotonic()
    worker = SimpleNamespace(
        scorers={"sharp": SimpleNamespace(state="ready"), "ocr": object()},
        account={"sharp": scorer, "ocr": {**scorer, "state": "scoring", "last_error": ""}},
        timings=deque([(now - 500, 9.0, 7), *((now - 30, 0.1 * i, 2) for i in range(1, 21))]),
        recent=deque([("u1", PROMPT, PICTURE, {"sharp/edges": 0.123456, "ocr/text": None})]),
    )
    draining, counts = SimpleNamespace(on=False), status.Counts()
    app = FastAPI()
    app.include_router(
        status.router(SimpleNamespace(account=account), worker, draining, token, counts, lambda: {"replica_id": "r-7"})
    )
    client = TestClient(app, base_url=LOCAL, follow_redirects=False)
    return SimpleNamespace(client=client, worker=worker, draining=draining, counts=counts, account=account)


def log_in(client, token=TOKEN):
    return client.post("/login", content=f"token={token.replace(' ', '+')}")


def test_health_tells_each_scorers_state():
    server = make()
    told = server.client.get("/health").json()
    assert told["status"] == "ok" and told["scorers"] == ["sharp", "ocr"] and told["replica_id"] == "r-7"
    assert (told["pending"], told["scored"], told["failed"]) == (3, 40, 2)
    assert told["scorer_states"]["ocr"]["state"] == "scoring"
    # A scorer in a process of its own knows better than the worker.
    server.worker.scorers["sharp"].state = "restarting"
    told = server.client.get("/health").json()
    assert told["status"] == "degraded" and told["scorer_states"]["sharp"]["state"] == "restarting"
    server.draining.on = True
    assert server.client.get("/health").json()["status"] == "stopping"
    assert make(reachable=False).client.get("/health").json()["status"] == "degraded"


def metrics(text):
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_are_prometheus_own_format_and_behind_the_token():
    server = make(replicas=3)
    refused = server.client.get("/metrics")
    assert refused.status_code == 401 and refused.json()["message"].startswith("token: ")
    server.counts.add(ENQUEUE, 200, 0.2)
    server.counts.add(ENQUEUE, 422, 0.2)
    server.counts.add(PULL, 400, 0.001)
    values = metrics(server.client.get("/metrics", headers=BEARER).text)
    assert values["ddrl_reward_queue_pending",] == 3 and values["ddrl_reward_queue_bytes",] == 4096
    assert values["ddrl_reward_replicas",] == 3 and values["ddrl_reward_queue_reachable",] == 1
    assert values["ddrl_reward_scored_total",] == 40 and values["ddrl_reward_failed_total",] == 2
    assert values["ddrl_reward_scorer_samples_total", "sharp"] == 80
    assert values["ddrl_reward_scorer_errors_total", "sharp"] == 1
    assert values["ddrl_reward_scorer_ready", "ocr"] == 1
    assert values["ddrl_reward_http_answers_total", ENQUEUE, "422"] == 1
    assert values["ddrl_reward_http_seconds_count", ENQUEUE] == 2
    assert values["ddrl_reward_latency_seconds", "0.5"] == pytest.approx(1.1)
    assert any(name[0].startswith("process_") for name in values)
    assert PROMPT not in server.client.get("/metrics", headers=BEARER).text


def test_made_up_paths_make_no_labels():
    counts = status.Counts()
    for i in range(50):
        counts.add(f"/nothing/{i}", 404, 0.0)
        counts.add(f"/samples/{i}", 404, 0.0)
    assert len({s.labels["path"] for f in counts.registry.collect() for s in f.samples}) == 2
    assert counts.refused == {404: 100}
    counts.add(PULL, 400, 0.0)  # pending
    assert 400 not in counts.refused


def test_latency_and_throughput():
    rows = [(100.0 - i, float(i), 4) for i in range(100)]
    told = status_page.latency(rows, now=100.0)
    assert told["p50"] == 49.5 and told["p95"] == pytest.approx(94.05)
    assert told["samples_per_second"] == pytest.approx(61 * 4 / 60)
    nothing = status_page.latency([], 0.0)
    assert np.isnan(nothing["p50"]) and nothing["samples_per_second"] == 0
    # All that is remembered is younger than a minute: over the time it spans.
    assert status_page.latency([(96.0, 1.0, 8)], 100.0)["samples_per_second"] == 2.0


def test_the_page_keeps_prompts_and_pictures_for_those_with_the_token():
    server = make()
    page = server.client.get("/")
    assert page.status_code == 200 and "sharp" in page.text and 'name="token"' in page.text
    assert "a cat" not in page.text and "/samples/" not in page.text
    sample = f"/samples/{status_page.key(PICTURE)}"
    assert server.client.get(sample).status_code == 401
    wrong = log_in(server.client, "guess")
    assert wrong.status_code == 303 and wrong.headers["location"] == "/?login=failed" and not wrong.cookies
    assert "not the token" in server.client.get("/?login=failed").text
    right = log_in(server.client)
    kept = right.headers["set-cookie"]
    assert "HttpOnly" in kept and "samesite=strict" in kept.lower() and TOKEN not in kept
    page = server.client.get("/").text
    assert "a &lt;script&gt;alert(1)&lt;/script&gt; &amp; a cat" in page and "<script>alert" not in page
    assert "0.123" in page and sample in page
    answer = server.client.get(sample)
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(answer.content))), PICTURE)
    assert server.client.get("/metrics").status_code == 200
    assert server.client.get("/samples/00").status_code == 404
    server.client.post("/logout")
    assert server.client.get(sample).status_code == 401


def test_a_cookie_of_another_server_or_a_made_up_one_opens_nothing():
    other = make(token="another")
    other.client.post("/login", content="token=another")
    stolen = dict(other.client.cookies)
    assert stolen
    server = make()
    for cookies in (stolen, {name: "" for name in stolen}, {name: TOKEN for name in stolen}):
        server.client.cookies = cookies
        assert "a cat" not in server.client.get("/").text
    assert server.client.post("/login", content="token=" + "x" * 5000).status_code == 413


def test_without_a_token_only_this_machines_own_names_see_samples():
    server = make(token="")
    assert "a cat" in server.client.get("/").text
    for host, seen in (("localhost:8080", True), ("[::1]:8080", True), ("evil.example:8080", False)):
        assert ("a cat" in server.client.get("/", headers={"Host": host}).text) == seen
    assert log_in(server.client, "").headers["location"] == "/?login=failed"


def test_the_page_trusts_no_script_but_its_own():
    first, second = (make().client.get("/") for _ in range(2))
    policy = first.headers["content-security-policy"]
    nonce = policy.split("script-src 'nonce-")[1].split("'")[0]
    assert f'<script nonce="{nonce}">' in first.text and nonce not in second.text
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert "http://" not in first.text and "https://" not in first.text  # self-contained


def test_a_queue_that_does_not_answer_is_said_on_the_page():
    assert "the queue does not answer" in make(reachable=False).client.get("/").text


@pytest.mark.skipif(not browser.CHROMIUM and not os.environ.get("CI"), reason="needs chromium")
def test_the_page_in_a_real_browser():
    """A login, pictures that load, renewal without a reload, nothing wider than a phone, no complaint."""
    import threading

    import uvicorn

    server = make()
    running = uvicorn.Server(uvicorn.Config(server.client.app, port=0, log_config=None, lifespan="off"))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    while not running.started:
        time.sleep(0.01)
    port = running.servers[0].sockets[0].getsockname()[1]
    form = "document.querySelector('[name=token]').value = {!r}; document.querySelector('form').submit()"
    try:
        with browser.Browser(390, 844, dark=True) as page:
            page.open(f"http://127.0.0.1:{port}/")
            dark = page.run("getComputedStyle(document.body).backgroundColor")
            page.submit(form.format("guess"))
            assert page.run("document.querySelector('[role=alert]').innerText") == "That was not the token."
            page.submit(form.format(TOKEN))
            assert page.run("document.images.length") == 1 and page.run("document.cookie") == ""
            assert page.run("document.images[0].decode().then(() => document.images[0].naturalWidth)") == 30
            assert page.run("document.querySelector('figcaption').innerText").startswith(PROMPT)
            assert page.run("document.documentElement.scrollWidth") <= 390
            server.account["pending"] = 17
            renewed = "document.querySelector('.tile b').innerText.startsWith('17')"
            page.run(f"new Promise(done => setInterval(() => {renewed} && done(1), 50))")
            assert [c["httpOnly"] and c["sameSite"] for c in page.cookies()] == ["Strict"]
            assert page.console == []
        with browser.Browser(1200, 900) as page:
            page.open(f"http://127.0.0.1:{port}/")
            assert page.run("getComputedStyle(document.body).backgroundColor") != dark
    finally:
        running.should_exit = True
        thread.join(10)


# --- logs ---


def lines(prompts, *, level="info"):
    stream, root = io.StringIO(), logging.getLogger()
    old = root.handlers[:], root.level
    try:
        logs.start(level, prompts)
        root.handlers[0].setStream(stream)
        log = logging.getLogger("ddrl_jax.sidecar")
        log.info("scored %d\nsamples", 3, extra={"request": "u1", "prompts": ["a secret cat"], "seconds": 0.5})
        try:
            raise ValueError("a secret cat")
        except ValueError:
            log.exception("failed")
        log.debug("not told")
    finally:
        root.handlers[:], root.level = old
    return [json.loads(line) for line in stream.getvalue().splitlines()], stream.getvalue()


def test_logs_are_json_lines_without_prompts():
    (first, second), text = lines(False)
    assert first["message"] == "scored 3\nsamples" and first["request"] == "u1" and first["seconds"] == 0.5
    assert first["level"] == "info" and first["time"].endswith("Z") and "prompts" not in first
    assert second["error"] == "ValueError" and "test_sidecar_status.py" in second["trace"][0]
    assert "secret" not in text  # an exception's text may quote one
    (first, _), _ = lines(True)
    assert first["prompts"] == ["a secret cat"]
