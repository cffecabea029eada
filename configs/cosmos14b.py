"""Cosmos-Predict2.5-14B with DDRL: the recipe of `configs/cosmos2b.py` with the 14B network and its few other values.

Needs what the 2B recipe needs, with the 14B weights, and 32 x 8 devices at the least for the recipe's mesh. The paper
trained it on H100s with learning rate 3e-6 and reports the same preference for DDRL as at 2B; nothing of that was run
here. Values: tests/test_recipes.py.
"""

from pathlib import Path

from ddrl_jax.config import load


def get_config():
    config = load(str(Path(__file__).with_name("cosmos2b.py")))
    config.model.checkpoint = "checkpoints/cosmos-predict2.5-14b/model.pt"
    config.model.width, config.model.depth, config.model.heads = 5120, 36, 40
    config.model.use_rf_ckpts = True
    config.train.learning_rate = 3e-6  # the paper's
    config.eval.guidance = 3.0
    config.mesh.fsdp, config.mesh.context = 32, 8
    config.model.remat = "save-qkv"
    config.train.micro_batch = config.rollout.micro_batch = 32  # a clip a data group
    return config
