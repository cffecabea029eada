"""The trainer's side of the rewards: starting the sidecar, asking it, telling valid scores from others, mixing them.

Needs numpy, httpx and pydantic; knows neither torch nor jax.
"""

from .client import RewardClient, Scores, Ticket, joined
from .environment import ConfigurationFault, check_environment, env_python, train_scorer
from .mixing import bounded, gated, passes_gates, resolve_name, total_reward, weighted_names
from .sidecar import Sidecar, launch
from .text import SidecarText, TextUnavailable, embed_captions

__all__ = [
    "ConfigurationFault",
    "RewardClient",
    "Scores",
    "Sidecar",
    "SidecarText",
    "TextUnavailable",
    "Ticket",
    "bounded",
    "check_environment",
    "embed_captions",
    "env_python",
    "gated",
    "joined",
    "launch",
    "passes_gates",
    "resolve_name",
    "total_reward",
    "train_scorer",
    "weighted_names",
]
