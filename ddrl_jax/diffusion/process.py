"""Processes: what a noise level means, how data is corrupted and which Gaussian kernel a sampling step is.

A process is a frozen, hashable dataclass. To add one, write a class with the members of `Process`:
levels (`levels`, `seen_levels`, `step_stds`), start (`start`), kernel (`mean_std`), finish (`finish`), training
(`corrupt`, `loss_weight`, `draw_sigma`), and say whether it keeps history (`keeps_history`: mean_std reads the
previous step's x0) and when it noises (`noises_first`); `ode` is optional. Nothing else in the library knows which
process it runs.

Dims: B batch, S the sample's shape, n solver steps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, get_args

import chex
import jax.numpy as jnp
import numpy as np

from ddrl_jax.diffusion import levels as levels_lib
from ddrl_jax.diffusion import solvers
from ddrl_jax.diffusion.broadcast import compute_dtype, expand
from ddrl_jax.diffusion.preconditioning import edm_loss_weight
from ddrl_jax.diffusion.training_levels import logit_normal_time, training_sigma

X0Fn = Callable[[chex.Array, chex.Array], chex.Array]
Solver = Literal["2ab", "1euler", "2mid"]


class Process(Protocol):
    """What the sampler and the losses ask of a process."""

    @property
    def keeps_history(self) -> bool:
        """Whether `mean_std` reads prev_x0 and prev_sigma; they are recorded only then."""

    @property
    def noises_first(self) -> bool:
        """True: step i's noise is added before its evaluation. False: after its mean."""

    def levels(self, num_steps: int) -> np.ndarray:
        """(n+1,) float64, the un-noised levels, both ends exact."""

    def seen_levels(self, num_steps: int) -> np.ndarray:
        """(n,) float64, the level the denoiser sees at each step."""

    def step_stds(self, num_steps: int) -> np.ndarray:
        """(n,) float64, the std of each step's next state; 0 where that is deterministic."""

    def start(self, unit_noise: chex.Array, first_churn: chex.Array, num_steps: int) -> chex.Array:
        """The first state that the denoiser sees, from unit start noise (and the first churn if noises_first)."""

    def mean_std(
        self,
        x: chex.Array,
        sigma: chex.ArrayLike,
        sigma_next: chex.ArrayLike,
        x0: chex.Array,
        prev_x0: chex.Array | None = None,
        prev_sigma: chex.ArrayLike | None = None,
        *,
        num_steps: int,
        x0_fn: X0Fn | None = None,
    ) -> tuple[chex.Array, chex.Array]:
        """Mean (B,*S) and std (sigma's shape) of the next state."""

    def finish(self, x_last: chex.Array, last_x0: chex.Array, x0_fn: X0Fn) -> chex.Array:
        """The sample, from the state after the last step and that step's x0."""

    def corrupt(self, x0: chex.Array, sigma: chex.ArrayLike, noise: chex.Array) -> chex.Array:
        """The forward process at level sigma."""

    def loss_weight(self, sigma: chex.ArrayLike) -> chex.Array:
        """The weight of the squared x0 error, averaged over dimensions."""

    def draw_sigma(self, rng: chex.PRNGKey, shape: Sequence[int]) -> chex.Array:
        """Levels from the training law."""

    # A process with noises_first False may also have `ode() -> Process`, its noiseless self on the same levels:
    # `sample(stochastic=...)` takes its mean where a step is deterministic.


