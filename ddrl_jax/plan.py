"""--mode=plan: what a config needs on hardware that is not here, before anything is rented.

Compiles an iteration's functions (rollout, data gradient, policy gradient with the optimizer) for the target of
plan.target, as they would run there, and reads the compiled programs: bytes a device, what is computed and what is
sent. Prints tables and whether it fits. Allocates nothing; reads no weights, no data and no text. Not counted: what
encoding and decoding compute between those functions, and a first iteration's record of the policy's means.

It is a plan of memory, sharding and cost. The time it gives is a bound from the card's data sheet, which nothing
reaches; whether cuDNN takes a graph, and the workspace it wants, shows on a card only.

GB are 1e9 bytes. FLOPs, bytes and times are one device's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict
from rich.console import Console

from ddrl_jax import build, files, plan_table
from ddrl_jax.config import REMAT, ConfigError
from ddrl_jax.diffusion.process import EDMChurn
from ddrl_jax.models.qwen_text import QwenText, QwenTextConfig
from ddrl_jax.models.wan_vae import WanVAE, WanVAEConfig
from ddrl_jax.parallel import hlo, topology
from ddrl_jax.parallel import mesh as mesh_lib
from ddrl_jax.update import Rewarded, Update

# cuDNN's workspace, which the compiler does not count: 0.35 GB for the 2B network's backward pass at context 2
# (1 sample of 86,400 tokens, 8 of 16 heads of width 128), scaled by tokens and heads.
_WORKSPACE = 0.35e9 / (86_400 * 8 * 128)
# Least kept last; offloading is another trade.
_REMAT = ("none", *(remat for remat in reversed(REMAT) if remat not in ("none", "offload")))
# Without the slow passes of code generation, which change neither where arrays lie nor what is sent.
_OPTIONS = {"cpu": {"xla_backend_optimization_level": 0}}
_REMATERIALIZED = "nvoluntary full rematerialization"


@dataclasses.dataclass(frozen=True)
class Work:
    """What one run of a function has to compute, by the network's formula: evaluations a rollout, of which `gradients`
    have a backward pass of twice the forward's FLOPs; FLOPs of all devices together."""

    evaluations: float
    gradients: float
    model_flops: float
    floor_flops: float  # the least that a program with fused attention executes: 2.5 forwards a backward


@dataclasses.dataclass(frozen=True)
class Function:
    """One compiled function, one device's share.

    Attributes:
      times: runs an iteration; 0: part of another function, compiled alone for its bytes.
      arguments, outputs, aliased, temporaries: bytes, as the compiler says; outputs that take the place of arguments
        are `aliased`.
      resident: bytes of what lies in memory meanwhile and is no argument.
      workspace: bytes that cuDNN is expected to ask for.
      host: bytes in the host's memory.
      warnings: the compiler's, about what it could not keep cut or small.
    """

    name: str
    times: int
    seconds: float
    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    resident: int
    workspace: int
    host: int
    work: Work
    program: hlo.Program
    evaluations: float
    warnings: tuple[str, ...]

    @property
    def peak(self) -> int:
        return self.arguments + self.temporaries + self.outputs - self.aliased + self.resident + self.workspace


class _TooLarge(Exception):
    """The compiler itself refuses: the program does not fit."""


def run(config: ConfigDict, target: topology.Target) -> bool:
    """Prints the plan and writes plan.json, if that is set. Returns whether it fits. Raises ConfigError, and
    topology.TargetError where the compiler knows no such topology."""
    jax.config.update("jax_enable_compilation_cache", False)  # what is kept for other hardware serves no run here
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    if config.plan.json:  # what cannot be written is said now, and not after minutes of compiling
        _check_writable(Path(config.plan.json))
    with _compiler_messages():  # a TPU's says that there is none here
        devices = topology.devices(target)
    result = make(config, devices, target.card, console=console)
    plan_table.show(result, console)
    if config.plan.json:
        write(result, Path(config.plan.json))
    return result["fits"]


def write(result: dict[str, Any], file: Path) -> None:
    """The whole result as JSON."""
    with _told_of(file), files.whole(file) as partial:
        partial.write_text(json.dumps(result, indent=2) + "\n")


