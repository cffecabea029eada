"""The Cosmos denoiser and its loss against `golden/cosmos_denoise`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ddrl_jax.checkpoint import load_pretrained
from ddrl_jax.diffusion.loss import diffusion_loss
from ddrl_jax.diffusion.preconditioning import edm_loss_weight, rectified_flow, rectified_flow_loss_weight
from ddrl_jax.diffusion.process import EDMChurn
from ddrl_jax.models import cosmos_denoiser
from ddrl_jax.parallel.mesh import make_mesh
from tests.paths import GOLDEN

CASES = [(n, rf, s) for n in (0, 1, 2) for rf in (False, True) for s in ("sigma_B", "sigma_BT")]
ATOL = {"sigma_B": 3e-5, "sigma_BT": 1e-4}


@functools.cache
def io():
    with np.load(GOLDEN / "cosmos_denoise/io.npz") as file:
        return dict(file)


@functools.cache
def network(dtype="float32"):
    return load_pretrained(GOLDEN / "cosmos_dit/official.safetensors", dtype=dtype)


@functools.partial(jax.jit, static_argnums=0)
def call(denoise, params, x, sigma, cond):
    return denoise(params, x, sigma, cond)


def expand(sigma):
    return sigma.reshape(2, 1, -1, 1, 1)


def condition(num_cond):
    g = io()
    return {
        "context": g["context"],
        "padding_mask": g["padding_mask_pixels"],
        "condition_mask": g[f"condition_mask_num_cond{num_cond}"],
        "frames": g["x0"],
    }


def denoised(num_cond, rf, sigma, **options):
    """(x_t, x0) of a golden case."""
    g = io()
    x = g["x0"] + expand(g[sigma]) * g["epsilon"]
    graphdef, params = network()
    denoise = cosmos_denoiser(graphdef, use_rf_ckpts=rf, **options)
    return x, np.asarray(call(denoise, params, x, g[sigma], condition(num_cond)))


@pytest.mark.parametrize("num_cond, rf, sigma", CASES)
def test_video(num_cond, rf, sigma):
    g = io()
    key = f"num_cond{num_cond}/rf_ckpts{rf}/{sigma}"
    x, x0 = denoised(num_cond, rf, sigma)
    np.testing.assert_allclose(x0, g[f"{key}/x0_pred"], atol=ATOL[sigma], rtol=0)
    np.testing.assert_allclose((x - x0) / expand(g[sigma]), g[f"{key}/eps_pred"], atol=ATOL[sigma], rtol=0)


@pytest.mark.parametrize(
    "name, num_cond, options",
    [
        ("use_video_condition_false", 2, {"zero_frames": True}),
        ("no_gt_replacement", 1, {"keep_frames": False}),
        ("sigma_conditional_0.02", 1, {"sigma_conditional": 0.02}),
    ],
)
def test_variants(name, num_cond, options):
    _, x0 = denoised(num_cond, False, "sigma_B", **options)
    want = io()[f"extra/{name}/num_cond{num_cond}/rf_ckptsFalse/sigma_B/x0_pred"]
    np.testing.assert_allclose(x0, want, atol=3e-5, rtol=0)
    # The control: the variant is not the plain case.
    assert np.abs(want - io()[f"num_cond{num_cond}/rf_ckptsFalse/sigma_B/x0_pred"]).max() > 1e-3


@pytest.mark.parametrize("mask", [False, True])
def test_image(mask):
    g = io()
    graphdef, params = network()
    denoise = cosmos_denoiser(graphdef, use_rf_ckpts=False)
    x = g["image_x0"] + expand(g["sigma_B"]) * g["image_epsilon"]
    cond = {"context": g["context"], "padding_mask": g["padding_mask_pixels"], "condition_mask": None, "frames": None}
    if mask:  # as the reference, which ignores what it is handed for images
        cond |= {"condition_mask": np.ones((2, 1, 1, 1, 1), np.float32), "frames": g["image_x0"]}
    x0 = call(denoise, params, x, g["sigma_B"], cond)
    np.testing.assert_allclose(x0, g["image/sigma_B/x0_pred"], atol=3e-5, rtol=0)
    eps = (x - x0) / expand(g["sigma_B"])
    np.testing.assert_allclose(eps, g["image/sigma_B/eps_pred"], atol=3e-5, rtol=0)


# ---- the loss --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_cond, rf, sigma", CASES)
def test_loss(num_cond, rf, sigma):
    g = io()
    key = f"loss/num_cond{num_cond}/rf_ckpts{rf}/{'sigma_B1' if sigma == 'sigma_B' else sigma}"
    _, x0 = denoised(num_cond, rf, sigma)
    error = np.square(x0 - g["x0"])
    weight = np.asarray(EDMChurn().loss_weight(g[sigma])).reshape(2, -1)
    weighted = error * weight[:, None, :, None, None]
    np.testing.assert_allclose(weight, g[f"{key}/weights_per_sigma"], rtol=1e-5)
    np.testing.assert_allclose(error.mean(), g[f"{key}/mse_loss"], rtol=1e-5)
    np.testing.assert_allclose(weighted.mean(), g[f"{key}/weighted_loss"], rtol=1e-5)
    np.testing.assert_allclose(weighted.mean((1, 3, 4)), g[f"{key}/weighted_loss_per_frame"], rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(weighted.sum(1).mean(), g[f"{key}/weighted_loss_reduce_sum"], rtol=1e-5)

    graphdef, params = network()
    loss = diffusion_loss(
        params,
        g["x0"],
        condition(num_cond),
        g[sigma],
        g["epsilon"],
        denoise=functools.partial(call, cosmos_denoiser(graphdef, use_rf_ckpts=rf)),
        process=EDMChurn(),
    )
    assert loss.shape == (2,)
    np.testing.assert_allclose(loss.mean(), g[f"{key}/weighted_loss"], rtol=1e-5)


def test_loss_with_frames_rounded_to_bfloat16():
    """The original's trainer holds the given frames in bfloat16, so they count in the loss by their rounding."""
    g = io()
    key = "extra/loss_gt_frames_rounded_to_bf16/num_cond2/rf_ckptsFalse/sigma_B1"
    graphdef, params = network()
    cond = condition(2) | {"frames": g["x0"].astype(jnp.bfloat16)}
    x = g["x0"] + expand(g["sigma_B"]) * g["epsilon"]
    x0 = call(cosmos_denoiser(graphdef, use_rf_ckpts=False), params, x, g["sigma_B"], cond)
    error = np.square(np.asarray(x0) - g["x0"])
    weighted = error * np.asarray(edm_loss_weight(g["sigma_B"]))[:, None, None, None, None]
    np.testing.assert_allclose(error.mean(), g[f"{key}/mse_loss"], rtol=1e-5)
    np.testing.assert_allclose(weighted.mean(), g[f"{key}/weighted_loss"], rtol=1e-5)
    np.testing.assert_allclose(weighted.mean((1, 3, 4)), g[f"{key}/weighted_loss_per_frame"], rtol=1e-5)


