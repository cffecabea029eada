"""Checkpoints of a small state: what is saved comes back, damage falls back, nothing is lost to a damaged one."""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ddrl_jax.checkpoint.manager import Checkpoints, UnreadableError


def state(value):
    return {"step": jnp.array(value, jnp.int32), "w": jnp.arange(64.0).reshape(8, 8) + value, "ema": None}


def save(folder, *steps, **options):
    checkpoints = Checkpoints(folder, **options)
    for step in steps:
        checkpoints.save(step, state(step))
    checkpoints.close()


def restore(folder, like=None, **options):
    checkpoints = Checkpoints(folder, read_only=True)
    try:
        return checkpoints.restore(state(0) if like is None else like, **options)
    finally:
        checkpoints.close()


def assert_is(restored, step):
    assert restored[0] == step
    jax.tree.map(np.testing.assert_array_equal, restored[1], state(step))
    assert restored[1]["ema"] is None


def damage(folder, pattern="*"):
    files = [p for p in folder.rglob(pattern) if p.is_file()]
    assert files
    for file in files:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def content(folder):
    return {p.relative_to(folder): (p.stat().st_mtime_ns, p.is_file() and p.read_bytes()) for p in folder.rglob("*")}


def test_the_newest_are_kept_and_come_back(tmp_path):
    save(tmp_path, 2, 4, 6, keep=2)
    assert_is(restore(tmp_path), 6)
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.steps() == [4, 6]
    checkpoints.close()


def test_a_state_may_be_donated_while_it_is_being_saved(tmp_path):
    sharding = NamedSharding(jax.make_mesh((8,), ("fsdp",)), P("fsdp"))
    like = {"w": jax.device_put(jnp.zeros((8, 1 << 15)), sharding), "step": jnp.zeros((), jnp.int32)}
    step = jax.jit(lambda s: {"w": s["w"] * 0 + s["step"] + 1, "step": s["step"] + 1}, donate_argnums=0)
    with Checkpoints(tmp_path, keep=4) as checkpoints:
        s = jax.tree.map(jnp.copy, like)
        for n in range(4):
            checkpoints.save(n, s)
            for _ in range(3):
                s = step(s)
    for n in range(4):
        np.testing.assert_array_equal(restore(tmp_path, like, step=n)[1]["w"], float(3 * n))


def test_there_is_nothing_to_restore(tmp_path):
    assert restore(tmp_path / "nowhere") is None
    assert not (tmp_path / "nowhere").exists()


def test_a_step_already_saved_is_left_as_it_is(tmp_path):
    save(tmp_path, 2)
    before = content(tmp_path / "2")
    checkpoints = Checkpoints(tmp_path)
    checkpoints.restore(state(0))
    checkpoints.save(2, state(99), wait=True)
    checkpoints.close()
    assert content(tmp_path / "2") == before


@pytest.mark.parametrize("pattern", ["*", "_METADATA", "manifest.ocdbt", "[0-9a-f]*[0-9a-f]"])
def test_a_truncated_newest_falls_back_and_is_replaced_by_the_next_save_at_its_step(tmp_path, pattern):
    save(tmp_path, 2, 4)
    damage(tmp_path / "4", pattern)
    checkpoints = Checkpoints(tmp_path)
    with pytest.warns(RuntimeWarning, match=rf"checkpoint {tmp_path.name}/4 cannot be read \(.+\); falling back"):
        assert_is(checkpoints.restore(state(0)), 2)
    assert (tmp_path / "4").is_dir()  # only a save replaces it
    checkpoints.save(4, state(4))
    checkpoints.save(4, state(99), wait=True)  # it is whole now
    checkpoints.close()
    assert_is(restore(tmp_path), 4)


def test_a_save_between_leaves_a_damaged_newer_one_that_still_falls_back(tmp_path):
    save(tmp_path, 2, 4)
    damage(tmp_path / "4")
    checkpoints = Checkpoints(tmp_path)
    with pytest.warns(RuntimeWarning):
        checkpoints.restore(state(0))
    checkpoints.save(3, state(3), wait=True)
    checkpoints.close()
    with pytest.warns(RuntimeWarning):
        assert_is(restore(tmp_path), 3)


def test_none_can_be_read(tmp_path):
    save(tmp_path, 2, 4)
    before = content(tmp_path)
    wrong = {**state(0), "w": jnp.zeros((3, 3))}  # a state of another shape: nothing may be deleted for it
    checkpoints = Checkpoints(tmp_path)
    with pytest.warns(RuntimeWarning), pytest.raises(RuntimeError, match=r"none of the checkpoints \[2, 4\]"):
        checkpoints.restore(wrong)
    checkpoints.close()
    assert content(tmp_path) == before


def test_one_step_is_asked_for(tmp_path):
    save(tmp_path, 2, 4, 6, keep=3)
    for step in (2, 4, 6):
        assert_is(restore(tmp_path, step=step), step)
    with pytest.raises(UnreadableError, match=rf"^{tmp_path} has no checkpoint of step 5; it has 2, 4, 6$"):
        restore(tmp_path, step=5)
    damage(tmp_path / "4")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # no word of a fallback
        with pytest.raises(UnreadableError, match=r"checkpoint 4 in .* cannot be read \(.+\); others: 2, 6$") as error:
            restore(tmp_path, step=4)
        assert "\n" not in str(error.value)
        assert_is(restore(tmp_path, step=2), 2)
    assert restore(tmp_path / "nowhere", step=2) is None


def test_read_only_leaves_the_folder_untouched(tmp_path):
    save(tmp_path, 2, 4)
    (tmp_path / "6.orbax-checkpoint-tmp").mkdir()
    before = content(tmp_path)
    assert_is(restore(tmp_path), 4)
    assert content(tmp_path) == before


def test_what_a_kill_inside_a_save_left_behind_is_cleaned_up(tmp_path):
    save(tmp_path, 2)
    (tmp_path / "4.orbax-checkpoint-tmp" / "default").mkdir(parents=True)
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.steps() == [2]
    checkpoints.save(4, state(4), wait=True)
    checkpoints.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "4"]


@pytest.mark.parametrize(("saved_on", "restored_on"), [(1, 8), (8, 1), (2, 4)])
def test_another_mesh_restores_the_same(tmp_path, saved_on, restored_on):
    def put(value, count):
        mesh = jax.make_mesh((count,), ("fsdp",), devices=jax.devices()[:count])
        cut, whole = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P())
        return jax.device_put(state(value), {"step": whole, "w": cut, "ema": None})

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(2, put(2, saved_on), wait=True)
    checkpoints.close()
    like = put(0, restored_on)
    restored = restore(tmp_path, like)
    assert_is(restored, 2)
    assert restored[1]["w"].sharding == like["w"].sharding and len(restored[1]["w"].devices()) == restored_on


def test_the_config_is_saved_beside_the_state(tmp_path):
    save(tmp_path, 3, config={"train": {"steps": 7}})
    (file,) = (tmp_path / "3/config").glob("metadata")
    assert json.loads(file.read_text()) == {"train": {"steps": 7}}
