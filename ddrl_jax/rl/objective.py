"""What is maximised: the settings of `loss_fn` and the presets that tell the methods apart."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, get_args

from ddrl_jax.rl.ratio import KL, LogRatio

RewardTransform = Literal["identity", "exp"]
DataLevels = Literal["training", "rollout"]


@dataclasses.dataclass(frozen=True)
class Objective:
    """Settings of `loss_fn` (static: hashable).

    Attributes:
      data_beta: weight of the data loss (DDRL's forward KL); 0 is off.
      kl_beta: weight of the reverse KL to ref_params; 0 is off.
      clip_range: c of clip(ratio, 1-c, 1+c), more than 0 (at 0 the tie halves the gradient).
      log_ratio: "mean_square" (the reference: mean over dimensions, no 1/(2 std^2)), "gaussian" (mean), "gaussian_sum".
      kl: "mean_square", "gaussian", "flow_grpo".
      reward_transform: "identity", or "exp": A -> -exp(-A), the lambda of DDRL's Eq. 8.
      adv_clip: symmetric, after the transform; None is off.
      loss_scale: multiplies the whole loss.
      data_draws: M, levels drawn a data sample where the data brings none.
      data_levels: "training" draws from the process's training law; "rollout" takes the trajectory's levels and noise.
      cond_dropout: probability of the null condition, in the data loss only.
    """

    data_beta: float = 0.0
    kl_beta: float = 0.0
    clip_range: float = 1e-4
    log_ratio: LogRatio = "mean_square"
    kl: KL = "mean_square"
    reward_transform: RewardTransform = "identity"
    adv_clip: float | None = 5.0
    loss_scale: float = 1.0
    data_draws: int = 1
    data_levels: DataLevels = "training"
    cond_dropout: float = 0.0

    def __post_init__(self) -> None:
        for name, kinds in (
            ("log_ratio", LogRatio),
            ("kl", KL),
            ("reward_transform", RewardTransform),
            ("data_levels", DataLevels),
        ):
            value = getattr(self, name)
            if value not in get_args(kinds):
                raise ValueError(f"{name}={value!r}: expected one of {', '.join(get_args(kinds))}")
        for name in ("data_beta", "kl_beta"):
            value = getattr(self, name)
            if not (value >= 0.0 and math.isfinite(value)):
                raise ValueError(f"{name}={value}: expected a finite number, at least 0")
        if not self.clip_range > 0.0:
            raise ValueError(f"clip_range={self.clip_range}: expected more than 0")
        if self.adv_clip is not None and not self.adv_clip > 0.0:
            raise ValueError(f"adv_clip={self.adv_clip}: expected more than 0, or None")
        if not self.loss_scale > 0.0:
            raise ValueError(f"loss_scale={self.loss_scale}: expected more than 0")
        if self.data_draws < 1:
            raise ValueError(f"data_draws={self.data_draws}: expected at least 1")
        if not 0.0 <= self.cond_dropout <= 1.0:
            raise ValueError(f"cond_dropout={self.cond_dropout}: expected a probability")


def ddrl(**overrides: Any) -> Objective:
    """DDRL (Ye et al. 2025, arXiv 2512.04332) as its recipes set it, with one level a data sample (reduced)."""
    return Objective(**{"data_beta": 0.01, "loss_scale": 10.0, "cond_dropout": 0.2, **overrides})


def dance_grpo(**overrides: Any) -> Objective:
    """DanceGRPO (Xue et al. 2025, arXiv 2505.07818): clipped Gaussian ratio, no KL."""
    return Objective(**{"log_ratio": "gaussian", **overrides})


def flow_grpo(**overrides: Any) -> Objective:
    """FlowGRPO (Liu et al. 2025, arXiv 2505.05470): clipped Gaussian ratio, reverse KL to the reference policy."""
    return Objective(**{"kl_beta": 0.04, "log_ratio": "gaussian", "kl": "flow_grpo", **overrides})
