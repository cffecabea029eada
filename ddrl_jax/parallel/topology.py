"""Hardware that is not here: a target such as "h100:256" as abstract devices, and the facts about its card.

JAX compiles for a topology as it would on it: `devices` are what a mesh is made of, and a program that is lowered for
that mesh is partitioned and optimised for those cards, with nothing allocated. Importing this module imports no jax:
`environment` says what has to be set before jax is.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

GIB = 1 << 30


class TargetError(ValueError):
    """A target that cannot be planned for: one line that begins with target=..."""


@dataclasses.dataclass(frozen=True)
class Card:
    """What is known of an accelerator.

    Attributes:
      platform: gpu, tpu or cpu.
      memory: bytes, as the device reports them.
      reserve: bytes of them that no program gets: CUDA context and NCCL's buffers, or a TPU runtime's own.
      peak: bfloat16 FLOP/s of dense matrix products; None: unknown.
      bandwidth: of the memory, bytes/s; None: unknown.
      link: bytes/s that a device sends to others of its host (NVLink) or of its torus (ICI); None: unknown.
      network: bytes/s that a device sends to other hosts; None where links reach them all.
      host: devices a host.
      description: fields of XLA's description of a GPU beyond those that H100, H200 and B200 share.
    """

    name: str
    platform: str
    memory: int
    reserve: int = 0
    peak: float | None = None
    bandwidth: float | None = None
    link: float | None = None
    network: float | None = None
    host: int = 8
    description: Mapping[str, int | float] = dataclasses.field(default_factory=dict)

    @property
    def usable(self) -> int:
        """Bytes that programs may fill."""
        return self.memory - self.reserve


_GPU_RESERVE = 2_000_000_000  # about: a CUDA context with cuBLAS and cuDNN, and NCCL's channels
_TPU_RESERVE = GIB // 4  # XLA offers 15.75 GiB of a v5e's 16

CARDS = {
    # NVIDIA H100 Tensor Core GPU data sheet, SXM: 80 GB, 3.35 TB/s, 989.4 TFLOP/s, NVLink 900 GB/s in both directions.
    # A DGX H100 has a 400 Gb/s adapter a GPU (DGX H100 data sheet).
    "h100": Card(
        "H100 SXM", "gpu", 84_978_434_048, _GPU_RESERVE, 989.4e12, 3.35e12, 450e9, 50e9,
        description={"major": 9, "core_count": 132, "l2_cache_size": 52_428_800, "clock_rate_ghz": 1.98},
    ),
    # NVIDIA H200 data sheet: the H100's compute and links, 141 GB, 4.8 TB/s.
    "h200": Card(
        "H200 SXM", "gpu", 151_397_597_184, _GPU_RESERVE, 989.4e12, 4.8e12, 450e9, 50e9,
        description={"major": 9, "core_count": 132, "l2_cache_size": 52_428_800, "clock_rate_ghz": 1.98},
    ),
    # NVIDIA DGX B200 data sheet, an eighth of it: 180 GB, 8 TB/s, 9 PFLOP/s of FP8 with sparsity (a quarter of which in
    # dense bfloat16), NVLink 1.8 TB/s in both directions, 400 Gb/s.
    "b200": Card(
        "B200 SXM", "gpu", 191_514_411_008, _GPU_RESERVE, 2.25e15, 8.0e12, 900e9, 50e9,
        description={"major": 10, "core_count": 148, "l2_cache_size": 132_644_864, "clock_rate_ghz": 1.965},
    ),
    # Google Cloud's pages "TPU v5e", "TPU v5p" and "TPU v6e": capacity in GiB, bandwidths a chip; of the interconnect,
    # given for both directions, half.
    "v5e": Card("TPU v5e", "tpu", 16 * GIB, _TPU_RESERVE, 197e12, 819e9, 200e9),
    "v5p": Card("TPU v5p", "tpu", 95 * GIB, _TPU_RESERVE, 459e12, 2765e9, 600e9),
    "v6e": Card("TPU v6e", "tpu", 32 * GIB, _TPU_RESERVE, 918e12, 1640e9, 400e9),
}  # fmt: skip
# Devices of a plan: more than anyone has, few enough to compile for.
_MOST, _MOST_CPUS = 65_536, 1024
FORMS = "h100:N, h200:N, b200:N, v5e:AxB, v5p:AxBxC, v6e:AxB or cpu:N"
# What compiles for it: (a module that must be there, the extra of this package that brings it).
_COMPILERS = {"gpu": ("jax_plugins.xla_cuda12", "plan-cuda"), "tpu": ("libtpu", "tpu")}
_TORUS = {"v5e": 2, "v5p": 3, "v6e": 2}  # dimensions
_GPU = """
gpu_device_info {{
  cuda_compute_capability {{ major: {major} }}
  core_count: {core_count}
  clock_rate_ghz: {clock_rate_ghz}
  fpus_per_core: 128
  device_memory_size: {memory}
  memory_bandwidth: {bandwidth:.0f}
  l2_cache_size: {l2_cache_size}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""


@dataclasses.dataclass(frozen=True)
class Target:
    """A parsed target: the card, and how many (`shape` of the torus for a TPU)."""

    text: str
    kind: str
    shape: tuple[int, ...]
    card: Card

    @property
    def count(self) -> int:
        """Devices."""
        return math.prod(self.shape)


def parse(text: str) -> Target:
    """A target from its text. Raises TargetError for what it cannot be, or where its compiler is not installed."""
    kind, _, size = text.strip().lower().partition(":")
    shape = tuple(int(n) for n in size.split("x")) if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", size) else ()
    if kind not in (*CARDS, "cpu") or len(shape) != _TORUS.get(kind, 1):
        raise TargetError(f"target={text!r}: must be {FORMS}")
    most = _MOST_CPUS if kind == "cpu" else _MOST
    if math.prod(shape) > most:
        raise TargetError(f"target={text!r}: must be at most {most:,} devices")
    if kind == "cpu":
        return Target(text, kind, shape, _this_machine(shape[0]))
    card = CARDS[kind]
    if card.platform == "gpu" and shape[0] > card.host and shape[0] % card.host:
        whole = -(-shape[0] // card.host) * card.host
        raise TargetError(
            f"target={text!r}: must be whole hosts of {card.host} above {card.host}, such as {kind}:{whole}"
        )
    module, extra = _COMPILERS[card.platform]
    if not _is_installed(module):
        raise TargetError(f"target={text!r}: needs its compiler; install it with pip install 'ddrl_jax[{extra}]'")
    return Target(text, kind, shape, card)


def environment(target: Target) -> dict[str, str]:
    """Environment variables that must be set before jax is imported, and a GPU's flags before it is first used."""
    variables = {"JAX_PLATFORMS": "cpu"}  # whatever is plugged in here is not what is planned for
    if target.kind == "cpu":
        variables["JAX_NUM_CPU_DEVICES"] = str(target.count)
    elif target.card.platform == "gpu":
        flags = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"  # both would need the card
        variables["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
        variables["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    else:
        # No metadata server is asked for a TPU that is not there, and plans may be made side by side.
        variables |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    return variables


def devices(target: Target) -> Sequence[Any]:
    """The target's devices, in the order of its hosts. Raises TargetError where there is no such topology."""
    import jax
    from jax.experimental import topologies

    if target.kind == "cpu":
        found = jax.devices("cpu")
        if len(found) < target.count:
            raise TargetError(f"target={target.text!r}: this process has {len(found)} CPU devices")
        return found[: target.count]
    card = target.card
    try:
        if card.platform == "tpu":
            name = f"{target.kind}:{'x'.join(map(str, target.shape))}"
            return topologies.get_topology_desc(platform="tpu", topology_name=name).devices
        hosts, each = -(-target.count // card.host), min(target.count, card.host)
        text = _GPU.format(name=card.name, memory=card.memory, bandwidth=card.bandwidth, **card.description)
        # topology: slices x hosts x devices a host
        shape = f"1x{hosts}x{each}"
        return topologies.get_topology_desc(
            platform="cuda", topology_name="", topology=shape, target_config=text
        ).devices
    except jax.errors.JaxRuntimeError as error:
        like = {2: "4x4, 8x8 or 16x16", 3: "2x2x1, 4x4x4 or 4x4x8"}.get(len(target.shape), "of whole hosts")
        why = " ".join(str(error).split())
        raise TargetError(
            f"target={target.text!r}: there is no such slice; its sides are such as {like} ({why:.200})"
        ) from error


def _this_machine(count: int) -> Card:
    """Of `count` CPU devices: each has its share of the memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Card("CPU", "cpu", memory // count, host=count)


def _is_installed(module: str) -> bool:
    package = module.partition(".")[0]
    return importlib.util.find_spec(package) is not None and importlib.util.find_spec(module) is not None
