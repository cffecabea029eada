"""Makes a scorer's virtual environment, and has it train the scorer's weights. Standard library only."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

# What pyproject's `sidecar` extra says, for when the package is run from a folder without being installed.
FALLBACK = (
    "torch==2.13.0",
    "fastapi>=0.115",
    "uvicorn>=0.34",
    "python-multipart>=0.0.20",
    "httpx>=0.28",
    "numpy>=2.1",
    "pydantic>=2.10",
    "safetensors>=0.5",
    "tokenizers>=0.22",
    "transformers>=5",
)
# What scorers need beside it. The two OCR engines are light and share an environment: one is the other's judge.
_OCR = ("rapidocr==3.10.0", "ddddocr==1.6.1", "onnxruntime>=1.20")
NEEDS = {"ocr": _OCR, "ocr_judge": _OCR}
# Modules the server needs, and what `serve` looks for before it starts.
MODULES = ("numpy", "pydantic", "fastapi", "uvicorn", "python_multipart", "torch", "safetensors")


def default_env(scorer: str) -> Path:
    return Path.home() / ".cache" / "ddrl_jax" / "sidecar" / scorer


def build_command(scorer: str, env: str | os.PathLike[str]) -> str:
    """What a user types to make the environment."""
    return f"python -m ddrl_jax.sidecar build --scorer {scorer} --env {env}"


def requirements(scorer: str = "digits") -> tuple[str, ...]:
    """The `sidecar` extra of the installed package, else the same list from here; and what the scorer needs."""
    try:
        lines = importlib.metadata.requires("ddrl_jax") or []
    except importlib.metadata.PackageNotFoundError:
        lines = []
    found = [line.split(";")[0].strip() for line in lines if re.search(r"""extra\s*==\s*['"]sidecar['"]""", line)]
    return (*(found or FALLBACK), *NEEDS.get(scorer, ()))


def env_python(env: str | os.PathLike[str]) -> Path:
    """The interpreter of a virtual environment."""
    folder = "Scripts" if os.name == "nt" else "bin"
    return Path(env) / folder / ("python.exe" if os.name == "nt" else "python")


def make_env(env: Path, needs: tuple[str, ...]) -> None:
    """Makes the environment, or completes one that is there. The package goes in as a link: jax stays out.

    Raises ValueError, in one line, when pip fails.
    """
    python = env_python(env)
    if not python.exists():
        print(f"making {env}", flush=True)
        venv.create(env, with_pip=bool(needs), symlinks=os.name != "nt")
    if needs:
        print(f"installing {' '.join(needs)}", flush=True)
        done = subprocess.run([python, "-m", "pip", "install", "--quiet", *needs])
        if done.returncode:
            raise ValueError(f"env: pip could not install {' '.join(needs)} into {env} (see above)")
    where = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    link, package = Path(where) / "ddrl_jax", Path(__file__).resolve().parents[1]
    if link.is_symlink():
        link.unlink()
    if not link.exists():
        link.symlink_to(package, target_is_directory=True)


def build(scorer: str, env: str, data: str, out: str, seed: int, threads: int) -> None:
    """`sidecar build`. With env "this" the running interpreter is the environment and nothing is installed."""
    if bool(data) != bool(out):
        raise ValueError("data, out: give both, to train the scorer's weights, or neither")
    if data and not Path(data).exists():
        raise ValueError(f"data: there is no {data!r}; a folder with clips.npz, or an .npz file, is needed")
    if env == "this":
        python = Path(sys.executable)
    else:
        folder = Path(env) if env else default_env(scorer)
        python = env_python(folder)
        make_env(folder, requirements(scorer))
        print(f"environment: {folder}", flush=True)
    if data:
        command = [python, "-m", "ddrl_jax.sidecar", "train", "--scorer", scorer, "--data", data]
        command += ["--out", out, "--seed", str(seed), "--threads", str(threads)]
        done = subprocess.run([str(part) for part in command], env=child_environment(env == "this"))
        if done.returncode:
            raise SystemExit(done.returncode)


def child_environment(same_interpreter: bool) -> dict[str, str]:
    """The environment variables for a process that runs ddrl_jax.sidecar.

    With the same interpreter the package is found where it was found here; another one has its own link to it, and must
    not see this interpreter's packages.
    """
    variables = dict(os.environ)
    if same_interpreter:
        parent = str(Path(__file__).resolve().parents[2])
        old = variables.get("PYTHONPATH", "")
        variables["PYTHONPATH"] = parent + (os.pathsep + old if old else "")
    else:
        variables.pop("PYTHONPATH", None)
    variables.setdefault("OMP_NUM_THREADS", "1")
    return variables
