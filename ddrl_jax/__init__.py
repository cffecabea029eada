"""Reinforcement learning of diffusion and flow models in JAX: DDRL and its relatives.

The public names of the pure library live here and are resolved on first use (PEP 562): importing the package
imports neither JAX nor anything that starts a JAX backend, so that command lines, the sidecar and the
report stay light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddrl_jax.diffusion.guidance import guided
    from ddrl_jax.diffusion.levels import karras_levels
    from ddrl_jax.diffusion.loss import diffusion_loss
    from ddrl_jax.diffusion.process import DanceSDE, EDMChurn, FlowCPS, FlowSDE
    from ddrl_jax.diffusion.sampler import Trajectory, sample
    from ddrl_jax.rl.advantages import group_advantages, log_partition, mixed_advantages, partition_advantages
    from ddrl_jax.rl.loss import DataBatch, loss_fn
    from ddrl_jax.rl.nft import nft_loss
    from ddrl_jax.rl.objective import Objective, dance_grpo, ddrl, flow_grpo
    from ddrl_jax.rl.selection import best_of_group, best_of_weights
    from ddrl_jax.rl.steps import random_steps, window_steps

__version__ = "0.1.0"

_HOME = {
    "DanceSDE": "ddrl_jax.diffusion.process",
    "DataBatch": "ddrl_jax.rl.loss",
    "EDMChurn": "ddrl_jax.diffusion.process",
    "FlowCPS": "ddrl_jax.diffusion.process",
    "FlowSDE": "ddrl_jax.diffusion.process",
    "Objective": "ddrl_jax.rl.objective",
    "Trajectory": "ddrl_jax.diffusion.sampler",
    "best_of_group": "ddrl_jax.rl.selection",
    "best_of_weights": "ddrl_jax.rl.selection",
    "dance_grpo": "ddrl_jax.rl.objective",
    "ddrl": "ddrl_jax.rl.objective",
    "diffusion_loss": "ddrl_jax.diffusion.loss",
    "flow_grpo": "ddrl_jax.rl.objective",
    "group_advantages": "ddrl_jax.rl.advantages",
    "guided": "ddrl_jax.diffusion.guidance",
    "karras_levels": "ddrl_jax.diffusion.levels",
    "log_partition": "ddrl_jax.rl.advantages",
    "loss_fn": "ddrl_jax.rl.loss",
    "mixed_advantages": "ddrl_jax.rl.advantages",
    "nft_loss": "ddrl_jax.rl.nft",
    "partition_advantages": "ddrl_jax.rl.advantages",
    "random_steps": "ddrl_jax.rl.steps",
    "sample": "ddrl_jax.diffusion.sampler",
    "window_steps": "ddrl_jax.rl.steps",
}

__all__ = [
    "DanceSDE",
    "DataBatch",
    "EDMChurn",
    "FlowCPS",
    "FlowSDE",
    "Objective",
    "Trajectory",
    "best_of_group",
    "best_of_weights",
    "dance_grpo",
    "ddrl",
    "diffusion_loss",
    "flow_grpo",
    "group_advantages",
    "guided",
    "karras_levels",
    "log_partition",
    "loss_fn",
    "mixed_advantages",
    "nft_loss",
    "partition_advantages",
    "random_steps",
    "sample",
    "window_steps",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
