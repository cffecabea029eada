"""docs/rewards.md: its examples run as they are printed."""

import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")

from ddrl_jax.rewards import launch

BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "docs" / "rewards.md").read_text(), re.S)


def test_the_scorer_example(tmp_path):
    [source] = [block for block in BLOCKS if "class Sharpness" in block]
    (tmp_path / "sharpness.py").write_text(source)
    stripes = np.zeros((2, 1, 3, 4, 4), np.float32)
    stripes[1, ..., ::2] = 1.0
    with launch("this", [f"{tmp_path}/sharpness.py:Sharpness"]) as sidecar:
        out = sidecar.client({"sharpness/edges": 1.0}).submit(stripes, ["plain", "striped"]).result()
    assert out.valid.all() and set(out.scores) == {"sharpness/edges", "sharpness/flicker"}
    np.testing.assert_array_equal(out.scores["sharpness/edges"], [0, 1])
    np.testing.assert_array_equal(out.scores["sharpness/flicker"], [0, 0])


def test_the_client_example():
    [source] = [block for block in BLOCKS if "total_reward" in block]
    names = {"latents_BCTHW": np.full((2, 1, 1, 2, 2), 0.5, np.float32), "prompts": ["a", "b"]}
    exec(source, names)
    np.testing.assert_array_equal(names["reward_B"], [0.5, 0.5])
    assert names["valid_B"].all()