def test_loss_gradients():
    g = io()
    graphdef, params = network()
    denoise = cosmos_denoiser(graphdef, use_rf_ckpts=False)

    @jax.jit
    @jax.grad
    def grad(params):
        return diffusion_loss(
            params, g["x0"], condition(1), g["sigma_B"], g["epsilon"], denoise=denoise, process=EDMChurn()
        ).mean()

    d = nnx.merge(graphdef, grad(params))
    got = {
        "x_embedder.proj.1": d.patch_embed.kernel[...].T,
        "blocks.0.cross_attn.k_proj": d.blocks.cross_attn.k.kernel[0].T,
        "final_layer.linear": d.final.kernel[...].T,
    }
    key = "loss/num_cond1/rf_ckptsFalse/sigma_B1/grad_weighted_loss/d_net"
    assert len([name for name in g if name.startswith(key)]) == len(got)
    for name, value in got.items():
        want = g[f"{key}.{name}.weight"]
        np.testing.assert_allclose(value, want, atol=1e-5 * np.abs(want).max(), rtol=0, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_preconditioning(dtype):
    g = io()
    with jax.enable_x64(dtype == "float64"):
        sigma = g[f"scaling/{dtype}/sigma"]
        c = rectified_flow(sigma)
        small = {"float32": 2.4e-7, "float64": 1e-15}[dtype]
        for name in ("c_skip", "c_out", "c_in", "c_noise"):
            np.testing.assert_allclose(getattr(c, name), g[f"scaling/{dtype}/{name}"], atol=small, rtol=0, err_msg=name)
        # The reference computes 1 - s, off by 0.14 % in float32 at sigma 1e5; ours keeps every digit.
        np.testing.assert_allclose(c.c_in, 1 / (1 + sigma.astype(np.float64)), rtol=small)
        # What the original's scaling object calls its loss weight, and its training never calls.
        never_called = g[f"scaling/{dtype}/loss_weight"]
        np.testing.assert_allclose(rectified_flow_loss_weight(sigma), never_called, rtol=4 * small)


# ---- what the golden files cannot show -------------------------------------------------------------------------------


def test_float64():
    g = io()
    with jax.enable_x64(True):
        graphdef, params = network("float64")
        x = (g["x0"] + expand(g["sigma_BT"]).astype(np.float64) * g["epsilon"]).astype(np.float64)
        cond = jax.tree.map(lambda a: a.astype(np.float64), condition(1))
        x0 = call(cosmos_denoiser(graphdef, use_rf_ckpts=False), params, x, g["sigma_BT"].astype(np.float64), cond)
        assert x0.dtype == jnp.float64
        np.testing.assert_allclose(x0, g["num_cond1/rf_ckptsFalse/sigma_BT/x0_pred"], atol=1e-4, rtol=0)


def test_float64_state_around_a_float32_network():
    """Sampling may run in float64 around a narrower network; at sigma 1e5 x is then 1e5 and x0 is still right."""
    g = io()
    with jax.enable_x64(True):
        graphdef, params = network()
        sigma = np.full(2, 1e5)
        x = g["x0"] + 1e5 * g["epsilon"].astype(np.float64)
        cond = condition(0)
        x0 = call(cosmos_denoiser(graphdef, use_rf_ckpts=True), params, x, sigma, cond)
        assert x0.dtype == jnp.float64
        net = nnx.merge(*network())(x / (1 + 1e5), sigma / (1 + 1e5), cond["context"], None, cond["padding_mask"])
        np.testing.assert_allclose(x0, x / (1 + 1e5) - 1e5 / (1 + 1e5) * np.asarray(net), atol=3e-5)


def test_flow_level_is_the_same_denoiser():
    """x_flow = x_edm/(1+sigma) at t = sigma/(1+sigma)."""
    g = io()
    graphdef, params = network()
    sigma = g["sigma_B"]
    x = g["x0"] + expand(sigma) * g["epsilon"]
    for rf in (False, True):
        edm, flow = (cosmos_denoiser(graphdef, use_rf_ckpts=rf, level=level) for level in ("edm", "flow"))
        want = call(edm, params, x, sigma, condition(1))
        got = call(flow, params, x / expand(1 + sigma), sigma / (1 + sigma), condition(1))
        np.testing.assert_allclose(got, want, atol=3e-5, rtol=0)
    pure = call(flow, params, g["epsilon"], np.ones(2, np.float32), condition(0))
    assert np.isfinite(pure).all()


def test_groups_share_a_condition():
    g = io()
    graphdef, params = network()
    denoise = cosmos_denoiser(graphdef, use_rf_ckpts=False)
    x = np.repeat(g["x0"] + expand(g["sigma_B"]) * g["epsilon"], 2, axis=0)
    x[1::2] += 0.5
    sigma = np.array([0.3, 4.0, 1.0, 80.0], np.float32)
    cond = condition(1)
    rows = jax.tree.map(lambda a: np.repeat(a, 2, axis=0), cond)
    want = call(denoise, params, x, sigma, rows)
    np.testing.assert_allclose(call(denoise, params, x, sigma, cond), want, atol=3e-6)
    for name in ("padding_mask", "condition_mask", "frames"):
        np.testing.assert_allclose(call(denoise, params, x, sigma, rows | {name: cond[name]}), want, atol=3e-6)


def test_given_frames_are_not_read_from_x():
    g = io()
    graphdef, params = network()
    denoise = cosmos_denoiser(graphdef, use_rf_ckpts=False)
    x = g["x0"] + expand(g["sigma_B"]) * g["epsilon"]
    cond = condition(2)
    given = np.broadcast_to(cond["condition_mask"] > 0, x.shape)
    garbage = np.where(given, np.nan, x)
    x0 = np.asarray(call(denoise, params, garbage, g["sigma_B"], cond))
    np.testing.assert_array_equal(x0, call(denoise, params, x, g["sigma_B"], cond))
    np.testing.assert_array_equal(x0[given], g["x0"][given])
    # NaN in what is overwritten must not reach a gradient either.
    f = jax.jit(jax.grad(lambda p: call(denoise, p, garbage, g["sigma_B"], cond).sum()))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(f(params)))


