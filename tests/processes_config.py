"""The run of tests/test_processes.py: the tiny one, at sizes that eight devices divide."""

from pathlib import Path

from ddrl_jax.config import ConfigDict
from tests import tiny

STEPS = 5


def get_config():
    config = tiny.config()
    config.pretrain.steps, config.checkpoint.pretrain_every = 2, 100
    config.train.micro_batch, config.train.steps = 8, STEPS
    config.objective.data_beta = 0.1
    config.reward.scorers = (f"{Path(__file__).with_name('recording_scorer.py')}:Recording",)
    config.reward.weights = ConfigDict({"recording": 1.0})
    config.checkpoint.every, config.checkpoint.keep = 1, 10
    config.eval.every, config.eval.judge_steps = 100, 1
    return config
