"""Evaluation: paired, the same whatever the chunk, and intervals that mean what they say. No sidecar."""

import json

import jax
import numpy as np
import pytest

from ddrl_jax import build, evaluate
from ddrl_jax.data import image_statistics, source
from ddrl_jax.logbook import Logbook
from ddrl_jax.rewards import Scores

from . import tiny


class _Client:
    """Scores by mean pixel, at once; every fourth sample of a batch of five or more is invalid."""

    def __init__(self, lose=False):
        self.lose, self.seen = lose, []

    def with_judges(self):
        return self

    def submit(self, latents, prompts):
        value = latents.reshape(len(latents), -1).mean(1).astype(np.float32)
        self.seen.append((latents, list(prompts)))
        valid = np.ones(len(latents), bool)
        if self.lose:
            valid[::4] = False
        value = np.where(valid, value, np.nan)
        scores = Scores({"brightness": value}, valid, "" if valid.all() else "lost", 0.0)
        return type("Ticket", (), {"result": lambda self: scores})()


def _evaluator(workdir, chunk=8, client=None):
    config = tiny.config()
    config.rollout.conditions, config.train.micro_batch = 8, 32  # eight groups for eight devices
    config.eval.chunk, config.eval.clips = chunk, 10
    setup = build.build(config)
    client = client or _Client()
    evaluator = evaluate.Evaluator(config, setup, client, workdir, Logbook(workdir, tensorboard=False))
    params = build.init_params(config, setup.mesh, jax.random.key(0))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    params = tree.unflatten([p + 0.05 * jax.random.normal(k, p.shape) for k, p in zip(keys, leaves, strict=True)])
    return evaluator, params, client


@pytest.fixture(autouse=True)
def few_clips_for_the_judge(monkeypatch):
    monkeypatch.setattr(source, "JUDGE_CLIPS", 200)


def _read(workdir, step=0):
    return json.loads((workdir / f"eval/{step:06d}/eval.json").read_text())


def test_an_evaluation_does_not_depend_on_its_chunks_and_is_repeatable(tmp_path):
    evaluator, params, client = _evaluator(tmp_path / "a", chunk=8)
    metrics = evaluator(params, 0, full=True)
    again = evaluator(params, 7, full=True)
    assert again == pytest.approx(metrics, rel=0, abs=0, nan_ok=True)
    assert [len(x) for x, _ in client.seen[:2]] == [8, 2]
    other, _, _ = _evaluator(tmp_path / "b", chunk=16)
    rest = other(params, 0, full=True)
    for name in metrics:
        assert rest[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-4, nan_ok=True), name
    a, b = _read(tmp_path / "a"), _read(tmp_path / "b")
    assert a["prompts"] == b["prompts"] and len(a["prompts"]) == 10
    np.testing.assert_allclose(a["per_clip"]["brightness"], b["per_clip"]["brightness"], atol=1e-5)
    named = {"reward", "brightness", "judge_digit", "judge_direction", "heldout_loss", "frechet"}
    assert set(metrics) == named | {f"image/{n}" for n in image_statistics.NAMES}
    # The line is that of the first four clips, as a short evaluation's is; eval.json has all ten.
    short = other(params, 3, full=False)
    for name in set(short) - {"heldout_loss"}:
        assert short[name] == pytest.approx(rest[name], rel=1e-4, abs=1e-4, nan_ok=True), name
    assert a["metrics"]["brightness"] == pytest.approx(np.mean(a["per_clip"]["brightness"]), rel=1e-6)


def test_a_short_evaluation_is_the_start_of_the_full_one_and_leaves_nothing(tmp_path):
    evaluator, params, client = _evaluator(tmp_path)
    metrics = evaluator(params, 3, full=False)
    assert not (tmp_path / "eval/000003").exists() and "frechet" not in metrics
    evaluator(params, 0, full=True)
    np.testing.assert_allclose(client.seen[0][0], client.seen[1][0][:4], atol=1e-5)