@dataclasses.dataclass(frozen=True)
class EDMChurn:
    """EDM levels with churn: an ODE solver step is the policy mean, the next step's noising its Gaussian.

    Step i noises up by eta = min(s_churn/(num_steps+1), sqrt(1.2)-1), sigma^ = (1+eta) sigma, and solves from sigma^
    to the next level. The next state after *its* noising is N(mu, sigma_next^2 (eta^2 + 2 eta) s_noise^2); nothing is
    noised after the step into sigma_min. Source: Karras et al. 2022, arXiv 2206.00364, Eq. 5 and Algorithm 2;
    Cosmos-Predict2.5.

    Attributes:
      sigma_min, sigma_max, rho: the schedule (`karras_levels`).
      solver: "2ab" (exponential Adams-Bashforth, keeps history), "1euler", "2mid" (two evaluations a step).
      s_churn: amount of churn; 0 is the ODE.
      s_noise: inflation of the churn noise.
      s_t_min, s_t_max: only levels inside are noised.
      train_mean, train_std, train_multiplier, high_sigma_ratio: the training law of sigma,
        train_multiplier * exp(N(train_mean, train_std)), with probability high_sigma_ratio log-uniform on [200, 1e5].
    """

    sigma_min: float = 0.01
    sigma_max: float = 200.0
    rho: float = 7.0
    solver: Solver = "2ab"
    s_churn: float = 1.0
    s_noise: float = 1.0
    s_t_min: float = 0.0
    s_t_max: float = math.inf
    train_mean: float = math.log(4.0)
    train_std: float = 1.2
    train_multiplier: float = 24**0.5
    high_sigma_ratio: float = 0.05

    def __post_init__(self) -> None:
        if not 0.0 < self.sigma_min < self.sigma_max:
            raise ValueError(
                f"sigma_min={self.sigma_min}, sigma_max={self.sigma_max}: expected 0 < sigma_min < sigma_max"
            )
        if self.solver not in get_args(Solver):
            raise ValueError(f"solver={self.solver!r}: expected one of {get_args(Solver)}")
        for name in ("s_churn", "s_noise"):
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least 0")

    @property
    def keeps_history(self) -> bool:
        return self.solver == "2ab"

    @property
    def noises_first(self) -> bool:
        return True

    def levels(self, num_steps: int) -> np.ndarray:
        return levels_lib.karras_levels(self.sigma_min, self.sigma_max, num_steps, self.rho)

    def seen_levels(self, num_steps: int) -> np.ndarray:
        sigma = self.levels(num_steps)[:-1]
        return sigma * (1.0 + self._eta(sigma, num_steps, np))

    def step_stds(self, num_steps: int) -> np.ndarray:
        return self._std(self.levels(num_steps)[1:], num_steps, np)

    def start(self, unit_noise: chex.Array, first_churn: chex.Array, num_steps: int) -> chex.Array:
        sigma = self.levels(num_steps)[0]
        churn_std = self._churn_std(sigma, num_steps, np)
        return float(sigma) * unit_noise + float(churn_std) * first_churn

    def mean_std(
        self,
        x: chex.Array,
        sigma: chex.ArrayLike,
        sigma_next: chex.ArrayLike,
        x0: chex.Array,
        prev_x0: chex.Array | None = None,
        prev_sigma: chex.ArrayLike | None = None,
        *,
        num_steps: int,
        x0_fn: X0Fn | None = None,
    ) -> tuple[chex.Array, chex.Array]:
        """One solver step from the noised level sigma, and the std of the next state after its own noising.

        Args:
          x: (B,*S), what the denoiser saw, after noising.
          sigma: () or (B,), its noised level.
          sigma_next: () or (B,), the next level, un-noised.
          x0: (B,*S), the denoiser's prediction at (x, sigma).
          prev_x0: (B,*S), the previous step's prediction; None, or any value beside a non-finite prev_sigma, for none.
          prev_sigma: () or (B,), the previous noised level; None or non-finite for no history: the Euler step.
          num_steps: n of the run, which sets eta.
          x0_fn: (x, sigma_B) -> x0, needed by "2mid".

        Returns:
          mean (B,*S) and std of sigma_next's shape, 0 for the step into sigma_min.
        """
        dtype = compute_dtype(x, x0)
        sigma, sigma_next = jnp.asarray(sigma, dtype), jnp.asarray(sigma_next, dtype)
        x, x0 = jnp.asarray(x, dtype), jnp.asarray(x0, dtype)
        s, t = expand(sigma, x), expand(sigma_next, x)
        if self.solver == "1euler":
            mean = solvers.euler_step(x, s, t, x0)
        elif self.solver == "2mid":
            if x0_fn is None:
                raise ValueError("solver='2mid' evaluates the denoiser twice a step: pass x0_fn")

            def x0_at(x_m: chex.Array, m: chex.Array) -> chex.Array:
                m_B = jnp.broadcast_to(m.reshape(-1), x.shape[:1])
                return jnp.asarray(x0_fn(x_m, m_B), dtype)

            mean = solvers.midpoint_step(x, s, t, x0, x0_at)
        else:
            if prev_x0 is None or prev_sigma is None:
                prev_x0, prev_sigma = jnp.zeros_like(x), jnp.inf
            p = expand(jnp.asarray(prev_sigma, dtype), x)
            mean = solvers.adams_bashforth_step(x, s, t, x0, jnp.asarray(prev_x0, dtype), p)
        return mean, self._std(sigma_next, num_steps, jnp)

    def finish(self, x_last: chex.Array, last_x0: chex.Array, x0_fn: X0Fn) -> chex.Array:
        """One more denoise at sigma_min."""
        sigma_B = jnp.full(x_last.shape[:1], self.sigma_min, compute_dtype(x_last))
        return x0_fn(x_last, sigma_B)

    def corrupt(self, x0: chex.Array, sigma: chex.ArrayLike, noise: chex.Array) -> chex.Array:
        """x0 + sigma e (EDM, Eq. 2). sigma (), (B,), or (B,T) for B,C,T,H,W."""
        return x0 + _level(sigma, x0, noise) * noise

    def loss_weight(self, sigma: chex.ArrayLike) -> chex.Array:
        """(sigma^2 + 1)/sigma^2, the EDM weight at sigma_data 1."""
        return edm_loss_weight(sigma, 1.0)

    def draw_sigma(self, rng: chex.PRNGKey, shape: Sequence[int]) -> chex.Array:
        """The training law in the attributes' words; JAX's default float dtype."""
        return training_sigma(
            rng,
            shape,
            mean=self.train_mean,
            std=self.train_std,
            multiplier=self.train_multiplier,
            high_sigma_ratio=self.high_sigma_ratio,
        )

    # xp is numpy for whole schedules in float64, jax.numpy for a step's own levels.
    def _eta(self, sigma: Any, num_steps: int, xp: Any) -> Any:
        eta = min(self.s_churn / (num_steps + 1), math.sqrt(1.2) - 1.0)
        return xp.where((sigma >= self.s_t_min) & (sigma <= self.s_t_max), eta, 0.0)

    def _churn_std(self, sigma: Any, num_steps: int, xp: Any) -> Any:
        eta = self._eta(sigma, num_steps, xp)
        return sigma * xp.sqrt(eta * eta + 2.0 * eta) * self.s_noise

    def _std(self, sigma_next: Any, num_steps: int, xp: Any) -> Any:
        # Levels end on sigma_min; the slack is for a level that was rounded to float32 on its way here.
        is_end = sigma_next <= self.sigma_min * (1.0 + 1e-6)
        return xp.where(is_end, 0.0, self._churn_std(sigma_next, num_steps, xp))


