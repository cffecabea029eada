"""A made-up study of realistic size and numbers, for its page: hacked and clean arms, several seeds, clips."""

import json

import numpy as np

UPDATES, EVERY = 200, 25
WOBBLE = (1.0, -0.2, -0.8)  # of the seeds, in units of each measure's spread
SUBS = ("digits/text_alignment", "digits/visual_quality", "digits/motion_quality")
LABELS = {
    "reward": "Reward",
    "digits/text_alignment": "text alignment",
    "digits/visual_quality": "visual quality",
    "digits/motion_quality": "motion quality",
    "judge_digit": "Judge reads the digit",
    "judge_direction": "Judge reads the motion",
    "frechet": "Fréchet distance",
    "heldout_loss": "Held-out diffusion loss (relative)",
}
BEFORE = {
    "reward": -3.87, "digits/text_alignment": -0.556, "digits/visual_quality": -0.929, "digits/motion_quality": -2.39,
    "judge_digit": 0.897, "judge_direction": 0.994, "frechet": 0.558, "heldout_loss": 0.16,
}  # fmt: skip

# name: (label, group, set, changes at the end: sub-scores, judge digit, judge direction, Frechet, held-out loss)
DDRL = ((0.57, 0.35, 0.18), 0.042, 0.004, 0.01, 0.016)
FLOW = {"objective.name": "flow_grpo"}
DANCE = {"objective.name": "dance_grpo"}
ARMS = {
    "ddrl": ("DDRL", "main", {}, DDRL),
    "dance_grpo": ("DanceGRPO", "main", DANCE, ((1.51, 1.29, 0.19), -0.061, 0.003, 1.01, 0.535)),
    "dance_grpo_edm": ("DanceGRPO, EDM sampler", "main", DANCE | {"process.name": "edm_churn"},
                       ((1.3, 1.0, 0.12), -0.04, 0.001, 0.8, 0.41)),
    "flow_grpo": ("FlowGRPO", "main", FLOW | {"objective.kl_beta": 0.04},
                  ((1.1, 0.8, -0.31), -0.052, -0.012, 0.7, 0.24)),
    "sft": ("Data loss only", "control", {"objective.name": "sft"}, ((0.04, 0.08, 0.11), 0.006, 0.003, -0.02, -0.003)),
    "dance_slow": ("DanceGRPO, low rate", "control", DANCE | {"train.learning_rate": 1e-5},
                   ((0.5, 0.36, 0.08), 0.02, 0.001, 0.09, 0.052)),
    "ddrl_full": ("DDRL, full data loss", "ablation", {"objective.data_levels": "rollout"},
                  ((0.58, 0.36, 0.18), 0.043, 0.004, 0.0, 0.014)),
    "ddrl_exact": ("DDRL, exact objective (Eq. 8)", "ablation", {"advantage.kind": "partition"},
                   ((0.4, 0.3, 0.15), 0.03, 0.003, 0.03, 0.012)),
    "ddrl_synthetic": ("DDRL, synthetic data", "ablation", {"data.path": "{synthetic}"},
                       ((0.55, 0.34, 0.16), 0.036, 0.003, 0.04, 0.021)),
    "nft": ("DiffusionNFT", "ablation", {"objective.name": "nft"}, ((0.9, 0.5, 0.1), 0.02, 0.002, 0.3, 0.12)),
    "rft": ("Best-of-n fine-tuning", "ablation", {"objective.name": "rft"}, ((0.3, 0.2, 0.1), 0.02, 0.0, 0.02, 0.01)),
    "mix_grpo": ("MixGRPO window", "ablation", FLOW | {"rollout.steps": "window"},
                 ((0.8, 0.6, -0.1), -0.02, -0.004, 0.4, 0.15)),
    "ddrl_64": ("DDRL, 64 clips", "data", {"data.limit": 64}, ((0.56, 0.3, 0.1), 0.02, 0.001, 0.2, 0.09)),
    "ddrl_512": ("DDRL, 512 clips", "data", {"data.limit": 512}, ((0.57, 0.34, 0.16), 0.038, 0.003, 0.05, 0.03)),
    "sft_ddrl_64": ("SFT, DDRL, 64 clips", "data",
                    {"data.limit": 64, "pretrain.from_run": "{arm:sft}", "pretrain.from_stage": "ddrl"},
                    ((0.57, 0.3, 0.12), 0.018, 0.001, 0.22, 0.10)),
    "sft_ddrl_512": ("SFT, DDRL, 512 clips", "data",
                     {"data.limit": 512, "pretrain.from_run": "{arm:sft}", "pretrain.from_stage": "ddrl"},
                     ((0.58, 0.35, 0.17), 0.04, 0.003, 0.04, 0.03)),
    "sft_ddrl": ("SFT, DDRL", "data", {"pretrain.from_run": "{arm:sft}", "pretrain.from_stage": "ddrl"},
                 ((0.58, 0.36, 0.19), 0.043, 0.004, 0.0, 0.014)),
}  # fmt: skip
SWEEP = {
    f"sweep_{lr:g}_{kl:g}": (f"FlowGRPO {lr:g}, KL {kl:g}", "sweep",
                             FLOW | {"train.learning_rate": lr, "objective.kl_beta": kl},
                             ((4e4 * lr, 3e4 * lr, -0.05), 0.01, 0.0, -0.05, 5e3 * lr / (1 + 5 * kl)))
    for lr in (1e-5, 3e-5, 5e-5) for kl in (0.0, 0.04, 0.4)
}  # fmt: skip


