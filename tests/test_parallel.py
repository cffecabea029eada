"""How a batch lies on eight devices: what the compiled rollout and update send, hold and compute."""

import dataclasses
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
from ddrl_jax.parallel import attention as attention_module
from ddrl_jax.parallel import mesh as mesh_lib

from . import tiny

# ---- pin_batch -------------------------------------------------------------------------------------------------------


def test_a_pinned_batch_is_cut_and_so_is_its_gradient():
    mesh = mesh_lib.make_mesh(replica=2, fsdp=2, context=2)
    x = jnp.arange(24.0).reshape(8, 3)

    @jax.jit
    def f(x):
        y, pull = jax.vjp(functools.partial(mesh_lib.pin_batch, mesh), x)
        return y, pull(jnp.ones_like(y))[0]

    for y in f(x):
        assert y.sharding.is_equivalent_to(mesh_lib.batch_sharding(mesh), y.ndim)
        assert y.sharding.shard_shape(y.shape) == (2, 3)
    np.testing.assert_array_equal(f(x)[0], x)


def test_a_batch_that_cannot_be_cut_stays_as_it_is():
    mesh, x = mesh_lib.make_mesh(), jnp.zeros((12, 3))
    assert mesh_lib.pin_batch(mesh, x) is x and mesh_lib.pin_batch(None, x) is x


# ---- rollout, data loss and update -----------------------------------------------------------------------------------


def setting(conditions, group, *, pinned, replica=1, micro_batch=None):
    """A method on eight devices with what its functions take: (method, {name: arguments})."""
    config = tiny.config()
    config.mesh.replica, config.mesh.fsdp, config.mesh.context = replica, 8 // replica, 1
    config.rollout.conditions, config.rollout.group_size = conditions, group
    config.train.micro_batch = micro_batch or conditions * group
    config.objective.data_beta = 0.1
    config.model.remat = "full"
    setup = build.build(config)
    denoise = dataclasses.replace(setup.denoise, mesh=setup.mesh if pinned else None)
    method = update.Update(config, dataclasses.replace(setup, denoise=denoise))

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
def runs(pinned):
    """{part: (program, result)} of a rollout, a data loss and an update: 8 conditions, 8 rollouts each."""
    method, (params, state, key, zero, cond, clean, rewarded) = setting(8, 8, pinned=pinned)
    parts = {}

    def run(name, f, *args):
        program = compiled(f, *args)
        parts[name] = program, program(*args)
        return parts[name][1]

    rollout = functools.partial(method._rollout, keep_mean=False)
    x0, trajectory = run("rollout", rollout, None, params, key, zero, cond)
    data = run("data", method._data, None, params, key, zero, zero, clean, cond, trajectory)
    run("update", method._apply, None, state, key, zero, x0, trajectory, cond, rewarded, data, None)
    return parts


def update_program(conditions, group, **options):
    """The update alone, compiled for a rollout that was never run."""
    method, (params, state, key, zero, cond, _, rewarded) = setting(conditions, group, pinned=True, **options)
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
    everything = ROWS * TOKENS * WIDTH
    assert largest_parameter() < everything / 8
    program, loose = (runs(pinned)[part][0] for pinned in (True, False))
    sent = collectives(program)
    assert ("all-gather", largest_parameter()) in sent, "parameters lie in pieces"
    assert max(elements for _, elements in sent) <= largest_parameter()
    # The control: left to itself the compiler gathers the tokens of all devices on every one.
    assert ("all-gather", everything) in collectives(loose)


@pytest.mark.parametrize("part", ["rollout", "data", "update"])
def test_a_device_holds_its_own_activations(part):
    pinned, loose = (runs(pinned)[part][0].memory_analysis().temp_size_in_bytes for pinned in (True, False))
    assert pinned < 0.75 * loose, (pinned, loose)


def test_the_numbers_are_the_same():
    pinned, loose = ({name: result for name, (_, result) in runs(pinned).items()} for pinned in (True, False))
    for x in (pinned["rollout"][0], *(getattr(pinned["rollout"][1], f) for f in ("x", "x_next"))):
        assert "fsdp" in str(x.sharding.spec), "rollouts and their record stay cut"
    for a, b in zip(jax.tree.leaves(pinned), jax.tree.leaves(loose), strict=True):
        if jnp.issubdtype(a.dtype, jnp.floating):
            size = np.abs(np.asarray(b)[np.isfinite(b)]).max(initial=0.0)
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * size)
        else:
            np.testing.assert_array_equal(a, b)


def test_fewer_conditions_than_shards_and_queries_in_blocks(monkeypatch):
    monkeypatch.setattr(attention_module, "LOGITS_BYTES", 2 * TOKENS * 4 * 12)  # 12 queries fit: 3 blocks
    program = update_program(4, 16, replica=2)
    assert max(elements for _, elements in collectives(program)) <= largest_parameter()


def test_micro_batches():
    program = update_program(16, 4, micro_batch=32)
    assert max(elements for _, elements in collectives(program)) <= largest_parameter()
