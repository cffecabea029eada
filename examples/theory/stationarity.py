"""At p* the expected gradient of the exact objective is zero, away from it it is not: by quadrature, without training.

The denoiser is the exact one of p_s = p_data exp(s r/beta)/Z_s (a mixture again, r = x), plus bumps in x and t of which
only the gradient at height zero is asked: 8 a recorded level. For s = 1 (p* of Eq. 10) every level's gradient cancels
between reward and data as the number of steps grows:

    reward:  c p*_t d/dx E[lambda | x_t]  =  c q_t d/dx log(p*_t/q_t)         since E[lambda | x_t] = -q_t/p*_t
    data:    2 w q_t (D* - D_data)        =  2 w q_t t^2/(1-t) d/dx log(p*_t/q_t)         (Tweedie's formula)

with q the noised data, c = 2 dt/t the coefficient of x0 in the step's mean, std^2 = 2 t dt/(1-t), w = c^2/(2 std^2).

Densities go forward and the value E[lambda | x_t] backward on a grid, step noise is a Gauss-Hermite sum; both are
handed to `loss_fn` as sample weights and advantages, one recorded step at a time. About 60 s.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from affine_gaussian import path_weights
from claims import BLUE, INK, ORANGE, TEAL, Claims, arguments, new_figure, save
from gaussian_mixture import Mixture

from ddrl_jax import DataBatch, FlowSDE, Objective, Trajectory, loss_fn

DATA = Mixture((0.6, 0.4), ((-1.0,), (1.0,)), (0.5, 0.4))
PROCESS = FlowSDE(noise_level=2**0.5, shift=1.0)
OBJECTIVE = Objective(data_beta=1.0, clip_range=0.9, log_ratio="gaussian_sum", reward_transform="exp", adv_clip=None)
BETA = 1.0
X = np.linspace(-6.0, 6.0, 1501)
CENTRES = np.linspace(-2.0, 2.0, 8)
NODES, NODE_WEIGHTS = np.polynomial.hermite_e.hermegauss(24)
NODE_WEIGHTS = NODE_WEIGHTS / NODE_WEIGHTS.sum()


@dataclasses.dataclass(frozen=True)
class BumpedDenoiser:
    """The policy's exact denoiser with bumps on it: the parameters are their heights (8,), all but always zero."""

    policy: Mixture

    def __call__(self, bumps: Any, x: jax.Array, t: jax.Array, cond: Any) -> jax.Array:
        basis = jnp.exp(-0.5 * ((x - (1.0 - t[:, None]) * CENTRES) / 0.5) ** 2)
        # t^2 is the size that E[x0|x] changes by when the density does.
        return self.policy.denoise(x, t) + t[:, None] ** 2 * (basis @ bumps)[:, None]


def chain(policy: Mixture, num_steps: int) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray, np.ndarray]:
    """(means (1501,) a step, densities of the state before each step (1501,), levels, stds) on the grid X."""
    levels, stds = PROCESS.levels(num_steps), PROCESS.step_stds(num_steps)
    means, densities, density = [], [], np.exp(-0.5 * X**2) / np.sqrt(2.0 * np.pi)
    dx = X[1] - X[0]
    for i in range(num_steps):
        x = jnp.asarray(X)[:, None]
        x0 = policy.denoise(x, jnp.full(X.size, levels[i]))
        mean = np.asarray(PROCESS.mean_std(x, levels[i], levels[i + 1], x0, num_steps=num_steps)[0][:, 0])
        means.append(mean)
        densities.append(density)
        if i < num_steps - 2:  # what comes later is not recorded, and narrower than the grid
            live = density > 1e-14
            kernel = np.exp(-0.5 * ((X[:, None] - mean[None, live]) / stds[i]) ** 2)
            density = kernel @ density[live] * dx / (stds[i] * np.sqrt(2.0 * np.pi))
    return means, densities, levels, stds