def _check_writable(file: Path) -> None:
    """Makes its folder. An earlier plan there stays until there is a new one."""
    with _told_of(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        tempfile.TemporaryFile(dir=file.parent).close()


@contextlib.contextmanager
def _told_of(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"config.plan.json={str(file)!r}: cannot be written ({error.strerror})") from error


# ------------------------------------------------------------------------------------------------------- the plan


def make(config: ConfigDict, devices: Any, card: topology.Card, *, console: Console | None = None) -> dict[str, Any]:
    """The plan of a config on `devices` of a kind of card, as it is written to plan.json."""
    began = time.perf_counter()
    console = console or Console(quiet=True)
    mesh = build.make_mesh(config, devices)
    planner = _Planner(config, mesh, card, console)
    too_large = ""
    try:
        planner.compile_all()
    except _TooLarge as error:
        too_large = str(error)
    functions = planner.functions
    peak = max((f.peak for f in functions), default=0)
    fits = not too_large and peak <= card.usable
    result = {
        "target": config.plan.target,
        "card": dataclasses.asdict(card) | {"usable": card.usable, "description": dict(card.description)},
        "devices": mesh.size,
        "mesh": dict(mesh.shape),
        "rollouts": planner.method.batch,
        "rollouts_per_data_group": planner.method.batch / mesh_lib.batch_shards(mesh),
        "held": planner.held,
        "functions": [_function(f, mesh, card, config.model.depth) for f in functions],
        "iteration": _iteration(functions, mesh, card),
        "evaluations_per_rollout": _evaluations(functions),
        "peak": peak,
        "too_large": too_large,
        "fits": fits,
        "seconds": time.perf_counter() - began,
    }
    return result | {"try": [] if fits else _suggest(config, result, mesh)}


class _Planner:
    """Compiles an iteration's functions one after another: what one gives is an argument of the next, cut as it is."""

    def __init__(self, config: ConfigDict, mesh: Mesh, card: topology.Card, console: Console) -> None:
        self.config, self.mesh, self.card, self.console = config, mesh, card, console
        build.check_mesh(config, mesh)
        self.setup = build.abstract_setup(config, mesh)
        base = self._place_params(build.abstract_params(config))
        self.base = base if config.lora.rank > 0 else None
        self.method = Update(config, self.setup, self.base)
        self.forward = Forward.of(config, self.setup.latent_shape)
        self.state = self._place_params(build.abstract_state(config))
        self.reference = base if self.method.needs_reference else None
        self.functions: list[Function] = []
        self.in_host: dict[int, Any] = {}  # arrays in the host's memory, by id
        conditions, latent = config.rollout.conditions, self.setup.latent_shape
        cut = mesh_lib.latent_sharding(mesh, (conditions, *latent))
        self.x0_GX = jax.ShapeDtypeStruct((conditions, *latent), jnp.float32, sharding=cut)
        self.cond = self._condition(conditions, latent)
        held: dict[str, Any] = {
            "parameters": self.state.params,
            "optimizer": self.state.opt_state,
            "EMA": self.state.ema,
            "old policy": self.state.old,
            "frozen base": self.base,
            "reference": self.reference,
            # Given frames are the batch itself.
            "data": self.x0_GX,
            "conditions": {k: v for k, v in self.cond.items() if k != "frames"},
            **self._encoders(),
        }
        # What lies in memory all the time, or from one function to another.
        self.alive = {name: tree for name, tree in held.items() if jax.tree.leaves(tree)}

    @property
    def held(self) -> dict[str, int]:
        """Bytes of each thing that is kept."""
        return {name: self._device_bytes(tree) for name, tree in self.alive.items()}

    # ------------------------------------------------------------------------------------------- arguments

    def _place(self, tree: Any, shardings: Any) -> Any:
        def place(x: Any, sharding: Any) -> Any:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        return jax.tree.map(place, tree, shardings)

    def _place_params(self, tree: Any) -> Any:
        return self._place(tree, mesh_lib.fsdp_sharding(self.mesh, tree))

    def _scalar(self, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct((), dtype, sharding=mesh_lib.replicated(self.mesh))

    def _encoders(self) -> dict[str, Any]:
        """What makes latents and features of captions and lies on the devices, in its published sizes: cut over those
        of a process, which are a host's."""
        config, made = self.config, dict[str, Any]()
        if config.codec.name == "wan_vae":
            made["codec"] = lambda: WanVAE(WanVAEConfig(), rngs=nnx.Rngs(0))
        if config.text_encoder.path and config.text_encoder.where == "device":
            made["text tower"] = lambda: QwenText(QwenTextConfig(), rngs=nnx.Rngs(0))
        devices = self.mesh.devices.reshape(-1)[: self.card.host]
        own = self.mesh if self.mesh.size <= self.card.host else Mesh(devices.reshape(1, -1, 1), mesh_lib.AXES)
        trees = {name: nnx.split(nnx.eval_shape(make))[1] for name, make in made.items()}
        return {name: self._place(tree, mesh_lib.fsdp_sharding(own, tree)) for name, tree in trees.items()}

    def _rows(self, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
        """Of one row a condition or a rollout, as `build.to_global` makes it."""
        sharding = NamedSharding(self.mesh, P(mesh_lib.batch_spec(self.mesh, shape[0])))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def _condition(self, conditions: int, latent: tuple[int, ...]) -> dict[str, Any]:
        """As `build.Setup.condition` makes it."""
        config = self.config
        shape = (conditions, config.text.length, config.text.dim)
        dtype = config.text_encoder.dtype if config.text_encoder.path else "float32"
        context = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=mesh_lib.text_sharding(self.mesh, shape))
        cond = build.cond(context)
        if config.data.image_to_video > 0:
            cond |= {"condition_mask": self._rows((conditions, 1, latent[1], 1, 1)), "frames": self.x0_GX}
        return cond

    def _next_batch(self) -> list[Any]:
        """What is read while rewards are computed: clean latents and features of the next conditions."""
        context = self.cond["context"]
        arriving = mesh_lib.arriving_text_sharding(self.mesh, context.shape)
        return self._place([self.x0_GX, context], [self.x0_GX.sharding, arriving])

    def _rewarded(self) -> Any:
        """As `update.to_device` makes it."""
        batch, reference = self.method.batch, self.method.needs_reference_rollouts
        sharding = NamedSharding(self.mesh, P(None, mesh_lib.batch_spec(self.mesh, batch)))
        rewards: Any = jax.ShapeDtypeStruct((1, batch), jnp.float32, sharding=sharding)
        weights: Any = jax.ShapeDtypeStruct((1,), jnp.float32, sharding=mesh_lib.replicated(self.mesh))
        valid, z = self._rows((batch,), bool), self._rows((batch,))
        return Rewarded(rewards, weights, valid, z if reference else None, valid if reference else None)

    # ------------------------------------------------------------------------------------------- compilation

    def compile_all(self) -> None:
        """Fills `functions`. Raises _TooLarge where the compiler says so itself."""
        method, s, updates = self.method, self.state, self.method.updates
        key = jax.eval_shape(lambda: jax.random.key(0))
        key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=mesh_lib.replicated(self.mesh))
        step, x0, trajectory, rewarded, data = self._scalar(), None, None, None, None
        arguments: tuple[Any, ...]
        if method.rolls_out:
            acting = method.rollout_params(s)
            arguments = (self.base, acting, key, step, self.cond)
            x0, trajectory = self._compile("rollout", method.rollout, arguments, {"keep_mean": method.keeps_mean})
            self.alive |= {"rollouts": x0} | ({"trajectory": trajectory} if trajectory is not None else {})
            self.alive["next batch"] = self._next_batch()
            if method.needs_reference_rollouts:
                arguments = (self.base, self.reference, key, step, self.cond)
                self._compile("reference rollout", method.rollout, arguments, {"keep_mean": False, "reference": True})
            rewarded = self._rewarded()
        if method.has_data:
            levels = trajectory if method.data_needs_rollout else None
            arguments = (self.base, s.params, key, step, step, self.x0_GX, self.cond, levels)
            data = self._compile("data gradient", method.data, arguments, times=updates)
            self.alive["data gradient"] = data
        name = "policy gradient + optimizer" if method.rolls_out else "optimizer"
        arguments = (self.base, s, key, step, x0, trajectory, self.cond, rewarded, data, self.reference)
        self._compile(name, method.apply, arguments, times=updates)
        if method.rolls_out:
            step_alone = jax.jit(
                lambda s, grads, loss, u: method.optimizer_step(s, grads, loss, u)[0], donate_argnums=0
            )
            arguments = (s, s.params, self._scalar(jnp.float32), step)
            self._compile("optimizer alone", step_alone, arguments, times=0)

    def _compile(
        self,
        name: str,
        function: Any,
        arguments: tuple[Any, ...],
        options: dict[str, Any] | None = None,
        times: int = 1,
    ) -> Any:
        """Compiles one function, appends what it is, and returns its abstract outputs."""
        jitted, began = getattr(function, "func", function), time.perf_counter()
        with self.console.status(f"compiling {name} for {self.mesh.size} x {self.card.name} ..."):
            try:
                traced = jitted.trace(*arguments, **(options or {}))
                lowered = traced.lower()
            except ValueError as error:
                raise (ConfigError(str(error)) if str(error).startswith("config.") else error) from error
            with _compiler_messages() as messages:
                try:
                    compiled = lowered.compile(compiler_options=_OPTIONS.get(self.card.platform))
                except jax.errors.JaxRuntimeError as error:
                    if "RESOURCE_EXHAUSTED" not in str(error) or "hbm" not in str(error):
                        raise
                    raise _TooLarge(f"{name}: {_memory_line(str(error))}") from error
            program = hlo.read(compiled.as_text(), self.mesh.shape)
        seconds = time.perf_counter() - began
        self.console.print(f"compiled {name} for {self.mesh.size} x {self.card.name} in {seconds:.1f} s")
        memory = compiled.memory_analysis()
        passed = _leaves(arguments)
        others = [leaf for leaf in _leaves(list(self.alive.values())) if id(leaf) not in {id(x) for x in passed}]
        argument_bytes, on_device = memory.argument_size_in_bytes, self._device_bytes(passed)
        if not memory.host_argument_size_in_bytes and any(id(x) in self.in_host for x in passed):
            # NVIDIA's compiler without a card takes what lies in the host's memory for the card's.
            argument_bytes = min(argument_bytes, on_device)
        self.functions.append(
            Function(
                name=name,
                times=times,
                seconds=seconds,
                arguments=argument_bytes,
                outputs=memory.output_size_in_bytes,
                aliased=memory.alias_size_in_bytes,
                temporaries=memory.temp_size_in_bytes,
                # An argument that the program does not read is in memory all the same.
                resident=self._device_bytes(others) + max(0, on_device - argument_bytes),
                workspace=self._workspace(program),
                host=memory.host_argument_size_in_bytes
                + memory.host_temp_size_in_bytes
                + memory.host_output_size_in_bytes
                - memory.host_alias_size_in_bytes,
                work=self._work(name),
                program=program,
                evaluations=self._counted(program),
                warnings=tuple(_notable(messages)),
            )
        )
        given = self._place(lowered.out_info, compiled.output_shardings)
        spaces = [result.memory_space for result in traced.jaxpr.out_avals]
        for leaf, space in zip(jax.tree.leaves(given), spaces, strict=True):
            if space == jax.memory.Space.Host:
                self.in_host[id(leaf)] = leaf
        return given

    def _device_bytes(self, tree: Any) -> int:
        """Bytes on one device of abstract arrays that are cut by their shardings; those in host memory are none."""
        there = [x for x in _leaves(tree) if id(x) not in self.in_host]
        return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in there)

    def _workspace(self, program: hlo.Program) -> int:
        if self.card.platform != "gpu":
            return 0
        largest = max((p.outputs for p in program.products if p.kind == "attention backward"), default=0)
        return int(_WORKSPACE * largest)

    # -------------------------------------------------------------------------------------- what is to be computed

    def _work(self, name: str) -> Work:
        config, method, ro = self.config, self.method, self.config.rollout
        steps = build.trained_step_count(config)
        each = 2 if config.process.solver == "2mid" else 1  # evaluations a solver step
        rollout_each = each * (2 if ro.guidance else 1)
        policy_each = each * (2 if config.train.guidance else 1)
        forwards = gradients = texts = 0.0  # evaluations a rollout; projections of the text a condition
        if name.endswith("rollout"):
            finish = int(isinstance(self.setup.process, EDMChurn)) * (2 if ro.guidance else 1)
            forwards, texts = rollout_each * ro.num_steps + finish, 1
        elif name == "data gradient":
            gradients = steps if method.data_needs_rollout else method.objective.data_draws
            texts = 3 * gradients
        elif name == "policy gradient + optimizer":
            if method.on_steps:
                gradients, forwards = policy_each * steps, steps * each * (method.objective.kl_beta > 0)
            elif method.needs_old:
                gradients = config.nft.draws * (2 if config.train.guidance else 1)
                forwards = config.nft.draws * (1 + (method.objective.kl_beta > 0))
            else:
                gradients = method.objective.data_draws
            texts = 3 * gradients + forwards
        if name != "rollout" and name != "reference rollout":
            forwards, gradients = forwards / method.updates, gradients / method.updates
            texts /= method.updates
        network, rollouts = self.forward, method.batch
        model = rollouts * network.flops * (forwards + 3 * gradients) + ro.conditions * texts * network.text
        least = (
            rollouts * (forwards * network.flops + gradients * (3 * network.linear + 3.5 * network.attention))
            + ro.conditions * texts * network.text
        )
        return Work(forwards + gradients, gradients, model, least)

    def _counted(self, program: hlo.Program) -> float:
        """Network evaluations a rollout that a program does: products of the patch embedding, the only ones of that
        width, which every evaluation does once for every token."""
        rows = sum(p.times * p.outputs for p in program.products if p.contraction == self.forward.patch)
        tokens = self.method.batch * self.forward.tokens * self.config.model.width
        return rows * self.mesh.size / tokens


