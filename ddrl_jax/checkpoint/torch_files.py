"""Torch files without torch: a child process in an environment that has it turns them into safetensors and back.

Nothing is unpickled here. What the child made of a file is kept beside it and taken again while the file is the same.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from ddrl_jax.checkpoint import safetensors_files

SUFFIXES = (".pt", ".pth")
# Run as a script, not as a module: that environment may have no copy of the package, or another one.
_SCRIPT = Path(__file__).parents[1] / "sidecar/convert.py"


def to_safetensors(file: str | os.PathLike[str], python: str | os.PathLike[str] | None = None) -> Path:
    """The safetensors form of a torch file, `model.pt.safetensors` beside `model.pt`, made if it is not there yet.

    Where that folder cannot be written it lies in ~/.cache/ddrl_jax/converted. It is made anew when the torch file's
    size or time of change is no longer what it was.

    Args:
      file: the torch file.
      python: an interpreter with torch; None: see `interpreter`.

    Raises:
      ValueError: no such file, not a torch file of plain tensors, or no environment with torch.
    """
    file = Path(file)
    if not file.is_file():
        raise ValueError(f"{file} does not exist; a .pt or .pth file is needed")
    absolute = str(file.resolve())
    folder = Path.home() / ".cache/ddrl_jax/converted" / hashlib.sha256(absolute.encode()).hexdigest()[:16]
    name = f"{file.name}.safetensors"
    for out in (file.with_name(name), folder / name):
        if _is_of(out, file):
            return out
    out = file.with_name(name) if os.access(file.parent, os.W_OK) else folder / name
    command = interpreter(python)
    out.parent.mkdir(parents=True, exist_ok=True)
    print(f"{file}: converting it to {out}, once", file=sys.stderr, flush=True)
    _run(command, "--to-safetensors", file, out)
    return out


def to_torch(
    file: str | os.PathLike[str], out: str | os.PathLike[str], python: str | os.PathLike[str] | None = None
) -> None:
    """Writes a safetensors file as a flat torch state dict. Arguments and errors as in `to_safetensors`."""
    _run(interpreter(python), "--to-torch", Path(file), Path(out))


def interpreter(python: str | os.PathLike[str] | None = None) -> Path:
    """An interpreter that has torch: the one given, this one, or that of an environment made by `sidecar build`.

    Raises ValueError with the command that makes one when there is none.
    """
    if python is not None:
        if not Path(python).is_file():
            raise ValueError(f"python={str(python)!r}: there is no such interpreter")
        return Path(python)
    if importlib.util.find_spec("torch") is not None:  # looked up, not imported
        return Path(sys.executable)
    environments = Path.home() / ".cache/ddrl_jax/sidecar"
    for found in sorted(environments.glob("*/bin/python")) + sorted(environments.glob("*/Scripts/python.exe")):
        folder = found.parents[1]
        if any(any(folder.glob(f"{lib}/site-packages/torch/__init__.py")) for lib in ("lib/python*", "Lib")):
            return found
    raise ValueError(
        "torch files are read and written by an environment with torch, and there is none; make one with: "
        "python -m ddrl_jax.sidecar build --scorer digits"
    )


def _is_of(out: Path, file: Path) -> bool:
    """Whether `out` was made of `file` as it is now."""
    if not out.is_file():
        return False
    try:
        metadata = safetensors_files.read_metadata(out)
    except ValueError:
        return False
    stat = file.stat()
    want = {"source_size": str(stat.st_size), "source_mtime_ns": str(stat.st_mtime_ns), "source_version": "1"}
    return {name: metadata.get(name) for name in want} == want


def _run(python: Path, option: str, file: Path, out: Path) -> None:
    variables = dict(os.environ)
    variables.setdefault("OMP_NUM_THREADS", "1")
    if python != Path(sys.executable):
        variables.pop("PYTHONPATH", None)  # another interpreter must not see this one's packages
    # -P: the script's own folder is not searched for modules.
    command = [python, "-P", _SCRIPT, option, file.absolute(), "--out", out.absolute()]
    words = ""
    with subprocess.Popen(
        [str(part) for part in command],
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            words = line.strip() or words
            if not words.startswith("ddrl_jax.sidecar: "):
                print(words, file=sys.stderr, flush=True)
    if process.returncode:
        if words.startswith("ddrl_jax.sidecar: "):
            raise ValueError(words.removeprefix("ddrl_jax.sidecar: "))
        raise ValueError(f"{file} could not be converted: {python} ended with {process.returncode}; it said {words!r}")