def test_frozen_hashable_and_not_traced_twice():
    graphdef, params = network()
    a, b = (cosmos_denoiser(graphdef, use_rf_ckpts=False) for _ in range(2))
    again = cosmos_denoiser(load_pretrained(GOLDEN / "cosmos_dit/official.safetensors")[0], use_rf_ckpts=False)
    assert a == b == again and hash(a) == hash(b) == hash(again)
    assert a != cosmos_denoiser(graphdef, use_rf_ckpts=True)
    meshed = [cosmos_denoiser(graphdef, use_rf_ckpts=False, mesh=make_mesh()) for _ in range(2)]
    assert meshed[0] == meshed[1] != a and hash(meshed[0]) == hash(meshed[1])
    with pytest.raises(AttributeError):
        a.use_rf_ckpts = True
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def f(denoise, params, x, sigma, cond):
        traces.append(denoise)
        return denoise(params, x, sigma, cond)

    g = io()
    for denoise in (a, b, again):
        f(denoise, params, g["x0"], g["sigma_B"], condition(0))
    assert len(traces) == 1


@pytest.mark.parametrize(
    "change, word",
    [
        ({"frames": None}, "go together"),
        ({"condition_mask": None}, "go together"),
        ({"frames": np.zeros((3, 16, 5, 6, 10))}, "divide the batch 2"),
        ({"sigma": np.ones((2, 3))}, "a level a sample or a frame"),
        ({"sigma": np.ones(3)}, "a level a sample or a frame"),
    ],
)
def test_inputs_that_do_not_fit(change, word):
    g = io()
    graphdef, params = network()
    sigma = change.get("sigma", g["sigma_B"])
    cond = condition(1) | {name: value for name, value in change.items() if name != "sigma"}
    with pytest.raises(ValueError, match=word):
        cosmos_denoiser(graphdef, use_rf_ckpts=False)(params, g["x0"], sigma, cond)


