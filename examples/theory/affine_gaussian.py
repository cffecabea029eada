"""Where an objective comes to rest, exactly, for p_data = N(0,1), reward r = slope x and an affine denoiser.

With D(x, level_i) = a_i + b_i x the sampler is affine in its noise z, a trajectory's log ratio has a gradient that is a
quadratic in z, and E[-exp(-(r-Z)/beta) f(z)] is a constant times E[f] under z with a shifted mean. A symmetric cubature
of 2 dim(z) points integrates such f exactly, so the *expected* gradient of `loss_fn` is one call of `sample` and one of
`loss_fn`, without sampling error; Newton's method then finds where it is zero. Needs float64.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from ddrl_jax import DataBatch, Objective, loss_fn, sample


@dataclasses.dataclass(frozen=True)
class AffineDenoiser:
    """D(x, sigma) = a_i + b_i x at the table's i-th level, found by nearness. Levels that params do not hold (those
    that no recorded step sees) keep the data's own E[x0|x]."""

    levels: tuple[float, ...]
    data_slopes: tuple[float, ...]

    def __call__(self, params: Any, x: jax.Array, sigma: jax.Array, cond: Any) -> jax.Array:
        num = params["a"].size
        a = jnp.append(params["a"], jnp.zeros(len(self.levels) - num))
        b = jnp.append(params["b"], jnp.asarray(self.data_slopes[num:]))
        i = jnp.argmin(jnp.abs(jnp.asarray(self.levels) - sigma[:, None]), axis=1)
        return a[i][:, None] + b[i][:, None] * x


def path_weights(process: Any, num_steps: int, steps: np.ndarray) -> np.ndarray:
    """(K,) the path KL's weight of one squared x0 error, (x0's coefficient in the mean)^2/(2 std^2)."""
    levels, seen = process.levels(num_steps), process.seen_levels(num_steps)
    one, zero = jnp.ones((1, 1)), jnp.zeros((1, 1))
    out = []
    for i in steps:
        previous = np.inf if i == 0 else seen[i - 1]
        mean, std = process.mean_std(
            zero, seen[i], levels[i + 1], one, zero, previous, num_steps=num_steps, x0_fn=lambda x, s: one
        )
        out.append(float(mean[0, 0]) ** 2 / (2.0 * float(std) ** 2))
    return np.array(out)


def rest_point(
    process: Any,
    num_steps: int,
    *,
    slope: float,
    beta: float,
    weight: str,
    log_ratio: str = "gaussian_sum",
) -> tuple[float, float, float]:
    """(mean, std, largest gradient left) of the samples where the expected gradient is zero; the target is
    N(slope/beta, 1).

    Args:
      weight: "path" (what Theorem 3.1 needs) or "process" (the process's own loss_weight).
      log_ratio: of the objective.
    """
    stds = process.step_stds(num_steps)
    steps = np.array([i for i in range(num_steps - 1) if stds[i] > 0.0])
    seen = process.seen_levels(num_steps)
    table = np.append(seen, process.levels(num_steps)[-1])
    edm = process.noises_first
    data_slopes = 1.0 / (1.0 + table**2) if edm else (1.0 - table) / ((1.0 - table) ** 2 + table**2)
    denoise = AffineDenoiser(tuple(table), tuple(data_slopes))
    objective = Objective(data_beta=1.0, clip_range=0.9, log_ratio=log_ratio, reward_transform="exp", adv_clip=None)

    # Data: x0 and noise, both N(0,1); four points make every quadratic of the two exact.
    root = math.sqrt(2.0)
    x0 = jnp.array([root, -root, 0.0, 0.0])[:, None]
    noise = jnp.array([0.0, 0.0, root, -root])[:, None]
    levels_K = seen[steps]
    weights_K = path_weights(process, num_steps, steps) if weight == "path" else process.loss_weight(levels_K)
    tile = lambda v_K: jnp.broadcast_to(jnp.asarray(v_K)[:, None], (len(steps), 4))  # noqa: E731
    data = DataBatch(x0=x0, noise=noise, sigma=tile(levels_K), weight=tile(weights_K))
    log_z = 0.5 * (slope / beta) ** 2

    def run(params: Any, z_BZ: jax.Array) -> tuple[jax.Array, Any]:
        noise = (z_BZ[:, :1], z_BZ[:, 1:].T[..., None])
        shape = (z_BZ.shape[0], 1)
        return sample(
            params, None, None, denoise=denoise, process=process, shape=shape, num_steps=num_steps,
            record=tuple(steps), noise=noise, keep_mean=True,
        )  # fmt: skip

    def endpoint(params: Any) -> tuple[jax.Array, jax.Array]:
        """x0 = m + L z."""
        x0_B = run(params, jnp.eye(num_steps + 1, num_steps + 2, k=1).T)[0][:, 0]
        return x0_B[0], x0_B[1:] - x0_B[0]

    def expected_gradient(params: Any, tilt: jax.Array) -> Any:
        m, load_Z = endpoint(params)
        shift_Z = -tilt * load_Z
        log_lambda = -tilt * m + log_z + 0.5 * (shift_Z @ shift_Z)  # log E[exp(-(r-Z)/beta)]
        points = math.sqrt(num_steps + 1) * jnp.concatenate([jnp.eye(num_steps + 1), -jnp.eye(num_steps + 1)])
        trajectory = run(params, shift_Z + points)[1]
        advantages = jnp.full(len(points), -log_lambda)

        def loss(at: Any) -> jax.Array:
            return loss_fn(at, trajectory, advantages, None, data, None, denoise=denoise, process=process,
                           objective=objective)[0]  # fmt: skip

        # For the loss's own parameters alone; Newton's Jacobian then sees the rollout move with them as well.
        return jax.grad(loss)(params)

    params = {"a": jnp.zeros(len(steps)), "b": jnp.asarray(data_slopes[: len(steps)])}
    flat, unflatten = ravel_pytree(params)
    gradient = jax.jit(lambda v, tilt: ravel_pytree(expected_gradient(unflatten(v), tilt))[0])
    jacobian = jax.jit(jax.jacfwd(lambda v, tilt: gradient(v, tilt)))
    left = np.inf
    for tilt in np.linspace(0.0, slope / beta, 5)[1:]:  # the solution moves with the reward's slope: follow it
        for _ in range(30):
            g = gradient(flat, tilt)
            left = float(jnp.abs(g).max())
            if left < 1e-10:
                break
            flat = flat - jnp.linalg.solve(jacobian(flat, tilt), g)
    m, load_Z = endpoint(unflatten(flat))
    return float(m), float(jnp.sqrt(load_Z @ load_Z)), left
