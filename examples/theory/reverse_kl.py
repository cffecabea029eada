"""Why a reverse KL does not hold a policy to the data: on-policy it looks calm while the forward KL explodes.

Both KLs between paths have one integrand, w(t) |D_theta - D_data|^2 with w = (coefficient of x0)^2/(2 std^2), summed
over steps. The reverse KL averages it over states that the *policy* visits, the forward KL (DDRL's data loss, less its
constant) over noised *data*. What the policy no longer visits, the reverse KL no longer sees.

Data: two modes of 1/2 each. The scorer prefers the right one and saturates. A small network on the data's
exact denoiser is trained from the same start on group-normalised advantages (identity), with the reverse KL to the
exact reference (FlowGRPO's preset and its kl_beta 0.04), and with the data loss in its place. Both policies sample
with FlowSDE(sqrt 2, shift 1), 32 steps, for which the two path KLs belong together. About 40 s on one core.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from affine_gaussian import path_weights
from claims import BLUE, INK, ORANGE, Claims, arguments, new_figure, save
from gaussian_mixture import Mixture
from residual_denoiser import ResidualDenoiser

from ddrl_jax import DataBatch, FlowSDE, Objective, diffusion_loss, flow_grpo, group_advantages, loss_fn, sample

DATA = Mixture((0.5, 0.5), ((-1.0,), (1.0,)), (0.4, 0.4))
PROCESS = FlowSDE(noise_level=2**0.5, shift=1.0)
NUM_STEPS, BATCH, GROUP, UPDATES, EVERY, LEARNING_RATE = 32, 512, 32, 500, 20, 0.005
STEPS = tuple(range(NUM_STEPS - 1))
LEVELS = PROCESS.levels(NUM_STEPS)[: len(STEPS)]
WEIGHTS = path_weights(PROCESS, NUM_STEPS, np.array(STEPS))
DENOISE = ResidualDenoiser(DATA, DATA.variance())

ARMS = {
    "reverse KL, kl_beta 0.04": flow_grpo(log_ratio="gaussian_sum", kl="gaussian", clip_range=0.2),
    "data loss, data_beta 1": Objective(data_beta=1.0, log_ratio="gaussian_sum", clip_range=0.2),
}


def reward(x_BD: jax.Array) -> jax.Array:
    """(B,) -1 left of -1/2, 1 right of 1/2, straight between: a scorer that saturates."""
    return jnp.clip(2.0 * x_BD[:, 0], -1.0, 1.0)


def trainer(objective: Objective) -> tuple[Callable, Callable]:
    """(advance(state, first update) -> state after EVERY updates, state at the start)."""
    optimizer = optax.adam(LEARNING_RATE, b2=0.99)
    levels_KB, weights_KB = (jnp.tile(jnp.asarray(v, jnp.float32)[:, None], (1, BATCH)) for v in (LEVELS, WEIGHTS))
    reference = DENOISE.init(jax.random.key(1))

    def update(i: jax.Array, carry: Any) -> Any:
        params, state = carry
        rollout_key, data_key, noise_key = jax.random.split(jax.random.fold_in(jax.random.key(0), i), 3)
        x0, trajectory = sample(
            params, rollout_key, None, denoise=DENOISE, process=PROCESS, shape=(BATCH, 1), num_steps=NUM_STEPS,
            record=STEPS,
        )  # fmt: skip
        advantages = group_advantages(reward(x0), GROUP)
        data = DataBatch(x0=DATA.draw(data_key, BATCH), sigma=levels_KB, weight=weights_KB)

        def loss(params: Any) -> jax.Array:
            return loss_fn(
                params, trajectory, advantages, None, data if objective.data_beta else None, noise_key,
                denoise=DENOISE, process=PROCESS, objective=objective, ref_params=reference,
            )[0]  # fmt: skip

        updates, state = optimizer.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    advance = jax.jit(lambda carry, first: jax.lax.fori_loop(first, first + EVERY, update, carry))
    return advance, (reference, optimizer.init(reference))


@jax.jit
def measure(params: Any) -> dict[str, jax.Array]:
    """Path KLs (sums over the recorded steps), mean reward, and the share of samples in the left mode."""
    reference, num = DENOISE.init(jax.random.key(1)), 4096
    x0, trajectory = sample(
        params, jax.random.key(5), None, denoise=DENOISE, process=PROCESS, shape=(num, 1), num_steps=NUM_STEPS,
        record=STEPS,
    )  # fmt: skip
    only_kl = Objective(kl_beta=1.0, kl="gaussian", log_ratio="gaussian_sum")
    kl = loss_fn(params, trajectory, None, None, None, None, denoise=DENOISE, process=PROCESS, objective=only_kl,
                 ref_params=reference)[1]["kl_loss"]  # fmt: skip
    data, noise = DATA.draw(jax.random.key(6), num), jax.random.normal(jax.random.key(7), (num, 1))

    def excess(level_and_weight: tuple[jax.Array, jax.Array]) -> jax.Array:
        """The data loss less the reference's, which is the exact denoiser's: the forward path KL of one level."""
        level, weight = level_and_weight
        at = lambda p: diffusion_loss(  # noqa: E731
            p, data, None, jnp.full(num, level), noise, denoise=DENOISE, process=PROCESS, weight=jnp.full(num, weight)
        )
        return jnp.mean(at(params) - at(reference))

    forward = jax.lax.map(excess, (jnp.asarray(LEVELS, jnp.float32), jnp.asarray(WEIGHTS, jnp.float32))).sum()
    return {
        "reverse": kl * len(STEPS),
        "forward": forward,
        "reward": reward(x0).mean(),
        "left": (x0[:, 0] < 0.0).mean(),
        "x0": x0[:, 0],
    }


def main() -> None:
    args, claims = arguments(__doc__), Claims()
    histories: dict[str, dict[str, np.ndarray]] = {}
    for name, objective in ARMS.items():
        advance, carry = trainer(objective)
        rows = [measure(carry[0])]
        for first in range(0, UPDATES, EVERY):
            carry = advance(carry, first)
            rows.append(measure(carry[0]))
        histories[name] = {key: np.stack([np.asarray(row[key]) for row in rows]) for key in rows[0]}
        h = histories[name]
        print(f"{name}\n  updates   reward   left mode   reverse KL (on policy)   forward KL (on data)")
        for i in range(0, len(rows), 5):
            print(
                f"{i * EVERY:9d}{h['reward'][i]:9.2f}{h['left'][i]:12.3f}{h['reverse'][i]:25.2f}{h['forward'][i]:23.2f}"
            )

    slack, steady = (histories[name] for name in ARMS)
    settled = slice(100 // EVERY, None)
    calm, forward = slack["reverse"][settled], slack["forward"][settled]
    last = forward[-5:].mean()
    claims.check(
        calm.max() < 2.0 * calm.min() and calm.max() < 3.0, "reverse KL: from update 100 on it looks flat, under 3"
    )
    claims.check(
        last > 3.0 * calm[-5:].mean(), f"meanwhile the forward KL to the data is {last / calm[-5:].mean():.1f} times it"
    )
    claims.check(last > 1.15 * forward[:5].mean(), f"and still grows: {forward[:5].mean():.1f} to {last:.1f}")
    claims.check(slack["left"][-1] < 0.01, "half of the data, the left mode, is gone")
    claims.check(
        steady["forward"].max() < 0.5, f"data loss: the forward KL stays at {steady['forward'][-5:].mean():.2f}"
    )
    claims.check(
        steady["left"][-5:].min() > 0.1, f"and the left mode keeps {steady['left'][-5:].mean():.2f} of the samples"
    )
    claims.check(steady["reward"][-5:].min() > 0.4, f"at a reward of {steady['reward'][-5:].mean():.2f}, up from 0")

    figure, (left, middle, right) = new_figure(3)
    updates = EVERY * np.arange(len(slack["reward"]))
    for axis, h, name in ((left, slack, "reverse KL"), (middle, steady, "data loss")):
        axis.plot(updates, h["reverse"], "--", color=ORANGE, label="reverse KL, on policy")
        axis.plot(updates, h["forward"], "-", color=BLUE, label="forward KL, on data")
        axis.set(title=f"Trained with the {name}", xlabel="updates", ylabel="path KL (nats)")
        axis.set_ylim(0.0, 1.05 * slack["forward"].max())
    left.legend(loc="upper left")
    edges = np.linspace(-2.6, 2.6, 66)
    centre = 0.5 * (edges[1:] + edges[:-1])
    right.plot(centre, np.exp(np.asarray(DATA.log_density(jnp.asarray(centre)[:, None]))), ":", color=INK, label="data")
    for h, color, name in ((slack, ORANGE, "reverse KL"), (steady, BLUE, "data loss")):
        right.stairs(np.histogram(h["x0"][-1], edges, density=True)[0], edges, color=color, lw=1.7, label=name)
    right.set(title="Samples after training", xlabel="x (the scorer pays for x > 0)", ylabel="density")
    right.legend(loc="upper left")
    save(figure, args.out, "theory_3.svg")
    claims.finish()


if __name__ == "__main__":
    main()
