"""Who may know whom (CONTRIBUTING, "Where things go"), asserted on the import graph and in processes of their own."""

import ast
import subprocess
import sys

import pytest

from .paths import ROOT

PACKAGE = ROOT / "ddrl_jax"
RANK = {
    "files": 0,
    "diffusion": 0,
    "rl": 1,
    "parallel": 2,
    "models": 3,
    "data": 4,
    "checkpoint": 4,
    "rewards": 4,
    "state": 5,
    "build": 6,
    "monitor": 6,
    "scoring": 7,
    "gradients": 7,
    "export": 8,
    "update": 8,
    "plan_table": 8,
    "train": 9,
    "evaluate": 9,
    "check": 9,
    "plan": 9,
    "prepare": 10,
    "prepare_videos": 11,
    "study": 11,
    "main": 12,
}
LEAVES = {"config", "logbook"}  # know nothing of the package
APART = {"report", "sidecar"}


def part_of(module):
    return module.split(".")[1] if module.startswith("ddrl_jax.") else None


def imports(file):
    """(module, line) of all that a file imports, in functions too; `from ddrl_jax import x` is ddrl_jax.x."""
    package = "ddrl_jax." + ".".join(file.relative_to(PACKAGE).with_suffix("").parts[:-1])
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield name.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = package.rstrip(".").split(".")[: len(package.rstrip(".").split(".")) - node.level + 1]
                base = ".".join([*up, base] if base else up)
            if base == "ddrl_jax":
                for name in node.names:
                    yield f"ddrl_jax.{name.name}", node.lineno
            else:
                yield base, node.lineno
                for name in node.names:
                    yield f"{base}.{name.name}", node.lineno


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_each_knows_only_those_left_of_it(file):
    parts = file.relative_to(PACKAGE).parts
    own = parts[0].removesuffix(".py")
    if own == "__init__":
        return
    for module, line in imports(file):
        other = part_of(module)
        if other is None or other == own:
            continue
        where = f"{'/'.join(parts)}:{line} imports {module}"
        if own in APART or own in LEAVES:
            pytest.fail(f"{where}: {own} stands apart")
        if own == "rewards" and other == "sidecar":
            allowed = ("ddrl_jax.sidecar.protocol", "ddrl_jax.sidecar.shared")
            assert module.startswith(allowed) or module == "ddrl_jax.sidecar", where
        elif own in ("main", "study") and other == "report":
            pass
        elif other in LEAVES:
            assert RANK[own] > RANK["state"], f"{where}: only what runs knows the config"
        else:
            assert other not in APART and RANK[other] < RANK[own], where


def test_every_part_has_a_rank():
    parts = {f.relative_to(PACKAGE).parts[0].removesuffix(".py") for f in FILES} - {"__init__"}
    assert parts == RANK.keys() | LEAVES | APART


def run(code):
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


TRAINER = (
    "import ddrl_jax.main, ddrl_jax.train, ddrl_jax.evaluate, ddrl_jax.report, ddrl_jax.check, ddrl_jax.export, "
    "ddrl_jax.prepare_videos, ddrl_jax.models.text_encoder, ddrl_jax.checkpoint.torch_files"
)


def blocked(*modules):
    """Code that makes the modules impossible to import."""
    return f"import sys\nfor name in {modules!r}: sys.modules[name] = None\n"


def test_the_trainer_works_without_torch():
    run(blocked("torch", "transformers", "diffusers", "fastapi", "uvicorn") + TRAINER)


def test_the_trainer_never_imports_torch_where_it_is():
    run(f"import sys\n{TRAINER}\nassert not {{'torch', 'transformers', 'diffusers'}} & set(sys.modules)")


def test_the_sidecar_works_without_jax():
    pytest.importorskip("torch", reason="the sidecar's own environment has it; the test extra installs it")
    run(
        blocked("jax", "jaxlib", "flax", "optax", "orbax", "grain", "chex", "ml_collections", "sklearn")
        + "import ddrl_jax.sidecar.__main__, ddrl_jax.sidecar.server, ddrl_jax.sidecar.worker\n"
        + "import ddrl_jax.sidecar.wan_vae, ddrl_jax.sidecar.convert\n"
        + "import ddrl_jax.sidecar.scorers.digits, ddrl_jax.sidecar.scorers.digits_training"
    )


def test_the_protocol_needs_pydantic_and_numpy_only():
    run(blocked("torch", "jax", "fastapi", "httpx") + "import ddrl_jax.sidecar.protocol")


def test_importing_the_package_starts_no_backend():
    run("import sys, ddrl_jax\nassert 'jax' not in sys.modules")


def test_the_pure_library_needs_neither_flax_nor_optax_nor_a_config():
    run(
        blocked("flax", "optax", "torch", "ml_collections", "orbax", "grain")
        + "import ddrl_jax\nfor name in ddrl_jax.__all__: getattr(ddrl_jax, name)"
    )
