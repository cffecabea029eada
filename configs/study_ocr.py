"""DDRL, DanceGRPO and the data loss alone on rendered words: the OCR reward against a second OCR engine as judge.

    python -m ddrl_jax.main --mode=study --config=configs/study_ocr.py --workdir=runs/study_ocr

The second study, smaller than configs/study_digits.py and built like it: one base (configs/words.py), 120 updates an
arm.
"""

from pathlib import Path

from ml_collections import ConfigDict

from ddrl_jax.config import load


def arm(label, group, **values):
    return {"label": label, "group": group, "set": values}


def arms():
    dance = {"objective": {"name": "dance_grpo"}, "rollout": {"steps": "random"}, "process": {"name": "dance_sde"}}
    return {
        "ddrl": arm("DDRL", "main"),
        "dance_grpo": arm("DanceGRPO", "main", **dance, train={"learning_rate": 1e-4}),
        "sft": arm("SFT (data loss only)", "control", objective={"name": "sft"}),
    }


def get_config():
    config = load(str(Path(__file__).with_name("words.py")))
    config.train.steps = 120
    config.train.learning_rate = 5e-5
    config.objective.data_beta = 0.3
    # Arms with other samplers are evaluated under the base's own.
    for field, value in config.process.items():
        config.eval.process[field] = value
    config.log.tensorboard = False
    with config.unlocked():
        config.study.arms = ConfigDict(arms(), sort_keys=False)  # the page's order
    return config