def test_invalid_rewards_are_left_out_not_counted_as_zero(tmp_path):
    evaluator, params, client = _evaluator(tmp_path, client=_Client(lose=True))
    metrics = evaluator(params, 0, full=True)
    sent = np.concatenate([x.reshape(len(x), -1).mean(1) for x, _ in client.seen])
    kept = np.ones(10, bool)
    kept[[0, 4, 8]] = False
    assert _read(tmp_path)["metrics"]["reward"] == pytest.approx(sent[kept].mean(), rel=1e-5)
    assert metrics["reward"] == pytest.approx(sent[:4][kept[:4]].mean(), rel=1e-5)
    rewards = _read(tmp_path)["per_clip"]["reward"]
    assert [r is None for r in rewards] == (~kept).tolist()


def _write(folder, prompts, reward, heldout, features, real):
    folder.mkdir(parents=True)
    per_clip = {"reward": reward, "judge_digit": [1.0] * len(prompts)}
    record = {"prompts": prompts, "per_clip": per_clip, "heldout_loss_per_clip": heldout, "metrics": {}}
    (folder / "eval.json").write_text(json.dumps(record))
    np.savez(folder / "features.npz", generated=features, real=real)


def _pair(tmp_path, rng, shift, prompts=60, clips=4, noise=0.5):
    names = [f"prompt {i}" for i in range(prompts) for _ in range(clips)]
    base = rng.normal(size=len(names))
    real, generated = rng.normal(size=(200, 3)), rng.normal(size=(len(names), 3))
    moved = base + shift + noise * rng.normal(size=len(names))
    loss = rng.uniform(0.5, 1.5, 50)
    _write(tmp_path / "a", names, base.tolist(), loss.tolist(), generated, real)
    _write(tmp_path / "b", names, moved.tolist(), (1.05 * loss).tolist(), generated + 1.0, real)
    return {c["name"]: c for c in evaluate.compare(tmp_path / "a", tmp_path / "b", resamples=400)}, moved - base


def test_changes_are_paired_and_intervals_hold_the_mean(tmp_path):
    changes, difference = _pair(tmp_path, np.random.default_rng(0), shift=0.3)
    reward = changes["reward"]
    assert reward["mean"] == pytest.approx(difference.mean())
    # Paired: the spread of the differences over 240 clips, not that of the rewards.
    assert (reward["high"] - reward["low"]) == pytest.approx(4 * 0.5 / 240**0.5, rel=0.3)
    assert reward["n"] == 60 and reward["low"] > 0
    assert (changes["judge_digit"]["low"], changes["judge_digit"]["high"]) == (0.0, 0.0)
    assert changes["heldout_loss"]["mean"] == pytest.approx(0.05) and changes["heldout_loss"]["n"] == 50
    assert changes["frechet"]["low"] > 1.0 and changes["frechet"]["better"] == "down"


def test_intervals_cover_as_often_as_they_say(tmp_path):
    inside = 0
    for i in range(100):
        change = _pair(tmp_path / str(i), np.random.default_rng(i), shift=0.2, prompts=40, clips=2)[0]["reward"]
        inside += change["low"] <= 0.2 <= change["high"]
    # 95 % nominal; binomial(100, .95) lies in 88..100 with probability .998.
    assert inside >= 88


def test_clips_of_one_prompt_are_resampled_together(tmp_path):
    rng = np.random.default_rng(3)
    names = [f"prompt {i}" for i in range(30) for _ in range(8)]
    by_prompt = np.repeat(rng.normal(size=30), 8)
    features, real = rng.normal(size=(240, 2)), rng.normal(size=(50, 2))
    _write(tmp_path / "a", names, [0.0] * 240, [1.0], features, real)
    _write(tmp_path / "b", names, by_prompt.tolist(), [1.0], features, real)
    (reward,) = [c for c in evaluate.compare(tmp_path / "a", tmp_path / "b", resamples=1000) if c["name"] == "reward"]
    # 30 independent values, not 240: treating clips as independent would give an interval 2.8 times too narrow.
    assert (reward["high"] - reward["low"]) == pytest.approx(4 * by_prompt.std() / 30**0.5, rel=0.25)


def test_other_prompts_are_no_comparison(tmp_path):
    features = np.zeros((2, 2))
    _write(tmp_path / "a", ["x", "y"], [0.0, 1.0], [1.0], features, features)
    _write(tmp_path / "b", ["x", "z"], [0.0, 1.0], [1.0], features, features)
    with pytest.raises(ValueError, match="different prompts"):
        evaluate.compare(tmp_path / "a", tmp_path / "b")
