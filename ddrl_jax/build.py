"""From a config to the objects of a run: mesh, codec, text, network, process, objective, optimizer, state.

The one place that turns config fields into constructor arguments, for every mode alike, and into the one line that says
what is wrong with them. Each object is made by the library it belongs to. What concerns rewards is in `scoring`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from ddrl_jax import rewards, state
from ddrl_jax.checkpoint import load_pretrained, torch_files
from ddrl_jax.config import PROCESS_FIELDS, RATIO_OBJECTIVES, ConfigError, differences, get, to_json
from ddrl_jax.data import prompts, source
from ddrl_jax.data.prompts import Prompt
from ddrl_jax.data.text_cache import TextCache
from ddrl_jax.diffusion.guidance import Denoiser, guided
from ddrl_jax.diffusion.process import DanceSDE, EDMChurn, FlowCPS, FlowSDE
from ddrl_jax.logbook import Logbook, write_text
from ddrl_jax.models.cosmos_dit import CosmosDiT, CosmosDiTConfig
from ddrl_jax.models.denoiser import CosmosDenoiser, cosmos_denoiser
from ddrl_jax.models.lora import init_lora, merge_lora
from ddrl_jax.models.text_encoder import TextEncoder
from ddrl_jax.models.unshuffle import Unshuffle
from ddrl_jax.models.wan_codec import WanCodec
from ddrl_jax.models.wan_vae import WanVAE, WanVAEConfig
from ddrl_jax.models.word_table import WordTable
from ddrl_jax.parallel import distributed
from ddrl_jax.parallel import mesh as mesh_lib
from ddrl_jax.parallel.attention import resolve
from ddrl_jax.rl.objective import Objective, dance_grpo, ddrl, flow_grpo

PROCESSES = {"edm_churn": EDMChurn, "flow_sde": FlowSDE, "dance_sde": DanceSDE, "flow_cps": FlowCPS}
AnyProcess = EDMChurn | FlowSDE | DanceSDE | FlowCPS
_LORA = 2000  # its stream of random numbers, apart from the trainer's, which count from 0
PRESETS: dict[str, Callable[..., Objective]] = {
    "ddrl": ddrl,
    "dance_grpo": dance_grpo,
    "flow_grpo": flow_grpo,
    "nft": Objective,  # DiffusionNFT: `rl.nft.nft_loss`; of these only kl_beta, loss_scale and the data loss apply
    "rft": Objective,  # best-of-n rejection fine-tuning: the diffusion loss on each group's best rollout
    "sft": functools.partial(Objective, data_beta=1.0),  # the data loss alone
}


class Text(Protocol):
    """Captions -> features: the word table, a text tower here or in the sidecar, or a cache of its features."""

    @property
    def length(self) -> int: ...

    @property
    def dim(self) -> int: ...

    def embed(self, captions: Sequence[str]) -> Any:
        """(N, S, D), float32 or bfloat16."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """What every mode needs. `latent_shape` is (C, T, h, w) of one sample."""

    mesh: Mesh
    codec: Unshuffle | WanCodec
    text: Text
    denoise: CosmosDenoiser
    process: AnyProcess
    objective: Objective
    latent_shape: tuple[int, ...]
    rollout_guidance: float = 0.0
    train_guidance: float = 0.0
    network: Callable[[Any], Any] = lambda params: params  # the trained parameters -> those of the network

    @property
    def rollout_denoise(self) -> Denoiser:
        """What rolls out: the network under rollout.guidance."""
        return self.guided(self.denoise, self.rollout_guidance)

    @property
    def policy_denoise(self) -> Denoiser:
        """What is trained by the policy term: under train.guidance. The data loss is never guided."""
        return self.guided(self.denoise, self.train_guidance)

    def guided(self, denoise: Denoiser, scale: float) -> Denoiser:
        """`denoise` under guidance against the condition without text."""
        return denoise if scale == 0 else guided(denoise, scale, self.null_cond)

    def projected(self, params: Any, cond: dict[str, Any]) -> dict[str, Any]:
        """The condition with its text projected by the network, where it is one of those that do."""
        return self.denoise.project(params, cond) if isinstance(self.denoise, CosmosDenoiser) else cond

    def latents(self, clips: dict[str, Any]) -> np.ndarray:
        """Clips of a data set -> float32 latents (N, C, T, h, w), stored or encoded now."""
        return clips["latent"] if "latent" in clips else self.codec.encode(clips["video"])

    def condition(
        self,
        captions: Sequence[str],
        x0: jax.Array | None = None,
        given_G: np.ndarray | None = None,
        count: int | None = None,
    ) -> dict[str, Any]:
        """The condition of this process's rows of a batch, on the devices, cut as it comes: see `spread`.

        Args:
          captions: one a condition.
          x0: clean latents (G, C, T, h, w), on the devices already, whose first frame is given where `given_G` says so.
          given_G: bool (G,), this process's rows: which conditions are image-to-video; None: none, and no frames.
          count: conditions of the global batch; None: `captions` are all of them.
        """
        try:
            context = to_global(self.mesh, self.text.embed(captions), count, mesh_lib.arriving_text_sharding)
        except ValueError as error:
            raise ConfigError(f"config.{error}") from error
        if given_G is None:
            return cond(context)
        assert x0 is not None, "given frames are frames of something"
        mask = np.zeros((len(given_G), 1, x0.shape[2], 1, 1), np.float32)
        mask[given_G, :, 0] = 1.0
        return cond(context) | {"condition_mask": to_global(self.mesh, mask, count), "frames": x0}

    def spread(self, cond: dict[str, Any]) -> dict[str, Any]:
        """The condition with its text cut as the network takes it. All processes do this together, unlike `condition`,
        in which one may fail alone."""
        context = cond["context"]
        return cond | {"context": distributed.placed(context, mesh_lib.text_sharding(self.mesh, context.shape))}

    @property
    def null_cond(self) -> dict[str, Any]:
        """The condition without text: zero features before the projection (specs/cosmos.md, traps)."""
        return cond(jnp.zeros((1, self.text.length, self.text.dim)))


def cond(context: Any) -> dict[str, Any]:
    """A denoiser's condition: text only, no padding and no conditioning frames."""
    return {"context": context, "padding_mask": None, "condition_mask": None, "frames": None}


