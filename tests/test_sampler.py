"""The sampler: golden chains, what is recorded, draws, dtypes, compilation."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddrl_jax import (
    DanceSDE,
    EDMChurn,
    FlowCPS,
    FlowSDE,
    Objective,
    Trajectory,
    guided,
    loss_fn,
    sample,
    window_steps,
)

GOLDEN = np.load(pathlib.Path(__file__).parent / "golden" / "sampler.npz")
PROCESSES = {
    "2ab": EDMChurn(),
    "1euler": EDMChurn(solver="1euler"),
    "2mid": EDMChurn(solver="2mid"),
    "flow": FlowSDE(),
    "cps": FlowCPS(),
    "dance": DanceSDE(),
}


def net(params, x, sigma, cond):
    scale = jnp.sqrt(1 + sigma**2).reshape(-1, *[1] * (x.ndim - 1))
    return jnp.tanh(jnp.einsum("dc,bc...->bd...", params, x) / scale)


def toy(params, x, sigma, cond):
    """A denoiser for any shape; cond shifts."""
    sigma = sigma.reshape(-1, *[1] * (x.ndim - 1))
    return jnp.tanh(params * x / (1 + sigma)) + (0.0 if cond is None else cond)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("solver", ["2ab", "1euler", "2mid"])
@pytest.mark.parametrize("churn", [0, 1, 30])
def test_whole_chains_match_golden(churn, solver, jit):
    g = {k: GOLDEN[f"chain/churn{churn}/{solver}/{k}"] for k in ("x_init", "noise", "noise_x", "sigma", "sigma_next")}
    g |= {k: GOLDEN[f"chain/churn{churn}/{solver}/{k}"] for k in ("mu", "final")}
    num_steps = len(g["sigma"])
    record = tuple(range(num_steps - 1)) if churn else ()
    process = EDMChurn(solver=solver, s_churn=float(churn))
    with jax.enable_x64(True):
        f = functools.partial(
            sample, denoise=net, process=process, shape=g["final"].shape, num_steps=num_steps, record=record,
            keep_mean=True,
        )  # fmt: skip
        f = jax.jit(f) if jit else f
        noise = (g["x_init"] / 200.0, g["noise"])
        x0, trajectory = f(GOLDEN["net/A"], None, None, noise=noise)
        assert x0.dtype == jnp.float64
        np.testing.assert_allclose(x0, g["final"], rtol=0, atol=1e-12)
        if not churn:
            assert trajectory.x.shape == (0, *g["final"].shape)
            return
        for ours, golden in (("x", "noise_x"), ("mean_old", "mu"), ("sigma", "sigma"), ("sigma_next", "sigma_next")):
            expected = g[golden][:-1]
            np.testing.assert_allclose(
                getattr(trajectory, ours), expected, rtol=0, atol=1e-11 * np.abs(expected).max(), err_msg=ours
            )
        # x_next is the next step's x, after its noising.
        np.testing.assert_allclose(trajectory.x_next, g["noise_x"][1:], rtol=0, atol=1e-11 * 200)
        spread = (g["noise_x"][1:] - g["mu"][:-1]) / g["noise"][1:]
        np.testing.assert_allclose(trajectory.std, np.median(spread.reshape(num_steps - 1, -1), 1), rtol=1e-8)
        np.testing.assert_allclose(trajectory.init_noise, noise[0], rtol=0, atol=0)
        if solver != "2ab":
            assert trajectory.prev_x0 is None and trajectory.prev_sigma is None
            return
        x0_pred = GOLDEN[f"chain/churn{churn}/{solver}/x0_pred"]
        np.testing.assert_allclose(trajectory.prev_x0[1:], x0_pred[: num_steps - 2], rtol=0, atol=1e-12)
        np.testing.assert_allclose(trajectory.prev_sigma[1:], g["sigma"][: num_steps - 2], rtol=1e-12)
        assert np.isinf(trajectory.prev_sigma[0]) and (trajectory.prev_x0[0] == 0).all()


@pytest.mark.parametrize("name", PROCESSES)
def test_record_keeps_what_the_replay_needs(name):
    process, num_steps = PROCESSES[name], 7
    x0, everything = sample(
        0.7, jax.random.key(0), None, denoise=toy, process=process, shape=(3, 2, 2), num_steps=num_steps,
        record=range(num_steps - 1), keep_mean=True,
    )  # fmt: skip
    assert isinstance(everything, Trajectory) and everything.num_steps == num_steps
    np.testing.assert_allclose(everything.x[1:], everything.x_next[:-1], rtol=0, atol=0)
    np.testing.assert_allclose(everything.sigma, process.seen_levels(num_steps)[:-1], rtol=1e-6)
    np.testing.assert_allclose(everything.sigma_next, process.levels(num_steps)[1:-1], rtol=1e-6)
    np.testing.assert_allclose(everything.std, process.step_stds(num_steps)[:-1], rtol=1e-6)
    np.testing.assert_array_equal(everything.step, range(num_steps - 1))
    assert everything.step.dtype == jnp.int32

    subset = np.array([4, 1])
    x0_again, some = sample(
        0.7, jax.random.key(0), None, denoise=toy, process=process, shape=(3, 2, 2), num_steps=num_steps, record=subset
    )
    np.testing.assert_array_equal(x0_again, x0)
    assert some.mean_old is None
    expected = everything.take_steps(subset)
    for field in ("x", "x_next", "sigma", "sigma_next", "std", "step", "prev_x0", "prev_sigma", "init_noise"):
        ours, theirs = getattr(some, field), getattr(expected, field)
        assert (ours is None) == (theirs is None) == (field.startswith("prev") and name != "2ab")
        if ours is not None:
            np.testing.assert_array_equal(ours, theirs, err_msg=field)


@pytest.mark.parametrize("name", PROCESSES)
def test_last_state_and_finish(name):
    # Rebuild the end of the chain by hand from the last recordable step.
    process, num_steps, params = PROCESSES[name], 5, 0.6
    rng = np.random.default_rng(0)
    noise = (rng.normal(size=(2, 3)).astype(np.float32), rng.normal(size=(num_steps, 2, 3)).astype(np.float32))
    is_edm = isinstance(process, EDMChurn)
    last = int(np.flatnonzero(process.step_stds(num_steps))[-1])
    assert last == (num_steps - 1 if name in ("flow", "dance") else num_steps - 2)
    x0, at = sample(
        params, None, None, denoise=toy, process=process, shape=(2, 3), num_steps=num_steps, record=(0, last),
        noise=noise,
    )  # fmt: skip
    if name == "cps":
        # The last step has no noise: x_next is its x, and the sample its x0.
        np.testing.assert_allclose(x0, toy(params, at.x_next[1], jnp.full(2, process.levels(5)[4]), None), rtol=1e-5)
        return
    if not is_edm:
        np.testing.assert_array_equal(at.x[0], noise[0])
        last_x0 = toy(params, at.x[1], jnp.full(2, at.sigma[1]), None)
        mean, std = process.mean_std(at.x[1], at.sigma[1], at.sigma_next[1], last_x0, num_steps=num_steps)
        x_last = mean + std * noise[1][-1]
        np.testing.assert_allclose(at.x_next[1], x_last, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(x0, x_last if name == "flow" else last_x0, rtol=1e-5, atol=1e-6)
        return
    eta = 1 / (num_steps + 1)
    start = 200 * noise[0] + 200 * np.sqrt(min(eta, 1.2**0.5 - 1) * (2 + min(eta, 1.2**0.5 - 1))) * noise[1][0]
    np.testing.assert_allclose(at.x[0], start, rtol=1e-5)
    # The last step starts at at.x_next[1]; its history is the step before it.
    levels, seen = process.levels(num_steps), process.seen_levels(num_steps)
    denoise = lambda x, s: toy(params, x, jnp.broadcast_to(s, 2), None)  # noqa: E731
    mean, std = process.mean_std(
        at.x_next[1], seen[-1], levels[-1], denoise(at.x_next[1], seen[-1]), denoise(at.x[1], at.sigma[1]),
        at.sigma[1], num_steps=num_steps, x0_fn=denoise,
    )  # fmt: skip
    assert float(std) == 0.0
    np.testing.assert_allclose(x0, denoise(mean, jnp.float32(0.01)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", PROCESSES)
def test_another_record_compiles_nothing(name):
    process, num_steps, traces = PROCESSES[name], 6, []

    def counted(params, x, sigma, cond):
        traces.append(1)
        return toy(params, x, sigma, cond)

    @jax.jit
    def rollout(params, rng, record):
        return sample(
            params, rng, None, denoise=counted, process=process, shape=(2, 3), num_steps=num_steps, record=record,
            keep_mean=True,
        )[1]  # fmt: skip

    everything = sample(
        0.7, jax.random.key(3), None, denoise=toy, process=process, shape=(2, 3), num_steps=num_steps,
        record=tuple(range(5)), keep_mean=True,
    )[1]  # fmt: skip
    first = None
    for record in ([0, 2, 4], [3, 1, 0], [2, 2, 4], [4, 3, 2]):
        some = rollout(0.7, jax.random.key(3), jnp.array(record))
        first = first or len(traces)
        for field in ("x", "x_next", "mean_old", "sigma", "std", "sigma_next"):
            np.testing.assert_allclose(
                getattr(some, field), getattr(everything, field)[np.array(record)], rtol=2e-5, atol=1e-5
            )
    assert len(traces) == first and rollout._cache_size() == 1


def test_a_traced_record_gives_dead_slots_for_what_cannot_be_recorded():
    f = jax.jit(
        lambda record: sample(
            0.7, jax.random.key(3), None, denoise=toy, process=EDMChurn(), shape=(2, 3), num_steps=6, record=record
        )[1]
    )
    some = f(jnp.array([5, 2, 17, -1]))  # the deterministic last step, a real one, two outside the schedule
    np.testing.assert_array_equal(np.asarray(some.std) > 0, [False, True, False, False])
    assert not any(np.isnan(leaf).any() for leaf in jax.tree.leaves(some))


@pytest.mark.parametrize(
    ("process", "record", "word"),
    [
        (EDMChurn(), (0, 6), "step 6"),
        (EDMChurn(), (-1,), "step -1"),
        (EDMChurn(), np.array([0, 5]), "deterministic"),
        (EDMChurn(s_churn=0.0), (0,), "deterministic"),
        (FlowSDE(noise_level=0.0), jnp.array([0]), "deterministic"),
        (EDMChurn(), (0.5,), "integers"),
    ],
)
def test_concrete_records_are_checked(process, record, word):
    for wrap in (lambda f: f, jax.jit):
        f = wrap(
            lambda rng: sample(0.7, rng, None, denoise=toy, process=process, shape=(2, 3), num_steps=6, record=record)[
                0
            ]
        )
        with pytest.raises(ValueError, match=word):
            f(jax.random.key(0))


@pytest.mark.parametrize("name", PROCESSES)
def test_default_record_and_odes(name):
    process = PROCESSES[name]
    f = functools.partial(sample, 0.7, jax.random.key(0), None, denoise=toy, shape=(2, 3), num_steps=6)
    np.testing.assert_array_equal(f(process=process)[1].step, [0, 2, 4])
    ode = EDMChurn(solver=process.solver, s_churn=0.0) if isinstance(process, EDMChurn) else process.ode()
    x0, nothing = f(process=ode)
    assert nothing.x.shape == (0, 2, 3) and nothing.step.shape == (0,)
    # The start noise alone decides an ODE's sample.
    noise = (nothing.init_noise, jax.random.normal(jax.random.key(9), (6, 2, 3)))
    np.testing.assert_allclose(f(process=ode, noise=noise)[0], x0, rtol=1e-6, atol=1e-6)
    with_last = f(process=process, record=(5,) if name in ("flow", "dance") else (4,))[1]
    assert with_last.std[0] > 0


def test_draws_are_unit_normals_and_differ_from_step_to_step():
    for process in (EDMChurn(), FlowSDE()):
        _, at = sample(
            0.7, jax.random.key(0), None, denoise=toy, process=process, shape=(200, 10), num_steps=4,
            record=(0, 1, 2), keep_mean=True,
        )  # fmt: skip
        draws = np.asarray((at.x_next - at.mean_old) / at.std[:, None, None]).reshape(3, -1)
        draws = np.concatenate([np.asarray(at.init_noise).reshape(1, -1), draws])
        np.testing.assert_allclose(np.corrcoef(draws), np.eye(4), atol=0.1)
        np.testing.assert_allclose(draws.std(1), 1.0, atol=0.07)
        np.testing.assert_allclose(draws.mean(1), 0.0, atol=0.09)


def test_dtypes():
    f = functools.partial(sample, 0.7, None, None, denoise=toy, process=EDMChurn(), shape=(2, 3), num_steps=4)
    draws = lambda dtype: (np.ones((2, 3), dtype), np.ones((4, 2, 3), dtype))  # noqa: E731
    key = dict(rng=jax.random.key(0))
    sample_key = functools.partial(
        sample, 0.7, cond=None, denoise=toy, process=EDMChurn(), shape=(2, 3), num_steps=4, **key
    )
    assert f(noise=draws(np.float32))[0].dtype == sample_key()[0].dtype == jnp.float32
    with jax.enable_x64(True):
        for x0, at in (f(noise=draws(np.float64)), sample_key(dtype=jnp.float64)):
            assert x0.dtype == jnp.float64
            assert {leaf.dtype for leaf in jax.tree.leaves(at)} == {jnp.dtype("float64"), jnp.dtype("int32")}
        x0, at = sample_key()
        assert {leaf.dtype for leaf in jax.tree.leaves((x0, at))} == {jnp.dtype("float32"), jnp.dtype("int32")}
        assert f(noise=draws(np.float64), dtype=jnp.float32)[0].dtype == jnp.float32
    x0, at = sample_key(dtype=jnp.bfloat16)
    assert x0.dtype == at.x.dtype == at.prev_x0.dtype == jnp.bfloat16
    assert at.sigma.dtype == at.std.dtype == jnp.float32


def test_denoiser_sees_a_level_per_sample_and_its_condition_as_given():
    cond = {"text": jnp.ones((1, 3)), "frames": None}
    seen = []

    def denoise(params, x, sigma, cond):
        seen.append((x.shape, sigma.shape, jax.tree.map(jnp.shape, cond)))
        return x

    sample({}, jax.random.key(0), cond, denoise=denoise, process=EDMChurn(solver="2mid"), shape=(4, 2), num_steps=3)
    assert len(seen) >= 3 and all(s == ((4, 2), (4,), {"text": (1, 3), "frames": None}) for s in seen)


def test_missing_or_misshapen_noise_is_an_error():
    f = functools.partial(sample, 0.7, None, None, denoise=toy, process=EDMChurn(), shape=(2, 3), num_steps=4)
    with pytest.raises(ValueError, match="rng=None"):
        f()
    for churn in (np.ones((3, 2, 3)), np.ones((2, 3))):
        with pytest.raises(ValueError, match="noise has shapes") as error:
            f(noise=(np.ones((2, 3)), churn))
        assert str(error.value).endswith("expected (2, 3), (4, 2, 3) or None") and "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"rng=None: noise=\(x_init_unit, None\) draws the churn"):
        f(noise=(np.ones((2, 3)), None))
    with pytest.raises(ValueError, match="noise has shapes"):
        sample(
            0.7, jax.random.key(0), None, denoise=toy, process=EDMChurn(), shape=(2, 3), num_steps=4,
            noise=(np.ones((3, 3)), None),
        )  # fmt: skip


def test_memory_is_the_recorded_steps_whatever_the_number_of_steps():
    def temp_bytes(num_steps):
        f = jax.jit(
            lambda rng: sample(
                0.7, rng, None, denoise=toy, process=EDMChurn(), shape=(64, 1024), num_steps=num_steps, record=(0, 2)
            )
        )
        return f.lower(jax.random.key(0)).compile().memory_analysis().temp_size_in_bytes

    assert temp_bytes(64) <= temp_bytes(8) + 4096


def test_a_trajectory_is_a_pytree_with_static_num_steps():
    at = sample(
        0.7, jax.random.key(0), None, denoise=toy, process=EDMChurn(), shape=(4, 3), num_steps=6, keep_mean=True
    )[1]
    summedd = jax.jit(lambda t: jax.tree.map(lambda a: 2 * a, t))(at)
    assert isinstance(summedd, Trajectory) and summedd.num_steps == 6
    leaves, _ = jax.tree.flatten(at)
    assert len(leaves) == 10 and 6 not in [leaf.ndim == 0 and int(leaf) for leaf in leaves]
    rows = at.take_rows(np.array([2, 0]))
    np.testing.assert_array_equal(rows.x, at.x[:, [2, 0]])
    np.testing.assert_array_equal(rows.init_noise, at.init_noise[np.array([2, 0])])
    np.testing.assert_array_equal(rows.sigma, at.sigma)


def test_a_record_tuple_may_hold_tracers():
    f = functools.partial(
        sample, 0.7, jax.random.key(0), None, denoise=toy, process=EDMChurn(), shape=(2,), num_steps=6
    )
    for wrap in (tuple, list):
        at = jax.jit(lambda i, wrap=wrap: f(record=wrap((i, 3)))[1])(jnp.int32(1))
        for ours, theirs in zip(jax.tree.leaves(at), jax.tree.leaves(f(record=(1, 3))[1]), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def summed(params, x, sigma, cond):
    return sum((jnp.asarray(leaf) for leaf in jax.tree.leaves(cond)), 0 * x)


@pytest.mark.parametrize(
    ("cond", "null", "expected"),
    [
        ({"a": np.ones((2, 1)), "b": np.ones((2, 1))}, {"a": np.zeros((1, 1))}, 1.0),  # b is kept
        ({"a": np.ones((2, 1))}, {"a": np.zeros((1, 1)), "b": None}, 0.0),
        ({"a": np.ones((2, 1)), "c": {"d": np.ones((2, 1))}}, {"a": np.zeros((1, 1)), "c": {}}, 1.0),
        ({"a": np.ones((2, 1)), "c": None}, {"a": np.zeros((1, 1)), "c": {"d": None}}, 0.0),
        (({"a": np.ones((2, 1))}, np.ones((2, 1))), ({}, np.zeros((1, 1))), 1.0),
    ],
)
def test_a_key_that_one_of_cond_and_null_cond_lacks_is_none(cond, null, expected):
    keys = jax.tree.structure(cond)

    def denoise(params, x, sigma, cond):
        assert jax.tree.structure(cond) == keys
        return summed(params, x, sigma, cond)

    x0 = guided(denoise, 1.0, null)(None, jnp.zeros((2, 1)), jnp.ones(2), cond)
    given = float(len(jax.tree.leaves(cond)))
    np.testing.assert_array_equal(x0, np.full((2, 1), given + (given - expected)))


ONE = np.ones((1, 1))


@pytest.mark.parametrize(
    ("cond", "null", "word"),
    [
        ({"a": ONE}, {"a": ONE, "b": ONE}, r"null_cond\['b'\] is given where cond\['b'\] is None or absent"),
        ({"a": None}, {"a": ONE}, r"null_cond\['a'\] is given"),
        (None, {"a": ONE}, r"null_cond\['a'\] is given"),
        ({"c": {"a": ONE}}, {"c": {"b": ONE}}, r"null_cond\['c'\]\['b'\] is given"),
        ({"c": {"a": ONE}}, {"c": ONE}, r"null_cond\['c'\] is a ndarray, cond\['c'\] a dict"),
        ({"c": ONE}, {"c": {"a": ONE}}, r"null_cond\['c'\] is a dict, cond\['c'\] a ndarray"),
        ({"c": (ONE, ONE)}, {"c": (ONE,)}, r"null_cond\['c'\] is a tuple of 1, cond\['c'\] a tuple of 2"),
        (ONE, {"a": ONE}, "null_cond is a dict, cond a ndarray"),
    ],
)
def test_trees_that_do_not_agree_are_a_one_line_error(cond, null, word):
    with pytest.raises(ValueError, match=word) as error:
        guided(summed, 1.0, null)(None, jnp.zeros((1, 1)), jnp.ones(1), cond)
    assert "\n" not in str(error.value)


# --- Start noise shared in a group, and a window of stochastic steps -------------------------------------------------


@pytest.mark.parametrize("name", PROCESSES)
def test_given_start_noise_and_drawn_churn(name):
    f = functools.partial(
        sample, 0.7, cond=None, denoise=toy, process=PROCESSES[name], shape=(4, 3), num_steps=5, keep_mean=True
    )
    key = jax.random.key(2)
    x0, drawn = f(key)
    # With the start noise that the key would have drawn, all is as the key alone gives it.
    again, given = f(key, noise=(drawn.init_noise, None))
    for ours, theirs in zip(jax.tree.leaves((again, given)), jax.tree.leaves((x0, drawn)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    # A group that shares its start noise still spreads, by its churn alone.
    shared = jnp.repeat(drawn.init_noise[:1], 4, axis=0)
    x0, at = f(key, noise=(shared, None))
    np.testing.assert_array_equal(at.init_noise, shared)
    assert np.asarray(x0).std(axis=0).min() > 1e-3
    if not PROCESSES[name].noises_first:
        np.testing.assert_array_equal(at.x[0], shared)  # EDMChurn's first state has its own churn already
    assert f(key, noise=(shared.astype(jnp.bfloat16), None))[1].x.dtype == jnp.bfloat16


FLOWS = {"flow": FlowSDE(), "cps": FlowCPS(noise_level=0.6), "dance": DanceSDE()}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", FLOWS)
def test_a_window_of_stochastic_steps_is_the_hand_written_loop(name, jit):
    process, num_steps, window = FLOWS[name], 7, (2, 3, 4)
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        noise = (rng.normal(size=(3, 2)), rng.normal(size=(num_steps, 3, 2)))
        mask = np.isin(np.arange(num_steps), window)
        f = lambda mask, record: sample(  # noqa: E731
            0.7, None, None, denoise=toy, process=process, shape=(3, 2), num_steps=num_steps, record=record,
            noise=noise, stochastic=mask, keep_mean=True,
        )  # fmt: skip
        x0, at = (jax.jit(f) if jit else f)(mask, jnp.array(window))

        levels = process.levels(num_steps)
        x, states, means, stds = noise[0], [], [], []
        for i in range(num_steps):
            t, t_next = levels[i], levels[i + 1]
            last = np.tanh(0.7 * x / (1 + t))
            v = (x - last) / t
            mean, std = x + (t_next - t) * v, 0.0
            if mask[i]:
                mean, std = (np.asarray(a) for a in process.mean_std(x, t, t_next, last, num_steps=num_steps))
            states.append(x)
            means.append(mean)
            stds.append(float(std))
            x = mean + std * noise[1][i]
        states.append(x)
        np.testing.assert_allclose(x0, last if name == "dance" else x, rtol=0, atol=1e-13)
        for k, i in enumerate(window):
            np.testing.assert_allclose(at.x[k], states[i], rtol=0, atol=1e-13)
            np.testing.assert_allclose(at.x_next[k], states[i + 1], rtol=0, atol=1e-13)
            np.testing.assert_allclose(at.mean_old[k], means[i], rtol=0, atol=1e-13)
            np.testing.assert_allclose(at.std[k], stds[i], rtol=1e-12)
        assert (np.asarray(at.std) > 0).all()

        # The replay of recorded steps is the rollout: ratio 1, with the recorded mean and without.
        objective = Objective(log_ratio="gaussian_sum")
        for trajectory in (at, dataclasses.replace(at, mean_old=None)):
            metrics = loss_fn(
                0.7, trajectory, np.array([1.0, -1.0, 0.5]), None, None, None, denoise=toy, process=process,
                objective=objective,
            )[1]  # fmt: skip
            np.testing.assert_allclose(metrics["parts"]["log_ratio"], 0.0, atol=1e-12)
            np.testing.assert_allclose([metrics["ratio_mean"], metrics["ratio_max"]], 1.0, rtol=1e-12)


@pytest.mark.parametrize("name", FLOWS)
def test_no_stochastic_step_is_the_ode_and_all_of_them_are_the_process(name):
    process, key = FLOWS[name], jax.random.key(1)
    f = functools.partial(sample, 0.7, key, None, denoise=toy, shape=(3, 2), num_steps=6)
    nothing = f(process=process, stochastic=np.zeros(6, bool))
    assert nothing[1].x.shape == (0, 3, 2)  # the default record holds stochastic steps only
    np.testing.assert_allclose(nothing[0], f(process=process.ode())[0], rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(
        jax.tree.leaves(f(process=process, stochastic=(True,) * 6)), jax.tree.leaves(f(process=process)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)
    assert np.abs(nothing[0] - f(process=process)[0]).max() > 1e-2


def test_a_moving_window_compiles_nothing():
    traces = []

    def counted(params, x, sigma, cond):
        traces.append(1)
        return toy(params, x, sigma, cond)

    @jax.jit
    def rollout(iteration):
        steps = window_steps(iteration, 6, window=2, every=1)
        mask = jnp.zeros(6, bool).at[steps].set(True)
        return sample(
            0.7, jax.random.key(0), None, denoise=counted, process=FlowSDE(), shape=(2, 3), num_steps=6, record=steps,
            stochastic=mask,
        )  # fmt: skip

    stds, first = FlowSDE().step_stds(6), None
    for iteration in range(6):
        x0, at = rollout(iteration)
        first = first or len(traces)
        np.testing.assert_array_equal(at.step, [iteration % 5, iteration % 5 + 1])
        np.testing.assert_allclose(at.std, stds[np.asarray(at.step)], rtol=1e-6)
        assert np.isfinite(x0).all()
    assert len(traces) == first and rollout._cache_size() == 1


def test_steps_outside_a_traced_window_are_dead_and_outside_a_concrete_one_an_error():
    f = functools.partial(
        sample, 0.7, jax.random.key(0), None, denoise=toy, process=FlowSDE(), shape=(2, 3), num_steps=6
    )
    mask = np.isin(np.arange(6), (1, 2))
    for record in ((1, 3, 2), jnp.array([1, 3, 2])):
        at = jax.jit(lambda m, record=record: f(record=record, stochastic=m))(mask)[1]
        np.testing.assert_array_equal(np.asarray(at.std) > 0, [True, False, True])
        with pytest.raises(ValueError, match="record holds step 3, whose next state is deterministic") as error:
            f(record=record, stochastic=mask)
        assert "\n" not in str(error.value)
    at = jax.jit(lambda record: f(record=record, stochastic=mask))(jnp.array([1, 3, 2]))[1]
    np.testing.assert_array_equal(np.asarray(at.std) > 0, [True, False, True])
    np.testing.assert_array_equal(f(stochastic=mask)[1].step, [2])
    at = jax.jit(lambda m: f(record=(1, 2), stochastic=tuple(m))[1])(mask)
    assert (np.asarray(at.std) > 0).all()


@pytest.mark.parametrize(
    ("process", "mask", "word"),
    [
        (EDMChurn(), np.ones(6, bool), "stochastic is given with EDMChurn"),
        (FlowSDE(), np.ones(5, bool), r"stochastic has shape \(5,\)"),
        (FlowSDE(), np.ones(6), "dtype float64: expected \\(6,\\) and bool"),
        (FlowSDE(), (0, 1), r"shape \(2,\)"),
    ],
)
def test_a_bad_window_is_a_one_line_error(process, mask, word):
    with pytest.raises(ValueError, match=word) as error:
        sample(0.7, jax.random.key(0), None, denoise=toy, process=process, shape=(2, 3), num_steps=6, stochastic=mask)
    assert "\n" not in str(error.value)
