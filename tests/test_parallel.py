"""How a batch lies on eight devices: what the compiled rollout and update send, hold and compute."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ddrl_jax import build, update
from ddrl_jax import config as config_lib
from ddrl_jax.parallel import attention as attention_module
from ddrl_jax.parallel import mesh as mesh_lib

from . import tiny

# ---- where arrays lie ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, want",
    [
        ((8, 16, 4, 6, 6), P(("replica", "fsdp"), None, "context")),
        ((8, 16, 1, 6, 6), P(("replica", "fsdp"), None, None)),  # an image
        ((6, 16, 4, 6, 6), P("replica", None, "context")),  # no whole number of rows a device
        ((5, 16, 3, 6, 6), P()),
    ],
)
def test_latents_are_cut_along_rows_and_frames_and_so_are_their_gradients(shape, want):
    mesh = mesh_lib.make_mesh(replica=2, fsdp=2, context=2)
    x = jnp.arange(float(math.prod(shape))).reshape(shape)

    @jax.jit
    def f(x):
        y, pull = jax.vjp(functools.partial(mesh_lib.pin_latents, mesh), x)
        return y, pull(jnp.ones_like(y))[0]

    for y in f(x):
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, want), y.ndim)
    np.testing.assert_array_equal(f(x)[0], x)
    assert mesh_lib.pin_latents(None, x) is x


def test_parameters_are_cut_along_what_a_layer_reads_and_vectors_are_not():
    mesh = mesh_lib.make_mesh(replica=2, fsdp=2, context=2)
    cut = ("fsdp", "context")
    specs = {
        (3, 32, 64): P(None, cut, None),
        (3, 6, 64): P(None, None, cut),  # 4 does not divide 6
        (32, 6): P(cut, None),
        (3, 6, 6): P(),
    }
    for shape, want in specs.items():
        tree = {"q": {"kernel": jnp.zeros(shape), "scale": jnp.zeros((4, 64))}}
        found = mesh_lib.fsdp_sharding(mesh, tree)["q"]
        assert found["kernel"].is_equivalent_to(NamedSharding(mesh, want), len(shape))
        assert found["scale"].is_fully_replicated


def test_text_is_cut_along_its_width_as_the_kernel_that_projects_it():
    mesh = mesh_lib.make_mesh(replica=2, fsdp=2, context=2)
    assert mesh_lib.text_sharding(mesh, (2, 5, 64)).spec == P("replica", None, ("fsdp", "context"))
    assert mesh_lib.text_sharding(mesh, (4, 5, 63)).spec == P(("replica", "fsdp"))
    assert mesh_lib.text_sharding(mesh, (3, 5, 64)).spec == P(None, None, ("fsdp", "context"))
    assert mesh_lib.text_sharding(mesh, (3, 5, 63)).is_fully_replicated


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 8, 1), (8, 1, 1)])
def test_a_product_with_a_kernel_in_pieces(shape, gather):
    mesh = mesh_lib.make_mesh(*shape)
    x, kernel = jax.random.normal(jax.random.key(0), (8, 4, 16)), jax.random.normal(jax.random.key(1), (16, 24))
    weight = jax.random.normal(jax.random.key(2), (8, 4, 24))

    def value(product, x, kernel):
        return jnp.sum(weight * product(x, kernel))

    got = jax.jit(jax.grad(functools.partial(value, lambda *a: mesh_lib.product(*a, mesh, gather)), (0, 1)))(x, kernel)
    want = jax.grad(functools.partial(value, jnp.matmul), (0, 1))(x, kernel)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_the_gradient_of_a_kernel_is_summed_in_float32_and_scattered():
    mesh = mesh_lib.make_mesh(1, 8, 1)
    x = jax.ShapeDtypeStruct((64, 16), jnp.bfloat16, sharding=mesh_lib.batch_sharding(mesh))
    kernel = jax.ShapeDtypeStruct((16, 24), jnp.float32, sharding=NamedSharding(mesh, P(("fsdp", "context"))))
    grad = jax.grad(lambda kernel, x: jnp.sum(mesh_lib.product(x, kernel, mesh).astype(jnp.float32) ** 2))
    program = jax.jit(grad).lower(kernel, x).compile()
    assert program.output_shardings.shard_shape((16, 24)) == (2, 24)
    reduced = re.findall(r"= (\w+)\[.*? (?:all-reduce|reduce-scatter)(?:-start)?\(", program.as_text())
    assert reduced and set(reduced) == {"f32"}, reduced


# ---- rollout, data loss and update -----------------------------------------------------------------------------------


def setting(conditions, group, *, replica=1, micro_batch=None, **fields):
    """A method on eight devices with what its functions take: (method, {name: arguments})."""
    config = tiny.config()
    config.mesh.replica, config.mesh.fsdp, config.mesh.context = replica, 8 // replica, 1
    config.rollout.conditions, config.rollout.group_size = conditions, group
    config.train.micro_batch = micro_batch or conditions * group
    config.objective.data_beta = 0.1
    config.model.remat = "full"
    for field, value in fields.items():
        section, _, name = field.rpartition(".")
        config_lib.get(config, section)[name] = value
    setup = build.build(config)
    method = update.Update(config, setup)

    rng = np.random.default_rng(0)
    # The network would start at zero: drawn, so that every gradient counts.
    params = jax.tree.map(lambda p: rng.standard_normal(p.shape, np.float32) * 0.2, build.abstract_params(config))
    params = jax.device_put(params, mesh_lib.fsdp_sharding(setup.mesh, params))
    state = build.train_state(setup, params, method.optimizer, method.exponent)
    cond = build.cond(build.to_global(setup.mesh, rng.standard_normal((conditions, 10, 8), np.float32)))
    clean = build.to_global(setup.mesh, rng.standard_normal((conditions, *setup.latent_shape), np.float32))
    rewards = rng.standard_normal((1, conditions * group), np.float32)
    valid = np.ones(conditions * group, bool)
    rewarded = update.to_device(setup.mesh, rewards, np.ones(1, np.float32), valid)
    return method, (params, state, jax.random.key(1), jnp.zeros((), jnp.int32), cond, clean, rewarded)


def compiled(f, *args):
    # Without the slow passes of code generation: they change neither where arrays lie nor what is sent.
    return jax.jit(f).lower(*args).compile(compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def runs():
    """{part: program} of a rollout, a data loss and an update: 8 conditions, 8 rollouts each."""
    method, (params, state, key, zero, cond, clean, rewarded) = setting(8, 8)
    parts = {}

    def run(name, f, *args):
        parts[name] = compiled(f, *args)
        return parts[name](*args)

    rollout = functools.partial(method._rollout, keep_mean=False)
    x0, trajectory = run("rollout", rollout, None, params, key, zero, cond)
    for x in (x0, trajectory.x, trajectory.x_next):
        assert "fsdp" in str(x.sharding.spec), "rollouts and their record stay cut"
    data = run("data", method._data, None, params, key, zero, zero, clean, cond, trajectory)
    run("update", method._apply, None, state, key, zero, x0, trajectory, cond, rewarded, data, None)
    return parts


def update_program(conditions, group, **options):
    """The update alone, compiled for a rollout that was never run."""
    method, (params, state, key, zero, cond, _, rewarded) = setting(conditions, group, **options)
    rollout = functools.partial(method._rollout, keep_mean=False)
    mesh, rows = method.setup.mesh, conditions * group

    def placed(a):
        spec = P(*[mesh_lib.BATCH[0] if n == rows else None for n in a.shape[:2]])
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))

    x0, trajectory = jax.tree.map(placed, jax.eval_shape(rollout, None, params, key, zero, cond))
    return compiled(method._apply, None, state, key, zero, x0, trajectory, cond, rewarded, None, None)


def collectives(program):
    """(kind, elements) of every array that a collective of a compiled program gives, or takes apart."""
    found = []
    kinds = "all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute|collective-broadcast"
    for line in program.as_text().splitlines():
        match = re.search(rf"= (.*?) ({kinds})(?:-start)?\(", line)
        for dims in re.findall(r"[a-z]+[0-9]+\[([0-9,]*)\]", match[1]) if match else ():
            found.append((match[2], math.prod(int(n) for n in dims.split(",") if n)))
    return found


TOKENS = 4 * 3 * 3  # of a sample
WIDTH = 32
ROWS = 64


def largest_parameter():
    return max(math.prod(p.shape) for p in jax.tree.leaves(build.abstract_params(tiny.config())))


@pytest.mark.parametrize("part", ["rollout", "data", "update"])
def test_parameters_are_gathered_and_activations_are_not(part):
    assert largest_parameter() < ROWS * TOKENS * WIDTH / 8
    program = runs()[part]
    sent = collectives(program)
    assert ("all-gather", largest_parameter()) in sent, "parameters lie in pieces"
    assert max(elements for _, elements in sent) <= largest_parameter()


def test_fewer_conditions_than_shards_and_queries_in_blocks(monkeypatch):
    monkeypatch.setattr(attention_module, "LOGITS_BYTES", 2 * TOKENS * 4 * 12)  # 12 queries fit: 3 blocks
    program = update_program(4, 16, replica=2)
    assert max(elements for _, elements in collectives(program)) <= largest_parameter()


def test_recorded_steps_on_the_host_and_rollouts_in_parts_change_nothing():
    def iteration(**fields):
        method, (params, state, key, zero, cond, _, rewarded) = setting(8, 8, **fields)
        x0, trajectory = method.rollout(params, key, zero, cond, keep_mean=True)
        gap = method.replay_gap(params, trajectory, cond)
        state, metrics, _ = method.apply(state, key, 0, x0, trajectory, cond, rewarded, None, None)
        return x0, trajectory, gap, state.params, metrics

    device = iteration()
    host = iteration(**{"train.trajectory": "host"})
    assert host[1].x.sharding.memory_kind == "pinned_host" and device[1].x.sharding.memory_kind != "pinned_host"
    for field in ("x", "x_next", "mean_old", "prev_x0"):
        np.testing.assert_array_equal(np.asarray(getattr(host[1], field))[:-1], getattr(device[1], field))
    parts = iteration(micro_batch=16, **{"rollout.micro_batch": 16, "log.step_grad_norms": False})
    assert "step_grad_norm" in device[4] and "step_grad_norm" not in parts[4]
    for other in (host, parts):
        assert float(other[2].max()) < 1e-3
        np.testing.assert_allclose(other[0], device[0], atol=2e-5)
        np.testing.assert_allclose(other[4]["grad_norm"], device[4]["grad_norm"], rtol=1e-4)
        for a, b in zip(jax.tree.leaves(other[3]), jax.tree.leaves(device[3]), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_micro_batches():
    program = update_program(16, 4, micro_batch=32)
    assert max(elements for _, elements in collectives(program)) <= largest_parameter()
