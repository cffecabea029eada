"""The loss of DDRL and its relatives, one pure function of recorded rollouts and data.

Dims: B rollouts, K recorded steps, Bd data samples, M data draws, S a sample's shape.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp

from ddrl_jax.diffusion.broadcast import compute_dtype, expand
from ddrl_jax.diffusion.guidance import Denoiser, drop_condition
from ddrl_jax.diffusion.loss import diffusion_loss
from ddrl_jax.diffusion.process import Process
from ddrl_jax.diffusion.sampler import Trajectory, step_mean
from ddrl_jax.rl.objective import Objective
from ddrl_jax.rl.ratio import gaussian_kl, log_ratio


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["x0", "cond", "sigma", "noise", "weight", "null_cond"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class DataBatch:
    """Data for the data loss (a pytree); Bd need not be B.

    Attributes:
      x0: (Bd,*S) clean samples.
      cond: their condition, any tree.
      sigma: (M,Bd) levels; None draws them, or takes the rollout's.
      noise: (M,Bd,*S), or (Bd,*S) for all draws; None draws it, or takes the rollout's start noise.
      weight: (M,Bd), replaces the process's loss weight.
      null_cond: same tree as cond, leading 1; a leaf that is None keeps the sample's own value. Required when
        cond_dropout > 0.
    """

    x0: chex.Array
    cond: Any = None
    sigma: chex.Array | None = None
    noise: chex.Array | None = None
    weight: chex.Array | None = None
    null_cond: Any = None


def loss_fn(
    params: Any,
    trajectory: Trajectory | None,
    advantages: chex.ArrayLike | None,
    cond: Any,
    data: DataBatch | None,
    rng: chex.PRNGKey | None,
    *,
    denoise: Denoiser,
    process: Process,
    objective: Objective,
    ref_params: Any = None,
    sample_weight: chex.ArrayLike | None = None,
) -> tuple[chex.Array, dict[str, Any]]:
    """loss_scale [ mean_{K,B} w max(-A rho, -A clip(rho)) + kl_beta mean_{K,B} w KL + data_beta mean_{M,Bd} L ].

    Source: DDRL (Ye et al. 2025, arXiv 2512.04332), Eq. 8 with Eq. 9's diffusion loss L for its KL; the clipped
    surrogate is PPO's (arXiv 1707.06347, Eq. 7).

    Args:
      params: parameters of the denoiser; what the loss is differentiated for.
      trajectory: the recorded steps; None for plain supervised training. Without std every slot is live, which only the
        kinds "mean_square" allow.
      advantages: (B,); None turns the policy part off.
      cond: the rollouts' condition, handed on as given.
      data: None when data_beta is 0, otherwise required.
      rng: key for levels, noise and condition dropout; None when every draw is given.
      denoise: (params, x (B,*S), sigma (B,), cond) -> x0.
      process: the rollouts' process.
      objective: the settings.
      ref_params: the reference policy, required when kl_beta > 0.
      sample_weight: (B,), default 1; 0 for invalid members and dead groups. The denominator stays K*B.

    Returns:
      loss () and metrics: loss, policy_loss, kl_loss, data_loss (weighted by w, without beta and loss_scale),
      ratio_mean and clip_fraction (plain means over the live slots, those whose weight is not 0), ratio_max (over the
      same slots), each 0 for a part that is off; and parts, unweighted: policy, kl, log_ratio (K,B), data (M,Bd).

    Raises:
      ValueError: a part that the objective asks for is missing.
    """
    use_policy = advantages is not None
    use_kl = objective.kl_beta > 0.0 and trajectory is not None
    use_data = objective.data_beta > 0.0
    if trajectory is None and use_policy:
        raise ValueError("trajectory=None: advantages need a trajectory")
    if trajectory is None and data is None:
        raise ValueError("trajectory=None, data=None: nothing to compute")
    if use_kl and ref_params is None:
        raise ValueError(f"ref_params=None: kl_beta={objective.kl_beta} needs the reference policy")
    if trajectory is not None and trajectory.std is None:
        for used, name in ((use_policy, "log_ratio"), (use_kl, "kl")):
            if used and getattr(objective, name) != "mean_square":
                raise ValueError(f"trajectory.std=None: {name}={getattr(objective, name)!r} needs it")
    if use_data and data is None:
        raise ValueError(f"data=None: data_beta={objective.data_beta} needs data")

    # Parts that are off are zeros of the other parts' dtype, never of x64's default one.
    num_steps, num_rollouts = (0, 0) if trajectory is None else trajectory.x.shape[:2]
    dtype = compute_dtype(None if trajectory is None else trajectory.x, None if data is None else data.x0)
    loss = jnp.zeros((), dtype)
    metrics: dict[str, Any] = dict.fromkeys(
        ("policy_loss", "kl_loss", "data_loss", "ratio_mean", "ratio_max", "clip_fraction"), loss
    )
    parts = dict.fromkeys(("policy", "kl", "log_ratio"), jnp.zeros((num_steps, num_rollouts), dtype)) | {
        "data": jnp.zeros((0, 0), dtype)
    }

    if trajectory is not None and (use_policy or use_kl) and num_steps and num_rollouts:
        policy_metrics, policy_parts = _policy_terms(
            params,
            trajectory,
            advantages,
            cond,
            denoise=denoise,
            process=process,
            objective=objective,
            ref_params=ref_params if use_kl else None,
            sample_weight=sample_weight,
        )
        metrics |= policy_metrics
        parts |= policy_parts
        loss += metrics["policy_loss"] + objective.kl_beta * metrics["kl_loss"]
    if use_data and data is not None:
        parts["data"] = _data_losses(
            params, trajectory, data, rng, denoise=denoise, process=process, objective=objective
        )
        metrics["data_loss"] = jnp.mean(parts["data"])
        loss += objective.data_beta * metrics["data_loss"]

    loss = objective.loss_scale * loss
    return loss, {"loss": loss, **metrics, "parts": parts}


def _policy_terms(
    params: Any,
    trajectory: Trajectory,
    advantages: chex.ArrayLike | None,
    cond: Any,
    *,
    denoise: Denoiser,
    process: Process,
    objective: Objective,
    ref_params: Any,
    sample_weight: chex.ArrayLike | None,
) -> tuple[dict[str, chex.Array], dict[str, chex.Array]]:
    num_steps, num_rollouts = trajectory.x.shape[:2]
    dtype = compute_dtype(trajectory.x)
    if trajectory.std is None:  # nothing that is used reads more of it than that the slots are live
        trajectory = dataclasses.replace(trajectory, std=jnp.ones(num_steps, dtype))
    w_B = jnp.ones(num_rollouts, dtype)
    if sample_weight is not None:
        w_B = jnp.asarray(sample_weight, dtype)
        chex.assert_shape(w_B, (num_rollouts,))
    a_B = None
    if advantages is not None:
        a_B = jnp.asarray(advantages, dtype)
        chex.assert_shape(a_B, (num_rollouts,))
        a_B = _transformed(a_B, w_B, objective)

    def masked(x: chex.Array | None) -> chex.Array | None:
        # A rollout that went non-finite has weight 0; left in, it would still make the gradient 0 * nan.
        return None if x is None else jnp.where((expand(w_B, x) == 0.0) & ~jnp.isfinite(x), 0.0, x)

    def replay(_: None, at: Trajectory) -> tuple[None, tuple[chex.Array, ...]]:
        at = dataclasses.replace(
            at, x=masked(at.x), x_next=masked(at.x_next), mean_old=masked(at.mean_old), prev_x0=masked(at.prev_x0)
        )

        def mean_of(params: Any) -> chex.Array:
            mean, _ = step_mean(
                params,
                at.x,
                at.sigma,
                at.sigma_next,
                at.prev_x0,
                at.prev_sigma,
                cond,
                denoise=denoise,
                process=process,
                num_steps=trajectory.num_steps,
            )
            return mean.astype(dtype)

        mean = mean_of(params)
        # Without a recorded mean the ratio is exactly 1 and its gradient that of the log-density.
        mean_old = jax.lax.stop_gradient(mean) if at.mean_old is None else at.mean_old
        log_ratio_B = log_ratio(mean, mean_old, at.x_next, at.std, objective.log_ratio)
        kl_B = jnp.zeros_like(log_ratio_B)
        if ref_params is not None:
            kl_B = gaussian_kl(
                mean,
                jax.lax.stop_gradient(mean_of(ref_params)),
                at.std,
                jnp.abs(at.sigma_next - at.sigma),
                objective.kl,
                summed=objective.log_ratio == "gaussian_sum",
            )
        return None, (log_ratio_B, kl_B)

    steps = dataclasses.replace(trajectory, init_noise=None)
    _, (log_ratio_KB, kl_KB) = jax.lax.scan(replay, None, steps)

    w_KB = jnp.where(trajectory.std[:, None] > 0.0, w_B, 0.0)
    metrics = {"kl_loss": _weighted_mean(kl_KB, w_KB)}
    parts = {"kl": kl_KB}
    if a_B is not None:
        low, high = 1.0 - objective.clip_range, 1.0 + objective.clip_range
        ratio_KB = jnp.exp(log_ratio_KB)
        policy_KB = jnp.maximum(-a_B * ratio_KB, -a_B * jnp.clip(ratio_KB, low, high))
        live_KB = w_KB != 0.0
        num_live = jnp.maximum(live_KB.sum(), 1)
        clipped_KB = (ratio_KB < low) | (ratio_KB > high)
        metrics |= {
            "policy_loss": _weighted_mean(policy_KB, w_KB),
            "ratio_mean": jnp.where(live_KB, ratio_KB, 0.0).sum() / num_live,
            "ratio_max": jnp.where(live_KB, ratio_KB, 0.0).max(),
            "clip_fraction": jnp.where(live_KB & clipped_KB, jnp.ones((), dtype), 0.0).sum() / num_live,
        }
        parts |= {"policy": policy_KB, "log_ratio": log_ratio_KB}
    return metrics, parts


def _transformed(a_B: chex.Array, w_B: chex.Array, objective: Objective) -> chex.Array:
    """lambda(A), then the clip: the reference's order. A non-finite advantage of weight 0 counts for nothing."""
    a_B = jnp.where((w_B == 0.0) & ~jnp.isfinite(a_B), 0.0, a_B)
    if objective.reward_transform == "exp":
        a_B = -jnp.exp(-a_B)
    if objective.adv_clip is not None:
        a_B = jnp.clip(a_B, -objective.adv_clip, objective.adv_clip)
    return a_B


