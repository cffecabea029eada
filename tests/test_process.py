"""Processes: golden SDE steps, the kernel's std, corruption, weights, and that they are static arguments."""

import dataclasses
import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddrl_jax import DanceSDE, DataBatch, EDMChurn, FlowCPS, FlowSDE, ddrl, guided, loss_fn, sample
from ddrl_jax.rl.ratio import log_ratio

FLOW = np.load(pathlib.Path(__file__).parent / "golden" / "flow.npz")
PROCESSES = [
    EDMChurn(),
    EDMChurn(solver="1euler"),
    EDMChurn(solver="2mid", s_churn=7.0),
    FlowSDE(),
    FlowCPS(),
    DanceSDE(),
]
ENDS_WITHOUT_NOISE = (EDMChurn, FlowCPS)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("step", [0, 3, 8])
@pytest.mark.parametrize("noise_level", [0.7, 0.3])
def test_flow_grpo_steps_match_golden(noise_level, step, jit):
    g = {k: FLOW[f"flow_grpo/a{noise_level}/i{step}/{k}"] for k in ("x", "v", "x_next", "mean", "std", "log_prob")}
    process = FlowSDE(noise_level=noise_level)
    t, t_next = FLOW["flow_grpo/sigmas"][step : step + 2]
    f = lambda x, v: process.mean_std(x, t, t_next, x - t * v, num_steps=10)  # noqa: E731
    mean, std = (jax.jit(f) if jit else f)(g["x"], g["v"])
    np.testing.assert_allclose(mean, g["mean"], rtol=1e-5, atol=1e-5 * np.abs(g["mean"]).max())
    np.testing.assert_allclose(std, g["std"][0], rtol=1e-5)
    check_log_prob(g, mean, std)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("step", [0, 5, 14])
@pytest.mark.parametrize("eta", [0.3, 0.7])
def test_dance_grpo_steps_match_golden(eta, step, jit):
    g = {k: FLOW[f"dance_grpo/eta{eta}/i{step}/{k}"] for k in ("x", "v", "x_next", "mean", "std", "log_prob", "x0")}
    process = DanceSDE(eta=eta)
    t, t_next = FLOW["dance_grpo/sigmas"][step : step + 2]
    f = lambda x, x0: process.mean_std(x, t, t_next, x0, num_steps=16)  # noqa: E731
    mean, std = (jax.jit(f) if jit else f)(g["x"], g["x0"])
    np.testing.assert_allclose(mean, g["mean"], rtol=1e-5, atol=1e-5 * np.abs(g["mean"]).max())
    np.testing.assert_allclose(std, g["std"], rtol=1e-5)
    check_log_prob(g, mean, std)


def check_log_prob(g, mean, std):
    """Our log ratio against a shifted mean is the difference of the golden mean log-density to the shifted one's."""
    with jax.enable_x64(True):
        mean, std = jnp.asarray(g["mean"], jnp.float64), jnp.asarray(np.max(g["std"]), jnp.float64)
        x_next = jnp.asarray(g["x_next"], jnp.float64)
        other = mean + 0.01
        terms = -((x_next - other) ** 2) / (2 * std**2) - jnp.log(std) - 0.5 * jnp.log(2 * jnp.pi)
        ours = log_ratio(mean, other, x_next, std, "gaussian") + terms.mean(axis=(1, 2, 3))
        np.testing.assert_allclose(ours, g["log_prob"], rtol=2e-5)


@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize("steps", [1, 10])
def test_kernel_std_is_the_schedules(process, steps):
    with jax.enable_x64(True):
        seen, levels, stds = process.seen_levels(steps), process.levels(steps), process.step_stds(steps)
        x = jnp.ones((2, 3))
        for i in range(steps):
            for shape in ((), (2,)):
                sigma, sigma_next = np.full(shape, seen[i]), np.full(shape, levels[i + 1])
                mean, std = process.mean_std(x, sigma, sigma_next, x, num_steps=steps, x0_fn=lambda x, s: x)
                assert std.shape == shape and mean.shape == x.shape
                np.testing.assert_allclose(std, np.full(shape, stds[i]), rtol=1e-13)
        assert (stds[:-1] > 0).all() and (stds[-1] == 0) == isinstance(process, ENDS_WITHOUT_NOISE)


