"""Torch files in and out through the child process; where torch is, and where it is not."""

import builtins
import os
import struct
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from ddrl_jax.checkpoint import load_pretrained, save_pretrained, torch_files
from ddrl_jax.sidecar import convert
from tests.paths import GOLDEN, ROOT
from tests.test_weights import FOLDER, OFFICIAL, error_of, raw, same_bits, same_params

WRAPPED = "official_wrapped_net_and_net_ema_bf16.pt"
torch = pytest.importorskip("torch", reason="the sidecar's own environment has it; the test extra installs it")


@pytest.fixture
def copied(tmp_path):
    """Copies a file of the golden set, because what it is converted to lies beside it."""

    def copy(name, of=FOLDER):
        (tmp_path / name).write_bytes((of / name).read_bytes())
        return tmp_path / name

    return copy


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home of our own, without environments."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setattr(Path, "home", lambda: home)
    return home


# ---- in --------------------------------------------------------------------------------------------------------------


def test_torch_file_equals_safetensors(copied):
    file = copied("official_flat.pt")
    same_params(load_pretrained(file)[1], load_pretrained(OFFICIAL)[1])
    # Everything that was in it, its counters too, bit for bit.
    state = torch.load(file, weights_only=True)
    converted = load_file(f"{file}.safetensors")
    same_bits(converted, {name: tensor.numpy() for name, tensor in state.items()})


def test_ema_is_chosen_by_the_option(copied, capfd):
    raw, ema = load_pretrained(copied(WRAPPED))[1], load_pretrained(copied(WRAPPED), which="ema")[1]
    assert "left out: net.blocks.0.self_attn.q_norm._extra_state" in capfd.readouterr().err
    same_params(raw, load_pretrained(copied("official_flat_bf16.pt"))[1])
    assert not any(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(raw), jax.tree.leaves(ema), strict=True))


def test_it_is_converted_once_and_again_when_it_changes(copied, monkeypatch):
    file = copied("official_flat_bf16.pt")
    out = torch_files.to_safetensors(file)
    assert out == file.with_name("official_flat_bf16.pt.safetensors")
    with monkeypatch.context() as m:
        m.setattr(torch_files, "_run", lambda *_: pytest.fail("converted again"))
        assert torch_files.to_safetensors(file) == out
    first = out.read_bytes()
    state = torch.load(file, weights_only=True)
    state["net.t_embedding_norm.weight"] += 1
    torch.save(state, file)
    assert torch_files.to_safetensors(file) == out and out.read_bytes() != first
    # What is left of a conversion that was cut short is not taken for one.
    whole = out.read_bytes()
    out.write_bytes(whole[:5])
    assert torch_files.to_safetensors(file) == out and out.read_bytes() == whole


def test_the_folder_of_a_converted_file_can_still_be_loaded(copied, tmp_path):
    copied("official.safetensors")
    load_pretrained(copied("official_flat.pt"))
    same_params(load_pretrained(tmp_path)[1], load_pretrained(OFFICIAL)[1])


def test_where_the_folder_cannot_be_written(copied, home, monkeypatch):
    file = copied("official_flat.pt")
    monkeypatch.setattr(os, "access", lambda *_: False)  # the tests may run as root, who may write everywhere
    out = torch_files.to_safetensors(file)
    assert home / ".cache/ddrl_jax/converted" in out.parents and out.name == "official_flat.pt.safetensors"
    assert torch_files.to_safetensors(file) == out
    assert not file.with_name(out.name).exists()
    other = file.parent / "other"
    other.mkdir()
    (other / file.name).write_bytes(file.read_bytes())
    assert torch_files.to_safetensors(other / file.name) != out