def _weighted_mean(value_KB: chex.Array, w_KB: chex.Array) -> chex.Array:
    return jnp.mean(jnp.where(w_KB != 0.0, w_KB * value_KB, 0.0))


def _data_losses(
    params: Any,
    trajectory: Trajectory | None,
    data: DataBatch,
    rng: chex.PRNGKey | None,
    *,
    denoise: Denoiser,
    process: Process,
    objective: Objective,
) -> chex.Array:
    """(M,Bd), the diffusion loss at given, rollout or drawn levels."""
    x0 = jnp.asarray(data.x0)
    num = x0.shape[0]
    dtype = compute_dtype(x0)
    rollout = objective.data_levels == "rollout"
    keys: list[Any] = [None] * 3 if rng is None else list(jax.random.split(rng, 3))
    sigma_key, noise_key, drop_key = keys

    # Levels.
    if data.sigma is not None:
        sigma_MB = jnp.asarray(data.sigma, dtype)
    elif rollout:
        if trajectory is None:
            raise ValueError("data.sigma=None: data_levels='rollout' needs a trajectory or DataBatch.sigma")
        sigma_MB = jnp.broadcast_to(trajectory.sigma[:, None], (trajectory.sigma.shape[0], num))
        sigma_MB = sigma_MB.astype(dtype)
    else:
        draws = objective.data_draws
        if data.noise is not None and jnp.ndim(data.noise) == x0.ndim + 1:
            draws = data.noise.shape[0]
        elif data.weight is not None:
            draws = data.weight.shape[0]
        sigma_MB = process.draw_sigma(_need(sigma_key, "data.sigma"), (draws, num)).astype(dtype)
    num_draws = sigma_MB.shape[0]
    if sigma_MB.shape != (num_draws, num):
        raise ValueError(f"data.sigma has shape {sigma_MB.shape}: expected (M, {num})")

    # Noise: given a draw, given once for all draws, the rollout's own, or drawn.
    noise = data.noise
    if noise is None and rollout and trajectory is not None and trajectory.init_noise is not None:
        noise = trajectory.init_noise
        if noise.shape != x0.shape:
            raise ValueError(
                f"data.x0 has shape {x0.shape}, the rollout's start noise {noise.shape}: "
                "data_levels='rollout' needs as many data samples as rollouts, or DataBatch.noise"
            )
    if noise is not None and noise.shape not in (x0.shape, (num_draws, *x0.shape)):
        raise ValueError(f"data.noise has shape {noise.shape}: expected {x0.shape} or {(num_draws, *x0.shape)}")
    if noise is None:
        _need(noise_key, "data.noise")
    noise_a_draw = noise is not None and noise.ndim == x0.ndim + 1

    weight_MB = None if data.weight is None else jnp.asarray(data.weight, dtype)
    if weight_MB is not None and weight_MB.shape != (num_draws, num):
        raise ValueError(f"data.weight has shape {weight_MB.shape}: expected {(num_draws, num)}")
    if objective.cond_dropout > 0.0:
        if data.null_cond is None:
            raise ValueError(f"data.null_cond=None: cond_dropout={objective.cond_dropout} needs a null condition")
        _need(drop_key, f"cond_dropout={objective.cond_dropout}")

    def one_draw(_: None, inputs: Any) -> tuple[None, chex.Array]:
        m, sigma_B, own_noise, weight_B = inputs
        if noise_a_draw:
            e = own_noise
        elif noise is not None:
            e = noise
        else:
            e = jax.random.normal(jax.random.fold_in(noise_key, m), x0.shape, dtype)
        cond = data.cond
        if objective.cond_dropout > 0.0:
            key = jax.random.fold_in(drop_key, m)
            cond = drop_condition(key, cond, data.null_cond, objective.cond_dropout)
        loss_B = diffusion_loss(
            params,
            x0,
            cond,
            sigma_B,
            jnp.asarray(e, dtype),
            denoise=denoise,
            process=process,
            weight=weight_B,
        )
        return None, loss_B

    inputs = (jnp.arange(num_draws), sigma_MB, noise if noise_a_draw else None, weight_MB)
    return jax.lax.scan(one_draw, None, inputs)[1]


def _need(key: chex.PRNGKey | None, what: str) -> chex.PRNGKey:
    if key is None:
        raise ValueError(f"rng=None: {what} has to be drawn, pass a key")
    return key