@pytest.mark.parametrize("given", ["condition_mask", "frames", "both"])
def test_an_image_takes_no_notice_of_any_mask_or_frames(given):
    g = io()
    graphdef, params = network()
    denoise = cosmos_denoiser(graphdef, use_rf_ckpts=False)
    cond = {"context": g["context"], "padding_mask": g["padding_mask_pixels"]}
    video = condition(1)  # of a video, and in numbers that do not divide the batch
    extra = {name: np.repeat(video[name], 2, axis=0)[:3] for name in ("condition_mask", "frames")}
    extra = {name: value for name, value in extra.items() if given in (name, "both")}
    args = (params, g["image_x0"], g["sigma_B"])
    np.testing.assert_array_equal(call(denoise, *args, cond | extra), call(denoise, *args, cond))


def test_a_mask_of_zeros_needs_no_frames_and_a_level_may_be_a_scalar():
    g = io()
    graphdef, params = network()
    denoise = cosmos_denoiser(graphdef, use_rf_ckpts=False)
    cond, zeros = condition(0) | {"frames": None}, condition(0)["condition_mask"]
    want = call(denoise, params, g["x0"], np.full(2, 4.0, np.float32), condition(0))
    for mask in (zeros, jnp.asarray(zeros), zeros[:1]):
        # Closed over, it is known while the rest is traced.
        got = jax.jit(lambda p, x, mask=mask: denoise(p, x, 4.0, cond | {"condition_mask": mask}))(params, g["x0"])
        np.testing.assert_allclose(got, want, atol=3e-6)
    for f, mask in ((call, zeros), (lambda d, *args: d(*args), condition(1)["condition_mask"])):
        with pytest.raises(ValueError, match="go together"):  # a tracer may be anything
            f(denoise, params, g["x0"], g["sigma_B"], cond | {"condition_mask": mask})
