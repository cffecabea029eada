"""What a block sends, keeps and computes on a mesh: read off a tiny DiT's compiled program, and off its numbers."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ddrl_jax.models.cosmos_dit import REMAT, CosmosDiT, CosmosDiTConfig
from ddrl_jax.parallel import attention as attention_module
from ddrl_jax.parallel import hlo
from ddrl_jax.parallel import mesh as mesh_lib

DEPTH, WIDTH, HEADS, FRAMES, CELLS, TEXT, ROWS = 3, 64, 4, 4, 6, 8, 8
TOKENS = FRAMES * (CELLS // 2) ** 2


def network(remat, dtype="float32"):
    """A DiT that predicts something: (graphdef, params)."""
    config = CosmosDiTConfig(
        in_channels=4, width=WIDTH, depth=DEPTH, heads=HEADS, mlp_ratio=2.0, adaln_rank=8, context_in=16,
        context_dim=32, max_grid=(8, 8, 8), dtype=dtype, remat=remat,
    )  # fmt: skip
    graphdef, params = nnx.split(nnx.eval_shape(lambda: CosmosDiT(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)
    return graphdef, jax.tree.map(lambda p: jnp.asarray(rng.standard_normal(p.shape, np.float32) * 0.2), params)


def inputs():
    keys = jax.random.split(jax.random.key(1), 3)
    x = jax.random.normal(keys[0], (ROWS, 4, FRAMES, CELLS, CELLS))
    return x, jax.random.uniform(keys[1], (ROWS, FRAMES)), jax.random.normal(keys[2], (2, TEXT, 16))


def gradient(remat, mesh, dtype="float32"):
    """(a jitted function of parameters and inputs -> loss and gradient, its arguments)."""
    graphdef, params = network(remat, dtype)

    def loss(params, x, t, context):
        y = nnx.merge(graphdef, params)(x, t, context, mesh=mesh)
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    arguments = (params, *inputs())
    if mesh is not None:
        x, t, context = arguments[1:]
        arguments = (
            jax.device_put(params, mesh_lib.fsdp_sharding(mesh, params)),
            jax.device_put(x, mesh_lib.latent_sharding(mesh, x.shape)),
            jax.device_put(t, mesh_lib.batch_sharding(mesh)),
            jax.device_put(context, mesh_lib.text_sharding(mesh, context.shape)),
        )
    return jax.jit(jax.value_and_grad(loss)), arguments


@functools.cache
def plain():
    step, arguments = gradient("none", None)
    return step(*arguments)


@functools.cache
def program(remat, shape):
    mesh = mesh_lib.make_mesh(*shape)
    step, arguments = gradient(remat, mesh)
    options = {"xla_backend_optimization_level": 0}
    return hlo.read(step.lower(*arguments).compile(compiler_options=options).as_text(), mesh.shape)


def in_blocks(remat, shape):
    return [c for c in program(remat, shape).collectives if DEPTH in c.loops]


@pytest.fixture(autouse=True)
def _blocked_attention(monkeypatch):
    """Attention in blocks of queries, as at a video's size: the form whose result can be kept."""
    monkeypatch.setattr(attention_module, "LOGITS_BYTES", TOKENS * 4 * (TOKENS // 2))


SHAPES = [(2, 2, 2), (1, 2, 4)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "remat, backward", [("none", 4), ("full", 8), ("save-attention", 8), ("save-qkv", 5), ("save-most", 5)]
)
def test_a_block_exchanges_tokens_for_heads_and_nothing_else_of_them(remat, backward, shape):
    """Four all-to-alls forward (queries, keys, values, result); backward four, and those computed again."""
    exchanges = [c for c in in_blocks(remat, shape) if c.kind == "all-to-all"]
    assert len(exchanges) == 4 + backward
    rows, context = ROWS // (shape[0] * shape[1]), shape[2]
    for c in exchanges:
        assert c.axes == ("context",) and c.bytes == rows * TOKENS // context * WIDTH * 4


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("remat", ["none", "full", "save-most"])
def test_what_else_goes_over_context_is_text_and_parameters(remat, shape):
    """Parameters lie over fsdp x context; of activations only the text's keys and values are gathered over context."""
    rows = ROWS // (shape[0] * shape[1])
    text = rows * TEXT * 32 * 4  # features; keys and values are as wide as WIDTH
    largest = 4 * WIDTH * 2 * WIDTH  # an MLP's kernel
    for c in in_blocks(remat, shape):
        if c.kind == "all-to-all":
            continue
        assert "replica" in c.axes or "fsdp" in c.axes or c.bytes <= text * 2 * WIDTH // 32 * 2, c
        parameters = {int(np.prod(s)) for s in c.shapes}
        assert all(n * 4 <= largest * (shape[1] * shape[2]) for n in parameters), c


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("remat", ["none", "full", "save-most"])
def test_no_collective_touches_the_stack_of_layers(remat, shape):
    stacked = [c for c in program(remat, shape).collectives if any(s[:1] == (DEPTH,) and len(s) > 2 for s in c.shapes)]
    assert not stacked, stacked


def test_no_activation_is_made_whole_against_the_layout(capfd):
    """XLA says so when it cannot keep to one ("involuntary full rematerialization")."""
    step, arguments = gradient("save-attention", mesh_lib.make_mesh(2, 2, 2))
    step.lower(*arguments).compile(compiler_options={"xla_backend_optimization_level": 0})
    assert "full rematerialization" not in capfd.readouterr().err


def test_each_policy_keeps_more_and_computes_less():
    flops = {remat: program(remat, (1, 2, 4)).flops for remat in REMAT}
    order = ["full", "save-attention", "save-attention-mlp", "save-qkv", "save-most", "none"]
    assert sorted(order, key=flops.get, reverse=True) == order, flops
    assert len({flops[r] for r in order}) == len(order), flops
    assert flops["offload"] < flops["save-attention"]
    # Attention's forward pass is computed again under "full" and under no other.
    kept = collections.Counter()
    for remat in ("full", "save-attention", "none"):
        for p in program(remat, (1, 2, 4)).products:
            kept[remat] += (p.contraction == TOKENS) * (DEPTH in p.loops)
    assert kept["full"] > kept["save-attention"] == kept["none"], kept


@pytest.mark.parametrize("shape", [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 2, 4)])
def test_losses_and_gradients_are_the_same_on_every_mesh(shape):
    mesh = mesh_lib.make_mesh(*shape)
    step, arguments = gradient("save-qkv", mesh)
    _agrees(step(*arguments), plain())


@pytest.mark.parametrize("remat", list(REMAT))
def test_losses_and_gradients_are_the_same_under_every_policy(remat):
    step, arguments = gradient(remat, mesh_lib.make_mesh(2, 2, 2))
    _agrees(step(*arguments), plain())


def test_bfloat16_on_a_mesh_is_as_close_to_float32_as_on_one_device():
    def error(mesh):
        step, arguments = gradient("full", mesh, "bfloat16")
        loss, grads = step(*arguments)
        differences = [
            np.linalg.norm(a - b) / np.linalg.norm(b)
            for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(plain()[1]), strict=True)
        ]
        return abs(float(loss) / float(plain()[0]) - 1), max(differences)

    for ours, alone in zip(error(mesh_lib.make_mesh(2, 2, 2)), error(None), strict=True):
        assert ours < max(1.5 * alone, 0.01), (ours, alone)


def _agrees(got, want):
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(float(jnp.abs(b).max()), 1e-3))


def test_what_does_not_divide_is_an_error():
    graphdef, params = network("none")
    x, t, context = inputs()
    net = nnx.merge(graphdef, params)
    with pytest.raises(ValueError, match=r"config.mesh.context=8: must divide the network's 4 heads"):
        net(x, t, context, mesh=mesh_lib.make_mesh(1, 1, 8))
