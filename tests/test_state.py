"""EMA, schedule and the guarded optimizer step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ddrl_jax import state

from .paths import GOLDEN

EMA = np.load(GOLDEN / "ema.npz")


def test_ema_exponent_is_the_references():
    assert state.ema_exponent(0.1) == pytest.approx(float(EMA["ema/exp_coefficient"]), abs=1e-9)


def test_ema_exponent_solves_its_equation():
    for rate in (0.01, 0.05, 0.1, 0.25):
        g = state.ema_exponent(rate)
        assert (g + 1) / ((g + 2) ** 2 * (g + 3)) == pytest.approx(rate**2, rel=1e-9)


@pytest.mark.parametrize("rate", [0.0, -0.1, 0.3])
def test_ema_exponent_refuses_widths_that_no_power_has(rate):
    with pytest.raises(ValueError, match="ema_rate"):
        state.ema_exponent(rate)


def test_ema_beta_matches_golden():
    with jax.enable_x64(True):
        exponent = state.ema_exponent(0.1)
        beta = [float(state.ema_beta(i, exponent)) for i in EMA["ema/iterations"]]
    np.testing.assert_allclose(beta, EMA["ema/beta"], atol=1e-12)


@pytest.mark.parametrize("jit", [True, False])
def test_ema_trajectory_matches_golden(jit):
    exponent = state.ema_exponent(0.1)
    update = jax.jit(state.ema_update, static_argnums=3) if jit else state.ema_update
    ema = jnp.asarray(EMA["ema/trajectory/init"])
    weights = EMA["ema/trajectory/source_weights_per_iteration"]
    for i, (source, expected) in enumerate(zip(weights, EMA["ema/trajectory/ema_after_iteration"], strict=True)):
        ema = update(ema, jnp.asarray(source), jnp.asarray(i, jnp.int32), exponent)
        np.testing.assert_allclose(ema, expected, atol=1e-6)


def test_learning_rate_matches_golden():
    schedule = state.warmup_schedule(1.0, int(EMA["lr/warm_up_steps"][0]), float(EMA["lr/f_start"][0]))
    np.testing.assert_allclose([float(schedule(n)) for n in EMA["lr/steps"]], EMA["lr/multiplier"], rtol=2e-6)


def test_no_warmup_is_constant():
    assert float(state.warmup_schedule(0.5, 0)(0)) == 0.5


def _state(ema=True):
    optimizer = state.make_optimizer(learning_rate=0.1, warmup_steps=0, grad_clip=1.0)
    params = {"w": jnp.array([1.0, -2.0]), "b": jnp.array(0.5)}
    return optimizer, state.init_state(params, optimizer, ema=ema)


def test_first_update_copies_the_weights_into_the_ema():
    optimizer, s = _state()
    grads = jax.tree.map(jnp.ones_like, s.params)
    s, _ = state.apply_gradients(s, grads, jnp.array(1.0), optimizer, ema_exponent=state.ema_exponent(0.1))
    jax.tree.map(np.testing.assert_array_equal, s.ema, s.params)
    assert (int(s.step), int(s.updates), int(s.skipped)) == (1, 1, 0)


def test_gradients_are_clipped_by_their_global_norm_and_adamw_is_optax():
    optimizer, s = _state()
    grads = {"w": jnp.array([30.0, 40.0]), "b": jnp.array(0.0)}
    new, metrics = state.apply_gradients(s, grads, jnp.array(1.0), optimizer, ema_exponent=1.0)
    assert float(metrics["grad_norm"]) == 50.0
    clipped = jax.tree.map(lambda g: g / 50.0, grads)
    plain = optax.adamw(0.1, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.0)
    updates, _ = plain.update(clipped, plain.init(s.params), s.params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), new.params, optax.apply_updates(s.params, updates)
    )


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_non_finite_step_changes_nothing_and_is_counted(what):
    optimizer, s = _state()
    good = jax.tree.map(jnp.ones_like, s.params)
    s, _ = state.apply_gradients(s, good, jnp.array(1.0), optimizer, ema_exponent=2.0)
    loss = jnp.array(jnp.nan if what == "loss" else 1.0)
    grads = good if what == "loss" else {"w": jnp.array([1.0, jnp.inf]), "b": jnp.array(1.0)}
    bad, metrics = jax.jit(lambda s, g, loss: state.apply_gradients(s, g, loss, optimizer, ema_exponent=2.0))(
        s, grads, loss
    )
    for name in ("params", "opt_state", "ema"):
        jax.tree.map(np.testing.assert_array_equal, getattr(bad, name), getattr(s, name))
    assert (int(bad.step), int(bad.updates), int(bad.skipped), int(bad.skipped_in_a_row)) == (2, 1, 1, 1)
    assert float(metrics["skipped"]) == 1.0
    again, _ = state.apply_gradients(bad, good, jnp.array(1.0), optimizer, ema_exponent=2.0)
    assert (int(again.skipped), int(again.skipped_in_a_row)) == (1, 0)
