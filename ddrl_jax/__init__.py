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
    from ddrl_jax.diffusion.process import DanceSDE, EDMChurn, FlowSDE
    from ddrl_jax.diffusion.sampler import Trajectory, sample
    from ddrl_jax.rl.advantages import group_advantages
    from ddrl_jax.rl.loss import DataBatch, loss_fn
    from ddrl_jax.rl.nft import nft_loss
    from ddrl_jax.rl.objective import Objective, dance_grpo, ddrl, flow_grpo

__version__ = "0.1.0"

_HOME = {
    "DanceSDE": "ddrl_jax.diffusion.process",
    "DataBatch": "ddrl_jax.rl.loss",
    "EDMChurn": "ddrl_jax.diffusion.process",
    "FlowSDE": "ddrl_jax.diffusion.process",
    "Objective": "ddrl_jax.rl.objective",
    "Trajectory": "ddrl_jax.diffusion.sampler",
    "dance_grpo": "ddrl_jax.rl.objective",
    "ddrl": "ddrl_jax.rl.objective",
    "diffusion_loss": "ddrl_jax.diffusion.loss",
    "flow_grpo": "ddrl_jax.rl.objective",
    "group_advantages": "ddrl_jax.rl.advantages",
    "guided": "ddrl_jax.diffusion.guidance",
    "karras_levels": "ddrl_jax.diffusion.levels",
    "loss_fn": "ddrl_jax.rl.loss",
    "nft_loss": "ddrl_jax.rl.nft",
    "sample": "ddrl_jax.diffusion.sampler",
}

__all__ = [
    "DanceSDE",
    "DataBatch",
    "EDMChurn",
    "FlowSDE",
    "Objective",
    "Trajectory",
    "dance_grpo",
    "ddrl",
    "diffusion_loss",
    "flow_grpo",
    "group_advantages",
    "guided",
    "karras_levels",
    "loss_fn",
    "nft_loss",
    "sample",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
