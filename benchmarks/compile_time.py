"""How long the full-size train step takes to compile: `python benchmarks/compile_time.py [--config=FILE]`.

Lowers and compiles, for one CPU device and without allocating anything, what an iteration of the recipe jits: the
rollout, and the update with the policy gradient, the data loss, AdamW and the EMA. Blocks are scanned, so the depth
should cost nothing: the same is compiled with four blocks, and the ratio printed.
"""

import argparse
import time

import jax
import jax.numpy as jnp

from ddrl_jax import build
from ddrl_jax import config as config_lib
from ddrl_jax.update import Rewarded, Update


def compile_step(config) -> dict[str, float]:
    """Seconds of lowering and compiling, of the rollout and of the update."""
    mesh = build.make_mesh(config)
    setup = build.abstract_setup(config, mesh)
    method = Update(config, setup)
    conditions, latent = config.rollout.conditions, setup.latent_shape
    abstract = jax.ShapeDtypeStruct
    cond = build.cond(abstract((conditions, config.text.length, config.text.dim), jnp.bfloat16))
    cond["condition_mask"] = abstract((conditions, 1, latent[1], 1, 1), jnp.float32)
    cond["frames"] = abstract((conditions, *latent), jnp.float32)
    params = build.abstract_params(config)
    key, zero = jax.eval_shape(lambda: jax.random.key(0)), abstract((), jnp.int32)
    seconds, began = {}, time.perf_counter()
    rollout = method.rollout.func.lower(None, params, key, zero, cond, keep_mean=False)
    rollout.compile()
    seconds["rollout"] = time.perf_counter() - began

    x0, trajectory = jax.eval_shape(
        lambda p, k, s, c: method._rollout(None, p, k, s, c, keep_mean=False), params, key, zero, cond
    )
    rewarded = Rewarded(
        abstract((1, method.batch), jnp.float32), abstract((1,), jnp.float32), abstract((method.batch,), bool)
    )
    s = build.abstract_state(config)

    def step(s, key, u, x0_BX, trajectory, cond, rewarded, x0_GX):
        data = method._data(None, s.params, key, s.step, u, x0_GX, cond, trajectory)
        return method._apply(None, s, key, u, x0_BX, trajectory, cond, rewarded, data, None)

    began = time.perf_counter()
    arguments = (s, key, zero, x0, trajectory, cond, rewarded, abstract((conditions, *latent), jnp.float32))
    jax.jit(step, donate_argnums=0).lower(*arguments).compile()
    seconds["update"] = time.perf_counter() - began
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="configs/cosmos2b.py")
    config = config_lib.load(parser.parse_args().config)
    config.mesh.replica, config.mesh.fsdp, config.mesh.context = 1, 1, 1
    whole = compile_step(config)
    config.model.depth = 4
    shallow = compile_step(config)
    for name, seconds in whole.items():
        print(f"{name}: {seconds:.1f} s, {seconds / shallow[name]:.2f} x that of a depth of 4")
    print(f"the full train step: {sum(whole.values()):.1f} s")


if __name__ == "__main__":
    main()