def test_edm_std_by_hand():
    # Section 3: N(mu, sigma_next^2 (eta^2 + 2 eta) s_noise^2), eta = s_churn/(n+1).
    process = EDMChurn(s_churn=2.0, s_noise=1.1)
    _, std = process.mean_std(jnp.zeros((1, 1)), 7.0, 5.0, jnp.zeros((1, 1)), num_steps=39)
    np.testing.assert_allclose(std, 5.0 * np.sqrt(0.05**2 + 0.1) * 1.1, rtol=1e-6)
    # The cap: (1+eta)^2 = 1.2.
    _, std = EDMChurn(s_churn=99.0).mean_std(jnp.zeros((1, 1)), 7.0, 5.0, jnp.zeros((1, 1)), num_steps=39)
    np.testing.assert_allclose(std, 5.0 * np.sqrt(0.2), rtol=1e-6)


def test_edm_noises_only_between_s_t_min_and_s_t_max():
    process = EDMChurn(s_t_min=0.5, s_t_max=50.0)
    levels, seen, stds = process.levels(20), process.seen_levels(20), process.step_stds(20)
    inside = (levels >= 0.5) & (levels <= 50.0)
    np.testing.assert_array_equal(seen > levels[:-1], inside[:-1])
    np.testing.assert_array_equal(stds > 0, inside[1:])


@pytest.mark.parametrize("process", PROCESSES)
def test_the_end_has_no_noise_in_float32_either(process):
    levels = process.levels(7).astype(np.float32)
    _, std = process.mean_std(
        jnp.ones((1, 2)), jnp.float32(levels[-2]), jnp.float32(levels[-1]), jnp.ones((1, 2)), num_steps=7,
        x0_fn=lambda x, s: x,
    )  # fmt: skip
    assert (float(std) == 0.0) == isinstance(process, ENDS_WITHOUT_NOISE)


@pytest.mark.parametrize("process", [FlowSDE().ode(), FlowCPS().ode(), DanceSDE().ode()])
def test_without_noise_the_flow_mean_is_the_ode_step(process):
    x, x0 = jnp.array([[2.0]]), jnp.array([[0.5]])
    mean, std = process.mean_std(x, 0.8, 0.6, x0, num_steps=5)
    np.testing.assert_allclose(mean, 2.0 + (2.0 - 0.5) / 0.8 * (0.6 - 0.8), rtol=1e-6)
    assert float(std) == 0.0


def test_the_true_flow_sde_keeps_the_marginal_of_gaussian_data():
    # FlowSDE(2**.5) reverses the forward noising (DESIGN): for data N(0, 1), x_t stays N(0, (1-t)^2 + t^2).
    process, steps = FlowSDE(noise_level=2**0.5, shift=1.0), 2000
    levels, stds = process.levels(steps), process.step_stds(steps)
    variance = 1.0
    with jax.enable_x64(True):
        for i in range(1, steps):  # the first step over-disperses by construction
            t, t_next = levels[i], levels[i + 1]
            if i == 1:
                variance = (1 - t) ** 2 + t**2
            gain = (1 - t) / ((1 - t) ** 2 + t**2)  # E[x0|x] = gain x
            mean, _ = process.mean_std(np.ones((1, 1)), t, t_next, np.full((1, 1), gain), num_steps=steps)
            variance = float(mean[0, 0]) ** 2 * variance + stds[i] ** 2
    assert abs(variance - 1.0) < 5e-3


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("noise_level", [0.0, 0.3, 0.7, 1.0])
def test_cps_step_by_hand(noise_level, jit):
    # arXiv 2509.05952 in flow_grpo's words, from the velocity and with the square root.
    rng = np.random.default_rng(0)
    x, v = rng.normal(size=(2, 3, 4)), rng.normal(size=(2, 3, 4))
    process = FlowCPS(noise_level=noise_level)
    with jax.enable_x64(True):
        for t, t_next in ((1.0, 0.9), (0.7, 0.55), (0.2, 0.0)):
            f = lambda x, x0: process.mean_std(x, t, t_next, x0, num_steps=10)  # noqa: B023, E731
            mean, std = (jax.jit(f) if jit else f)(x, x - t * v)
            sine = np.sin(noise_level * np.pi / 2)
            expected = (1 - t_next) * (x - t * v) + np.sqrt(t_next**2 - (t_next * sine) ** 2) * (x + (1 - t) * v)
            np.testing.assert_allclose(mean, expected, rtol=0, atol=1e-13)
            np.testing.assert_allclose(std, t_next * sine, rtol=1e-13)


