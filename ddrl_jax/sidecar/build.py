"""Makes a scorer's virtual environment, and has it train the scorer's weights. Standard library only."""

from __future__ import annotations

import ast
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
    "av>=17.1",
    "pillow>=11",
    "prometheus-client>=0.21",
    "redis>=5",
    "rich>=13.9",
)
# Modules the server needs, and what `serve` looks for before it starts.
MODULES = (
    *("numpy", "pydantic", "fastapi", "uvicorn", "python_multipart", "torch", "safetensors"),
    *("prometheus_client", "av", "PIL", "rich"),
)


def default_env(scorer: str) -> Path:
    """Where an environment goes unless told otherwise; of FILE.py:Class it has the file's name."""
    if ":" in scorer:
        scorer = Path(scorer.rpartition(":")[0]).stem
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
    return (*(found or FALLBACK), *scorer_requirements(scorer))


def scorer_requirements(scorer: str) -> tuple[str, ...]:
    """A scorer class's `requirements`, read off its file: what it imports need not be installed yet.

    Args:
      scorer: a name of `scorers.BUILT_IN`, or FILE.py:Class.

    Raises:
      ValueError: no such scorer, or its `requirements` is no tuple of texts.
    """
    from .scorers import BUILT_IN  # standard library only

    where, _, class_name = BUILT_IN.get(scorer, scorer).rpartition(":")
    if scorer in BUILT_IN:
        file = Path(__file__).parent / "scorers" / f"{where.rpartition('.')[2]}.py"
    else:
        file = Path(where)
        if file.suffix != ".py" or not file.is_file():
            raise ValueError(f"scorer: {scorer!r} is none of {', '.join(BUILT_IN)} and no FILE.py:Class either")
    try:
        tree = ast.parse(file.read_text())
    except SyntaxError as error:
        raise ValueError(f"scorer: {file} is no Python: line {error.lineno}: {error.msg}") from None
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if class_name not in classes:
        raise ValueError(f"scorer: {file} has no class {class_name!r}")
    for node in classes[class_name].body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "requirements" for target in targets):
            try:
                found = ast.literal_eval(node.value)  # type: ignore[attr-defined]
            except ValueError:
                found = None
            if not isinstance(found, tuple) or not all(isinstance(one, str) and one for one in found):
                raise ValueError(f"scorer: {class_name}.requirements in {file}: a plain tuple of texts is needed")
            return found
    return ()


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
    needs = requirements(scorer)
    if env == "this":
        python = Path(sys.executable)
    else:
        folder = Path(env) if env else default_env(scorer)
        python = env_python(folder)
        make_env(folder, needs)
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
