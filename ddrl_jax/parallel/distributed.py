"""Several processes as one run: how they find each other, agree, share rows, and end together.

Every process runs the same program on its own devices. Two channels join them. Collectives on the devices (`jax.jit`
over the mesh, `any_process`, `share_rows`) are fast and must be called by all processes in the same order. The
coordinator's key-value store needs no devices: what process 0 alone does (files, the sidecar, judges) is told to the
others through it (`primary`), however long it takes, and so is a failure.

Ending. A process that fails says so in the store (`fail`); a thread of every other one listens, and ends it with the
same status where it is stuck in a collective that will never be whole. The first to fail prints its line, nobody else.

With one process all of this is nothing: no thread, no store, no collective. Knows nothing of configs and models.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src import clusters, distributed  # of these two, what `jax.distributed` finds and holds has no public name
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_FAULT, _SAID, _END = "ddrl/fault", "ddrl/said", "ddrl/end"  # keys and barriers of the store
_FOREVER_MS = 7 * 24 * 3600 * 1000  # process 0 may train a scorer or decode videos meanwhile
_LEAVE_S = 600.0  # most seconds for the others to notice that the run ends, and to finish their saves
_Value = TypeVar("_Value")


class EndedElsewhere(RuntimeError):
    """Another process ended the run, and has printed why; `status` is everyone's exit status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"another process ended the run with status {status}")
        self.status = status


# --------------------------------------------------------------------------------------------------- the start


def initialize() -> None:
    """Joins the other processes where there are any; before the first use of a backend.

    Several processes are: JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID; a Slurm step of more than one
    task; a TPU slice, indexed Kubernetes job or Open MPI run of several, as jax finds them. Otherwise nothing happens.

    Raises:
      ValueError: one line: a variable that is missing or wrong, or no connection.
    """
    settings = _settings()
    if settings is None:
        return
    # SIGTERM is the trainer's: it saves. jax's own service would take it first.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(**settings)
    except (RuntimeError, ValueError, TypeError) as error:
        raise ValueError(f"jax.distributed: {' '.join(str(error).split())}") from error
    threading.Thread(target=_listen, name="end of the run", daemon=True).start()


def several() -> bool:
    """Whether the environment says that this is one of several processes. Starts nothing."""
    return _settings() is not None


def _settings() -> dict[str, Any] | None:
    """Arguments of `jax.distributed.initialize`; None: one process."""
    given = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    slurm = int(os.environ.get("SLURM_STEP_NUM_TASKS", os.environ.get("SLURM_NTASKS", "1")) or 1)
    if len(given) == len(VARIABLES):
        return _explicit(*given.values())
    if slurm > 1 and _cluster("slurm"):
        return _slurm(slurm)
    found = _found()
    if given and (found is None or len(given) > 1 or VARIABLES[0] not in given):
        missing = ", ".join(name for name in VARIABLES if name not in given)
        raise ValueError(f"{missing}: not set, but {', '.join(given)} is; several processes need all three")
    return found


def _explicit(address: str, count: str, index: str) -> dict[str, Any] | None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"JAX_COORDINATOR_ADDRESS={address!r}: must be HOST:PORT, of process 0")
    if not count.isdecimal() or int(count) < 1:
        raise ValueError(f"JAX_NUM_PROCESSES={count!r}: must be a whole number, at least 1")
    if not index.isdecimal() or int(index) >= int(count):
        raise ValueError(f"JAX_PROCESS_ID={index!r}: must be in 0 .. {int(count) - 1}, as JAX_NUM_PROCESSES={count}")
    if int(count) == 1:
        return None
    return {
        "coordinator_address": address,
        "num_processes": int(count),
        "process_id": int(index),
        "cluster_detection_method": "deactivate",
    }


def _slurm(tasks: int) -> dict[str, Any]:
    """One process a node has all its devices, one a GPU has that GPU, whether Slurm binds it to the task or not."""
    cluster = _cluster("slurm")
    assert cluster is not None
    on_this_node = os.environ.get("SLURM_STEP_TASKS_PER_NODE", os.environ.get("SLURM_TASKS_PER_NODE", ""))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    bound = bool(visible) and "," not in visible
    alone = bound or on_this_node.partition("(")[0] == "1"
    return {
        "coordinator_address": os.environ.get(VARIABLES[0])
        or cluster.get_coordinator_address(None, os.environ.get("JAX_COORDINATOR_PORT")),
        "num_processes": tasks,
        "process_id": cluster.get_process_id(),
        "local_device_ids": None if alone or os.environ.get("JAX_LOCAL_DEVICE_IDS") else cluster.get_local_process_id(),
        "cluster_detection_method": "deactivate",
    }


def _cluster(name: str) -> Any:
    """jax's description of a kind of cluster, where this process runs in one."""
    kinds = clusters.ClusterEnv._cluster_types
    return next((kind for kind in kinds if kind.name == name and kind.is_env_present()), None)


