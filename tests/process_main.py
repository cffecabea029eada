"""python tests/process_main.py ...: ddrl_jax.main, with data that cannot be read on one process at one step.

DDRL_TEST_DAMAGED="PROCESS:STEP"
"""

import os
import sys

import jax

from ddrl_jax import main, train

process, step = map(int, os.environ["DDRL_TEST_DAMAGED"].split(":"))
read = train.next_batch


def damaged(config, setup, batches, at, count):
    if (jax.process_index(), at, count) == (process, step, config.rollout.conditions):
        raise train.RunStopped(f"the data of step {at} cannot be read: it is damaged")
    return read(config, setup, batches, at, count)


train.next_batch = damaged
sys.exit(main.main())
