"""The methods side by side on the moving digits: one base, equal budgets, one page (docs/results/study_digits.md).

    python -m ddrl_jax.main --mode=study --config=configs/study_digits.py --workdir=runs/study_digits
    ... --config.study.seeds=0,1,2 for intervals over seeds; --config.study.base=RUN takes a base that is there

Every arm has 100 updates of 32 rollouts from the same network, 10 sampler steps of which 5 are trained, and is
evaluated under the base's own sampler. Two CPU cores: about 12 minutes for the base, 20 for the 24 runs of the first
seed, 10 for each further one. Over three seeds DDRL reached reward +0.74 with the held-out loss up by 0.9 %, DanceGRPO
+1.25 with 19 %, FlowGRPO +1.96 with 13 %. The sweep behind the settings: configs/study_digits_sweep.py.
"""

from pathlib import Path

from ml_collections import ConfigDict

from ddrl_jax.config import load

SFT = {"name": "sft"}
DANCE_GRPO = {"objective": {"name": "dance_grpo"}, "rollout": {"steps": "random"}}
FLOW_GRPO = {"objective": {"name": "flow_grpo"}, "advantage": {"std": "batch"}}
DANCE_SDE, FLOW_SDE = {"name": "dance_sde"}, {"name": "flow_sde"}
DATA_BETA = 1.0
DDRL = {"name": "ddrl", "data_beta": DATA_BETA}
SLOW = {"learning_rate": 3e-5}


def arm(label, group, *, seeds=0, **values):
    """An arm; `seeds`: of the study's only the first so many, 0 all."""
    return {"label": label, "group": group, "set": values, "seeds": seeds}


def after(name, **values):
    """Values that start an arm where another one ended."""
    return {"pretrain": {"from_run": f"{{arm:{name}}}", "from_stage": "ddrl"}, **values}


def arms():
    return {
        # The comparison: each method under its own sampler, all at one learning rate, number of trained steps and kind
        # of start noise (each rollout its own; DanceGRPO's code shares it within a group, FlowGRPO's trains all steps).
        "ddrl": arm("DDRL", "main"),
        "dance_grpo": arm("DanceGRPO", "main", **DANCE_GRPO, process=DANCE_SDE),
        "flow_grpo": arm("FlowGRPO", "main", **FLOW_GRPO, process=FLOW_SDE),
        "nft": arm("DiffusionNFT", "main", objective={"name": "nft"}),
        # What explains it: the data loss alone, baselines that have not gone far, and samplers exchanged.
        "sft": arm("SFT (data loss only)", "control", objective=SFT),
        "dance_grpo_slow": arm("DanceGRPO, slow", "control", **DANCE_GRPO, process=DANCE_SDE, train=SLOW),
        "flow_grpo_slow": arm("FlowGRPO, slow", "control", **FLOW_GRPO, process=FLOW_SDE, train=SLOW),
        "dance_grpo_edm": arm("DanceGRPO, DDRL's sampler", "control", **DANCE_GRPO),
        "flow_grpo_edm": arm(
            # The KL in its own units: FlowGRPO's is weighed by a step of flow time, which EDM levels are not.
            "FlowGRPO, DDRL's sampler",
            "control",
            objective={"name": "flow_grpo", "kl": "gaussian"},
            advantage={"std": "batch"},
        ),
        "ddrl_flow": arm("DDRL, FlowGRPO's sampler", "control", objective=DDRL, process=FLOW_SDE),
        # DDRL's own choices: Table 3, Eq. 8, Table 4, SFT first.
        "ddrl_full": arm("DDRL, full data loss", "ablation", objective={"data_levels": "rollout"}),
        "ddrl_synthetic": arm("DDRL, synthetic data", "ablation", data={"path": "{synthetic}"}),
        "sft_ddrl": arm("SFT, then DDRL", "ablation", **after("sft")),
        "ddrl_exact": arm(
            "DDRL, exact objective (Eq. 8)",
            "ablation",
            seeds=1,
            objective={"reward_transform": "exp", "adv_clip": float("inf")},
            advantage={"kind": "partition", "beta": 2.0},
        ),
        # Fig. 5: with and without SFT first, against the number of clips.
        **{
            name: entry
            for n in (50, 500)
            for name, entry in {
                f"ddrl_{n}": arm(f"DDRL, {n} clips", "ablation", seeds=1, data={"limit": n}),
                f"sft_{n}": arm(f"SFT, {n} clips", "ablation", seeds=1, objective=SFT, data={"limit": n}),
                f"sft_ddrl_{n}": arm(
                    f"SFT, then DDRL, {n} clips", "ablation", seeds=1, **after(f"sft_{n}"), data={"limit": n}
                ),
            }.items()
        },
        # Other ways to sample, to choose steps and to choose rollouts.
        "flow_cps": arm(
            "Flow-CPS",
            "ablation",
            seeds=1,
            objective={"name": "flow_grpo", "kl_beta": 0.0, "log_ratio": "mean_square"},
            advantage={"std": "batch"},
            process={"name": "flow_cps"},
        ),
        "mix_grpo": arm(
            "MixGRPO",
            "ablation",
            seeds=1,
            objective={"name": "flow_grpo", "kl_beta": 0.0},
            process=FLOW_SDE,
            rollout={"steps": "window", "window_every": 14},  # once over the seven places of the window
        ),
        "best_of": arm("DDRL, best and worst two", "ablation", seeds=1, advantage={"best_of": 4}),
        "rft": arm("Best-of-n fine-tuning", "ablation", seeds=1, objective={"name": "rft"}),
    }


def get_config():
    config = load(str(Path(__file__).with_name("quickstart.py")))
    config.model.width, config.model.context_dim, config.model.adaln_rank = 96, 96, 24
    config.pretrain.steps = 7000
    config.pretrain.learning_rate = 2e-3

    config.rollout.conditions = 4
    config.rollout.num_steps, config.rollout.trained_steps = 10, (0, 2, 4, 6, 8)
    config.objective.data_beta = DATA_BETA
    config.train.steps = 100
    config.train.learning_rate = 1e-4

    config.eval.num_steps = 10
    config.eval.every, config.eval.clips, config.eval.clips_during = 20, 540, 135
    config.eval.chunk, config.eval.heldout_clips = 135, 270
    for field, value in config.process.items():
        config.eval.process[field] = value
    config.log.tensorboard = False

    with config.unlocked():
        config.study.arms = ConfigDict(arms(), sort_keys=False)  # the page's order
    return config