@dataclasses.dataclass(frozen=True)
class Forward:
    """FLOPs of one evaluation of a Cosmos DiT on one sample, by formula, two a multiplication and addition: `linear`
    layers, `attention` (4 L S D a block, to itself and to the text), and the `text`'s projection, once a condition."""

    tokens: int
    patch: int
    linear: float
    attention: float
    text: float

    @property
    def flops(self) -> float:
        return self.linear + self.attention

    @classmethod
    def of(cls, config: ConfigDict, latent_shape: tuple[int, ...]) -> Forward:
        model, (C, T, h, w), text = config.model, latent_shape, config.text
        D, S, rank = model.width, text.length, model.adaln_rank
        tokens, cells = T * h * w // 4, 4
        patch = (C + 2) * cells  # two mask channels beside the latent's
        a_token = 4 * D * D + 2 * D * D + 2 * D * round(D * model.mlp_ratio)  # q k v out, q out, the MLP
        a_text_token = 2 * model.context_dim * D
        a_frame = 3 * (D * rank + rank * 3 * D)  # modulation of a block
        frame = D * D + 3 * D * D + D * rank + rank * 2 * D  # time, modulation of the last layer
        linear = tokens * (patch * D + D * C * cells + model.depth * a_token)
        # A time a frame where given frames have their own, else one a sample.
        times = T if config.data.image_to_video > 0 and not model.use_rf_ckpts else 1
        linear += times * (model.depth * a_frame + frame) + S * model.depth * a_text_token
        attention = model.depth * 4.0 * tokens * (tokens + S) * D
        return cls(tokens, patch, 2.0 * linear, attention, 2.0 * S * text.dim * model.context_dim)