def _found() -> dict[str, Any] | None:
    """{} where jax finds several processes of a TPU slice, a Kubernetes job or Open MPI by itself."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    for kind in clusters.ClusterEnv._cluster_types:
        if kind.opt_in_only_method or kind.name == "slurm":
            continue
        if "tpu" in kind.name and platforms and "tpu" not in platforms:
            continue
        if kind.name == "k8s" and "JOB_COMPLETION_INDEX" not in os.environ:
            continue  # any pod is in Kubernetes; only an indexed job is of several
        try:
            if kind.is_env_present():
                return {} if kind.get_process_count() > 1 else None
        except (RuntimeError, ValueError, OSError) as error:
            raise ValueError(f"jax.distributed: {kind.name}: {' '.join(str(error).split())}") from error
    return None


# --------------------------------------------------------------------------------------------------------- words


_calls = itertools.count()


def is_primary() -> bool:
    """Whether this is process 0, which owns the workdir."""
    return jax.process_index() == 0


def primary(do: Callable[[], _Value]) -> _Value:
    """`do()`, called by process 0 only; the others wait for its value, however long that takes.

    With several processes the value goes through JSON: tuples become lists. All processes call this in the same order.
    """
    if jax.process_count() == 1:
        return do()
    key = f"{_SAID}/{next(_calls)}"
    if is_primary():
        said = json.dumps(do())
        _store().key_value_set(key, said)
    else:
        said = _store().blocking_key_value_get(key, _FOREVER_MS)
    return json.loads(said)


def any_process(*flags: bool) -> tuple[bool, ...]:
    """Each flag: whether it is set on any process. Waits for all processes and for the devices."""
    if jax.process_count() == 1:
        return flags
    return tuple(map(bool, multihost_utils.process_allgather(np.array(flags)).any(axis=0)))


class Told:
    """Flags that any process may set, known to all a step later, so that the devices are not waited for.

    `tell` is called before a step is dispatched and `told` after: what it gives was ready before that step began.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._sharding = NamedSharding(mesh, P(mesh.axis_names))
        self._any = jax.jit(lambda flags_NF: flags_NF.any(axis=0), out_shardings=NamedSharding(mesh, P()))
        self._flags: Any = ()

    def tell(self, *flags: bool) -> None:
        if jax.process_count() == 1:
            self._flags = flags
            return
        shape = (self._sharding.mesh.size, len(flags))
        own = np.array([flags])
        self._flags = self._any(jax.make_array_from_callback(shape, self._sharding, lambda _: own))

    def told(self) -> tuple[bool, ...]:
        return tuple(map(bool, np.asarray(self._flags)))


def _store() -> Any:
    return distributed.global_state.client


# ---------------------------------------------------------------------------------------------------------- rows


def local_mesh(mesh: Mesh) -> Mesh:
    """A mesh of this process's devices, with the same axes: for what each process computes for itself."""
    if jax.process_count() == 1:
        return mesh
    devices = np.array(jax.local_devices())
    sizes = [len(devices) if axis == "fsdp" else 1 for axis in mesh.axis_names]
    return Mesh(devices.reshape(sizes), mesh.axis_names, axis_types=mesh.axis_types)


def own_rows(sharding: Sharding, shape: Sequence[int]) -> np.ndarray:
    """The rows of an array of `shape` that this process's devices hold, int64, ascending."""
    pieces = sharding.addressable_devices_indices_map(tuple(shape)).values()
    return np.unique(np.concatenate([np.arange(shape[0])[piece[0]] for piece in pieces if piece]))


def from_rows(sharding: Sharding, rows: np.ndarray, shape: Sequence[int]) -> jax.Array:
    """The global array of `shape` of which this process has `rows`, those of `own_rows`, or all of them."""
    rows = np.asarray(rows)
    own = np.arange(shape[0]) if len(rows) == shape[0] else own_rows(sharding, shape)

    def piece(index: Any) -> np.ndarray:
        wanted = np.arange(shape[0])[index[0]]
        return rows[np.searchsorted(own, wanted)][(slice(None), *index[1:])]

    return jax.make_array_from_callback(tuple(shape), sharding, piece)


@functools.cache
def _placing(sharding: Sharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: x, out_shardings=sharding)


def placed(x: jax.Array, sharding: Sharding) -> jax.Array:
    """The array cut in another way. A collective where its pieces move between processes."""
    return _placing(sharding)(x)


