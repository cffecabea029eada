"""Theorem 3.1 and Eq. 10 of DDRL: trained with the exact objective, the samples are p_data exp(r/beta)/Z.

Where the theorem's conditions hold: FlowSDE(noise_level=sqrt 2, shift=1), whose kernel reverses the forward noising as
the number of steps grows; all steps but the last recorded; the summed Gaussian log ratio, no clip that bites;
lambda(u) = -exp(-u) of u = (r-Z)/beta with the true Z; the data loss at the recorded levels with the path KL's weight,
dimensions * (coefficient of x0 in the mean)^2 / (2 std^2), and data_beta 1. `loss_fn` averages policy terms and data
terms over the same K steps, so both are the theorem's sums divided by K.

Left and middle of the figure: a 1-D mixture (three beta) and a 2-D one, 32 steps each, a small network on the
data's exact denoiser trained with `sample` and `loss_fn`, KL and Wasserstein-1 to Eq. 10 by 200,000 samples.
Right: a condition dropped, exactly, for a Gaussian (`affine_gaussian.py`). About 100 s on one core.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from affine_gaussian import path_weights, rest_point
from claims import BLUE, INK, ORANGE, PURPLE, SOFT, TEAL, Claims, arguments, new_figure, save
from gaussian_mixture import Mixture
from residual_denoiser import ResidualDenoiser

from ddrl_jax import DataBatch, EDMChurn, FlowSDE, Objective, loss_fn, sample

PROCESS = FlowSDE(noise_level=2**0.5, shift=1.0)
OBJECTIVE = Objective(data_beta=1.0, clip_range=0.9, log_ratio="gaussian_sum", reward_transform="exp", adv_clip=None)
BATCH, LEARNING_RATE, NUM_SAMPLES = 512, 0.01, 200_000


@dataclasses.dataclass(frozen=True)
class Problem:
    """Data, a reward between 0 and 1 that peaks where the data is thin, and a grid that holds nearly all mass."""

    data: Mixture
    peak: tuple[float, ...]
    width: float
    num_steps: int
    num_cells: int
    num_updates: int
    hidden: int

    def reward(self, x_BD: jax.Array) -> jax.Array:
        """(B,)."""
        return jnp.exp(-0.5 * ((x_BD - jnp.asarray(self.peak)) ** 2).sum(axis=-1) / self.width**2)

    def edges(self) -> np.ndarray:
        return np.linspace(-3.2, 3.2, self.num_cells + 1)

    def optimum(self, beta: float, fine: int = 5) -> tuple[np.ndarray, np.ndarray, float]:
        """(p_data's and p*'s mass in each cell, Z), by the midpoint rule on `fine` points a cell and axis."""
        edges = np.linspace(-3.2, 3.2, self.num_cells * fine + 1)
        middle = 0.5 * (edges[1:] + edges[:-1])
        axes = np.meshgrid(*[middle] * self.data.dims, indexing="ij")
        x = jnp.asarray(np.stack([a.reshape(-1) for a in axes], axis=1))
        data = np.exp(np.asarray(self.data.log_density(x), np.float64))
        data /= data.sum()
        tilted = data * np.exp(np.asarray(self.reward(x), np.float64) / beta)
        z = beta * float(np.log(tilted.sum()))
        tilted /= tilted.sum()
        shape = (self.num_cells, fine) * self.data.dims
        inner = tuple(range(1, 2 * self.data.dims, 2))
        return data.reshape(shape).sum(axis=inner), tilted.reshape(shape).sum(axis=inner), z


ONE_D = Problem(
    Mixture((0.6, 0.4), ((-1.0,), (1.0,)), (0.5, 0.4)),
    (0.2,),
    0.6,
    num_steps=32,
    num_cells=64,
    num_updates=300,
    hidden=24,
)
TWO_D = Problem(
    Mixture(
        (0.2,) * 5, tuple((1.2 * np.cos(a), 1.2 * np.sin(a)) for a in 0.3 + 0.4 * np.pi * np.arange(5)), (0.35,) * 5
    ),
    (0.8, 0.2),
    0.6,
    num_steps=32,
    num_cells=32,
    num_updates=500,
    hidden=32,
)


def trainer(problem: Problem) -> tuple[ResidualDenoiser, Callable]:
    """(denoiser, train(beta, Z) -> params): on-policy rollouts and data, a new draw of both each update."""
    denoise = ResidualDenoiser(problem.data, problem.data.variance(), problem.hidden)
    dims, n = problem.data.dims, problem.num_steps
    steps = np.arange(n - 1)
    levels = PROCESS.levels(n)[:-2]
    weights = dims * path_weights(PROCESS, n, steps)
    levels_KB, weights_KB = (jnp.tile(jnp.asarray(v, jnp.float32)[:, None], (1, BATCH)) for v in (levels, weights))
    optimizer = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, problem.num_updates), b2=0.99)

    def update(i: jax.Array, carry: Any, beta: jax.Array, z: jax.Array) -> Any:
        params, state = carry
        rollout_key, data_key, noise_key = jax.random.split(jax.random.fold_in(jax.random.key(0), i), 3)
        x0, trajectory = sample(
            params, rollout_key, None, denoise=denoise, process=PROCESS, shape=(BATCH, dims), num_steps=n,
            record=tuple(steps),
        )  # fmt: skip
        advantages = (problem.reward(x0) - z) / beta
        data = DataBatch(x0=problem.data.draw(data_key, BATCH), sigma=levels_KB, weight=weights_KB)
        # A control variate: weight 1 - exp(u) turns lambda = -exp(-u) into lambda + 1, whose mean at the optimum is 0.
        # A constant added to lambda changes no expected gradient, only its noise.
        steady = 1.0 - jnp.exp(advantages)

        def loss(params: Any) -> jax.Array:
            return loss_fn(
                params, trajectory, advantages, None, data, noise_key, denoise=denoise, process=PROCESS,
                objective=OBJECTIVE, sample_weight=steady,
            )[0]  # fmt: skip

        updates, state = optimizer.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def train(beta: float, z: float) -> Any:
        params = denoise.init(jax.random.key(1))
        start = (params, optimizer.init(params))
        return jax.lax.fori_loop(0, problem.num_updates, lambda i, carry: update(i, carry, beta, z), start)[0]

    return denoise, train


def draw(problem: Problem, denoise: ResidualDenoiser, params: Any) -> np.ndarray:
    """(NUM_SAMPLES, D) samples of the policy."""
    chunk = 20_000
    run = jax.jit(
        lambda key: sample(
            params, key, None, denoise=denoise, process=PROCESS, shape=(chunk, problem.data.dims),
            num_steps=problem.num_steps, record=(),
        )[0]
    )  # fmt: skip
    keys = jax.random.split(jax.random.key(2), NUM_SAMPLES // chunk)
    return np.concatenate([np.asarray(run(key)) for key in keys])


def distances(x_BD: np.ndarray, target: np.ndarray, edges: np.ndarray) -> tuple[float, float]:
    """(KL(target || samples) over the cells, Wasserstein-1; in 2-D the mean of the axes' and the diagonals')."""
    counts = np.histogramdd(x_BD, [edges] * x_BD.shape[1])[0]
    found = np.maximum(counts, 0.5) / len(x_BD)
    live = target > 0.0
    kl = float((target[live] * np.log(target[live] / found[live])).sum())
    middle = 0.5 * (edges[1:] + edges[:-1])
    centres = np.stack(np.meshgrid(*[middle] * x_BD.shape[1], indexing="ij"), axis=-1).reshape(-1, x_BD.shape[1])
    directions = (
        [np.ones(1)] if x_BD.shape[1] == 1 else [np.array([np.cos(a), np.sin(a)]) for a in np.pi / 4 * np.arange(4)]
    )
    gaps = []
    grid = np.linspace(-4.0, 4.0, 1601)
    for direction in directions:
        # A cell's mass is spread over the cell: as much jitter as the projection of a uniform cell has.
        cell = (edges[1] - edges[0]) * np.abs(direction).sum()
        at = centres @ direction
        order = np.argsort(at)
        spread = (np.arange(9) - 4.0) / 9.0 * cell
        points = (at[order, None] + spread).reshape(-1)
        mass = np.repeat(target.reshape(-1)[order] / 9.0, 9)
        again = np.argsort(points, kind="stable")
        target_cdf = np.interp(grid, points[again], np.cumsum(mass[again]) - 0.5 * mass[again], left=0.0, right=1.0)
        cdf = np.searchsorted(np.sort(x_BD @ direction), grid) / len(x_BD)
        gaps.append(np.abs(cdf - target_cdf).sum() * (grid[1] - grid[0]))
    return kl, float(np.mean(gaps))


# Name, process, weight of the data loss, log ratio: one Gaussian, 20 steps, target N(0.8, 1).
SURROGATES = (
    ("FlowSDE(√2), exact weight", PROCESS, "path", "gaussian_sum"),
    ("FlowSDE(0.7), exact weight", FlowSDE(0.7, 1.0), "path", "gaussian_sum"),
    ("FlowSDE(√2), weight 1/t²", PROCESS, "process", "gaussian_sum"),
    ("EDMChurn, path weight", EDMChurn(sigma_max=80.0), "path", "gaussian_sum"),
    ("EDMChurn, EDM weight", EDMChurn(sigma_max=80.0), "process", "gaussian_sum"),
    ("EDMChurn, EDM weight,\nmean-square ratio", EDMChurn(sigma_max=80.0), "process", "mean_square"),
)


def _holding(mass: np.ndarray, *shares: float) -> list[float]:
    """The cell masses above which the densest cells hold these shares of the whole."""
    ordered = np.sort(mass.reshape(-1))[::-1]
    return [float(ordered[np.searchsorted(np.cumsum(ordered), share)]) for share in shares]


def main() -> None:
    args, claims = arguments(__doc__), Claims()
    figure, (left, middle, right) = new_figure(3, width=11.0)

    print("problem          KL(p*||data)   KL(p*||samples)   W1(p*,data)   W1(p*,samples)")

    def report(
        name: str, problem: Problem, data: np.ndarray, target: np.ndarray, x: np.ndarray, kl_limit: float
    ) -> None:
        kl, w1 = distances(x, target, problem.edges())
        before = np.asarray(problem.data.draw(jax.random.key(3), NUM_SAMPLES))
        kl_before, w1_before = distances(before, target, problem.edges())
        print(f"{name:15s}{kl_before:13.4f}{kl:18.4f}{w1_before:14.3f}{w1:17.3f}")
        claims.check(
            kl < kl_limit and kl < 0.1 * kl_before, f"{name}: KL to Eq. 10 under {kl_limit}, a tenth of the data's"
        )
        claims.check(w1 < 0.04 and w1 < 0.25 * w1_before, f"{name}: Wasserstein-1 under 0.04, a quarter of the data's")

    denoise, train = trainer(ONE_D)
    edges = ONE_D.edges()
    centre, width = 0.5 * (edges[1:] + edges[:-1]), edges[1] - edges[0]
    for beta, color, mark in ((1.0, TEAL, "o"), (0.5, BLUE, "s"), (0.3, ORANGE, "^")):
        data, target, z = ONE_D.optimum(beta)
        x = draw(ONE_D, denoise, train(beta, z))
        report(f"1-D, beta {beta:g}", ONE_D, data, target, x, kl_limit=0.01)
        left.plot(centre, target / width, color=color, label=f"Eq. 10, beta {beta:g}")
        left.plot(centre, np.histogram(x[:, 0], edges)[0] / len(x) / width, mark, ms=3.5, color=color)
    left.plot(centre, data / width, color=INK, ls=":", label="data")
    left.set(title="1-D: trained (marks)", xlabel="x", ylabel="density", xlim=(-2.8, 2.8), ylim=(0, 1.35))
    left.legend(loc="upper left")

    denoise, train = trainer(TWO_D)
    data, target, z = TWO_D.optimum(0.5)
    x = draw(TWO_D, denoise, train(0.5, z))
    report("2-D, beta 0.5", TWO_D, data, target, x, kl_limit=0.02)
    edges = TWO_D.edges()
    centre = 0.5 * (edges[1:] + edges[:-1])
    middle.plot(*x[:1500].T, ".", ms=2.0, color=BLUE, alpha=0.6)
    middle.contour(centre, centre, target.T, levels=_holding(target, 0.95, 0.8, 0.5), colors=ORANGE, linewidths=1.4)
    middle.contour(centre, centre, data.T, levels=_holding(data, 0.8), colors=INK, linewidths=0.9, linestyles=":")
    title = "2-D: samples; Eq. 10's 50, 80,\n95 % regions; data's 80 % (dots)"
    middle.set(title=title, xlim=(-2.6, 2.6), ylim=(-2.6, 2.6), aspect="equal")

    print("\nOne Gaussian, 20 steps, target mean 0.800, std 1: where the expected gradient is zero")
    rests = []
    with jax.enable_x64(True):
        for name, process, weight, log_ratio in SURROGATES:
            mean, std, left_over = rest_point(process, 20, slope=0.8, beta=1.0, weight=weight, log_ratio=log_ratio)
            name = name.replace("\n", " ")
            rests.append(mean)
            print(f"{name:45s} mean {mean:.3f}  std {std:.3f}  (gradient left {left_over:.0e})")
            claims.check(left_over < 1e-6, f"{name}: Newton's method found the rest point")
    claims.check(abs(rests[0] - 0.8) < 0.005, "the exact setting rests on Eq. 10's mean within 0.005")
    claims.check(all(abs(m - 0.8) > 0.03 for m in rests[1:]), "every other setting misses it by more than 0.03")
    claims.check(max(rests[3:]) < 0.45, "EDMChurn goes less than 0.45 of the 0.80")
    y = -np.arange(len(rests))
    colors = [BLUE] + [PURPLE] * (len(rests) - 1)
    right.axvline(0.8, color=ORANGE, lw=1.4)
    right.hlines(y, 0.0, rests, color=SOFT)
    right.scatter(rests, y, color=colors, zorder=3)
    for mean, at in zip(rests, y, strict=True):
        right.annotate(f"{mean:.2f}", (mean, at), (0, 7), textcoords="offset points", ha="center", fontsize=9)
    right.set_yticks(y, [name for name, *_ in SURROGATES], fontsize=9)
    right.set(
        title="Mean reached; Eq. 10 says 0.80",
        xlabel="mean of the samples",
        xlim=(-0.03, 0.95),
        ylim=(y[-1] - 0.5, 0.7),
    )

    save(figure, args.out, "theory_1.svg")
    claims.finish()


if __name__ == "__main__":
    main()