@dataclasses.dataclass(frozen=True)
class _Flow:
    """What the flow processes share: time t in [0,1], x_t = (1-t) x0 + t e, noise after each mean, no history."""

    @property
    def keeps_history(self) -> bool:
        return False

    @property
    def noises_first(self) -> bool:
        return False

    def levels(self, num_steps: int) -> np.ndarray:
        raise NotImplementedError

    def ode(self) -> _Flow:
        """The same levels without noise: the Euler step of the probability-flow ODE."""
        raise NotImplementedError

    def seen_levels(self, num_steps: int) -> np.ndarray:
        return self.levels(num_steps)[:-1]

    def step_stds(self, num_steps: int) -> np.ndarray:
        levels = self.levels(num_steps)
        return self._std(levels[:-1], levels[1:], np)

    def start(self, unit_noise: chex.Array, first_churn: chex.Array, num_steps: int) -> chex.Array:
        del first_churn, num_steps  # Levels start at t = 1: pure unit noise.
        return unit_noise

    def mean_std(
        self,
        x: chex.Array,
        sigma: chex.ArrayLike,
        sigma_next: chex.ArrayLike,
        x0: chex.Array,
        prev_x0: chex.Array | None = None,
        prev_sigma: chex.ArrayLike | None = None,
        *,
        num_steps: int,
        x0_fn: X0Fn | None = None,
    ) -> tuple[chex.Array, chex.Array]:
        """Mean (B,*S) and std (sigma's shape) of the next state; arguments as in `EDMChurn.mean_std`, no history."""
        del prev_x0, prev_sigma, num_steps, x0_fn
        dtype = compute_dtype(x, x0)
        sigma, sigma_next = jnp.asarray(sigma, dtype), jnp.asarray(sigma_next, dtype)
        x, x0 = jnp.asarray(x, dtype), jnp.asarray(x0, dtype)
        mean = self._mean(x, x0, expand(sigma, x), expand(sigma_next, x))
        return mean, self._std(sigma, sigma_next, jnp)

    def corrupt(self, x0: chex.Array, sigma: chex.ArrayLike, noise: chex.Array) -> chex.Array:
        """(1-sigma) x0 + sigma e. sigma (), (B,), or (B,T) for B,C,T,H,W."""
        t = _level(sigma, x0, noise)
        return (1.0 - t) * x0 + t * noise

    def loss_weight(self, sigma: chex.ArrayLike) -> chex.Array:
        """1/sigma^2: the velocity error seen from x0."""
        return 1.0 / jnp.asarray(sigma) ** 2

    def draw_sigma(self, rng: chex.PRNGKey, shape: Sequence[int]) -> chex.Array:
        """Logit-normal, mean 0, std 1, no shift; JAX's default float dtype."""
        return logit_normal_time(rng, shape)

    def _mean(self, x: chex.Array, x0: chex.Array, t: chex.Array, t_next: chex.Array) -> chex.Array:
        """The kernel's mean; t and t_next broadcast against x (B,*S)."""
        raise NotImplementedError

    def _std(self, t: Any, t_next: Any, xp: Any) -> Any:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class FlowSDE(_Flow):
    """FlowGRPO's SDE on diffusers' flow-match Euler levels (Liu et al. 2025, arXiv 2505.05470).

    With s(t) = noise_level sqrt(t/(1-t)), dt = t' - t < 0, v = (x - x0)/t:
      mean = x (1 + s^2 dt/(2t)) + v (1 + s^2 (1-t)/(2t)) dt,  std = s sqrt(-dt).
    At t = 1 the denominator 1-t becomes 1-t'. Noise on every step, the last too; the sample is the last state.

    Attributes:
      noise_level: the paper's a; 0 is the ODE.
      shift: the schedule's time shift.
    """

    noise_level: float = 0.7
    shift: float = 3.0

    def __post_init__(self) -> None:
        _check_flow("noise_level", self.noise_level, self.shift)

    def levels(self, num_steps: int) -> np.ndarray:
        return levels_lib.flow_match_euler_levels(num_steps, self.shift)

    def ode(self) -> FlowSDE:
        return dataclasses.replace(self, noise_level=0.0)

    def _mean(self, x: chex.Array, x0: chex.Array, t: chex.Array, t_next: chex.Array) -> chex.Array:
        g, dt = self._diffusion(t, t_next, jnp) ** 2 / (2.0 * t), t_next - t
        v = (x - x0) / t
        return x * (1.0 + g * dt) + v * (1.0 + g * (1.0 - t)) * dt

    def finish(self, x_last: chex.Array, last_x0: chex.Array, x0_fn: X0Fn) -> chex.Array:
        """The last state."""
        del last_x0, x0_fn
        return x_last

    def _diffusion(self, t: Any, t_next: Any, xp: Any) -> Any:
        return self.noise_level * xp.sqrt(t / (1.0 - xp.where(t < 1.0, t, t_next)))

    def _std(self, t: Any, t_next: Any, xp: Any) -> Any:
        return self._diffusion(t, t_next, xp) * xp.sqrt(t - t_next)