def test_awkward_tensors(tmp_path):
    """Shared memory, strides, offsets, empty ones, scalars, every dtype, and what is no tensor."""
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    state = {
        "base": base,
        "same": base,
        "transposed": base.T,
        "row": base[2],
        "column": base[:, 1],
        "spread": base[0].expand(3, 6),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "flag": torch.tensor([True, False]),
        "half": torch.tensor([1.5], dtype=torch.float16),
        "double": torch.tensor([1e-300], dtype=torch.float64),
        "step": 3,
        "nested": {"a": base},
        5: base,
    }
    torch.save(state, tmp_path / "x.pt")
    got = load_file(torch_files.to_safetensors(tmp_path / "x.pt"))
    want = {k: v.detach().contiguous().numpy() for k, v in state.items() if isinstance(k, str) and hasattr(v, "dtype")}
    same_bits(got, want)
    assert len(got) == 12


def test_a_file_of_the_form_before_zip(tmp_path):
    state = {"a": torch.arange(6.0).reshape(2, 3)}
    torch.save(state, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert load_file(torch_files.to_safetensors(tmp_path / "old.pth"))["a"].tolist() == [[0, 1, 2], [3, 4, 5]]


class Evil:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return builtins.open, (self.mark, "w")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_torch_file_runs_no_code(tmp_path, zipped):
    mark = tmp_path / "ran"
    torch.save({"net.x": Evil(str(mark))}, tmp_path / "evil.pt", _use_new_zipfile_serialization=zipped)
    message = error_of(tmp_path / "evil.pt")
    assert "evil.pt is not a torch file of tensors alone" in message and "objects other than tensors" in message
    assert "weights_only" not in message
    assert not mark.exists() and not (tmp_path / "evil.pt.safetensors").exists()
    # The control: a reader without the safeguard runs it.
    torch.load(tmp_path / "evil.pt", weights_only=False)
    assert mark.exists()


def test_damaged_torch_files(tmp_path):
    whole = (FOLDER / WRAPPED).read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "empty.pt").write_text("")
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    torch.save({"step": 1}, tmp_path / "none.pt")
    torch.save({"x": torch.ones(2, dtype=torch.complex64)}, tmp_path / "complex.pt")
    for name, why in (("cut", "cut off or damaged"), ("text", "of another kind"), ("empty", "it is empty")):
        message = error_of(tmp_path / f"{name}.pt")
        assert f"{name}.pt is not a torch file" in message and why in message
    assert "does not hold a dict of tensors but a list" in error_of(tmp_path / "list.pt")
    assert "there is none in it" in error_of(tmp_path / "none.pt")
    assert "x is a torch.strided tensor of torch.complex64" in error_of(tmp_path / "complex.pt")
    assert "does not exist" in error_of(tmp_path / "nowhere.pt")
    assert not list(tmp_path.glob("*.safetensors")) and not list(tmp_path.glob(".*"))


def test_a_dtype_that_only_torch_knows(tmp_path):
    torch.save({"net.a": torch.ones(2).to(torch.float8_e4m3fn)}, tmp_path / "x.pt")
    assert "x.pt.safetensors: net.a is a tensor of F8_E4M3; F64" in error_of(tmp_path / "x.pt")


def test_safetensors_the_command_cannot_turn_into_a_torch_file(tmp_path):
    file = tmp_path / "x.safetensors"
    for entry, words in [
        ({"dtype": "F4", "shape": [8], "data_offsets": [0, 8]}, "x.safetensors: a is a tensor of F4; F64, "),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 8]}, "a has the shape [-1]"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [-8, -4]}, "a ends behind the end of the file"),
    ]:
        file.write_bytes(raw({"__metadata__": {"format": "pt"}, "a": entry}))
        with pytest.raises(ValueError) as error:
            convert.to_torch(file, tmp_path / "x.pt")
        assert words in str(error.value)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", 100_000_001))
        stream.truncate(200_000_000)  # a hole
    with pytest.raises(ValueError, match="its header has 100000001 bytes; at most"):
        convert.to_torch(file, tmp_path / "x.pt")
    assert not (tmp_path / "x.pt").exists()