def expected_gradients(policy: Mixture, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """((K,8) of the reward part, (K,8) of the data part) of the loss's expected gradient, K = num_steps - 1."""
    means, densities, levels, stds = chain(policy, num_steps)
    steps = np.arange(num_steps - 1)
    weights = path_weights(PROCESS, num_steps, steps)
    denoise, log_z = BumpedDenoiser(policy), DATA.log_normaliser((1.0 / BETA,))
    rows, dx = X[::10], X[10] - X[0]

    def split_loss(bumps: Any, at: dict[str, jax.Array], reward_on: bool) -> jax.Array:
        """One recorded step; x, x_next (B,1), advantages, mass (B,) by quadrature."""
        trajectory = Trajectory(
            x=at["x"][None], x_next=at["x_next"][None], mean_old=None, sigma=at["t"][None],
            sigma_next=at["t_next"][None], std=at["std"][None], step=None, num_steps=num_steps,
        )  # fmt: skip
        data = DataBatch(x0=at["x0"], noise=at["noise"], sigma=at["sigma"][None], weight=at["weight"][None])
        objective = OBJECTIVE if not reward_on else dataclasses.replace(OBJECTIVE, data_beta=0.0)
        return loss_fn(
            bumps, trajectory, at["advantages"] if reward_on else None, None, data, None, denoise=denoise,
            process=PROCESS, objective=objective, sample_weight=at["mass"],
        )[0]  # fmt: skip

    gradient = jax.jit(
        lambda at: (
            jax.grad(split_loss)(jnp.zeros(CENTRES.size), at, True),
            jax.grad(split_loss)(jnp.zeros(CENTRES.size), at, False),
        )
    )

    # Data: a grid over x0 and Gauss-Hermite noise; the mean over rows times `weight` is the expectation.
    x0 = np.linspace(-4.5, 4.5, 181)
    x0_mass = np.exp(np.asarray(DATA.log_density(jnp.asarray(x0)[:, None])))
    x0_mass /= x0_mass.sum()
    pair_mass = (x0_mass[:, None] * NODE_WEIGHTS).reshape(-1)
    pair_x0, pair_noise = np.repeat(x0, NODES.size)[:, None], np.tile(NODES, x0.size)[:, None]

    reward_part, data_part = np.zeros((2, steps.size, CENTRES.size))
    # The value before the last step, then backward: log E[exp(-(r-Z)/beta) | x], smooth enough to interpolate.
    ends = means[-1][:, None] + stds[-1] * NODES
    log_value = np.log(np.exp(-ends / BETA + log_z) @ NODE_WEIGHTS)
    for i in steps[::-1]:
        next_x = np.interp(rows, X, means[i])[:, None] + stds[i] * NODES
        next_log_value = _interpolate(next_x, log_value)
        mass = np.interp(rows, X, densities[i])[:, None] * dx * NODE_WEIGHTS
        at = {
            "x": np.repeat(rows, NODES.size)[:, None], "x_next": next_x.reshape(-1, 1), "t": levels[i],
            "t_next": levels[i + 1], "std": stds[i], "advantages": -next_log_value.reshape(-1),
            "mass": mass.reshape(-1) * mass.size, "x0": pair_x0, "noise": pair_noise,
            "sigma": np.full(pair_mass.size, levels[i]), "weight": weights[i] * pair_mass * pair_mass.size,
        }  # fmt: skip
        reward_part[i], data_part[i] = gradient(jax.tree.map(jnp.asarray, at))
        log_value = np.log(np.exp(_interpolate(means[i][:, None] + stds[i] * NODES, log_value)) @ NODE_WEIGHTS)
    return reward_part, data_part


def _interpolate(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """On the grid X, straight on beyond its ends (log values are nearly linear there)."""
    inside = np.interp(x, X, values)
    low, high = (values[1] - values[0]) / (X[1] - X[0]), (values[-1] - values[-2]) / (X[1] - X[0])
    return inside + low * np.minimum(x - X[0], 0.0) + high * np.maximum(x - X[-1], 0.0)


def size(parts: tuple[np.ndarray, np.ndarray]) -> float:
    """|reward + data| over |reward|, Euclidean over levels and bumps."""
    reward_part, data_part = parts
    return float(np.linalg.norm(reward_part + data_part) / np.linalg.norm(reward_part))


def main() -> None:
    args, claims = arguments(__doc__), Claims()
    jax.config.update("jax_enable_x64", True)
    figure, (left, middle, right) = new_figure(3)

    optimum = DATA.tilted((1.0 / BETA,))
    counts = (12, 25, 50, 100)
    parts_of = {n: expected_gradients(optimum, n) for n in counts}
    relative = [size(parts_of[n]) for n in counts]
    for n, value in zip(counts, relative, strict=True):
        print(f"{n:4d} steps: |expected gradient at p*| = {value:.4f} of its reward part")
    claims.check(relative[-1] < 0.03, "at p* with 100 steps: under 3 % of the reward part is left")
    ratios = [a / b for a, b in itertools.pairwise(relative)]
    claims.check(min(ratios) > 1.6, f"it falls with the steps: by {', '.join(f'{r:.2f}' for r in ratios)} a doubling")

    along = np.linspace(0.0, 2.0, 9)
    scale = np.linalg.norm(parts_of[50][0])
    norms = []
    for s in along:
        parts = parts_of[50] if s == 1.0 else expected_gradients(DATA.tilted((s / BETA,)), 50)
        norms.append(float(np.linalg.norm(sum(parts)) / scale))
        print(f"s = {s:4.2f}: |expected gradient| = {norms[-1]:.4f}")
    claims.check(int(np.argmin(norms)) == 4, "along p_data exp(s r/beta)/Z the gradient is smallest at s = 1, Eq. 10")
    others = min(norms[:4] + norms[5:])
    claims.check(others > 5.0 * norms[4], f"a quarter of the way off it is {others / norms[4]:.0f} times larger")

    reward_part, data_part = parts_of[50]
    middle_level = 25
    left.plot(CENTRES, -reward_part[middle_level] * 1e3, "-o", color=BLUE, ms=4, label="reward")
    left.plot(CENTRES, -data_part[middle_level] * 1e3, "--s", color=ORANGE, ms=4, label="data")
    left.plot(CENTRES, -(reward_part + data_part)[middle_level] * 1e3, "-", color=INK, label="sum")
    left.axhline(0.0, color=INK, lw=0.6)
    left.set(title="At p*, half way down the levels", xlabel="place of the bump", ylabel="pull on the denoiser (1e-3)")
    left.set_ylim(top=1.8e3 * np.abs(reward_part[middle_level]).max())
    left.legend()
    middle.plot(along, norms, "-o", color=BLUE, ms=4)
    middle.set(
        title="Along p_data exp(s r/β)/Z, 50 steps", xlabel="s (1 is Eq. 10)", ylabel="size of expected gradient"
    )
    middle.set_ylim(bottom=0.0)
    right.loglog(counts, relative, "-o", color=TEAL, ms=4, label="at p*")
    right.loglog(counts, [relative[0] * counts[0] / n for n in counts], ":", color=INK, label="1/steps")
    right.set(title="What is left at p*", xlabel="number of steps", ylabel="gradient / its reward part")
    right.set_xticks(counts, [str(n) for n in counts])
    right.minorticks_off()
    right.legend()
    save(figure, args.out, "theory_2.svg")
    claims.finish()


if __name__ == "__main__":
    main()
