"""The pure library's surface: exactly DESIGN's names, lazily, without flax, optax, torch or a config."""

import ast
import pathlib
import subprocess
import sys

import ddrl_jax

ROOT = pathlib.Path(__file__).resolve().parent.parent
NAMES = [
    "loss_fn",
    "nft_loss",
    "Objective",
    "ddrl",
    "dance_grpo",
    "flow_grpo",
    "Trajectory",
    "DataBatch",
    "group_advantages",
    "diffusion_loss",
    "sample",
    "guided",
    "EDMChurn",
    "FlowSDE",
    "DanceSDE",
    "karras_levels",
    # What the study of methods added.
    "FlowCPS",
    "mixed_advantages",
    "log_partition",
    "partition_advantages",
    "best_of_weights",
    "best_of_group",
    "random_steps",
    "window_steps",
]


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_names_are_exactly_the_documented_ones():
    assert sorted(ddrl_jax.__all__) == sorted(NAMES)
    for name in NAMES:
        assert callable(getattr(ddrl_jax, name)) and getattr(ddrl_jax, name).__doc__


def test_importing_the_package_imports_no_jax():
    assert run("import sys, ddrl_jax; print('jax' in sys.modules, 'numpy' in sys.modules)") == "False False"


def test_every_name_works_where_the_other_packages_are_missing():
    code = f"""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {{'flax', 'optax', 'torch', 'orbax', 'grain', 'ml_collections', 'pydantic'}}:
            raise ImportError(name + ' is blocked')
sys.meta_path.insert(0, Block())
from ddrl_jax import {", ".join(NAMES)}
import jax
from jax._src import xla_bridge
assert not xla_bridge._backends, 'importing started a backend'
import jax.numpy as jnp
denoise = lambda params, x, sigma, cond: params * x / (1 + sigma[:, None] ** 2)
process = EDMChurn()
x0, trajectory = sample(1.0, jax.random.key(0), None, denoise=denoise, process=process, shape=(4, 1), num_steps=6)
advantages = group_advantages(x0[:, 0], 4)
loss, metrics = loss_fn(1.0, trajectory, advantages, None, DataBatch(x0), jax.random.key(1), denoise=denoise,
                        process=process, objective=ddrl(cond_dropout=0.0))
assert jnp.isfinite(loss)
print(not {{'flax', 'optax', 'torch', 'orbax', 'grain', 'ddrl_jax.config'}} & set(sys.modules))
"""
    assert run(code) == "True"


def test_unknown_name_is_an_attribute_error():
    try:
        ddrl_jax.no_such_name  # noqa: B018
    except AttributeError as error:
        assert "no_such_name" in str(error)
    else:
        raise AssertionError("expected AttributeError")


def test_pure_packages_import_only_jax_chex_numpy_and_the_left():
    allowed = {
        "diffusion": {"jax", "chex", "numpy", "ddrl_jax.diffusion"},
        "rl": {"jax", "chex", "numpy", "ddrl_jax.diffusion", "ddrl_jax.rl"},
    }
    for package, names in allowed.items():
        files = sorted((ROOT / "ddrl_jax" / package).glob("*.py"))
        assert len(files) > 3
        for file in files:
            for node in ast.walk(ast.parse(file.read_text())):
                modules = []
                if isinstance(node, ast.Import):
                    modules = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    modules = [f"{node.module}"]
                    modules = [
                        f"{node.module}.{alias.name}" if node.module == "ddrl_jax" else module
                        for module, alias in zip(modules * len(node.names), node.names, strict=True)
                    ]
                for module in modules:
                    root = module.split(".")[0]
                    key = ".".join(module.split(".")[:2]) if root == "ddrl_jax" else root
                    assert key in names or root in sys.stdlib_module_names, f"{file.name} imports {module}"