def _leaves(tree: Any) -> list[Any]:
    """Distinct leaves."""
    return list({id(x): x for x in jax.tree.leaves(tree)}.values())


@contextlib.contextmanager
def _compiler_messages() -> Iterator[list[str]]:
    """What the compiler writes to this process's stderr while the block runs, as lines."""
    lines: list[str] = []
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            caught.seek(0)
            lines += caught.read().decode(errors="replace").splitlines()


def _notable(messages: list[str]) -> list[str]:
    """Of the compiler's messages those about memory and layout, without what stands before them."""
    pattern = re.compile(rf".*?\] (.*(?:{_REMATERIALIZED}|Can't reduce memory use below).*)")
    return [found[1][:400] for line in messages if (found := pattern.match(line))]


def _memory_line(text: str) -> str:
    found = re.search(r"Used [^.]*\.\S* of [^.]*\.\S*[^.]*", text)
    return " ".join((found[0] if found else text[:300]).split())


# --------------------------------------------------------------------------------------------------------- results


def _function(f: Function, mesh: Mesh, card: topology.Card, depth: int) -> dict[str, Any]:
    times = _times(f, mesh, card)
    model, executed = f.work.model_flops / mesh.size, f.program.flops
    return {
        "name": f.name,
        "runs": f.times,
        "compile_seconds": f.seconds,
        "bytes": {
            "arguments": f.arguments,
            "outputs": f.outputs,
            "aliased": f.aliased,
            "temporaries": f.temporaries,
            "resident": f.resident,
            "workspace": f.workspace,
            "peak": f.peak,
            "host": f.host,
        },
        "model_flops": model,
        "executed_flops": executed,
        "executed_over_model": executed / model if model else None,
        "floor": f.work.floor_flops / f.work.model_flops if model and f.program.fused_attention else None,
        "evaluations": {"expected": f.work.evaluations, "counted": f.evaluations},
        "collectives": _collectives(f.program, mesh, card),
        "blocks": _blocks(f.program, depth),
        # Of kernels or activations of all blocks at once: there should be none.
        "stacked": sum(any(len(s) > 2 and s[0] == depth for s in c.shapes) for c in f.program.collectives),
        "seconds": times,
        "warnings": list(f.warnings),
        "uncounted": f.program.uncounted,
        "unknown_loops": f.program.unknown_loops,
    }


