"""Orbax checkpoints of a train state: atomic, asynchronous, and tolerant of a damaged newest one."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp


class Checkpoints:
    """The checkpoints of one stage of a run, `folder/<step>`; the newest `keep` stay.

    Saving is asynchronous: the arrays are copied, then written in the background into a temporary folder that is
    renamed when whole, so a kill at any moment leaves either the checkpoint or nothing.
    """

    def __init__(self, folder: Path, *, keep: int = 2, read_only: bool = False) -> None:
        options = ocp.CheckpointManagerOptions(
            max_to_keep=None if read_only else keep,
            create=not read_only,
            cleanup_tmp_directories=not read_only,
            read_only=read_only,
        )
        self.folder = folder.absolute()
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def steps(self) -> list[int]:
        """Steps with a whole checkpoint, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, *, wait: bool = False) -> None:
        """Saves `state` as `step`; a step already saved is left as it is. `wait` returns only when it is on disk."""
        if step not in self._manager.all_steps():
            self._manager.save(step, args=ocp.args.StandardSave(state), force=True)
        if wait:
            self._manager.wait_until_finished()

    def restore(self, like: Any) -> tuple[int, Any] | None:
        """(step, state) of the newest readable checkpoint, or None when there is none.

        `like`: a tree of arrays or ShapeDtypeStructs whose shapes, dtypes and shardings the result takes; the mesh may
        differ from the one that saved. A checkpoint that cannot be read is reported and the one before it is taken.
        Raises RuntimeError when there are checkpoints and none can be read.
        """
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        steps = self.steps()
        for step in reversed(steps):
            try:
                return step, self._manager.restore(step, args=ocp.args.StandardRestore(abstract))
            except Exception as error:  # Whatever is wrong with it, the one before may be whole.
                reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
                warnings.warn(
                    f"checkpoint {self.folder.name}/{step} cannot be read ({reason}); falling back to the one before",
                    RuntimeWarning,
                    stacklevel=2,
                )
        if steps:
            raise RuntimeError(f"none of the checkpoints {steps} in {self.folder} can be read")
        return None

    def close(self) -> None:
        """Waits for what is being written."""
        self._manager.wait_until_finished()
        self._manager.close()
