"""DDRL, DanceGRPO and the data loss alone on rendered words: the OCR reward against a second OCR engine as judge.

    python -m ddrl_jax.main --mode=study --config=configs/study_ocr.py --workdir=runs/study_ocr

The second study, smaller than configs/study_digits.py and built like it: one base (configs/words.py), 80 updates of 32
rollouts an arm, at one learning rate. One seed (docs/results/study_ocr.md): the base reads 97 % of the letters, so that
no reward rises; DanceGRPO's held-out loss does, by 39 %, DDRL's by 1.9 %.
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
        "dance_grpo": arm("DanceGRPO", "main", **dance),
        "sft": arm("SFT (data loss only)", "control", objective={"name": "sft"}),
    }


def get_config():
    config = load(str(Path(__file__).with_name("words.py")))
    config.rollout.conditions = 4
    config.train.steps = 80
    config.train.learning_rate = 1e-4
    config.objective.data_beta = 0.3
    config.eval.clips, config.eval.clips_during = 228, 76  # six and two of each word
    config.eval.chunk, config.eval.heldout_clips = 76, 228
    # Arms with other samplers are evaluated under the base's own.
    for field, value in config.process.items():
        config.eval.process[field] = value
    config.log.tensorboard = False
    with config.unlocked():
        config.study.arms = ConfigDict(arms(), sort_keys=False)  # the page's order
    return config
