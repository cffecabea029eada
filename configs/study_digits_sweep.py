"""The methods of configs/study_digits.py over learning rate, KL weight and data weight, one seed each; all is shown.

    python -m ddrl_jax.main --mode=study --config=configs/study_digits_sweep.py --workdir=runs/study_digits_sweep \
        --config.study.base=runs/study_digits/base

configs/study_digits.py takes one learning rate for all, 1e-4, and 3e-5 for its slow arms; what else this sweep found is
in docs/results/study_digits_sweep.md. 16 runs of two minutes on one core.
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict

STUDY = runpy.run_path(str(Path(__file__).with_name("study_digits.py")))
LEARNING_RATES = ("3e-5", "1e-4", "3e-4")  # as text: an arm's name has no dot
KL_BETAS = ("0", "4e-1")  # beside FlowGRPO's own .04
DATA_BETAS = ("1e-1", "1")  # of DDRL, beside the .3 of its learning rates
DDRL = {"objective": {"name": "ddrl", "data_beta": 0.3}}


def arms():
    main = STUDY["arms"]()
    main["ddrl"]["set"] = DDRL
    result = {}
    for name in ("ddrl", "dance_grpo", "flow_grpo", "nft"):
        for rate in LEARNING_RATES:
            values = main[name]["set"] | {"train": {"learning_rate": float(rate)}}
            label = f"{main[name]['label']}, learning rate {rate}"
            result[f"{name}_lr_{rate}"] = {"label": label, "group": "sweep", "set": values}
    for beta in KL_BETAS:
        values = main["flow_grpo"]["set"] | {"objective": {"name": "flow_grpo", "kl_beta": float(beta)}}
        result[f"flow_grpo_kl_{beta}"] = {
            "label": f"FlowGRPO, KL weight {float(beta):g}",
            "group": "sweep",
            "set": values,
        }
    for beta in DATA_BETAS:
        values = {"objective": {"name": "ddrl", "data_beta": float(beta)}}
        result[f"ddrl_beta_{beta}"] = {"label": f"DDRL, data weight {float(beta):g}", "group": "sweep", "set": values}
    return result


def get_config():
    config = STUDY["get_config"]()
    with config.unlocked():
        config.study.arms = ConfigDict(arms(), sort_keys=False)
    return config