def end_of(numbers):
    """{name: change at the end} of one arm's numbers."""
    subs, digit, direction, frechet, loss = numbers
    return {"reward": sum(subs), **dict(zip(SUBS, subs, strict=True)), "judge_digit": digit,
            "judge_direction": direction, "frechet": frechet, "heldout_loss": loss}  # fmt: skip


def kind_of(name):
    if name == "reward" or name in SUBS:
        return "reward" if name == "reward" else "sub"
    return "loss" if name == "heldout_loss" else "judge"


def seed_entry(settings, numbers, seed, *, noise=0.03, workdir=None):
    """One seed of an arm: the change grows along training; seeds differ by `noise` and a spread."""
    rng = np.random.default_rng([seed, len(settings), int(1e4 * abs(numbers[4]))])
    spread = {"reward": 0.05, "judge_digit": 0.004, "judge_direction": 0.002, "frechet": 0.04, "heldout_loss": 0.003}
    end = {n: v * (1 + noise * (seed - 1)) + spread.get(n, 0.02) * WOBBLE[(seed + i) % 3]
           for i, (n, v) in enumerate(end_of(numbers).items())}  # fmt: skip
    after = {n: BEFORE[n] * (1 + v) if n == "heldout_loss" else BEFORE[n] + v for n, v in end.items()}
    changes = [
        dict(name=n, label=LABELS[n], kind=kind_of(n), mean=v, low=v - w, high=v + w, n=270,
             better="down" if n in ("frechet", "heldout_loss") else "up")
        for n, v in end.items() for w in [0.03 * abs(v) + 0.002]
    ]  # fmt: skip
    steps = np.arange(0, UPDATES + 1, EVERY)
    t = steps / UPDATES
    path = {n: t ** (1.6 if kind_of(n) in ("judge", "loss") else 0.8) for n in end}
    evals = {"step": steps.tolist()}
    for n, v in end.items():
        wobble = rng.normal(size=len(t)) * 0.02 * abs(v) * (t > 0) * (t < 1)
        change = v * path[n] + wobble
        evals[n] = (BEFORE[n] * (1 + change) if n == "heldout_loss" else BEFORE[n] + change).tolist()
    u = np.arange(UPDATES) / UPDATES
    has_kl = settings.get("objective.name") == "flow_grpo"
    kl = 0.012 * (1 - np.exp(-u / 0.08)) * (1 + 0.1 * rng.normal(size=UPDATES))
    full = settings.get("objective.data_levels") == "rollout"
    ddrl = {
        "step": list(range(UPDATES)), "reward": (BEFORE["reward"] + end["reward"] * u**0.8).tolist(),
        "reward_std": (0.9 - 0.2 * u).tolist(), "kl_loss": kl.tolist() if has_kl else [None] * UPDATES,
        "data_loss": [0.16] * UPDATES,
    }  # fmt: skip
    counts = {"rollout": 1344, "policy": 640, "data": 640 if full else 64, "reference": 640 if has_kl else 0}
    return {
        "seed": seed, "workdir": workdir, "status": "done", "error": "", "seconds": 610.0 + 40 * seed + 200 * full,
        "verdict": "hacked" if end["heldout_loss"] > 0.1 or end["judge_digit"] < -0.01 else "clean",
        "updates": UPDATES, "rollouts": 64 * UPDATES,
        "evaluations_per_iteration": counts | {"total": sum(counts.values())},
        "summary": {
            "before": dict(BEFORE), "after": after, "changes": changes,
            "signals": [{"name": "heldout_loss", "value": end["heldout_loss"], "limit": 0.1,
                         "alarm": end["heldout_loss"] > 0.1, "evidence": ""}],
        },
        "changes_from_base": changes, "curves": {"eval": evals, "ddrl": ddrl},
    }  # fmt: skip