@dataclasses.dataclass(frozen=True)
class FlowCPS(_Flow):
    """Coefficients-preserving sampling on diffusers' flow-match Euler levels (Wang & Yu 2025, arXiv 2509.05952).

    With x1 = x + (1-t) v the predicted noise, v = (x - x0)/t:
      std = t' sin(noise_level pi/2),  mean = (1-t') x0 + sqrt(t'^2 - std^2) x1 (root = t' cos(noise_level pi/2)).
    x0 and noise keep the coefficients 1-t' and t' of x_t' = (1-t') x0 + t' e, so that no noise is left in the sample
    that the denoiser was not told of. The std does not shrink with the step length: exact for a point mass, but not the
    reversal of the forward noising. The step into t' = 0 is deterministic and the sample is the last state. Its usual
    log ratio is "mean_square": the authors drop 1/(2 std^2).

    Attributes:
      noise_level: the paper's eta in [0,1], the share of new noise; 0 is the ODE (Euler).
      shift: the schedule's time shift.
    """

    noise_level: float = 0.7
    shift: float = 3.0

    def __post_init__(self) -> None:
        _check_flow("noise_level", self.noise_level, self.shift)
        if not self.noise_level <= 1.0:
            raise ValueError(
                f"noise_level={self.noise_level}: expected at most 1 (FlowCPS replaces a share of the noise)"
            )

    def levels(self, num_steps: int) -> np.ndarray:
        return levels_lib.flow_match_euler_levels(num_steps, self.shift)

    def ode(self) -> FlowCPS:
        return dataclasses.replace(self, noise_level=0.0)

    def _mean(self, x: chex.Array, x0: chex.Array, t: chex.Array, t_next: chex.Array) -> chex.Array:
        x1 = x + (1.0 - t) * (x - x0) / t
        return (1.0 - t_next) * x0 + t_next * math.cos(0.5 * math.pi * self.noise_level) * x1

    def finish(self, x_last: chex.Array, last_x0: chex.Array, x0_fn: X0Fn) -> chex.Array:
        """The last state, which is the last x0."""
        del last_x0, x0_fn
        return x_last

    def _std(self, t: Any, t_next: Any, xp: Any) -> Any:
        del t, xp
        return t_next * math.sin(0.5 * math.pi * self.noise_level)


