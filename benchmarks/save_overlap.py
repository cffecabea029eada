"""What an asynchronous save costs the steps under it: `python benchmarks/save_overlap.py [--width=512 --depth=4]`.

Train steps of a Cosmos DiT (the data loss, AdamW, EMA, the state donated) are timed in turns: `--steps` without a save,
then as many with one begun before the first of them, `--rounds` times. Prints the median step of both kinds and the
ratio, over all steps and over those that a save was under way in; aim: at most 1.05. `save` itself, which brings the
state to the host, is printed apart: it happens once a save, not once a step. With several processes (the variables of
jax.distributed) each saves its own pieces; `--folder` must then be one that all see.

On CPU the writer and the step share the cores, so that the ratio says more about the machine than about the trainer.
"""

import argparse
import functools
import statistics
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from ddrl_jax import build, state
from ddrl_jax import config as config_lib
from ddrl_jax.checkpoint.manager import Checkpoints
from ddrl_jax.gradients import data_gradient
from ddrl_jax.parallel import distributed
from ddrl_jax.rl.objective import Objective


def config_of(width: int, depth: int, batch: int) -> config_lib.ConfigDict:
    config = config_lib.default()
    config.model.width, config.model.depth, config.model.heads = width, depth, max(1, width // 64)
    config.pretrain.batch_size = config.train.micro_batch = config.eval.chunk = batch
    config.rollout.conditions, config.rollout.group_size = batch // 2, 2
    config_lib.validate(config)
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("width", 512), ("depth", 4), ("batch", 16), ("steps", 20), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--folder", default="", help="where to save; a temporary folder unless given")
    args = parser.parse_args()
    distributed.initialize()

    config = config_of(args.width, args.depth, args.batch)
    setup = build.build(config)
    optimizer, exponent = build.optimizer(config.pretrain), build.ema_exponent(config.pretrain)
    s = build.train_state(setup, build.init_params(config, setup.mesh, jax.random.key(0)), optimizer, exponent)
    rng = np.random.default_rng(0)
    x0 = build.to_global(setup.mesh, rng.standard_normal((args.batch, *setup.latent_shape), np.float32))
    text = rng.standard_normal((args.batch, config.text.length, config.text.dim), np.float32)
    cond = build.cond(build.to_global(setup.mesh, text))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(s, x0, cond):
        loss, _, grads = data_gradient(
            s.params, jax.random.fold_in(jax.random.key(1), s.step), x0, cond, None,
            setup=setup, objective=Objective(data_beta=1.0), group=1, micro_batch=args.batch,
        )  # fmt: skip
        return state.apply_gradients(s, grads, loss, optimizer, ema_exponent=exponent)[0]

    size = sum(x.nbytes for x in jax.tree.leaves(s))
    if distributed.is_primary():
        print(f"{jax.device_count()} x {jax.devices()[0].device_kind}: a state of {size / 1e6:.0f} MB")
    for _ in range(3):
        s = jax.block_until_ready(step(s, x0, cond))
    with tempfile.TemporaryDirectory() as scratch, Checkpoints(Path(args.folder or scratch), keep=1) as checkpoints:
        without, during, under, saving = [], [], [], []
        for number in range(args.rounds):
            for save in (False, True):
                if save:
                    began = time.perf_counter()
                    checkpoints.save(number, s)
                    saving.append(time.perf_counter() - began)
                for _ in range(args.steps):
                    busy = save and checkpoints.saving()
                    began = time.perf_counter()
                    s = jax.block_until_ready(step(s, x0, cond))
                    seconds = time.perf_counter() - began
                    (during if save else without).append(seconds)
                    if busy:
                        under.append(seconds)
            checkpoints.wait()
    if not distributed.is_primary():
        return
    alone, beside = statistics.median(without), statistics.median(during)
    print(
        f"a step: {1e3 * alone:.1f} ms alone, {1e3 * beside:.1f} ms after a save was begun: {beside / alone:.3f} times"
    )
    if under:
        ratio = statistics.median(under) / alone
        print(f"{len(under)} steps with the save under way: {1e3 * statistics.median(under):.1f} ms: {ratio:.3f} times")
    print(f"save() returned after {statistics.median(saving):.3f} s")


if __name__ == "__main__":
    main()