def test_cps_without_noise_is_flow_sde_without_noise():
    assert (FlowCPS(shift=2.0).levels(9) == FlowSDE(shift=2.0).levels(9)).all()
    rng = np.random.default_rng(1)
    x, x0 = rng.normal(size=(2, 5)), rng.normal(size=(2, 5))
    with jax.enable_x64(True):
        for t, t_next in ((1.0, 0.8), (0.8, 0.3), (0.3, 0.0)):
            ours, std = FlowCPS(noise_level=0.0).mean_std(x, t, t_next, x0, num_steps=5)
            theirs, _ = FlowSDE(noise_level=0.0).mean_std(x, t, t_next, x0, num_steps=5)
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-14)
            assert float(std) == 0.0


def moments(process, steps, prior_mean, prior_var):
    """Exact mean and variance of every state, for data N(prior_mean, prior_var) and its true denoiser."""
    levels, stds = process.levels(steps), process.step_stds(steps)
    mean, variance, out = 0.0, 1.0, [(0.0, 1.0)]
    for i in range(steps):
        t, t_next = levels[i], levels[i + 1]
        gain = (1 - t) * prior_var / ((1 - t) ** 2 * prior_var + t**2)
        # The kernel is affine in x once x0 = prior_mean + gain (x - (1-t) prior_mean) is put in.
        points = np.array([[0.0], [1.0]])
        x0 = prior_mean + gain * (points - (1 - t) * prior_mean)
        m, _ = process.mean_std(points, t, t_next, x0, num_steps=steps)
        offset, slope = float(m[0, 0]), float(m[1, 0] - m[0, 0])
        mean, variance = offset + slope * mean, slope**2 * variance + stds[i] ** 2
        out.append((mean, variance))
    return levels, np.array(out)


@pytest.mark.parametrize("noise_level", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("steps", [2, 7, 40])
def test_cps_keeps_the_coefficients(noise_level, steps):
    # A point mass at c: every state is (1-t) c + t e with unit e, exactly, whatever the number of steps.
    with jax.enable_x64(True):
        levels, states = moments(FlowCPS(noise_level=noise_level), steps, 1.7, 0.0)
        np.testing.assert_allclose(states[:, 0], (1 - levels) * 1.7, rtol=0, atol=1e-13)
        np.testing.assert_allclose(states[:, 1], levels**2, rtol=0, atol=1e-13)
        # FlowSDE's states are noisier than the denoiser is told, up to the last one (the paper's complaint).
        levels, states = moments(FlowSDE(noise_level=0.7), steps, 1.7, 0.0)
        assert (states[1:, 1] - levels[1:] ** 2 > 1e-4).all()


def test_cps_is_not_the_reversal_of_the_forward_noising():
    # For data N(0,1) and full noise each step redraws e: the last state is E[x0|x], whose variance has a closed form.
    with jax.enable_x64(True):
        levels, states = moments(FlowCPS(noise_level=1.0, shift=1.0), 10, 0.0, 1.0)
        variance = 1.0
        for t, t_next in itertools.pairwise(levels):
            gain = (1 - t) / ((1 - t) ** 2 + t**2)
            variance = ((1 - t_next) * gain) ** 2 * variance + t_next**2
        np.testing.assert_allclose(states[-1, 1], variance, rtol=1e-12)
        assert variance < 0.5  # the ODE's is 1 up to its discretisation
        np.testing.assert_allclose(
            moments(FlowCPS(noise_level=0.0, shift=1.0), 2000, 0.0, 1.0)[1][-1, 1], 1.0, atol=2e-3
        )


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: FlowCPS(noise_level=1.1), "noise_level=1.1: expected at most 1"),
        (lambda: FlowCPS(noise_level=-0.1), "noise_level=-0.1: expected at least 0"),
        (lambda: FlowCPS(noise_level=float("nan")), "noise_level=nan"),
        (lambda: FlowCPS(shift=0.0), "shift=0.0"),
    ],
)
def test_cps_settings_are_checked(make, word):
    with pytest.raises(ValueError, match=word) as error:
        make()
    assert "\n" not in str(error.value)