@dataclasses.dataclass(frozen=True)
class DanceSDE(_Flow):
    """DanceGRPO's SDE on shifted linear levels (Xue et al. 2025, arXiv 2505.07818).

    With score = -(x - (1-t) x0)/t^2, dt = t' - t < 0, v = (x - x0)/t:
      mean = x + dt v - (eta^2/2) score dt,  std = eta sqrt(-dt).
    The sample is the last step's x0.

    Attributes:
      eta: the diffusion coefficient; 0 is the ODE.
      shift: the schedule's time shift.
    """

    eta: float = 0.3
    shift: float = 3.0

    def __post_init__(self) -> None:
        _check_flow("eta", self.eta, self.shift)

    def levels(self, num_steps: int) -> np.ndarray:
        return levels_lib.shifted_linear_levels(num_steps, self.shift)

    def ode(self) -> DanceSDE:
        return dataclasses.replace(self, eta=0.0)

    def _mean(self, x: chex.Array, x0: chex.Array, t: chex.Array, t_next: chex.Array) -> chex.Array:
        dt, score = t_next - t, -(x - (1.0 - t) * x0) / t**2
        return x + dt * (x - x0) / t - 0.5 * self.eta**2 * score * dt

    def finish(self, x_last: chex.Array, last_x0: chex.Array, x0_fn: X0Fn) -> chex.Array:
        """The last step's x0."""
        del x_last, x0_fn
        return last_x0

    def _std(self, t: Any, t_next: Any, xp: Any) -> Any:
        return self.eta * xp.sqrt(t - t_next)


def _level(sigma: chex.ArrayLike, x0: chex.Array, noise: chex.Array) -> chex.Array:
    return expand(jnp.asarray(sigma, compute_dtype(x0, noise)), x0)


def _check_flow(name: str, value: float, shift: float) -> None:
    if not value >= 0.0:
        raise ValueError(f"{name}={value}: expected at least 0")
    if not shift > 0.0:
        raise ValueError(f"shift={shift}: expected more than 0")
