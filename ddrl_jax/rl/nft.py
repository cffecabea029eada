"""DiffusionNFT: reinforcement learning on the forward process, without trajectories or likelihoods.

Dims: B samples, M draws, S a sample's shape.
"""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp

from ddrl_jax.diffusion.broadcast import compute_dtype, expand, mean_over_sample
from ddrl_jax.diffusion.guidance import Denoiser
from ddrl_jax.diffusion.process import Process
from ddrl_jax.rl.advantages import group_advantages


def optimality(advantages: chex.Array, adv_clip: float) -> chex.Array:
    """Optimality probability r = 1/2 + clip(A/adv_clip, -1, 1)/2 in [0,1], from advantages of any shape."""
    return 0.5 + 0.5 * jnp.clip(advantages / adv_clip, -1.0, 1.0)


def nft_loss(
    params: Any,
    x0: chex.Array,
    rewards: chex.ArrayLike,
    cond: Any,
    rng: chex.PRNGKey | None,
    *,
    denoise: Denoiser,
    process: Process,
    old_params: Any,
    ref_params: Any = None,
    group_size: int | None = None,
    adv_clip: float = 5.0,
    beta: float = 1.0,
    kl_beta: float = 0.0,
    adaptive_weight: bool = True,
    draws: int = 1,
    sigma: chex.Array | None = None,
    noise: chex.Array | None = None,
    sample_weight: chex.ArrayLike | None = None,
) -> tuple[chex.Array, dict[str, Any]]:
    """mean_{M,B} w [ r |x0+ - x0|^2 + (1-r) |x0- - x0|^2 ] + kl_beta mean_{M,B} w |x0_theta - x0_ref|^2.

    The implicit policies are x0+ = (1-beta) x0_old + beta x0_theta and x0- = (1+beta) x0_old - beta x0_theta. The paper
    writes them in velocities; at a fixed noisy state the velocity is affine in x0: only the error's weight differs.
    Source: DiffusionNFT (Zheng et al. 2025, arXiv 2509.16117), the objective of its section 3.

    Args:
      params: parameters of the denoiser; what the loss is differentiated for.
      x0: (B,*S) the rollouts' samples.
      rewards: (B,), optimality probabilities r in [0,1] (clipped to it); with group_size, raw rewards, and
        r = 1/2 + clip(A/adv_clip, -1, 1)/2 with A = `group_advantages`. Non-finite ones get weight 0.
      cond: condition, handed on as given.
      rng: key for levels and noise; None when both are given.
      denoise: (params, x (B,*S), sigma (B,), cond) -> x0.
      process: corruption, training law and loss weight; the sampler's kernel is not used.
      old_params: the policy that made x0.
      ref_params: the reference, required when kl_beta > 0.
      group_size: None, or N to normalise raw rewards in groups.
      adv_clip: the advantage that maps to r = 1.
      beta: the strength of the implicit guidance, more than 0.
      kl_beta: weight of the distance to the reference, under the process's loss weight (flow: the velocity error).
      adaptive_weight: divide each squared error by the stopped mean absolute error of its sample, as the paper does;
        False uses the process's loss weight.
      draws: M, where neither sigma nor noise brings one.
      sigma: (M,B) levels; None draws them from the training law.
      noise: (M,B,*S); None draws it.
      sample_weight: (B,), default 1. The denominator stays M*B.

    Returns:
      loss () and metrics: loss, policy_loss, kl_loss, positive_loss, negative_loss (unweighted means), r_mean,
      old_distance (mean squared distance of x0_theta and x0_old), and parts: policy, kl (M,B).

    Raises:
      ValueError: beta not positive; ref_params missing; rng missing where something has to be drawn.
    """
    if not beta > 0.0:
        raise ValueError(f"beta={beta}: expected more than 0")
    if kl_beta > 0.0 and ref_params is None:
        raise ValueError(f"ref_params=None: kl_beta={kl_beta} needs the reference policy")
    if rng is None and (sigma is None or noise is None):
        raise ValueError("rng=None: expected a key, or both sigma and noise")
    num = x0.shape[0]
    dtype = compute_dtype(x0)
    x0 = jnp.asarray(x0, dtype)
    rewards = jnp.asarray(rewards, dtype)
    chex.assert_shape(rewards, (num,))

    finite_B = jnp.isfinite(rewards)
    w_B = finite_B.astype(dtype)
    if sample_weight is not None:
        sample_weight = jnp.asarray(sample_weight, dtype)
        chex.assert_shape(sample_weight, (num,))
        w_B = w_B * sample_weight
    # A rollout of weight 0 that went non-finite would still make the gradient 0 * nan.
    x0 = jnp.where((expand(w_B, x0) == 0.0) & ~jnp.isfinite(x0), 0.0, x0)
    if group_size is None:
        r_B = jnp.clip(jnp.where(finite_B, rewards, 0.5), 0.0, 1.0)
    else:
        r_B = optimality(group_advantages(rewards, group_size), adv_clip)

    if sigma is not None:
        draws = sigma.shape[0]
    elif noise is not None:
        draws = noise.shape[0]
    keys: list[Any] = [None] * 2 if rng is None else list(jax.random.split(rng))
    sigma_key, noise_key = keys
    sigma_MB = process.draw_sigma(sigma_key, (draws, num)) if sigma is None else jnp.asarray(sigma)
    chex.assert_shape(sigma_MB, (draws, num))
    if noise is not None:
        chex.assert_shape(noise, (draws, *x0.shape))

    def one_draw(_: None, inputs: Any) -> tuple[None, dict[str, chex.Array]]:
        m, sigma_B, e = inputs
        if e is None:
            e = jax.random.normal(jax.random.fold_in(noise_key, m), x0.shape, dtype)
        x = process.corrupt(x0, sigma_B, jnp.asarray(e, dtype))

        def predict(params: Any) -> chex.Array:
            return denoise(params, x, sigma_B, cond).astype(dtype)

        def error(x0_pred: chex.Array) -> chex.Array:
            square = (x0_pred - x0) ** 2
            if not adaptive_weight:
                return process.loss_weight(sigma_B) * mean_over_sample(square)
            size_B = jax.lax.stop_gradient(mean_over_sample(jnp.abs(x0_pred - x0)))
            return mean_over_sample(square / expand(jnp.maximum(size_B, 1e-5), square))

        new, old = predict(params), jax.lax.stop_gradient(predict(old_params))
        positive_B = error((1.0 - beta) * old + beta * new)
        negative_B = error((1.0 + beta) * old - beta * new)
        kl_B = jnp.zeros_like(positive_B)
        if kl_beta > 0.0:
            ref = jax.lax.stop_gradient(predict(ref_params))
            kl_B = process.loss_weight(sigma_B) * mean_over_sample((new - ref) ** 2)
        return None, {
            "positive": positive_B,
            "negative": negative_B,
            "policy": r_B * positive_B + (1.0 - r_B) * negative_B,
            "kl": kl_B,
            "old_distance": mean_over_sample((new - old) ** 2),
        }

    inputs = (jnp.arange(draws), sigma_MB.astype(dtype), noise)
    _, terms = jax.lax.scan(one_draw, None, inputs)
    policy_loss = jnp.mean(jnp.where(w_B != 0.0, w_B * terms["policy"], 0.0))
    kl_loss = jnp.mean(jnp.where(w_B != 0.0, w_B * terms["kl"], 0.0))
    loss = policy_loss + kl_beta * kl_loss
    return loss, {
        "loss": loss,
        "policy_loss": policy_loss,
        "kl_loss": kl_loss,
        "positive_loss": jnp.mean(terms["positive"]),
        "negative_loss": jnp.mean(terms["negative"]),
        "r_mean": jnp.mean(r_B),
        "old_distance": jnp.mean(terms["old_distance"]),
        "parts": {"policy": terms["policy"], "kl": terms["kl"]},
    }
