"""Starts a run in several processes on this machine's CPU, each with devices of its own."""

import contextlib
import os
import socket
import subprocess
import sys

from .paths import ROOT

CONFIG = ROOT / "tests/processes_config.py"
# Programs are compiled quickly and run slowly: these runs compile more than they compute.
FAST_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def environments(count, devices, **variables):
    """The environment of each process of a run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    common = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "XLA_FLAGS": FAST_COMPILE,
        "JAX_NUM_CPU_DEVICES": str(devices),
        **variables,
    }
    if count == 1:
        return [common]
    joined = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count)}
    return [{**common, **joined, "JAX_PROCESS_ID": str(i)} for i in range(count)]


def start(commands, environments):
    """One process a command, with its output as text."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    return [
        subprocess.Popen([sys.executable, *command], env=env, **pipes)
        for command, env in zip(commands, environments, strict=True)
    ]


def finish(processes, timeout=240):
    """[(exit status, output, errors)] of all, which must end by themselves."""
    ended = []
    with contextlib.ExitStack() as stack:
        for process in processes:
            stack.callback(process.kill)
        for process in processes:
            # Pipes are small, so that what the others say meanwhile must fit into one: these runs say little.
            out, err = process.communicate(timeout=timeout)
            ended.append((process.returncode, "\n".join(x for x in out.splitlines() if "[Gloo]" not in x), err))
    return ended


def run(workdir, count, devices, *arguments, each=None, module=("-m", "ddrl_jax.main"), **variables):
    """Starts `ddrl_jax.main` in `count` processes; `each`: more arguments of every single one."""
    common = [*module, f"--config={CONFIG}", f"--workdir={workdir}", *arguments]
    commands = [[*common, *(each[i] if each else ())] for i in range(count)]
    return start(commands, environments(count, devices, **variables))
