"""The trainer's parts that need no run: bad meshes, the numbers of a line, what stops it. Runs are in test_survival."""

import jax.numpy as jnp
import numpy as np
import pytest

from ddrl_jax import build, train
from ddrl_jax import config as config_lib

from . import tiny


def test_reward_metrics_leave_invalid_members_out():
    reward = np.array([1.0, 3.0, np.nan, 5.0, np.nan, np.nan, 2.0, np.nan])
    valid = np.isfinite(reward)
    scores = train.rewards.Scores({"a": reward, "b": np.full(8, np.nan)}, valid, "", 0.5)
    record = train.reward_metrics(reward, valid, scores, 4)
    assert record["reward"] == pytest.approx(11 / 4)
    assert record["reward_std"] == pytest.approx(2.0)  # the second group has one valid member: no std
    assert record["valid_rate"] == 0.5
    assert record["sub/a"] == pytest.approx(11 / 4) and "sub/b" not in record


def test_a_mesh_that_does_not_fit_is_one_line():
    config = tiny.config()
    config.mesh.fsdp = 3
    with pytest.raises(config_lib.ConfigError, match=r"config.mesh: .*fsdp=3.* does not give 8 devices"):
        build.build(config)


def test_many_skipped_steps_in_a_row_stop_the_run():
    train._check_finite(2, limit=3)
    with pytest.raises(train.RunStopped, match="3 steps in a row had a non-finite"):
        train._check_finite(3, limit=3)


def test_an_iterations_line_covers_all_its_updates():
    updates = [
        {
            "ratio_max": jnp.array(a),
            "grad_norm": jnp.array(b),
            "skipped": jnp.array(c),
            "skipped_in_a_row": jnp.array(d),
        }
        for a, b, c, d in ((2.0, 1.0, 1.0, 1), (1.0, 3.0, 0.0, 0))
    ]
    done = train.Iteration(4, updates, {"reward": 0.5}, begin=0.0)
    done.wait()
    line = done.metrics()
    assert (line["ratio_max"], line["grad_norm"], line["skipped"], line["reward"]) == (2.0, 2.0, 1.0, 0.5)
    assert done.skipped_in_a_row() == 0 and "skipped_in_a_row" not in line
    assert line["seconds"] == line["seconds_gradients"] > 0
    seconds = line["seconds"]
    done.wait()
    assert done.metrics()["seconds"] == seconds
