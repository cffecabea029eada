"""The smallest run there is: the quick start's stages in seconds, with the brightness scorer."""

import json
import os
import subprocess
import sys

from ddrl_jax import config as config_lib

from .paths import ROOT


def config():
    c = config_lib.default()
    c.codec.mean, c.codec.std = -0.729, 0.513
    c.process.sigma_max, c.process.train_mean, c.process.train_multiplier = 80.0, 0.0, 1.0
    c.process.high_sigma_ratio = 0.0
    c.text.dim = 8
    with c.unlocked():
        c.model.update(
            dict(
                width=32,
                depth=1,
                heads=2,
                mlp_ratio=2.0,
                adaln_rank=4,
                context_dim=16,
                dtype="float32",
                remat="none",
            )
        )
        c.reward.weights = config_lib.ConfigDict({"brightness": 1.0})
    c.pretrain.steps, c.pretrain.batch_size = 4, 16
    c.rollout.conditions, c.rollout.group_size, c.rollout.num_steps = 2, 4, 4
    c.rollout.trained_steps = (0, 2)
    c.train.steps, c.train.micro_batch, c.train.learning_rate = 12, 4, 1e-3
    c.reward.scorers, c.reward.env, c.reward.timeout_s = ("brightness",), "this", 30.0
    c.eval.every, c.eval.clips, c.eval.clips_during, c.eval.heldout_clips = 3, 8, 4, 8
    c.eval.chunk, c.eval.num_steps, c.eval.judge_steps = 8, 4, 5
    c.checkpoint.every, c.checkpoint.pretrain_every = 2, 2
    c.log.tensorboard = False
    return c


def main(workdir, *arguments, config_file=None, env=None, timeout=300, **popen):
    """Runs `python -m ddrl_jax.main` in a process of its own; returns it, finished, with its output as text."""
    with start(workdir, *arguments, config_file=config_file, env=env, **popen) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"the run took more than {timeout} s:\n{out[-3000:]}\n{err[-3000:]}") from None
    process.out, process.err = out, err
    return process


def start(workdir, *arguments, config_file=None, env=None, **popen):
    file = config_file or str(ROOT / "tests/tiny_config.py")
    command = [sys.executable, "-m", "ddrl_jax.main", f"--config={file}", f"--workdir={workdir}", *arguments]
    variables = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})}
    popen = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT, **popen}
    return subprocess.Popen(command, env=variables, **popen)


def lines(workdir, stage=None):
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [r for r in rows if stage in (None, r["stage"])]