def conditions(cond: dict[str, Any]) -> int:
    """G, how many a condition holds."""
    return cond["context"].shape[0]


def build(config: ConfigDict) -> Setup:
    """Everything but the network's parameters, data and the sidecar. Raises `ConfigError`."""
    mesh = make_mesh(config)
    check_mesh(config, mesh)
    if config.pretrain.steps > 0:
        _check_cut(config, mesh, "pretrain.batch_size")
    # Each process encodes, decodes and embeds what is its own, without a word to the others.
    own = distributed.local_mesh(mesh)
    codec = build_codec(config, own)
    return dataclasses.replace(abstract_setup(config, mesh), codec=codec, text=build_text(config, own))


def abstract_setup(config: ConfigDict, mesh: Mesh) -> Setup:
    """A setup for tracing and compiling: nothing is read, there is no codec, and texts have no words."""
    return Setup(
        mesh=mesh,
        codec=None,  # type: ignore[arg-type]  # nothing is encoded
        text=WordTable((), length=config.text.length, dim=config.text.dim),
        denoise=denoiser(config, config.process.name, mesh),
        process=build_process(config),
        objective=build_objective(config),
        latent_shape=latent_shape(config),
        rollout_guidance=config.rollout.guidance,
        train_guidance=config.train.guidance,
    )