def test_corruption_and_weights():
    x0, e, sigma = jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([[0.5, -1.0], [1.0, 0.0]]), jnp.array([2.0, 0.5])
    np.testing.assert_allclose(EDMChurn().corrupt(x0, sigma, e), [[2.0, 0.0], [3.5, 4.0]])
    np.testing.assert_allclose(EDMChurn().loss_weight(sigma), [1.25, 5.0])
    for process in (FlowSDE(), FlowCPS(), DanceSDE()):
        np.testing.assert_allclose(process.corrupt(x0, 0.25 * sigma, e), [[0.75, 0.5], [2.75, 3.5]])
        np.testing.assert_allclose(process.loss_weight(sigma), [0.25, 4.0])
    # A level a frame, for x_BCTHW.
    x = EDMChurn().corrupt(jnp.zeros((1, 2, 3, 1, 1)), jnp.array([[1.0, 2.0, 3.0]]), jnp.ones((1, 2, 3, 1, 1)))
    np.testing.assert_allclose(x[0, :, :, 0, 0], [[1, 2, 3], [1, 2, 3]])


@pytest.mark.parametrize("process", PROCESSES)
def test_processes_are_static_arguments(process):
    assert hash(process) == hash(dataclasses.replace(process)) and process == dataclasses.replace(process)
    with pytest.raises(dataclasses.FrozenInstanceError):
        process.shift = 1.0
    out = jax.jit(lambda x, p: p.corrupt(x, 0.5, x), static_argnums=1)(jnp.ones((1, 1)), process)
    assert out.shape == (1, 1)


def test_guidance():
    denoise = lambda params, x, sigma, cond: params * x + cond["text"] + cond["frames"]  # noqa: E731
    cond = {"text": jnp.array([[1.0], [2.0]]), "frames": jnp.array([[10.0], [20.0]])}
    null = {"text": jnp.array([[0.5]]), "frames": None}
    x, sigma = jnp.ones((2, 1)), jnp.ones(2)
    np.testing.assert_allclose(guided(denoise, 3.0, null)(2.0, x, sigma, cond), [[13 + 1.5], [24 + 4.5]])
    np.testing.assert_allclose(guided(denoise, 0.0, null)(2.0, x, sigma, cond), [[13.0], [24.0]])
    unconditional = lambda params, x, sigma, cond: x * (1.0 if cond is None else cond)  # noqa: E731
    np.testing.assert_allclose(guided(unconditional, 2.0, None)(None, x, sigma, jnp.full((2, 1), 3.0)), [[7.0], [7.0]])


@dataclasses.dataclass(frozen=True)
class Constant:
    """A process from outside: it shares no code with ours and has only the documented members."""

    keeps_history = False
    noises_first = False

    def levels(self, num_steps):
        return np.linspace(1.0, 0.0, num_steps + 1)

    def seen_levels(self, num_steps):
        return self.levels(num_steps)[:-1]

    def step_stds(self, num_steps):
        return np.full(num_steps, 0.1)

    def start(self, unit_noise, first_churn, num_steps):
        return unit_noise

    def mean_std(self, x, sigma, sigma_next, x0, prev_x0=None, prev_sigma=None, *, num_steps, x0_fn=None):
        return 0.5 * (x + x0), jnp.float32(0.1)

    def finish(self, x_last, last_x0, x0_fn):
        return x_last

    def corrupt(self, x0, sigma, noise):
        return x0 + noise

    def loss_weight(self, sigma):
        return jnp.ones_like(sigma)

    def draw_sigma(self, rng, shape):
        return jax.random.uniform(rng, shape)


def test_a_process_from_outside_runs_everything():
    denoise = lambda params, x, sigma, cond: params * x  # noqa: E731
    x0, trajectory = sample(
        0.5, jax.random.key(0), None, denoise=denoise, process=Constant(), shape=(4, 2), num_steps=3, record=(0, 2)
    )
    np.testing.assert_array_equal(x0, trajectory.x_next[1])
    loss, metrics = loss_fn(
        0.5, trajectory, jnp.array([1.0, -1.0, 1.0, -1.0]), None, DataBatch(x0), jax.random.key(1), denoise=denoise,
        process=Constant(), objective=ddrl(cond_dropout=0.0),
    )  # fmt: skip
    assert np.isfinite(loss) and metrics["ratio_max"] == 1.0 and metrics["data_loss"] > 0
