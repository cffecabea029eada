"""python -m ddrl_jax.main --config=configs/quickstart.py --workdir=runs/quickstart [--config.train.steps=40 ...]

--mode=train (the default) pre-trains, runs DDRL (or the method of objective.name) and writes the report, resuming what
the workdir holds; --mode=eval evaluates its newest checkpoint; --mode=prepare encodes a folder of videos, or writes
synthetic clips of the base model; --mode=export writes the trained weights in a published format; --mode=check looks
whether all that a run needs is there; --mode=plan says whether it fits on hardware that is not here, such as
--config.plan.target=h100:256, and what it costs; --mode=study trains the arms of a study, side by side, and writes its
page. Every field of the config, listed in ddrl_jax/config.py, can be set with --config.field=value.

Training and evaluation run in several processes where the environment says so (ddrl_jax/parallel/distributed.py); each
is started with this same command.

Exit status, the same of all processes: 0 done (or stopped by SIGTERM or Ctrl-C, state saved), 1 the run stopped itself
or a plan does not fit, 2 bad input.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags

from ddrl_jax import config as config_lib
from ddrl_jax.parallel import topology

# What is wrong with a place on disk, and not with this program.
_NO_PLACE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOTDIR, errno.EEXIST, errno.EISDIR)
# Set where this may be one of several processes.
_ONE_OF_SEVERAL = (
    *("JAX_COORDINATOR_ADDRESS", "SLURM_PROCID", "TPU_WORKER_HOSTNAMES", "JOB_COMPLETION_INDEX"),
    "OMPI_COMM_WORLD_RANK",
)
MODES = ("train", "eval", "prepare", "export", "check", "plan", "study")


def read_flags(argv: list[str]) -> tuple[Any, str, str, str]:
    """(config, config file, workdir, mode). Raises ConfigError for anything the flags cannot take."""
    values = flags.FlagValues()
    flags.DEFINE_string("workdir", None, "the run's folder: checkpoints, metrics, report", flag_values=values)
    flags.DEFINE_enum("mode", "train", MODES, "what to do: see the top of this help", flag_values=values)
    for i in range(len(argv) - 1, 0, -1):
        if argv[i - 1] in ("--config", "--workdir", "--mode"):  # with a space instead of the =
            argv[i - 1 : i + 1] = [f"{argv[i - 1]}={argv[i]}"]
    argv = [config_lib.locate(a) for a in argv]
    config_flags.DEFINE_config_file("config", None, "a file with get_config()", flag_values=values, sys_argv=argv)
    file = next((a.partition("=")[2] for a in argv if a.startswith("--config=")), "")
    if not file:
        raise config_lib.ConfigError("--config: name a file, such as --config=configs/quickstart.py")
    if not Path(file).is_file():
        raise config_lib.ConfigError(f"--config={file!r}: there is no such file")
    known = config_lib.load(file)
    try:
        rest = values(argv)[1:]
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
        reason = config_lib.bad_flag(argv, known)
        raise config_lib.ConfigError(reason or " ".join(str(error).split())) from error
    if rest:
        raise config_lib.ConfigError(f"{rest[0]!r}: is no flag; flags begin with -- and take their value after =")
    workdir = values.workdir or str(Path("runs") / Path(file).stem)
    return values.config, file, workdir, values.mode


def main(argv: list[str] | None = None) -> int:
    argv = list(sys.argv if argv is None else argv)
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    try:
        config, file, workdir, mode = read_flags(argv)
        config_lib.validate(config)
    except config_lib.ConfigError as error:
        return _bad_flags(error)
    if mode == "plan":
        return _plan(config)
    # Only now: jax takes seconds to import, and bad flags should not wait for it.
    import jax

    from ddrl_jax import rewards, train
    from ddrl_jax.parallel import distributed

    try:
        distributed.initialize()
    except ValueError as error:
        return _complain(config_lib.ConfigError(str(error)))
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(Path.home() / ".cache/ddrl_jax/xla"))
    folder = Path(workdir).absolute()
    try:
        return distributed.finish(_run(mode, config, folder, file, argv[1:]))
    except config_lib.ConfigError as error:
        return distributed.fail(2, f"error: {error}")
    except (train.RunStopped, rewards.TextUnavailable) as error:
        return distributed.fail(1, f"stopped: {error}")
    except distributed.EndedElsewhere as error:
        return distributed.fail(error.status)
    except KeyboardInterrupt:
        return distributed.fail(130, "interrupted")
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _NO_PLACE:
            return distributed.fail(1, f"stopped: {error.strerror}: {error.filename or folder}")
        if jax.process_count() == 1:
            raise
        return distributed.fail(1, traceback.format_exc())  # the others would wait for this process


def _run(mode: str, config: Any, folder: Path, file: str, arguments: list[str]) -> int:
    """What the mode does. Returns the exit status."""
    from ddrl_jax import build, check, evaluate, export, prepare, prepare_videos, report, study, train
    from ddrl_jax.parallel import distributed

    if mode not in ("train", "eval"):
        build.one_process(f"--mode={mode}")
    if mode == "study":
        study.run(config, folder, config_file=file, arguments=arguments)
        return 0
    if mode == "prepare":
        made = prepare_videos if config.data.name == "videos" else prepare
        made.run(config, folder, arguments=arguments)
        return 0
    if mode == "export":
        export.run(config, folder, arguments=arguments)
        return 0
    if mode == "check":
        return 0 if check.run(config, folder) else 2
    if config.data.name == "videos" and not prepare_videos.ensure(config, folder):
        return 0  # stopped; the same command goes on
    done = train.run(config, folder, evaluate.Evaluator) if mode == "train" else evaluate.run(config, folder)
    if not done:
        return 0

    def summarise() -> int:
        evaluate.summarise(config, folder, config_file=file, arguments=arguments)
        print(f"report: {report.write_report(folder)}")
        # stopped.json: the monitor ended the run (monitor.on_hacking).
        return 1 if mode == "train" and (folder / "stopped.json").exists() else 0

    return distributed.primary(summarise)


def _plan(config: Any) -> int:
    """--mode=plan. The environment is that of the target, and has to be before jax is imported."""
    try:
        target = topology.parse(config.plan.target)
        os.environ |= topology.environment(target)
        from ddrl_jax import plan

        return 0 if plan.run(config, target) else 1
    except topology.TargetError as error:
        return _complain(config_lib.ConfigError(f"config.plan.{error}"))
    except config_lib.ConfigError as error:
        return _complain(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _bad_flags(error: config_lib.ConfigError) -> int:
    """Ends this process, and with it those of the same run: they may have been given other flags."""
    if any(name in os.environ for name in _ONE_OF_SEVERAL):
        from ddrl_jax.parallel import distributed

        with contextlib.suppress(ValueError):  # the flags come first
            distributed.initialize()
            return distributed.fail(2, f"error: {error}")
    return _complain(error)


def _complain(error: config_lib.ConfigError) -> int:
    print(f"error: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
