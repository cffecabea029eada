"""Files that are whole or not there. Knows nothing of what is in them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole(file: Path) -> Iterator[Path]:
    """A path to write to, which becomes `file` when the block ends well: beside it, synced to disk, then renamed.

    It is hidden and has the process's id in its name, so that two writers of one file do not meet.
    """
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        yield partial
        with partial.open("rb+") as f:
            os.fsync(f.fileno())
        umask = os.umask(0)
        os.umask(umask)
        partial.chmod(0o666 & ~umask)  # whatever the writer made of it
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)
