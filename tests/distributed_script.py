"""What `parallel.distributed` does in several processes, asserted in each of them; started by test_processes.py."""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ddrl_jax import build
from ddrl_jax.parallel import distributed
from ddrl_jax.parallel import mesh as mesh_lib

distributed.initialize()
me, count = jax.process_index(), jax.process_count()


def words():
    assert distributed.primary(lambda: {"from": me, "pair": (1, None)}) == {"from": 0, "pair": [1, None]}
    assert distributed.any_process(me == 1, False, True) == (True, False, True)
    told = distributed.Told(mesh_lib.make_mesh())
    for step in range(3):
        told.tell(step == 1 and me == count - 1, False)
        assert told.told() == (step == 1, False)
    notes = distributed.share_notes(f"process {me} says {'é' * 200}", float(me))
    assert [round(n) for _, n in notes] == list(range(count))
    assert all(text.startswith(f"process {i} says é") for i, (text, _) in enumerate(notes))


def rows(replica, fsdp, context, size):
    """A batch over a mesh: who has which rows, and who sends them."""
    mesh = mesh_lib.make_mesh(replica, fsdp, context)
    own = build.own_rows(mesh, size)
    whole = np.arange(size * 3, dtype=np.float32).reshape(size, 3)
    for given in (build.to_global(mesh, whole[own], size), build.to_global(mesh, whole)):
        assert given.sharding.is_equivalent_to(build.rows_sharding(mesh, size), 2)
        for shard in given.addressable_shards:
            np.testing.assert_array_equal(shard.data, whole[shard.index])
    np.testing.assert_array_equal(distributed.to_host(given), whole)
    clips = whole.reshape(size, 1, 3, 1, 1) + np.zeros((1, 1, 1, 2, 2), np.float32)
    clips = np.repeat(clips, 8, axis=2)  # frames that context divides
    cut = build.to_global(mesh, clips[own], size, mesh_lib.latent_sharding)
    for shard in cut.addressable_shards:
        np.testing.assert_array_equal(shard.data, clips[shard.index])
    text = clips[:, 0, :, :, 0].swapaxes(1, 2)
    spread = distributed.placed(build.to_global(mesh, text[own], size), mesh_lib.text_sharding(mesh, text.shape))
    for shard in spread.addressable_shards:
        np.testing.assert_array_equal(shard.data, text[shard.index])
    mine, values = distributed.first_copies(given)
    np.testing.assert_array_equal(values, whole[mine])
    everyone = distributed.share_rows(mine, values, size)
    np.testing.assert_array_equal(everyone, whole)
    counted = distributed.share_rows(np.array([me]), np.array([[float(len(mine))]]), count)
    assert counted.sum() == size, "every row is sent once"
    missing = distributed.share_rows(mine[mine > 0], values[mine > 0], size)
    assert np.isnan(missing[0]).all() and np.array_equal(missing[1:], whole[1:])
    assert distributed.local_mesh(mesh).size == jax.local_device_count()


def end():
    """Process 1 fails while the others are in a collective that will never be whole."""
    mesh = mesh_lib.make_mesh()
    if me == 1:
        time.sleep(1.0)  # the others are in it by then
        distributed.fail(2, "error: process 1 found it")
    ones = jax.make_array_from_callback((mesh.size,), NamedSharding(mesh, P(mesh_lib.AXES)), lambda _: jnp.ones(1))
    try:
        jax.block_until_ready(jax.jit(jnp.sum, out_shardings=mesh_lib.replicated(mesh))(ones))
    except jax.errors.JaxRuntimeError as error:  # gloo sees the connection close; what waits on would be ended
        distributed.fail(1, f"this is only what follows from it: {error}")
    raise AssertionError("the collective was whole without process 1")


words()
devices = jax.device_count()
rows(1, devices, 1, 2 * devices)
rows(1, 1, devices, 3)  # one sample lies on several processes
rows(2, 1, devices // 2, 6)
rows(1, devices, 1, devices + 1)  # cannot be cut: whole everywhere
print("done", flush=True)
if "fail" in sys.argv:
    end()
distributed.finish(0)