def study(arms=None, seeds=(0, 1, 2), **changed):
    """study.json's contents. `changed` replaces the numbers of arms by name, None leaves an arm out."""
    arms = dict(ARMS if arms is None else arms)
    entries = []
    for name, (label, group, settings, numbers) in arms.items():
        numbers = changed.get(name, numbers)
        if numbers is None:
            continue
        runs = [seed_entry(settings, numbers, s, workdir=f"arms/{name}/seed{s}") for s in seeds]
        starts = "sft" if "pretrain.from_run" in settings else "base"
        entries.append(
            {"name": name, "label": label, "group": group, "set": settings, "starts_from": starts, "seeds": runs}
        )
    return {
        "title": "Study digits",
        "command": "python -m ddrl_jax.main --mode=study --config=configs/study_digits.py --workdir=runs/study_digits",
        "seeds": list(seeds), "arms": entries,
        "base": {"workdir": "base", "pretrain_steps": 9000, "metrics": dict(BEFORE)},
    }  # fmt: skip


def write(workdir, contents):
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "study.json").write_text(json.dumps(contents))
    return workdir


def write_clips(workdir, contents, clips=12):
    """eval/*/samples.npz of the first seed of main arms and controls: bars that move, thicker where hacked."""
    for arm in contents["arms"]:
        if arm["group"] not in ("main", "control"):
            continue
        folder = workdir / arm["seeds"][0]["workdir"]
        thick = 1 + round(10 * min(abs(arm["seeds"][0]["summary"]["changes"][-1]["mean"]), 0.5))
        for step, width in ((0, 1), (UPDATES, thick)):
            video = np.zeros((clips, 4, 12, 12, 1), np.uint8)
            for i in range(clips):
                for t in range(4):
                    at = (i + t) % 8
                    video[i, t, 2:10, at : at + width + 1] = 180 + 10 * (i % 7)
            captions = np.array([f"a {i % 10} moves {('left', 'right', 'up', 'down')[i % 4]}" for i in range(clips)])
            path = folder / f"eval/{step:06d}"
            path.mkdir(parents=True, exist_ok=True)
            np.savez(path / "samples.npz", video=video, caption=captions)


if __name__ == "__main__":  # the whole page, to look at: python -m tests.study_example FOLDER
    import sys
    from pathlib import Path

    from ddrl_jax.report.study import write_study

    folder = Path(sys.argv[1])
    made = study(ARMS | SWEEP)
    write(folder, made)
    write_clips(folder, made)
    print(*write_study(folder))