# ---- out -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_written_torch_files_are_plain_state_dicts(tmp_path, dtype):
    loaded = load_pretrained(OFFICIAL)
    save_pretrained(tmp_path / "out.pt", *loaded, dtype=dtype)
    save_pretrained(tmp_path / "out.safetensors", *loaded, dtype=dtype)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["out.pt", "out.safetensors"]
    state = torch.load(tmp_path / "out.pt", weights_only=True)
    want = load_file(OFFICIAL)
    assert state.keys() == want.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, torch.from_numpy(want[name]).to(tensor.dtype)), name
        assert tensor.dtype == (torch.bfloat16 if dtype else torch.float32)
        # A tensor carries its own numbers only, or handing one on would hand on the file.
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    same_params(
        load_pretrained(tmp_path / "out.pt", dtype=dtype)[1],
        load_pretrained(tmp_path / "out.safetensors", dtype=dtype)[1],
    )


def test_nothing_is_written_without_torch(tmp_path, home, monkeypatch):
    loaded = load_pretrained(OFFICIAL)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ValueError, match=r"python -m ddrl_jax.sidecar build --scorer digits"):
        save_pretrained(tmp_path / "out.pt", *loaded)
    assert list(tmp_path.iterdir()) == [home]


# ---- environments ----------------------------------------------------------------------------------------------------


def test_the_trainer_does_not_import_torch(copied):
    file = copied("official_flat.pt")
    code = f"""
import sys
from ddrl_jax.checkpoint import load_pretrained, save_pretrained
loaded = load_pretrained({str(file)!r})
save_pretrained({str(file.with_name("out.pt"))!r}, *loaded)
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_environment_made_by_the_sidecar_is_found(copied, home, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    file = copied("official_flat.pt")
    message = error_of(file)
    assert "there is none; make one with: python -m ddrl_jax.sidecar build --scorer digits" in message
    for name in ("broken", "digits"):
        (home / f".cache/ddrl_jax/sidecar/{name}/bin").mkdir(parents=True)
        # Its own interpreter: a script that hands on to this one.
        python = home / f".cache/ddrl_jax/sidecar/{name}/bin/python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
    package = home / ".cache/ddrl_jax/sidecar/digits/lib/python3.11/site-packages/torch"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    assert torch_files.interpreter() == home / ".cache/ddrl_jax/sidecar/digits/bin/python"
    same_params(load_pretrained(file)[1], load_pretrained(OFFICIAL)[1])


def test_an_interpreter_that_is_named(copied, tmp_path):
    file = copied("official_flat.pt")
    with pytest.raises(ValueError, match="there is no such interpreter"):
        torch_files.to_safetensors(file, tmp_path / "nowhere")
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho something went wrong\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(ValueError, match="ended with 3; it said 'something went wrong'"):
        torch_files.to_safetensors(file, python)


def sidecar(*arguments):
    blocked = ("jax", "jaxlib", "flax", "ml_dtypes")
    code = f"import sys\nfor name in {blocked!r}: sys.modules[name] = None\n"
    code += "from ddrl_jax.sidecar.__main__ import main\nsys.exit(main())"
    command = [sys.executable, "-c", code, "convert", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_command(copied, tmp_path):
    """By hand, and where jax is not."""
    out = tmp_path / "out.safetensors"
    done = sidecar("--to-safetensors", copied(WRAPPED), "--out", out)
    assert done.returncode == 0, done.stderr
    assert "left out: iteration, beside the model" in done.stdout
    done = sidecar("--to-torch", out, "--out", tmp_path / "back.pt")
    assert done.returncode == 0, done.stderr
    state = torch.load(FOLDER / WRAPPED, weights_only=True)["model"]
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert back.keys() == {name for name in state if not name.endswith("_extra_state")}
    assert all(torch.equal(tensor, state[name]) and tensor.dtype == state[name].dtype for name, tensor in back.items())
    done = sidecar("--to-torch", tmp_path / "back.pt", "--out", tmp_path / "x.pt")
    assert done.returncode == 2 and "back.pt is not a whole safetensors file" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "x.pt").exists()


def test_the_autoencoders_torch_file(copied):
    copied("official.safetensors", GOLDEN / "wan_vae")
    file = copied("official.pth", GOLDEN / "wan_vae")
    same_bits(load_file(torch_files.to_safetensors(file)), load_file(file.with_name("official.safetensors")))
