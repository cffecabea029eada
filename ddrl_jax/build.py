"""From a config to the objects of a run: mesh, codec, text, network, process, objective, reward client.

The one place that turns config fields into constructor arguments, for training and evaluation alike. Each object
is made by the library it belongs to; this module adds no behaviour.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Literal

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from ddrl_jax import rewards, state
from ddrl_jax.config import PROCESS_FIELDS, RATIO_OBJECTIVES, ConfigError
from ddrl_jax.data import digits, source
from ddrl_jax.diffusion.guidance import Denoiser, guided
from ddrl_jax.diffusion.process import DanceSDE, EDMChurn, FlowCPS, FlowSDE
from ddrl_jax.logbook import Logbook
from ddrl_jax.models.cosmos_dit import CosmosDiT, CosmosDiTConfig
from ddrl_jax.models.denoiser import CosmosDenoiser, cosmos_denoiser
from ddrl_jax.models.unshuffle import Unshuffle
from ddrl_jax.models.word_table import WordTable
from ddrl_jax.parallel import mesh as mesh_lib
from ddrl_jax.rl.objective import Objective, dance_grpo, ddrl, flow_grpo

PROCESSES = {"edm_churn": EDMChurn, "flow_sde": FlowSDE, "dance_sde": DanceSDE, "flow_cps": FlowCPS}
AnyProcess = EDMChurn | FlowSDE | DanceSDE | FlowCPS
SCORER_CLIPS = 12_000
PRESETS: dict[str, Callable[..., Objective]] = {
    "ddrl": ddrl,
    "dance_grpo": dance_grpo,
    "flow_grpo": flow_grpo,
    "nft": Objective,  # DiffusionNFT: `rl.nft.nft_loss`; of these only kl_beta, loss_scale and the data loss apply
    "rft": Objective,  # best-of-n rejection fine-tuning: the diffusion loss on each group's best rollout
    "sft": functools.partial(Objective, data_beta=1.0),  # the data loss alone
}


@dataclasses.dataclass(frozen=True)
class Setup:
    """What every mode needs. `latent_shape` is (C, T, h, w) of one sample."""

    mesh: Mesh
    codec: Unshuffle
    table: WordTable
    denoise: CosmosDenoiser
    process: AnyProcess
    objective: Objective
    latent_shape: tuple[int, ...]
    rollout_guidance: float = 0.0
    train_guidance: float = 0.0

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

    def context(self, captions: list[str]) -> np.ndarray:
        """Captions -> (N, S, D) float32 text features."""
        return self.table.embed(captions)

    @property
    def null_cond(self) -> dict[str, Any]:
        """The condition without text: zero features before the projection (specs/cosmos.md, traps)."""
        return cond(np.zeros((1, self.table.length, self.table.dim), np.float32))


def cond(context: Any) -> dict[str, Any]:
    """A denoiser's condition: text only, no padding and no conditioning frames."""
    return {"context": context, "padding_mask": None, "condition_mask": None, "frames": None}