def check_mesh(config: ConfigDict, mesh: Mesh) -> None:
    """Raises ConfigError where the mesh cannot cut an iteration's micro-batches, the heads or a clip's tokens."""
    for field in ("train.micro_batch", "rollout.micro_batch"):
        _check_cut(config, mesh, field)
    context = mesh.shape["context"]
    if config.model.heads % context:
        raise ConfigError(f"config.mesh.context={context}: must divide model.heads={config.model.heads}")
    _, frames, rows, columns = latent_shape(config)
    of_a_frame = rows * columns // 4  # a patch is 2x2 latents
    try:
        mesh_lib.sequence_axis(mesh, frames, of_a_frame)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    model, tokens = config.model, frames * of_a_frame

    def heads(length: int, count: int = 1) -> Any:
        return jax.ShapeDtypeStruct((1, length, model.heads // count, model.width // model.heads), model.dtype)

    try:
        resolve(model.attention, mesh, heads(tokens, context), heads(tokens, context))
        resolve(model.attention, mesh, heads(tokens // context), heads(config.text.length))
    except ValueError as error:
        raise ConfigError(f"config.model.{error}") from error


def chunk(config: ConfigDict, mesh: Mesh) -> int:
    """Clips a compiled call of an evaluation: eval.chunk, made a multiple of what the mesh cuts a batch into."""
    shards = mesh_lib.batch_shards(mesh)
    return -(-config.eval.chunk // shards) * shards


def _check_cut(config: ConfigDict, mesh: Mesh, field: str) -> None:
    shards, value = mesh_lib.batch_shards(mesh), get(config, field)
    if value % shards:
        fewer = "" if value > shards else "; with a larger mesh.context it is smaller"
        raise ConfigError(f"config.{field}={value}: must be a multiple of the mesh's replica * fsdp = {shards}{fewer}")


def make_mesh(config: ConfigDict, devices: Any = None) -> Mesh:
    """The mesh of `devices`, by default of all. Raises `ConfigError`."""
    try:
        return mesh_lib.make_mesh(config.mesh.replica, config.mesh.fsdp, config.mesh.context, devices=devices)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def latent_shape(config: ConfigDict) -> tuple[int, int, int, int]:
    """(C, T, h, w) of a clip's latent, of landscape clips where both kinds are; without reading any weights."""
    video = data_set(config).video_shape
    if config.codec.name == "wan_vae":
        return WanVAEConfig().latent_shape(video)
    return Unshuffle(config.codec.factor, config.codec.mean, config.codec.std).latent_shape(video)


def build_codec(config: ConfigDict, mesh: Mesh) -> Unshuffle | WanCodec:
    """Between pixels and latents."""
    codec = config.codec
    if codec.name == "unshuffle":
        return Unshuffle(codec.factor, codec.mean, codec.std)
    try:
        graphdef, params = load_pretrained(weights_file(config, codec.path), mesh=mesh, compute_dtype=codec.dtype)
        found = type(nnx.merge(graphdef, params))
        if found is not WanVAE:
            raise ValueError(f"holds a {found.__name__}, not a Wan VAE")
        return WanCodec(graphdef, params, tile=codec.tile)
    except ValueError as error:
        raise ConfigError(f"config.codec.path={codec.path!r}: {error}") from error


def weights_file(config: ConfigDict, path: str) -> Path:
    """A torch file as safetensors, converted in the sidecar's environment (reward.env); anything else as it is."""
    file = Path(path)
    if file.suffix not in torch_files.SUFFIXES or not file.is_file():
        return file
    return torch_files.to_safetensors(file, torch_python(config))


def torch_python(config: ConfigDict) -> Path | None:
    """The interpreter of reward.env, for what needs torch; None: whichever is found to have it."""
    env = config.reward.env
    return rewards.env_python(env) if env not in ("", "this") else None


def build_text(config: ConfigDict, mesh: Mesh) -> Text:
    """What makes features of captions."""
    text, size = config.text_encoder, {"length": config.text.length, "dim": config.text.dim}
    if not text.path:
        return WordTable(data_set(config).vocabulary, **size)
    if text.where == "cached":
        return text_cache(config)
    if text.where == "sidecar":
        return rewards.SidecarText(**size, timeout_s=max(600.0, config.reward.timeout_s))
    return text_tower(config, mesh)


def text_tower(config: ConfigDict, mesh: Mesh) -> TextEncoder:
    """The tower itself, on the devices."""
    text = config.text_encoder
    try:
        graphdef, params = load_pretrained(text.path, mesh=mesh, dtype=text.dtype)
        encoder = TextEncoder(
            graphdef, params, text.tokenizer or text.path, length=config.text.length, strategy=text.strategy, mesh=mesh
        )
    except ValueError as error:
        raise ConfigError(f"config.text_encoder.path={text.path!r}: {error}") from error
    if encoder.dim != config.text.dim:
        raise ConfigError(
            f"config.text.dim={config.text.dim}: must be {encoder.dim}, the width of the tower's features with "
            f"text_encoder.strategy={text.strategy!r}"
        )
    return encoder


def check_text_files(config: ConfigDict) -> None:
    """Raises ConfigError unless text_encoder.path holds a tokenizer and weights. Reads neither."""
    text = config.text_encoder
    for wanted in ("tokenizer.json", "config.json", "*.safetensors"):
        field = "tokenizer" if wanted == "tokenizer.json" and text.tokenizer else "path"
        if not list(Path(text[field]).glob(wanted)):
            raise ConfigError(f"config.text_encoder.{field}={text[field]!r}: holds no {wanted}")


def text_cache(config: ConfigDict) -> TextCache:
    """The features of captions in data.path, and what they must be a function of."""
    text = config.text_encoder
    made = {"tower": signature(text.path, "text_encoder.path"), "strategy": text.strategy}
    made["tokenizer"] = signature(Path(text.tokenizer or text.path) / "tokenizer.json", "text_encoder.tokenizer")
    size = {"length": config.text.length, "dim": config.text.dim}
    try:
        return TextCache(Path(config.data.path) / "text", fingerprint=made, **size)
    except ValueError as error:
        raise ConfigError(f"config.{error}") from error


def data_set(config: ConfigDict) -> source.DataSet:
    """What data.name stands for."""
    fields: dict[str, Any] = {f: config.data[f] for f in ("name", "frames", "size", "long_size", "path", "limit")}
    fields |= {"heldout": config.eval.heldout_clips, "prompts": config.eval.prompts}
    fields |= {
        "image_to_video": config.data.image_to_video,
        "fingerprint": functools.partial(latent_fingerprint, config),
    }
    try:
        return source.data_set(**fields, seed=config.seed)
    except ValueError as error:
        raise ConfigError(f"config.{error}") from error


@functools.cache
def signature(path: str | os.PathLike[str], field: str) -> str:
    """Of a file, or of a folder's safetensors files: a hash of their sizes and of samples of their bytes. Tells weights
    apart without reading gigabytes. Raises ConfigError, which names `field`, where there are none."""
    path = Path(path)
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"config.{field}={str(path)!r}: there is no such file, nor a folder with .safetensors files")
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(str(size).encode())
        with file.open("rb") as stream:
            for i in range(17):
                stream.seek(max(0, size - 4096) * i // 16)
                digest.update(stream.read(4096))
    return digest.hexdigest()[:16]


def latent_fingerprint(config: ConfigDict) -> dict[str, Any]:
    """What the stored latents of videos are a function of."""
    data = config.data
    return {
        "codec": signature(config.codec.path, "codec.path"),
        "codec_dtype": config.codec.dtype,
        "frames": data.frames,
        "size": data.size,
        "long_size": data.long_size,
        "fps": data.fps,
    }


def evaluation(config: ConfigDict, setup: Setup) -> tuple[Denoiser, AnyProcess]:
    """Denoiser and process of the evaluations: eval.process, or the run's own; the denoiser is not guided."""
    if not config.eval.process.name:
        return setup.denoise, setup.process
    return denoiser(config, config.eval.process.name, setup.mesh), _process(config.eval.process, "eval.process")


def denoiser(config: ConfigDict, process: str, mesh: Mesh) -> CosmosDenoiser:
    """The network under a process's own level: the same network serves them all."""
    level: Literal["edm", "flow"] = "edm" if process == "edm_churn" else "flow"
    return cosmos_denoiser(graphdef(config), use_rf_ckpts=config.model.use_rf_ckpts, level=level, mesh=mesh)


def _model_config(config: ConfigDict) -> CosmosDiTConfig:
    sizes = {k: v for k, v in config.model.items() if k not in ("checkpoint", "weights", "use_rf_ckpts")}
    channels = WanVAEConfig.z_dim if config.codec.name == "wan_vae" else config.codec.factor**2
    try:
        return CosmosDiTConfig(in_channels=channels, context_in=config.text.dim, param_dtype="float32", **sizes)
    except ValueError as error:
        raise ConfigError(f"config.model: {error}") from error


def graphdef(config: ConfigDict) -> nnx.GraphDef:
    return nnx.split(nnx.eval_shape(lambda: CosmosDiT(_model_config(config), rngs=nnx.Rngs(0))))[0]


def abstract_params(config: ConfigDict) -> Any:
    """Shapes and dtypes of the network's parameters."""
    return nnx.split(nnx.eval_shape(lambda: CosmosDiT(_model_config(config), rngs=nnx.Rngs(0))))[1]


def with_base(config: ConfigDict, setup: Setup, base: Any) -> Setup:
    """The setup in which an adapter is trained (lora.rank) and the network is `base` with it; else the same setup."""
    if config.lora.rank == 0:
        return setup
    scale = config.lora.alpha / config.lora.rank
    return dataclasses.replace(setup, network=lambda lora: merge_lora(base, lora, scale))


def check_adapter_base(config: ConfigDict, workdir: Path) -> None:
    """Raises ConfigError where a run's adapter is of other weights than model.checkpoint now holds. The first call of a
    run notes what they are in base.json."""
    if config.lora.rank == 0:
        return
    file, now = workdir / "base.json", {"model.checkpoint": signature(config.model.checkpoint, "model.checkpoint")}
    if not file.is_file():
        write_text(file, json.dumps(now))
    elif json.loads(file.read_text()) != now:
        raise ConfigError(
            f"config.model.checkpoint={config.model.checkpoint!r}: its content is not what this run's adapter was "
            "trained on; put that back, or take another --workdir"
        )


def trained_params(config: ConfigDict, base: Any) -> Any:
    """What is trained at step 0: the network's own parameters, or a new adapter of them."""
    lora = config.lora
    if lora.rank == 0:
        return base
    key = jax.random.fold_in(jax.random.key(config.seed), _LORA)
    try:
        return init_lora(base, lora.rank, tuple(lora.targets), key=key)
    except ValueError as error:
        raise ConfigError(f"config.lora.{error}") from error


def init_params(config: ConfigDict, mesh: Mesh, key: jax.Array | None) -> Any:
    """Parameters, float32, sharded over fsdp: freshly drawn, or those of model.checkpoint."""
    if config.model.checkpoint:
        return pretrained_params(config, mesh)
    assert key is not None, "without a checkpoint parameters are drawn"

    def init(key: jax.Array) -> Any:
        return nnx.split(CosmosDiT(_model_config(config), rngs=nnx.Rngs(key)))[1]

    shardings = mesh_lib.fsdp_sharding(mesh, jax.eval_shape(init, key))
    return jax.jit(init, out_shardings=shardings)(key)


def pretrained_params(config: ConfigDict, mesh: Mesh) -> Any:
    """The parameters of model.checkpoint, float32, sharded over fsdp. Raises `ConfigError` where they do not fit."""
    path, want = config.model.checkpoint, _model_config(config)
    try:
        file = weights_file(config, path)
        graphdef, params = load_pretrained(file, which=config.model.weights, mesh=mesh, dtype="float32")
    except ValueError as error:
        raise ConfigError(f"config.model.checkpoint={path!r}: {error}") from error
    model = nnx.merge(graphdef, params)
    if not isinstance(model, CosmosDiT):
        raise ConfigError(f"config.model.checkpoint={path!r}: holds a {type(model).__name__}, not a Cosmos DiT")
    fields = {"in_channels": "codec.name", "context_in": "text.dim"}
    for field in ("in_channels", "width", "depth", "heads", "mlp_ratio", "adaln_rank", "context_in", "context_dim"):
        ours, theirs = getattr(want, field), getattr(model.config, field)
        if ours != theirs:
            where = fields.get(field, f"model.{field}")
            raise ConfigError(
                f"config.{where}={get(config, where)!r}: gives the network {field} {ours}, but "
                f"model.checkpoint={path!r} has {theirs}"
            )
    for field in ("patch", "max_grid", "rope_ratios"):
        if getattr(want, field) != getattr(model.config, field):
            raise ConfigError(
                f"config.model.checkpoint={path!r}: its {field} is {getattr(model.config, field)}, not the "
                f"{getattr(want, field)} of Cosmos-Predict2.5"
            )
    return params


def _process(section: ConfigDict, where: str) -> AnyProcess:
    given = {f: section[f] for f in PROCESS_FIELDS[section.name] if section[f] is not None}
    try:
        return PROCESSES[section.name](**given)
    except ValueError as error:
        raise ConfigError(f"config.{where}: {error}") from error


def build_process(config: ConfigDict) -> AnyProcess:
    """The rollouts' process; every step that may be trained must be stochastic where something trains on steps."""
    process = _process(config.process, "process")
    try:
        stds = process.step_stds(config.rollout.num_steps)
    except ValueError as error:
        raise ConfigError(f"config.process: {error}") from error
    if config.objective.name not in RATIO_OBJECTIVES:
        return process
    field = "rollout.trained_steps" if config.rollout.steps == "fixed" else "rollout.steps"
    value = tuple(config.rollout.trained_steps) if config.rollout.steps == "fixed" else config.rollout.steps
    still = [step for step in trainable_steps(config) if not stds[step] > 0]
    if still:
        raise ConfigError(
            f"config.{field}={value!r}: step {still[0]} has no noise with "
            "this process (std 0), and so no policy gradient; raise its s_churn, s_noise, noise_level or eta above 0"
        )
    return process


def trainable_steps(config: ConfigDict) -> tuple[int, ...]:
    """The solver steps that are, or may be drawn to be, trained: the fixed ones, or all but the last."""
    if config.rollout.steps == "fixed":
        return tuple(config.rollout.trained_steps)
    return tuple(range(config.rollout.num_steps - 1))


def trained_step_count(config: ConfigDict) -> int:
    """K, how many steps of a rollout are trained."""
    ro, steps = config.rollout, trainable_steps(config)
    return {"fixed": len(steps), "random": max(1, round(ro.random_fraction * len(steps))), "window": ro.window}[
        ro.steps
    ]


def build_objective(config: ConfigDict) -> Objective:
    """The preset with the fields that are not None."""
    given = {f: v for f, v in config.objective.items() if f != "name" and v is not None}
    try:
        return PRESETS[config.objective.name](**given)
    except ValueError as error:
        raise ConfigError(f"config.objective: {error}") from error


def optimizer(section: ConfigDict) -> optax.GradientTransformation:
    """AdamW of `config.pretrain` or `config.train`; a field the section lacks has `state.make_optimizer`'s value."""
    names = ("learning_rate", "warmup_steps", "b1", "b2", "eps", "weight_decay", "grad_clip")
    return state.make_optimizer(**{n: section[n] for n in names if n in section})


def ema_exponent(section: ConfigDict) -> float | None:
    """The EMA's exponent, or None where `ema_rate` is 0: no EMA."""
    return state.ema_exponent(section.ema_rate) if section.ema_rate > 0 else None


def train_state(
    setup: Setup, params: Any, optimizer: optax.GradientTransformation, exponent: float | None, *, old: bool = False
) -> state.TrainState:
    """A state at step 0 whose every leaf is sharded by the mesh's rule; `old`: with an old policy (DiffusionNFT)."""

    def init(p: Any) -> state.TrainState:
        return state.init_state(p, optimizer, ema=exponent is not None, old=old)

    shardings = mesh_lib.fsdp_sharding(setup.mesh, jax.eval_shape(init, params))
    return jax.jit(init, out_shardings=shardings)(params)


def abstract_state(config: ConfigDict) -> state.TrainState:
    """Shapes and dtypes of what a checkpoint of the run holds."""
    steps, with_ema, old = optimizer(config.train), config.train.ema_rate > 0, config.objective.name == "nft"
    return jax.eval_shape(
        lambda base: state.init_state(trained_params(config, base), steps, ema=with_ema, old=old),
        abstract_params(config),
    )


def read_prompts(config: ConfigDict, field: str) -> list[Prompt]:
    """The prompts of the file that a field names. Raises `ConfigError`."""
    try:
        return prompts.read_prompts(get(config, field))
    except ValueError as error:
        raise ConfigError(f"config.{field}={get(config, field)!r}: {error}") from error


def evaluated_params(config: ConfigDict, s: state.TrainState) -> Any:
    """The weights that evaluations look at: the EMA's (eval.ema), which is nothing yet before the first update."""
    return s.ema if config.eval.ema and s.ema is not None and int(s.step) > 0 else s.params


def own_workdir(workdir: Path) -> contextlib.ExitStack:
    """`own_folder` for a run's workdir, which belongs to process 0: the others go on when it has it."""
    lock = contextlib.ExitStack()

    def own() -> None:
        lock.enter_context(own_folder(workdir, "workdir", "; take another --workdir"))

    distributed.primary(own)
    return lock


def own_folder(folder: Path, field: str, instead: str = "") -> IO[str]:
    """Makes the folder and locks it for this process until the file returned is closed (or the process gone).

    Raises ConfigError, which names `field`, when it cannot be made or written, or when another run holds it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("a+")
    except OSError as error:
        raise ConfigError(f"{field}={str(folder)!r}: cannot be made or written ({error.strerror}){instead}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ConfigError(f"{field}={str(folder)!r}: another run is using it{instead}") from None
    return lock


def logbook(config: ConfigDict, workdir: Path) -> Logbook:
    """The run's, which process 0 writes."""
    log = config.log
    return Logbook(
        workdir, primary=distributed.is_primary(), every=log.every, tensorboard=log.tensorboard, wandb=log.wandb
    )


def one_process(what: str) -> None:
    """Raises ConfigError with several processes: `what` is one's work."""
    count = jax.process_count()
    if count > 1:
        raise ConfigError(f"{what}: runs in one process, not in {count}; start it on one host")


def same_run(config: ConfigDict, workdir: Path) -> None:
    """Raises ConfigError where this process was started with another config or workdir than process 0."""
    theirs = distributed.primary(lambda: [str(workdir), to_json(config)])
    if theirs[0] != str(workdir):
        raise ConfigError(
            f"--workdir={str(workdir)!r}: process 0 has {theirs[0]!r}; all processes must be given the same"
        )
    for field, then, now in differences(config, json.loads(theirs[1])):
        if field != "reward.url":  # of a fleet of sidecars each process may have its own
            raise ConfigError(f"config.{field}={now!r}: process 0 has {then!r}; all processes must be given the same")


def rows_sharding(mesh: Mesh, count: int) -> NamedSharding:
    """Of a batch of `count` rows: its first axis over replica x fsdp; whole on every device where they do not divide
    it (16 conditions on 128 data groups)."""
    return NamedSharding(mesh, P(mesh_lib.batch_spec(mesh, count)))


def own_rows(mesh: Mesh, count: int) -> np.ndarray:
    """The rows of a batch of `count` that this process's devices hold, ascending: what it gives to `to_global`."""
    return distributed.own_rows(rows_sharding(mesh, count), (count,))


def to_global(
    mesh: Mesh,
    rows: np.ndarray,
    count: int | None = None,
    sharding_of: Callable[[Mesh, Sequence[int]], NamedSharding] | None = None,
) -> jax.Array:
    """A batch's rows -> the global array. No other process is waited for.

    Args:
      rows: those of `own_rows(mesh, count)`; all of them, on every process the same, where there is no count.
      count: rows of the global batch.
      sharding_of: a rule of `parallel.mesh` that cuts other axes as well; None: `rows_sharding`.
    """
    rows = np.asarray(rows)
    shape = (len(rows) if count is None else count, *rows.shape[1:])
    sharding = sharding_of(mesh, shape) if sharding_of else rows_sharding(mesh, shape[0])
    return distributed.from_rows(sharding, rows, shape)
