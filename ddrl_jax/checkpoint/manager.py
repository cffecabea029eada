"""Orbax checkpoints of a train state: atomic, asynchronous, and tolerant of a damaged newest one."""

from __future__ import annotations

import contextlib
import logging
import warnings
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from ddrl_jax.parallel import distributed


class UnreadableError(RuntimeError):
    """There are checkpoints and none can be read (all damaged, or of another network), or not the one asked for."""


class Checkpoints:
    """The checkpoints of one stage of a run, `folder/<step>`; the newest `keep` stay. Each holds state and `config`.

    Saving is asynchronous: the arrays are copied, then written in the background into a temporary folder that is
    renamed when whole, so a kill at any moment leaves either the checkpoint or nothing. Of several processes each
    writes and reads its own pieces, in a folder that all of them see; all make the same calls.

    A state that is being saved may be donated: `save` returns when it is on the host. (Where the host's memory is the
    device's, the copy is a view, and a buffer with a view is not reused.)
    """

    def __init__(
        self, folder: Path, *, keep: int = 2, read_only: bool = False, config: dict[str, Any] | None = None
    ) -> None:
        options = ocp.CheckpointManagerOptions(
            max_to_keep=None if read_only else keep,
            create=not read_only,
            cleanup_tmp_directories=not read_only,
            read_only=read_only,
        )
        self.folder = folder.absolute()
        # Orbax warns that a read-only manager is read-only.
        logging.getLogger("absl").setLevel(logging.ERROR)
        self._manager = ocp.CheckpointManager(self.folder, options=options)
        self._leaving = contextlib.ExitStack()
        self._leaving.enter_context(distributed.finished_first(self._manager.wait_until_finished))
        self._config = config or {}
        self._unreadable: set[int] = set()  # steps that `restore` gave up on

    def steps(self) -> list[int]:
        """Steps with a whole checkpoint, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, *, wait: bool = False) -> None:
        """Saves `state` as `step`; `wait` returns only when it is on disk.

        A step already saved is left as it is, unless `restore` could not read it: then it is replaced.
        """
        if step in self._unreadable:
            self._manager.delete(step)
            self._unreadable.remove(step)
        if step not in self._manager.all_steps():
            items = ocp.args.Composite(state=ocp.args.StandardSave(state), config=ocp.args.JsonSave(self._config))
            self._manager.save(step, args=items, force=True)
        if wait:
            self.wait()

    def saving(self) -> bool:
        """Whether a save is under way."""
        return self._manager.is_saving_in_progress()

    def wait(self) -> None:
        """Until nothing is being written."""
        self._manager.wait_until_finished()

    def forget_after(self, step: int) -> None:
        """Deletes the checkpoints of later steps: the run goes back to `step`."""
        self._manager.wait_until_finished()
        for later in [s for s in self.steps() if s > step]:
            self._manager.delete(later)

    def restore(self, like: Any, step: int | None = None) -> tuple[int, Any] | None:
        """(step, state) of the newest readable checkpoint, or of that of `step`, or None when there is none at all.

        `like`: a tree of arrays or ShapeDtypeStructs whose shapes, dtypes and shardings the result takes; the mesh may
        differ from the one that saved. A leaf that is `...` is not read, and is that in the result (of a read-only
        manager). A checkpoint that cannot be read is reported and the one before it is taken, but for a `step` that was
        asked for. Raises UnreadableError when there are checkpoints and none can be read, or not that one. Nothing is
        deleted here.
        """
        abstract = jax.tree.map(lambda leaf: leaf if leaf is ... else ocp.utils.to_shape_dtype_struct(leaf), like)
        args = ocp.args.StandardRestore(abstract)
        if any(leaf is ... for leaf in jax.tree.leaves(abstract)):  # which the standard form, that saves, cannot do
            args = ocp.args.PyTreeRestore(abstract, ocp.checkpoint_utils.construct_restore_args(abstract))
        steps = self.steps()
        if steps and step is not None and step not in steps:
            raise UnreadableError(f"{self.folder} has no checkpoint of step {step}; it has {_listed(steps)}")
        for tried in reversed([s for s in steps if step in (None, s)]):
            found, reason = None, ""
            try:
                found = self._manager.restore(tried, args=ocp.args.Composite(state=args)).state
            except Exception as error:  # Whatever is wrong with it, the one before may be whole.
                reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
            (unreadable,) = distributed.any_process(found is None)
            if not unreadable:
                return tried, found
            self._unreadable.add(tried)
            reason = reason or "by another process"
            if step is None:
                warnings.warn(
                    f"checkpoint {self.folder.name}/{tried} cannot be read ({reason}); falling back to the one before",
                    RuntimeWarning,
                    stacklevel=2,
                )
        if steps and step is not None:
            others = _listed([s for s in steps if s != step]) or "none"
            raise UnreadableError(f"checkpoint {step} in {self.folder} cannot be read ({reason}); others: {others}")
        if steps:
            raise UnreadableError(f"none of the checkpoints {steps} in {self.folder} can be read: {reason}")
        return None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Waits for what is being written: whatever ends the run, a save under way is finished."""
        self._manager.wait_until_finished()
        self._leaving.close()
        self._manager.close()


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps))