def _collectives(program: hlo.Program, mesh: Mesh, card: topology.Card) -> list[dict[str, Any]]:
    """By kind and axes: how often, and the bytes of a run of the function."""
    found: dict[tuple[str, tuple[str, ...], int], dict[str, Any]] = {}
    for c in program.collectives:
        entry = found.setdefault((c.kind, c.axes, c.group), {"count": 0, "bytes": 0, "sent": 0.0, "seconds": 0.0})
        entry["count"] += c.times
        entry["bytes"] += c.times * c.bytes
        entry["sent"] += c.times * c.sent
        entry["seconds"] += c.times * _seconds_of(c, mesh, card)
    rows = [{"kind": k, "axes": list(a), "group": n, **entry} for (k, a, n), entry in found.items()]
    return sorted(rows, key=lambda row: -row["bytes"])


def _blocks(program: hlo.Program, depth: int) -> list[dict[str, Any]]:
    """The collectives of one turn of each loop over the blocks: a forward pass is one loop, a gradient has a second.
    `bytes` are those of one."""
    found: dict[Any, int] = {}
    for c in program.collectives:
        if c.loops and c.loops[-1] == depth:
            key = (c.body, c.kind, c.axes, c.group, c.shapes, c.bytes)
            found[key] = found.get(key, 0) + 1
    names = ("loop", "kind", "axes", "group", "shapes", "bytes")
    return [dict(zip(names, key, strict=True)) | {"count": count} for key, count in found.items()]


