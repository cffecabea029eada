"""Arrays for a process of the same host and user, in POSIX shared memory: written once, mapped by the reader.

A segment is born without a name, is locked, filled, and only then named. Whoever takes it removes the name at once, so
that what is left is a mapping that dies with its process. A maker that is killed before that leaves a named segment
without a lock (the kernel drops it, kill -9 included): `sweep`, which servers call all the time and clients when they
begin and end, removes those. Linux; elsewhere `available` is False and arrays go over HTTP. Needs numpy only.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import re
import secrets
import stat
from typing import Any

import numpy as np

try:
    import fcntl
except ImportError:  # not on Windows; `available` says so
    fcntl = None  # type: ignore[assignment]

_FOLDER = "/dev/shm"  # where Linux keeps what shm_open names
_ARRAY = re.compile(r"ddrl_[0-9a-f]{32}")
_PROOF = re.compile(r"ddrl_here_[0-9a-f]{32}")


def available() -> bool:
    """Whether this host has what `Segment` needs."""
    return fcntl is not None and hasattr(os, "O_TMPFILE") and os.access(_FOLDER, os.W_OK)


class Segment:
    """Bytes that this process has put into shared memory. `close` removes the name if nobody has taken it.

    Raises OSError where there is no room (the array then goes another way) or no shared memory.
    """

    def __init__(self, content: np.ndarray | bytes, prefix: str = "ddrl_"):
        if not available():
            raise OSError("no shared memory here")
        self.name = prefix + secrets.token_hex(16)
        array = np.ascontiguousarray(content) if isinstance(content, np.ndarray) else np.frombuffer(content, np.uint8)
        self._fd = os.open(_FOLDER, os.O_TMPFILE | os.O_RDWR, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            # write() says so when memory is full; writing into a mapping would be a SIGBUS.
            rest = array.reshape(-1).view(np.uint8).data
            while rest:
                rest = rest[os.write(self._fd, rest) :]
            with _opened("/proc/self/fd", os.O_RDONLY) as fds:  # as linkat(2) has it for O_TMPFILE
                os.link(str(self._fd), f"{_FOLDER}/{self.name}", src_dir_fd=fds, follow_symlinks=True)
        except BaseException:
            os.close(self._fd)
            raise

    def close(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{_FOLDER}/{self.name}")
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def take(name: str, nbytes: int) -> mmap.mmap:
    """Maps a segment, read only, and removes its name: the memory is free once the mapping is.

    Raises ValueError, in one line, for a name that `Segment` does not give, one that is not there, or another size.
    """
    if not _ARRAY.fullmatch(name):
        raise ValueError(f"shared.name: {name!r:.80} is no name of ours (ddrl_ and 32 hexadecimal digits)")
    path = f"{_FOLDER}/{name}"
    try:
        with _opened(path, os.O_RDONLY) as fd:
            about = os.fstat(fd)
            if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid():
                raise ValueError(f"shared.name: {name} is no segment of this server's user")
            if about.st_size != nbytes:
                raise ValueError(f"shared: {name} has {about.st_size} bytes where shape and dtype need {nbytes}")
            mapping = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ)
        os.unlink(path)
    except OSError as error:
        raise ValueError(f"shared.name: {name} cannot be had on this server's host ({error.strerror})") from None
    return mapping


def prove() -> tuple[Segment, dict[str, str]]:
    """A segment with a random content, and what `/health` says of it: whoever can read it is on this host."""
    nonce = secrets.token_bytes(32)
    segment = Segment(nonce, "ddrl_here_")
    return segment, {"name": segment.name, "sha256": hashlib.sha256(nonce).hexdigest()}


def same_host(proof: Any) -> bool:
    """Whether the server that gave this proof shares its memory with this process."""
    if not available() or not isinstance(proof, dict) or not _PROOF.fullmatch(str(proof.get("name"))):
        return False
    try:
        with _opened(f"{_FOLDER}/{proof['name']}", os.O_RDONLY) as fd:
            nonce = os.read(fd, 64)
    except OSError:
        return False
    return hashlib.sha256(nonce).hexdigest() == proof.get("sha256")


def sweep() -> int:
    """Removes the segments of this user's dead processes. Returns how many. Never touches a live one's."""
    if not available():
        return 0
    removed = 0
    for name in os.listdir(_FOLDER):
        if not _ARRAY.fullmatch(name) and not _PROOF.fullmatch(name):
            continue
        with contextlib.suppress(OSError), _opened(f"{_FOLDER}/{name}", os.O_RDONLY) as fd:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held by a maker that lives
            os.unlink(f"{_FOLDER}/{name}")
            removed += 1
    return removed


@contextlib.contextmanager
def _opened(path: str, flags: int) -> Any:
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
