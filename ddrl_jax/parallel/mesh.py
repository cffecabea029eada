"""The device mesh and every sharding rule: the one place that names mesh axes.

Axes: `replica` (whole copies of the parameters), `fsdp` (parameters, optimizer state and EMA are sharded over it) and
`context` (activations along the sequence). Rollout groups and data go over replica x fsdp. Knows nothing of models.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("replica", "fsdp", "context")
BATCH = P(("replica", "fsdp"))


def make_mesh(replica: int = 1, fsdp: int = -1, context: int = 1) -> Mesh:
    """A (replica, fsdp, context) mesh over all devices of all processes; one size may be -1, "the rest".

    Raises ValueError when the sizes do not multiply to the number of devices.
    """
    sizes = {"replica": replica, "fsdp": fsdp, "context": context}
    count = jax.device_count()
    free = [axis for axis, size in sizes.items() if size == -1]
    given = int(np.prod([size for size in sizes.values() if size != -1]))
    if len(free) > 1 or (free and count % given) or (not free and given != count):
        shown = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        raise ValueError(f"config.mesh: {shown} does not give {count} devices; at most one size may be -1")
    if free:
        sizes[free[0]] = count // given
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Leading axis over replica x fsdp: rollouts, conditions and data."""
    return NamedSharding(mesh, BATCH)


def batch_shards(mesh: Mesh) -> int:
    """How many pieces the batch axis is cut into."""
    return mesh.shape["replica"] * mesh.shape["fsdp"]


def pin_batch(mesh: Mesh | None, x: jax.Array) -> jax.Array:
    """x with its leading axis cut over replica x fsdp and the others whole, here and in its gradient.

    Parameters are cut over fsdp as well: where nothing says how activations lie, the compiler may as well gather every
    device's activations as the parameters. A no-op without a mesh, or where the shards do not divide the leading axis.
    """
    if mesh is None or x.shape[0] % batch_shards(mesh):
        return x
    return jax.lax.with_sharding_constraint(x, batch_sharding(mesh))


def fsdp_sharding(mesh: Mesh, tree: Any) -> Any:
    """A sharding for each leaf: the largest axis that fsdp divides is cut; scalars and odd shapes are replicated."""
    size = mesh.shape["fsdp"]

    def rule(leaf: Any) -> NamedSharding:
        shape = leaf.shape
        axes = [axis for axis in range(len(shape)) if shape[axis] % size == 0 and shape[axis] >= size]
        if size == 1 or not axes:
            return replicated(mesh)
        axis = max(axes, key=lambda a: (shape[a], a))
        return NamedSharding(mesh, P(*(("fsdp" if a == axis else None) for a in range(len(shape)))))

    return jax.tree.map(rule, tree)