def _seconds_of(c: hlo.Collective, mesh: Mesh, card: topology.Card) -> float:
    """The least that one run of a collective takes: within a host over its links, beyond it over the network, to which
    a host's devices contribute an adapter each."""
    if not card.link:
        return 0.0
    if not card.network:
        return c.sent / card.link
    index = tuple(slice(None) if axis in c.axes else 0 for axis in mesh.axis_names)
    hosts = [d.process_index for d in np.asarray(mesh.devices[index]).flat][: c.group]
    here = max(hosts.count(host) for host in set(hosts))
    inside = c.sent / card.link
    if here == len(hosts):
        return inside
    if c.kind in ("all-to-all", "ragged-all-to-all"):
        return max(inside, c.bytes * (1 - here / len(hosts)) / card.network)
    # What is gathered or reduced crosses between hosts once a host, over all its adapters.
    return max(inside, c.sent / (card.network * here))


def _times(f: Function, mesh: Mesh, card: topology.Card) -> dict[str, float | None]:
    """Bounds: products at the card's peak, collectives at its links' rate, and both at once."""
    compute = f.program.flops / card.peak if card.peak else None
    sent = sum(c.times * _seconds_of(c, mesh, card) for c in f.program.collectives) if card.link else None
    both = None if compute is None or sent is None else max(compute, sent)
    return {"compute": compute, "collectives": sent, "roofline": both}