def build(config: ConfigDict) -> Setup:
    """Everything but parameters, data and the sidecar. Raises `ConfigError`."""
    try:
        mesh = mesh_lib.make_mesh(config.mesh.replica, config.mesh.fsdp, config.mesh.context)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    shards, groups = mesh_lib.batch_shards(mesh), config.train.micro_batch // config.rollout.group_size
    if groups % shards:
        raise ConfigError(
            f"config.train.micro_batch={config.train.micro_batch}: holds {groups} groups of "
            f"{config.rollout.group_size}, which must be a multiple of the mesh's replica * fsdp = {shards}"
        )
    for field in ("pretrain.batch_size", "eval.chunk"):
        section, name = field.split(".")
        if config[section][name] % shards:
            raise ConfigError(
                f"config.{field}={config[section][name]}: must be a multiple of the mesh's replica * fsdp = {shards}"
            )
    codec = Unshuffle(config.codec.factor, config.codec.mean, config.codec.std)
    data = data_set(config)
    channels, frames, height, width = data.video_shape
    factor = config.codec.factor
    table = WordTable(data.vocabulary, dim=config.text.dim, length=config.text.length)
    return Setup(
        mesh=mesh,
        codec=codec,
        table=table,
        denoise=_denoiser(config, config.process.name),
        process=build_process(config),
        objective=build_objective(config),
        latent_shape=(channels * factor**2, frames, height // factor, width // factor),
        rollout_guidance=config.rollout.guidance,
        train_guidance=config.train.guidance,
    )


def data_set(config: ConfigDict) -> source.DataSet:
    """What data.name stands for."""
    fields = {f: config.data[f] for f in ("name", "frames", "size", "path", "limit")}
    try:
        return source.data_set(**fields, seed=config.seed)
    except ValueError as error:
        raise ConfigError(f"config.{error}") from error


def evaluation(config: ConfigDict, setup: Setup) -> tuple[Denoiser, AnyProcess]:
    """Denoiser and process of the evaluations: eval.process, or the run's own; the denoiser is not guided."""
    if not config.eval.process.name:
        return setup.denoise, setup.process
    return _denoiser(config, config.eval.process.name), _process(config.eval.process, "eval.process")


def _denoiser(config: ConfigDict, process: str) -> CosmosDenoiser:
    """The network under a process's own level: the same network serves them all."""
    level: Literal["edm", "flow"] = "edm" if process == "edm_churn" else "flow"
    return cosmos_denoiser(_graphdef(config), use_rf_ckpts=True, level=level)


def _model_config(config: ConfigDict) -> CosmosDiTConfig:
    try:
        return CosmosDiTConfig(
            in_channels=config.codec.factor**2, context_in=config.text.dim, param_dtype="float32", **config.model
        )
    except ValueError as error:
        raise ConfigError(f"config.model: {error}") from error


def _graphdef(config: ConfigDict) -> nnx.GraphDef:
    return nnx.split(nnx.eval_shape(lambda: CosmosDiT(_model_config(config), rngs=nnx.Rngs(0))))[0]


def init_params(config: ConfigDict, setup: Setup, key: jax.Array) -> Any:
    """Freshly drawn parameters, float32, sharded over fsdp."""

    def init(key: jax.Array) -> Any:
        return nnx.split(CosmosDiT(_model_config(config), rngs=nnx.Rngs(key)))[1]

    shardings = mesh_lib.fsdp_sharding(setup.mesh, jax.eval_shape(init, key))
    return jax.jit(init, out_shardings=shardings)(key)


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


def evaluated_params(config: ConfigDict, s: state.TrainState) -> Any:
    """The weights that evaluations look at: the EMA's (eval.ema), which is nothing yet before the first update."""
    return s.ema if config.eval.ema and s.ema is not None and int(s.step) > 0 else s.params


def own_workdir(workdir: Path) -> IO[str]:
    """Makes the folder and locks it for this process until the file returned is closed (or the process gone).

    Raises ConfigError when it cannot be made or written, or when another run holds it.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        lock = (workdir / ".lock").open("a+")
    except OSError as error:
        raise ConfigError(f"workdir={str(workdir)!r}: cannot be made or written ({error.strerror})") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ConfigError(f"workdir={str(workdir)!r}: another run is using it; take another --workdir") from None
    return lock


def one_process() -> None:
    """Raises ConfigError under jax.distributed: stop decisions and rewards are not collective yet."""
    count = jax.process_count()
    if count > 1:
        raise ConfigError(f"{count} processes: training runs in one process for now; start it on one host")


def to_global(mesh: Mesh, local: np.ndarray) -> jax.Array:
    """This process's rows of a batch -> the global array, cut along its first axis over replica x fsdp."""
    return jax.make_array_from_process_local_data(mesh_lib.batch_sharding(mesh), np.asarray(local))


def scorer_weights(config: ConfigDict, workdir: Path, book: Logbook) -> Path:
    """The folder the sidecar's scorers load from; the digits scorer's weights are trained into it, once per workdir.

    The sidecar knows nothing of our data: it reads clips of the "scorer" scans from a file.
    """
    folder = workdir / "scorer"
    if "digits" not in config.reward.scorers or (folder / "digits.json").exists():
        return folder
    shape = {"frames": config.data.frames, "size": config.data.size}
    clips = digits.write_clips(workdir / "clips", "scorer", SCORER_CLIPS, seed=config.eval.seed, **shape)
    title = f"scorer: training on {SCORER_CLIPS} clips of its own scans"
    with book.working(title), book.progress(title, 0) as advance:
        rewards.train_scorer(
            "digits",
            env=config.reward.env,
            data=clips,
            out=folder,
            log_path=workdir / "sidecar.log",
            progress=lambda done, total: advance(done=done, total=total),
        )
    return folder


@contextlib.contextmanager
def open_rewards(config: ConfigDict, workdir: Path, book: Logbook) -> Iterator[rewards.RewardClient]:
    """The reward client, with a sidecar launched beside it where the config says so; both end with the block.

    Raises `ConfigError` for what the user has to change: no environment, no torch in it, port taken, wrong token.
    """
    reward = config.reward
    options: dict[str, Any] = {"timeout_s": reward.timeout_s, "retries": reward.retries, "fps": reward.fps}
    options["gates"] = tuple(reward.gates)
    try:
        with contextlib.ExitStack() as stack:
            if reward.launch:
                rewards.check_environment(reward.env, reward.scorers)
                codec = config.codec
                sidecar = stack.enter_context(
                    rewards.launch(
                        env=reward.env,
                        scorers=reward.scorers,
                        weights_dir=weights if (weights := scorer_weights(config, workdir, book)).is_dir() else "",
                        codec=f"unshuffle:factor={codec.factor},mean={codec.mean},std={codec.std}",
                        port=reward.port,
                        log_path=workdir / "sidecar.log",
                    )
                )
                client = sidecar.client(reward.weights.to_dict(), **options)
            else:
                token = os.environ.get(reward.token_env, "")
                client = rewards.RewardClient(reward.url, token, reward.weights.to_dict(), **options)
            stack.callback(client.close)
            client.with_judges().ping()
            _try_rewards(config, client.with_judges())
            book.say(f"rewards: the sidecar at {client.url} answers")
            yield client
    except rewards.ConfigurationFault as error:
        raise ConfigError(str(error)) from error


def _try_rewards(config: ConfigDict, client: rewards.RewardClient) -> None:
    """One real clip's latent through the scorers, before anything is trained: weights that name no score, and scorers
    that fail on our clips, are found now. Raises ConfigurationFault."""
    clip = data_set(config).heldout_clips(1)
    codec = Unshuffle(config.codec.factor, config.codec.mean, config.codec.std)
    scores = client.submit(codec.encode(clip["video"]), clip["caption"]).result()
    if not scores.valid.all():
        raise rewards.ConfigurationFault(
            f"reward.weights, reward.gates, reward.scorers: a real clip got no reward: {scores.reason}"
        )


def total_reward(scores: rewards.Scores, config: ConfigDict) -> tuple[np.ndarray, np.ndarray]:
    """(reward (B,) float32, valid (B,)) of a batch: the weighted sum; all invalid where nothing came back."""
    if not scores.scores:
        return np.full(len(scores.valid), np.nan, np.float32), scores.valid
    return rewards.total_reward(scores.scores, config.reward.weights.to_dict())


def training_rewards(
    scores: rewards.Scores, config: ConfigDict
) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, float]]:
    """What advantages are made of: rewards (R, B) and their weights (R,) float32, valid (B,), metrics.

    One row with reward.mix "sum", one a weighted sub-score with "normalised"; after the gates: a sample that fails one
    counts as its group's worst.
    """
    total, valid = total_reward(scores, config)
    rows, weights = total[None], np.ones(1, np.float32)
    if config.reward.mix == "normalised":
        given = config.reward.weights.to_dict()
        names = rewards.weighted_names(given, scores.scores) if scores.scores else {n: w for n, w in given.items() if w}
        weights = np.array(list(names.values()), np.float32)
        rows = np.stack([scores.scores.get(n, np.full(len(valid), np.nan)) for n in names])
    metrics: dict[str, float] = {}
    if config.reward.gates and scores.scores:
        passed, known = rewards.passes_gates(scores.scores, config.reward.gates.to_dict())
        valid = valid & known
        rows = rewards.gated(rows, passed, valid, config.rollout.group_size)
        metrics["gate_rate"] = float(passed[valid].mean()) if valid.any() else float("nan")
    return np.asarray(rows, np.float32), weights, valid, metrics
