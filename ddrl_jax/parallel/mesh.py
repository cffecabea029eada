"""The device mesh and every sharding rule: the one place that names mesh axes.

Axes: `replica` (whole copies of the parameters), `fsdp` (a group of data that shares one copy) and `context` (the
sequence of one sample). Rollouts, conditions and data are cut over replica x fsdp, activations along the sequence over
context as well, and parameters, optimizer state and EMA over fsdp x context (HSDP: replica x the rest). Knows nothing
of models.

Dims: B batch, T frame, L token of a frame, N head, K head width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("replica", "fsdp", "context")
BATCH = P(("replica", "fsdp"))
_CUT = ("fsdp", "context")  # what one axis of a parameter is cut over
_WHOLE = ("scale", "bias")  # names of parameters that are vectors: too small to cut


def make_mesh(replica: int = 1, fsdp: int = -1, context: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A (replica, fsdp, context) mesh over `devices`, all of all processes by default; one size may be -1, "the rest".

    Raises ValueError when the sizes do not multiply to the number of devices.
    """
    sizes = {"replica": replica, "fsdp": fsdp, "context": context}
    count = jax.device_count() if devices is None else len(devices)
    free = [axis for axis, size in sizes.items() if size == -1]
    given = int(np.prod([size for size in sizes.values() if size != -1]))
    shown = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    if len(free) > 1:
        raise ValueError(f"config.mesh: {shown} does not give {count} devices: at most one may be -1, the rest")
    if free and count % given:
        others = " * ".join(axis for axis in sizes if axis != free[0])
        raise ValueError(f"config.mesh: {shown} does not give {count} devices: {others} = {given} must divide them")
    if not free and given != count:
        raise ValueError(f"config.mesh: {shown} does not give {count} devices: the product is {given}")
    if free:
        sizes[free[0]] = count // given
    # A TPU's torus need not have a side of every size: context 2 on 4x4x8 takes half of one.
    placed = mesh_utils.create_device_mesh(tuple(sizes.values()), devices, allow_split_physical_axes=True)
    return Mesh(placed, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Leading axis over replica x fsdp: rollouts, conditions and data."""
    return NamedSharding(mesh, BATCH)


def batch_shards(mesh: Mesh) -> int:
    """How many pieces the batch axis is cut into."""
    return mesh.shape["replica"] * mesh.shape["fsdp"]


# ----------------------------------------------------------------------------------------------------- activations


def batch_spec(mesh: Mesh, rows: int) -> Any:
    """What an axis of `rows` samples is cut over: replica x fsdp, or replica alone (64 conditions of 512 rollouts on 64
    replicas of 8), or nothing, as the shards divide it."""
    if rows % batch_shards(mesh) == 0:
        return BATCH[0]
    return _replica_spec(mesh, rows)


def sequence_axis(mesh: Mesh, frames: int, tokens: int) -> int | None:
    """Which axis of (B, T, L, ...) is cut over context: 1, the frames, or 2, a frame's tokens (images); None: neither.

    Raises ValueError where context divides neither.
    """
    context = mesh.shape["context"]
    if context == 1:
        return None
    for axis, size in ((1, frames), (2, tokens)):
        if size % context == 0:
            return axis
    raise ValueError(
        f"config.mesh.context={context}: must divide a latent's {frames} frames, or else the {tokens} tokens of a frame"
    )


def latent_spec(mesh: Mesh, shape: Sequence[int], lead: int = 0) -> P:
    """Of latents (B,C,T,h,w), with `lead` axes before them: B over replica x fsdp, T over context, each where it can
    be cut. Images stay whole: their tokens are cut."""
    rows, _, frames = shape[lead : lead + 3]
    context = mesh.shape["context"]
    return P(*[None] * lead, batch_spec(mesh, rows), None, "context" if frames % context == 0 else None)


def latent_sharding(mesh: Mesh, shape: Sequence[int], lead: int = 0) -> NamedSharding:
    """`latent_spec` on the mesh."""
    return NamedSharding(mesh, latent_spec(mesh, shape, lead))


def text_sharding(mesh: Mesh, shape: Sequence[int]) -> NamedSharding:
    """Of text features (G,S,D): their width over fsdp x context, as the kernel that projects them (`product` with
    gather=False), and conditions over replica; where the width cannot be cut, conditions over replica x fsdp."""
    size = mesh.shape["fsdp"] * mesh.shape["context"]
    if size > 1 and shape[-1] % size == 0:
        return NamedSharding(mesh, P(_replica_spec(mesh, shape[0]), None, _CUT))
    return NamedSharding(mesh, P(batch_spec(mesh, shape[0])))


def arriving_text_sharding(mesh: Mesh, shape: Sequence[int]) -> NamedSharding:
    """Of text features (G,S,D) as processes make them, each those of its own conditions: `text_sharding` where nothing
    has to move for that, because conditions are not cut over fsdp; else cut along conditions only."""
    rows = batch_spec(mesh, shape[0])
    moves = rows is not None and "fsdp" in rows and mesh.shape["fsdp"] > 1
    return NamedSharding(mesh, P(rows)) if moves else text_sharding(mesh, shape)


def _replica_spec(mesh: Mesh, rows: int) -> str | None:
    return "replica" if rows % mesh.shape["replica"] == 0 else None


def pin(mesh: Mesh | None, x: jax.Array, *spec: Any) -> jax.Array:
    """x laid out as the spec says, here and in its gradient. A no-op without a mesh.

    Parameters are cut over fsdp x context as well: where nothing says how activations lie, the compiler may as well
    gather every device's activations as the parameters.
    """
    if mesh is None or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


def pin_tokens(mesh: Mesh | None, x: jax.Array) -> jax.Array:
    """Activations (B,T,L,...) laid out: B over replica x fsdp, T or else L over context. T = 1 or L = 1 stay whole."""
    if mesh is None:
        return x
    spec: list[Any] = [batch_spec(mesh, x.shape[0]), None, None]
    context = mesh.shape["context"]
    if context > 1:
        spec[1] = "context" if x.shape[1] % context == 0 else None
        spec[2] = "context" if spec[1] is None and x.shape[2] % context == 0 else None
    return pin(mesh, x, *spec[: x.ndim])


def pin_text(mesh: Mesh | None, x: jax.Array) -> jax.Array:
    """A text's features (B,S,D), one a sample, laid out: B over replica x fsdp, S over context where it can be cut."""
    if mesh is None:
        return x
    cut = x.shape[1] % mesh.shape["context"] == 0
    return pin(mesh, x, batch_spec(mesh, x.shape[0]), "context" if cut else None)


def pin_latents(mesh: Mesh | None, x: jax.Array) -> jax.Array:
    """Latents (B,C,T,h,w) laid out by `latent_spec`. A no-op without a mesh."""
    return x if mesh is None else pin(mesh, x, *latent_spec(mesh, x.shape))


def on_host(mesh: Mesh, x: jax.Array, lead: int = 0) -> jax.Array:
    """Latents put in the memory of the hosts, laid out as on the devices (`latent_spec`); within a jitted function."""
    return jax.device_put(pin(mesh, x, *latent_spec(mesh, x.shape, lead)), jax.memory.Space.Host)


def on_device(mesh: Mesh, x: jax.Array, lead: int = 1) -> jax.Array:
    """Latents back from there; those that never were stay as they are."""
    if jax.typeof(x).memory_space != jax.memory.Space.Host:
        return x
    return pin(mesh, jax.device_put(x, jax.memory.Space.Device), *latent_spec(mesh, x.shape, lead))


# ------------------------------------------------------------------------------------------------------ parameters


def kernel_spec(mesh: Mesh, shape: Sequence[int]) -> P:
    """Of a kernel (..., d_in, d_out): d_in over fsdp x context, or d_out where it does not divide, or neither."""
    over = tuple(axis for axis in _CUT if axis in mesh.axis_names)  # another program's mesh may have no context
    size = math.prod(mesh.shape[axis] for axis in over)
    for axis in (-2, -1):
        if len(shape) >= -axis and shape[axis] % size == 0 and size > 1:
            return P(*[over if a == axis else None for a in range(-len(shape), 0)])
    return P()


def fsdp_sharding(mesh: Mesh, tree: Any) -> Any:
    """A sharding for each leaf of parameters, of their moments or averages: `kernel_spec`, but whole for vectors."""

    def rule(path: Any, leaf: Any) -> NamedSharding:
        whole = leaf.ndim == 0 or any(str(getattr(k, "key", getattr(k, "name", ""))) in _WHOLE for k in path)
        return NamedSharding(mesh, P() if whole else kernel_spec(mesh, leaf.shape))

    return jax.tree_util.tree_map_with_path(rule, tree)


def product(x: jax.Array, kernel: jax.Array, mesh: Mesh, gather: bool = True) -> jax.Array:
    """x (..., d_in) @ kernel (d_in, d_out) in x's dtype, for a kernel that is cut by `kernel_spec`.

    The kernel is cast first and gathered then: half the bytes where x is bfloat16. Its gradient leaves the product in
    the kernel's own dtype, so that it is summed over devices in float32, and goes to the shard it belongs to. With
    `gather` False the kernel stays where it is and x has its d_in cut likewise: partial products are summed, which is
    less to send where d_in is long and the rows are few.
    """
    if mesh.shape["context"] > 1 or not gather:
        return _product(x, kernel, mesh, gather)
    # Rows in one axis: with more, the product's weight gradient is preceded by a transposing copy of both operands on
    # CPU, which costs more than the product. Rows that are cut along two axes cannot be merged without sending them.
    return _product(x.reshape(-1, x.shape[-1]), kernel, mesh, gather).reshape(*x.shape[:-1], -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product(x: jax.Array, kernel: jax.Array, mesh: Mesh, gather: bool) -> jax.Array:
    y = x @ _placed(kernel, x.dtype, mesh, gather)
    return y if gather else pin(mesh, y, _replica_spec(mesh, y.shape[0]))


def _placed(kernel: jax.Array, dtype: Any, mesh: Mesh, gather: bool) -> jax.Array:
    kernel = pin(mesh, kernel.astype(dtype), *kernel_spec(mesh, kernel.shape))
    return pin(mesh, kernel) if gather else kernel


def _product_forward(x: jax.Array, kernel: jax.Array, mesh: Mesh, gather: bool) -> tuple[jax.Array, Any]:
    return _product(x, kernel, mesh, gather), (x, kernel)


def _product_backward(mesh: Mesh, gather: bool, kept: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = kept
    dx = dy @ _placed(kernel, x.dtype, mesh, gather).T
    over = tuple(range(x.ndim - 1))
    dkernel = jax.lax.dot_general(
        x, dy, ((over, over), ((), ())), preferred_element_type=jnp.promote_types(kernel.dtype, x.dtype)
    )
    return dx, pin(mesh, dkernel.astype(kernel.dtype), *kernel_spec(mesh, kernel.shape))


_product.defvjp(_product_forward, _product_backward)