def _iteration(functions: list[Function], mesh: Mesh, card: topology.Card) -> dict[str, Any]:
    model = sum(f.times * f.work.model_flops for f in functions) / mesh.size
    executed = sum(f.times * f.program.flops for f in functions)
    bounds = [_times(f, mesh, card)["roofline"] for f in functions if f.times]
    runs = [f.times for f in functions if f.times]
    known = [b for b in bounds if b is not None]
    return {
        "model_flops": model,
        "executed_flops": executed,
        "executed_over_model": executed / model if model else None,
        "roofline_seconds": sum(n * b for n, b in zip(runs, known, strict=True)) if len(known) == len(runs) else None,
        "compile_seconds": sum(f.seconds for f in functions),
    }


def _evaluations(functions: list[Function]) -> dict[str, float]:
    return {
        "expected": sum(f.times * f.work.evaluations for f in functions),
        "counted": sum(f.times * f.evaluations for f in functions),
    }


def _suggest(config: ConfigDict, result: dict[str, Any], mesh: Mesh) -> list[str]:
    """What makes it smaller, what is likely to save most first."""
    held, usable = result["held"], result["card"]["usable"]
    replica, fsdp, context = (mesh.shape[axis] for axis in mesh_lib.AXES)
    shards, frames = mesh_lib.batch_shards(mesh), build.latent_shape(config)[1]
    worst = max(result["functions"], key=lambda f: f["bytes"]["peak"], default=None)
    name = "" if worst is None or result["too_large"] else worst["name"]
    temporaries = usable if not name or worst is None else worst["bytes"]["temporaries"]
    weights = sum(held.get(kind, 0) for kind in ("parameters", "optimizer", "EMA", "old policy", "data gradient"))
    tries: list[tuple[float, str]] = []

    def half(axis: str, size: int) -> str:
        return f"mesh.{axis}={size // 2}"

    # Activations. Both micro-batches at once: what makes the one too large makes the other.
    samples = {"rollout": config.rollout.micro_batch or result["rollouts"], "train": config.train.micro_batch}
    above = [kind for kind, size in samples.items() if size > shards]
    if above:
        saved = temporaries * (1 - shards / samples["rollout" if "rollout" in name else "train"])
        tries.append((saved, " and ".join(f"{kind}.micro_batch={shards}" for kind in above)))
    less = _REMAT[_REMAT.index(config.model.remat) + 1 :] if config.model.remat in _REMAT else ()
    if less and "rollout" not in name:
        tries.append((temporaries / 3, f"model.remat={less[0]}, down to {less[-1]}"))
    wider = 2 * context
    if config.model.heads % wider == 0 and frames % wider == 0 and (replica % 2 == 0 or fsdp % 2 == 0):
        with_half = half("replica", replica) if replica % 2 == 0 else half("fsdp", fsdp)
        tries.append((temporaries / 3, f"mesh.context={wider} with {with_half}"))
    # Weights.
    if replica % 2 == 0:
        tries.append((weights / 2, f"mesh.fsdp={2 * fsdp} with {half('replica', replica)}"))
    if config.log.step_grad_norms and "policy" in name:
        tries.append((held["data gradient"], "log.step_grad_norms=False"))
    # What is no part of the training state.
    if "text tower" in held:
        tries.append((held["text tower"], "text_encoder.where=cached"))
    trajectory = held.get("trajectory", 0)
    if config.train.trajectory == "device":
        tries.append((trajectory, "train.trajectory=host"))
    large = sorted((entry for entry in tries if entry[0] > 0.01 * usable), reverse=True)
    return [*(text for _, text in large), "more devices, with a larger mesh.fsdp"]