def to_host(x: jax.Array) -> np.ndarray:
    """All of an array, on every process. A collective where its pieces lie on several."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    return multihost_utils.process_allgather(x, tiled=True)


def first_copies(x: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """(rows, x[rows]) of an array that is cut along its first axis only: those whose first copy is on this process.

    Over all processes every row is there once.
    """
    shards = {s.index[0].start or 0: s.data for s in x.addressable_shards if s.replica_id == 0}
    if not shards:
        return np.zeros(0, np.int64), np.zeros((0, *x.shape[1:]), x.dtype)
    data = {start: np.asarray(shards[start]) for start in sorted(shards)}
    rows = [np.arange(start, start + len(piece)) for start, piece in data.items()]
    return np.concatenate(rows), np.concatenate(list(data.values()))


def share_rows(rows: np.ndarray, values_NF: np.ndarray, count: int) -> np.ndarray:
    """float32 (count, F) on every process, of the rows that each has; NaN where nobody has one."""
    out = np.full((count, values_NF.shape[1]), np.nan, np.float32)
    if jax.process_count() == 1:
        out[rows] = values_NF
        return out
    # Every process sends as much as the one that has most; a number of a row is exact in float32.
    width = int(multihost_utils.process_allgather(np.array(len(rows))).max())
    sent = np.full((width, 1 + values_NF.shape[1]), -1.0, np.float32)
    sent[: len(rows)] = np.column_stack([rows, values_NF])
    for part in multihost_utils.process_allgather(sent):
        part = part[part[:, 0] >= 0]
        out[part[:, 0].astype(np.int64)] = part[:, 1:]
    return out


_NOTE_BYTES = 240


def share_notes(text: str, *numbers: float) -> list[tuple[Any, ...]]:
    """(text, *numbers) of every process, on every process; the text's first 240 bytes, numbers in float32."""
    if jax.process_count() == 1:
        return [(text, *numbers)]
    letters = np.frombuffer(text.encode()[:_NOTE_BYTES].ljust(_NOTE_BYTES), np.uint8).astype(np.float32)
    sent = np.concatenate([np.array(numbers, np.float32), letters])
    said = []
    for part in multihost_utils.process_allgather(sent):
        words = part[len(numbers) :].astype(np.uint8).tobytes().decode(errors="ignore").rstrip()
        said.append((words, *map(float, part[: len(numbers)])))
    return said


# ------------------------------------------------------------------------------------------------------- the end


_ending = threading.Event()  # this process goes by itself: the listener leaves it alone
_leaving = threading.Lock()
_finish_first: list[Callable[[], None]] = []


@contextlib.contextmanager
def finished_first(wait: Callable[[], None]) -> Any:
    """While the block runs: what the listener waits for before it ends the process, such as a save under way."""
    _finish_first.append(wait)
    try:
        yield
    finally:
        _finish_first.remove(wait)


def ending() -> None:
    """All processes have agreed that the run ends, and each goes by itself."""
    _ending.set()


def ended_elsewhere() -> EndedElsewhere:
    """After `ending`, on a process that has no failure of its own: the other's, once it has said so."""
    return EndedElsewhere(json.loads(_store().blocking_key_value_get(_FAULT, _FOREVER_MS))["status"])


def fail(status: int, line: str = "") -> int:
    """The run ends on this process with `status`, and so on all. Prints `line`, if no other process has said why.

    Of several processes this one is gone with the call. Returns the status where there is one.
    """
    if _leaving.locked():
        threading.Event().wait()  # the listener ends this process: what failed here only follows from that
    if _store() is None:
        if line:
            print(line, file=sys.stderr)
        return status
    _ending.set()
    try:
        _store().key_value_set(_FAULT, json.dumps({"status": status}))
        if line:
            print(line, file=sys.stderr)
    except jax.errors.JaxRuntimeError:
        try:  # another one was first
            status = json.loads(_store().key_value_try_get(_FAULT))["status"]
        except jax.errors.JaxRuntimeError:  # or the store is gone, and process 0 with it
            if line:
                print(line, file=sys.stderr, flush=True)
            os._exit(status)
    _leave(status)
    return status


def finish(status: int) -> int:
    """The run is done: waits for the others, so that none sees a connection break. Returns the status."""
    if _store() is not None:
        _store().wait_at_barrier(_END + "/well", _FOREVER_MS)
        _ending.set()
        jax.distributed.shutdown()
    return status


def _listen() -> None:
    store = _store()
    while not _ending.is_set():
        try:
            fault = store.blocking_key_value_get(_FAULT, 5000)
        except jax.errors.JaxRuntimeError:  # nothing yet
            time.sleep(0.2)
            continue
        if not _ending.is_set():
            _leave(json.loads(fault)["status"])


def _leave(status: int) -> None:
    """Ends this process, together with the others: the coordinator must not go before they know."""
    if not _leaving.acquire(blocking=False):
        threading.Event().wait()  # the other thread's call ends this one too

    def orderly() -> None:
        for wait in list(_finish_first):
            wait()
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            _store().wait_at_barrier(_END, int(_LEAVE_S * 1000))
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.distributed.shutdown()

    thread = threading.Thread(target=orderly, name="leaving", daemon=True)
    thread.start()
    thread.join(2 * _LEAVE_S)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by an exception: the main thread may be in a collective that never ends, and the backend's end waits for it.
    os._exit(status)
