"""The config schema: every field with its default, what it may be, and one-line errors.

A config file is a Python function `get_config()` that starts from `default()` and changes fields; fields are typed and
locked, so a misspelt one is an error. `None` in `process` and `objective` means "the value of the named process or
preset". This module knows ml_collections and nothing else of the package; nothing left of `state` may know it.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import runpy
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict, config_dict

# What may change between the first start of a run and a later one in the same workdir.
MAY_DIFFER = (
    *("train.steps", "mesh", "log", "checkpoint", "monitor", "reward.url", "prepare", "study", "export", "plan"),
    # How it is computed and not what, up to rounding: another machine may want another choice.
    *("model.remat", "model.attention", "train.micro_batch", "rollout.micro_batch", "train.trajectory"),
)

PROCESS_FIELDS = {
    "edm_churn": [
        *("sigma_min", "sigma_max", "rho", "solver", "s_churn", "s_noise", "s_t_min", "s_t_max"),
        *("train_mean", "train_std", "train_multiplier", "high_sigma_ratio"),
    ],
    "flow_sde": ["noise_level", "shift"],
    "dance_sde": ["eta", "shift"],
    "flow_cps": ["noise_level", "shift"],
}
REMAT = ("none", "full", "save-attention", "save-attention-mlp", "save-qkv", "save-most", "offload")
ATTENTION = ("auto", "xla", "cudnn", "splash")
OBJECTIVES = ("ddrl", "dance_grpo", "flow_grpo", "nft", "rft", "sft")
RATIO_OBJECTIVES = ("ddrl", "dance_grpo", "flow_grpo")  # those with a policy gradient on recorded steps


class ConfigError(ValueError):
    """Bad input of a user: one line that names the field, the value and what would be right; exit status 2."""


def _optional(kind: type) -> Any:
    """A typed field that may be None."""
    return config_dict.placeholder(kind)


def _process(name: str) -> dict[str, Any]:
    """A process block; None is the process's own value."""
    return {
        "name": name,
        **{field: _optional(float) for field in PROCESS_FIELDS["edm_churn"] if field != "solver"},
        "solver": _optional(str),
        "noise_level": _optional(float),
        "shift": _optional(float),
        "eta": _optional(float),
    }


def default() -> ConfigDict:
    """Every field there is. Sizes are those of a laptop; recipes in `configs/` change them."""
    config = ConfigDict(
        {
            "seed": 0,
            "data": {
                "name": "digits",  # digits (moving handwritten digits) | words | videos (a folder of video files)
                # Of digits: a folder with a clips.npz, such as --mode=prepare writes; "" renders real ones. Of videos:
                # the folder with videos/ and metas/, and with the latents/ that --mode=prepare makes.
                "path": "",
                "limit": 0,  # train on the first so many clips only; 0 is all
                "frames": 4,
                "size": 12,  # pixels: both edges; of videos the short one
                "long_size": 0,  # pixels: the long edge of videos, landscape or portrait; 0 for the others
                "fps": 16.0,  # of videos: frames a second they are read at and written with
                "image_to_video": 0.0,  # of videos: the share of conditions whose first latent frame is given (I2V)
            },
            "codec": {
                "name": "unshuffle",  # unshuffle (lossless space to depth) | wan_vae
                "factor": 2,
                "mean": 0.0,
                "std": 1.0,  # factor, mean and std are unshuffle's
                "path": "",  # of wan_vae: its weights, official or diffusers
                "dtype": "float32",  # of wan_vae's compute
                "tile": 0,  # of wan_vae: decode in tiles of so many latent rows and columns; 0: whole frames
            },
            "text": {"length": 10, "dim": 64},  # what the network is given: tokens a caption, width of a token
            "text_encoder": {
                "path": "",  # folder of a Qwen2.5-VL text tower and its tokenizer; "": a frozen table of word vectors
                "tokenizer": "",  # folder of the tokenizer, where that is another
                "where": "device",  # device: beside the network | sidecar | cached: read what --mode=prepare embedded
                "strategy": "full_concat",  # how hidden states become features: see models.qwen_text.embed_text
                "dtype": "bfloat16",  # of the tower and of its features
            },
            "model": {
                "checkpoint": "",  # published or exported weights to start from; "": drawn at random and pre-trained
                "weights": "raw",  # of an official checkpoint with both: raw (net.*) | ema (net_ema.*)
                "use_rf_ckpts": True,  # one time for all frames; False: given frames have a time of their own (2B)
                "width": 128,
                "depth": 3,
                "heads": 4,
                "mlp_ratio": 4.0,
                "adaln_rank": 32,
                "context_dim": 128,
                "dtype": "float32",  # of the compute; parameters are always float32
                "remat": "none",  # what the backward pass finds kept: REMAT below, CosmosDiTConfig says what each is
                "attention": "auto",  # auto (what suits the hardware) | xla | cudnn | splash
            },
            "lora": {
                "rank": 0,  # of low-rank adapters, which alone are trained; 0 trains every parameter
                "alpha": 32.0,  # the adapters' scale is alpha / rank
                "targets": ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.out"),  # ends of layers' paths
            },
            "process": _process("edm_churn"),
            "rollout": {
                "conditions": 8,  # conditions (prompts) an iteration
                "group_size": 8,  # rollouts a condition
                "micro_batch": 0,  # rollouts an evaluation of the network; 0 is all of them at once
                "num_steps": 20,
                "steps": "fixed",  # which steps are trained: fixed | random (DanceGRPO) | window (MixGRPO)
                "trained_steps": tuple(range(0, 19, 2)),  # of "fixed": every other step (paper, practice section)
                "random_fraction": 0.6,  # of "random": so many of the first T-1, drawn anew every iteration
                "window": 4,  # of "window": consecutive stochastic steps; the others are the ODE's
                "window_every": 25,  # iterations until the window moves on by a step
                "same_noise": False,  # a group's rollouts share their start noise
                "guidance": 0.0,  # of the rollouts: cond + guidance * (cond - null)
                "ema": False,  # roll out with the EMA's weights
            },
            "objective": {
                "name": "ddrl",
                "data_beta": _optional(float),
                "kl_beta": _optional(float),
                "clip_range": _optional(float),
                "log_ratio": _optional(str),
                "kl": _optional(str),
                "reward_transform": _optional(str),
                "adv_clip": _optional(float),
                "loss_scale": _optional(float),
                "data_draws": _optional(int),
                "data_levels": _optional(str),
                "cond_dropout": _optional(float),
            },
            "advantage": {
                "kind": "group",  # group: (r - mean)/std | partition: (r - Z)/beta, Eq. 8's (needs reference rollouts)
                "std": "group",  # of "group": group | batch (FlowGRPO's global one)
                "ddof": 1,
                "eps": 1e-4,
                "reward_clip": 5.0,  # std, ddof, eps and this one are of "group" only
                "beta": 1.0,  # of "partition": the reward's temperature
                "best_of": 0,  # train on the best_of/2 best and worst of a group only; 0 is all
            },
            "nft": {
                "beta": 1.0,  # strength of the implicit guidance
                "adv_clip": 5.0,  # the advantage that counts as certainly good
                "decay_rate": 1e-3,  # of the old policy: it keeps min(decay_rate * iteration, decay_max) of itself
                "decay_max": 0.5,
                "draws": 1,  # noise levels a sample
            },
            "pretrain": {
                "steps": 0,
                "batch_size": 64,
                "learning_rate": 1e-3,
                "warmup_steps": 100,
                "weight_decay": 0.0,
                "grad_clip": 1.0,
                "ema_rate": 0.1,
                "cond_dropout": 0.1,
                "from_run": "",  # workdir of a run whose weights (EMA) to start from, instead of pre-training
                "from_stage": "pretrain",  # which of that run's: pretrain | ddrl (its last, such as SFT's)
            },
            "train": {
                "steps": 100,  # RL iterations
                "micro_batch": 32,  # rollouts a gradient evaluation
                "trajectory": "device",  # where recorded steps wait for their gradient: device | host (its memory)
                "updates_per_rollout": 1,
                "learning_rate": 1e-5,
                "warmup_steps": 50,  # multiplier from 1e-6 to 1, then constant
                "b1": 0.9,
                "b2": 0.99,
                "eps": 1e-8,
                "weight_decay": 1e-4,
                "grad_clip": 1.0,
                "ema_rate": 0.1,  # relative width of the power-function EMA; 0 turns it off
                "guidance": 0.0,  # of the trained policy; the rollouts' is rollout.guidance
                "max_skipped_in_a_row": 10,  # steps with a non-finite loss, gradient or update, before the run stops
            },
            "reward": {
                "launch": True,  # start a sidecar beside the trainer; False: use `url`
                "url": "",
                "token_env": "DDRL_SIDECAR_TOKEN",  # the environment variable that holds the bearer token
                "device": "cpu",  # of a launched sidecar: cpu | cuda | cuda:N
                "threads": 1,  # of a launched sidecar's torch on the CPU
                "env": "",  # the sidecar's virtual environment; "" the cache folder; "this" the running interpreter
                "scorers": ("digits",),  # names, or FILE.py:Class
                "weights": ConfigDict(
                    {
                        "digits/text_alignment": 1.0,
                        "digits/visual_quality": 1.0,
                        "digits/motion_quality": 1.0,
                    }
                ),
                "mix": "sum",  # sum: weighted sum | normalised: each within its group, then weighted
                # "scorer/sub-score": (low, high), what it is clipped to before its weight scales it
                "bounds": ConfigDict({}),
                "gates": ConfigDict({}),  # "scorer/sub-score": minimum; a sample below counts as its group's worst
                "port": 0,  # of a launched sidecar; 0 takes a free one
                "wire": "float32",  # of latents on their way to the sidecar: float32 | bfloat16 (half the bytes)
                "timeout_s": 60.0,
                "retries": 3,
                "min_valid_rate": 0.5,  # stop when the valid rate stays under this ...
                "min_valid_window": 5,  # ... for so many iterations
                "fps": 8.0,
            },
            "eval": {
                "every": 25,  # iterations between evaluations during training
                "clips": 1080,  # before and after: four of each of the 270 held-out prompts
                "clips_during": 120,
                "num_steps": 20,
                "guidance": 0.0,  # cond + guidance * (cond - null)
                "ema": True,  # evaluate the EMA (raw weights wobble from one evaluation to the next)
                "heldout_clips": 512,  # of videos: so many are set aside and never trained on
                "prompts": "",  # of videos: captions, with or without a first frame; "": those of held-out clips
                "chunk": 120,  # clips a compiled call
                "judge_steps": 800,
                "seed": 1234,
                "process": _process(""),  # of the evaluations' sampler and held-out loss; "" is the run's own
            },
            "checkpoint": {"every": 50, "keep": 2, "pretrain_every": 500},
            "log": {
                "every": 1,
                "tensorboard": True,
                "wandb": "",  # a project's name, "" off
                "step_grad_norms": True,  # of each trained step; with micro-batches they cost a gradient's memory
            },
            "monitor": {
                "on_hacking": "warn",  # warn | stop | rollback (to the last clean evaluation, and stop there)
                "heldout_loss_limit": 0.10,
                "reward_slope_limit": 0.02,
                "reward_std_limit": 0.25,
                "sub_score_limit": 0.25,
                "image_limit": 0.15,
            },
            "prepare": {  # --mode=prepare: synthetic clips of the base; of videos: latents of a folder
                "clips": 4096,  # synthetic ones
                "guidance": 0.0,
                "out": "",
                "prompts": "",  # of videos: captions (.jsonl, .csv, .txt) for synthetic clips; "": encode data.path
            },
            "study": {  # --mode=study
                "base": "",  # workdir of a finished base; "" trains it
                "seeds": (0,),
                "workers": 2,  # arms at once, each pinned to its share of the cores
                "arms": ConfigDict({}),  # name -> {label, group, set: {a part of a config}}
            },
            "plan": {  # --mode=plan
                "target": "",  # h100:N | h200:N | b200:N | v5e:AxB | v5p:AxBxC | v6e:AxB | cpu:N
                "json": "",  # a file that the whole plan is written to; "": none
            },
            "export": {  # --mode=export
                "format": "safetensors",  # safetensors (official names) | pt | diffusers
                "weights": "ema",  # ema | raw
                "dtype": "float32",  # float32 | bfloat16
                "step": -1,  # -1: the newest checkpoint's
                "lora": "merged",  # merged into the weights | separate: the adapter alone, for peft or diffusers
                "out": "",  # "" is a folder of its own in the workdir's export/
            },
            "mesh": {"replica": 1, "fsdp": -1, "context": 1},  # -1: all remaining devices
        }
    )
    return config.lock()


def _require(ok: bool, field: str, value: Any, right: str) -> None:
    if not ok:
        raise ConfigError(f"config.{field}={value!r}: {right}")


def validate(config: ConfigDict) -> None:
    """Checks what the types cannot say. Raises `ConfigError` with one line."""
    _validate_schema(config)

    def at_least(low: float, *fields: str) -> None:
        for field in fields:
            value = get(config, field)
            _require(value >= low and math.isfinite(value), field, value, f"must be at least {low:g}")

    at_least(1, "data.frames", "text.length", "text.dim", "model.width", "model.depth", "model.heads")
    at_least(1, "rollout.conditions", "rollout.num_steps", "train.micro_batch", "train.updates_per_rollout")
    at_least(1, "pretrain.batch_size", "eval.every", "eval.chunk", "eval.num_steps", "checkpoint.every")
    at_least(
        1,
        "checkpoint.pretrain_every",
        "checkpoint.keep",
        "log.every",
        "train.max_skipped_in_a_row",
        "reward.min_valid_window",
    )
    at_least(0, "train.steps", "pretrain.steps", "train.learning_rate", "pretrain.learning_rate")
    at_least(0, "train.warmup_steps", "pretrain.warmup_steps", "train.ema_rate", "pretrain.ema_rate")
    at_least(0, "reward.retries", "reward.port", "eval.judge_steps", "seed", "eval.seed")
    at_least(0, "data.limit", "advantage.best_of")
    at_least(1, "rollout.window", "rollout.window_every", "nft.draws", "prepare.clips", "study.workers")
    at_least(2, "rollout.group_size", "eval.clips", "eval.clips_during", "eval.heldout_clips")
    _require(
        0 < config.reward.timeout_s <= 86_400,
        "reward.timeout_s",
        config.reward.timeout_s,
        "must be above 0 and at most 86400 seconds",
    )
    _require(config.reward.port < 65_536, "reward.port", config.reward.port, "must be below 65536; 0 takes a free one")
    at_least(1, "reward.threads")
    at_least(-1, "export.step")
    device = config.reward.device
    _require(
        re.fullmatch(r"cpu|cuda(:\d+)?", device) is not None, "reward.device", device, "must be cpu, cuda or cuda:N"
    )
    _require(config.reward.fps > 0, "reward.fps", config.reward.fps, "must be above 0")
    for scorer in config.reward.scorers:
        _require(
            isinstance(scorer, str) and bool(scorer),
            "reward.scorers",
            tuple(config.reward.scorers),
            "must be names or FILE.py:Class",
        )
    _require(
        config.eval.clips_during <= config.eval.clips,
        "eval.clips_during",
        config.eval.clips_during,
        f"must be at most eval.clips={config.eval.clips}",
    )
    at_least(1, "model.adaln_rank", "model.context_dim")
    _require(
        config.model.width * config.model.mlp_ratio >= 1,
        "model.mlp_ratio",
        config.model.mlp_ratio,
        "must give the MLP a hidden width of at least 1",
    )
    at_least(0, "train.b1", "train.b2")
    at_least(0, "train.weight_decay", "pretrain.weight_decay", "advantage.eps", "pretrain.cond_dropout")
    at_least(1, "codec.factor", "data.size")
    for field in ("seed", "eval.seed"):
        _require(get(config, field) < 2**32, field, get(config, field), "must be below 2**32")
    for field in ("train.grad_clip", "pretrain.grad_clip", "train.eps"):
        _require(get(config, field) > 0, field, get(config, field), "must be above 0")
    for field in ("train.b1", "train.b2", "pretrain.cond_dropout"):
        _require(get(config, field) < 1, field, get(config, field), "must be below 1")
    for field in ("train.ema_rate", "pretrain.ema_rate"):
        value = get(config, field)
        _require(value < 0.288, field, value, "must be below 0.288 (the width of a plain average); 0 turns the EMA off")
    _validate_data(config)
    _require(
        config.model.width % config.model.heads == 0,
        "model.heads",
        config.model.heads,
        f"must divide model.width={config.model.width}",
    )
    _require(
        config.model.dtype in ("float32", "bfloat16"), "model.dtype", config.model.dtype, "must be float32 or bfloat16"
    )
    _require(
        config.train.trajectory in ("device", "host"),
        "train.trajectory",
        config.train.trajectory,
        "must be device or host",
    )
    _require(
        config.train.trajectory == "device" or config.train.updates_per_rollout == 1,
        "train.trajectory",
        config.train.trajectory,
        f"must be device with train.updates_per_rollout={config.train.updates_per_rollout}: host is for one update",
    )
    for field, known in (("model.remat", REMAT), ("model.attention", ATTENTION)):
        _require(get(config, field) in known, field, get(config, field), "must be one of " + ", ".join(known))

    _require(
        config.objective.name in OBJECTIVES,
        "objective.name",
        config.objective.name,
        "must be one of " + ", ".join(OBJECTIVES),
    )
    _validate_process(config.process, "process")
    if config.eval.process.name:
        _validate_process(config.eval.process, "eval.process")
    else:
        for field, value in config.eval.process.items():
            _require(not value, f"eval.process.{field}", value, "needs eval.process.name")
    _validate_rollout(config)
    _validate_methods(config)

    _require(
        config.objective.clip_range is None or config.objective.clip_range > 0,
        "objective.clip_range",
        config.objective.clip_range,
        "must be above 0 (at 0 the tie halves the gradient)",
    )
    sft = config.objective.name == "sft"
    _require(
        not sft or config.objective.data_levels in (None, "training"),
        "objective.data_levels",
        config.objective.data_levels,
        "must be training for sft, which has no rollouts",
    )
    beta = config.objective.data_beta
    _require(
        beta is None or beta > 0 or (beta == 0 and not sft),
        "objective.data_beta",
        beta,
        "must be at least 0, and above it for sft, which trains on nothing else",
    )
    clip = config.advantage.reward_clip
    _require(clip is None or clip > 0, "advantage.reward_clip", clip, "must be above 0, or None")
    _require(
        config.advantage.std in ("group", "batch"), "advantage.std", config.advantage.std, "must be group or batch"
    )
    _require(config.advantage.ddof in (0, 1), "advantage.ddof", config.advantage.ddof, "must be 0 or 1")
    _require(
        0 <= config.reward.min_valid_rate <= 1,
        "reward.min_valid_rate",
        config.reward.min_valid_rate,
        "must be between 0 and 1",
    )
    _require(len(config.reward.scorers) > 0, "reward.scorers", (), "must name at least one scorer, such as 'digits'")
    _require(
        any(config.reward.weights.values()),
        "reward.weights",
        config.reward.weights.to_dict(),
        "must give at least one sub-score a weight other than 0",
    )
    _require(
        config.reward.launch or bool(config.reward.url),
        "reward.url",
        config.reward.url,
        "must be the sidecar's address when reward.launch is False",
    )
    for axis in ("replica", "fsdp", "context"):
        value = config.mesh[axis]
        _require(value >= 1 or value == -1, f"mesh.{axis}", value, "must be at least 1, or -1 for the rest")


# Fields that may be infinite: no bound.
_UNBOUNDED = {"process.s_t_min", "process.s_t_max", "advantage.reward_clip", "train.grad_clip", "pretrain.grad_clip"}
_UNBOUNDED |= {"objective.clip_range", "objective.adv_clip"}


def _validate_schema(config: ConfigDict) -> None:
    """Every field is there, none is unknown (an unlocked block takes any name), none is None or nan that may not."""
    known, given = flatten(default().to_dict()), flatten(config.to_dict())
    numbers, pairs, free = ("reward.weights", "reward.gates"), "reward.bounds", ("study.arms",)
    for field in sorted(f for f in known.keys() - given.keys() if not f.startswith((*numbers, pairs, *free))):
        raise ConfigError(f"config.{field}: is missing; its default is {known[field]!r}")
    for field, value in given.items():
        if field.startswith(free):
            continue  # checked by study.py, arm by arm
        if field in (*numbers, pairs) and not value:
            continue
        if field.startswith(pairs):
            two = isinstance(value, tuple | list) and len(value) == 2
            numeric = two and all(isinstance(v, int | float) and not math.isnan(v) for v in value)
            _require(numeric and value[0] < value[1], field, value, "must be (low, high), one pair a sub-score")
            continue
        if field.startswith(numbers):
            number = isinstance(value, int | float) and math.isfinite(value)
            _require(number, field, value, "must be a finite number, one a sub-score")
            continue
        if field not in known:
            close = difflib.get_close_matches(field, known, n=1, cutoff=0.4)
            hint = f"; did you mean config.{close[0]}?" if close else ""
            raise ConfigError(f"config.{field}={value!r}: there is no such field{hint}")
        may_be_none = known[field] is None or field == "advantage.reward_clip"
        _require(value is not None or may_be_none, field, value, f"must not be None; its default is {known[field]!r}")
        if isinstance(value, float):
            _require(not math.isnan(value), field, value, "must be a number")
            _require(math.isfinite(value) or field in _UNBOUNDED, field, value, "must be finite")


def _validate_process(process: ConfigDict, where: str) -> None:
    _require(
        process.name in PROCESS_FIELDS, f"{where}.name", process.name, "must be one of " + ", ".join(PROCESS_FIELDS)
    )
    for field, value in process.items():
        _require(
            field == "name" or value is None or field in PROCESS_FIELDS[process.name],
            f"{where}.{field}",
            value,
            f"is not a field of {process.name}, whose fields are {', '.join(PROCESS_FIELDS[process.name])}",
        )
    if process.name == "edm_churn":
        low = 0.01 if process.sigma_min is None else process.sigma_min
        high = 200.0 if process.sigma_max is None else process.sigma_max
        _require(
            0 < low < high,
            f"{where}.sigma_min",
            process.sigma_min,
            f"must be above 0 and below {where}.sigma_max={high:g}",
        )
        for field in ("rho", "train_std", "train_multiplier"):
            _require(
                process[field] is None or process[field] > 0, f"{where}.{field}", process[field], "must be above 0"
            )
        share = process.high_sigma_ratio
        _require(share is None or 0 <= share <= 1, f"{where}.high_sigma_ratio", share, "must be between 0 and 1")
        _require(
            process.solver in (None, "2ab", "1euler", "2mid"),
            f"{where}.solver",
            process.solver,
            "must be 2ab, 1euler or 2mid",
        )


def _validate_data(config: ConfigDict) -> None:
    """Data, codec and text: what videos have and the built-in sets have not, and the other way round."""
    data, codec, text = config.data, config.codec, config.text_encoder
    names = ("digits", "words", "videos")
    _require(data.name in names, "data.name", data.name, "must be digits, words or videos")
    _require(codec.name in ("unshuffle", "wan_vae"), "codec.name", codec.name, "must be unshuffle or wan_vae")
    _require(codec.std > 0, "codec.std", codec.std, "must be above 0")
    _require(codec.tile >= 0, "codec.tile", codec.tile, "must be at least 0")
    dtypes = ("float32", "bfloat16")
    for field in ("codec.dtype", "text_encoder.dtype", "export.dtype", "reward.wire"):
        _require(get(config, field) in dtypes, field, get(config, field), "must be float32 or bfloat16")
    videos, wan = data.name == "videos", codec.name == "wan_vae"
    _require(videos == wan, "codec.name", codec.name, f"must be {'wan_vae' if videos else 'unshuffle'} for {data.name}")
    _require(wan or not codec.path, "codec.path", codec.path, "must be '' for unshuffle, which has no weights")
    _require(not wan or bool(codec.path), "codec.path", codec.path, "must name the weights of the Wan VAE")
    cell = 16 if wan else 2 * codec.factor  # a patch is 2x2 latents
    why = f"must be a multiple of {cell}: 8 pixels a latent, 2x2 latents a patch"
    why = why if wan else f"must be a multiple of 2 * codec.factor = {cell} (a patch is 2x2 latents)"
    for field in ("data.size", "data.long_size") if wan else ("data.size",):
        value = get(config, field)
        _require(codec.factor >= 1 and value >= 1 and value % cell == 0, field, value, why)
    if videos:
        _require(
            data.long_size >= data.size, "data.long_size", data.long_size, f"must be at least data.size={data.size}"
        )
        _require(data.frames % 4 == 1, "data.frames", data.frames, "must be 4k+1 for the Wan VAE, such as 93")
        _require(bool(data.path), "data.path", data.path, "must be a folder with videos/ and metas/, or latents/")
        _require(data.fps > 0, "data.fps", data.fps, "must be above 0")
    else:
        for field in ("data.long_size", "data.image_to_video", "prepare.prompts", "eval.prompts"):
            value = get(config, field)
            _require(not value, field, value, f"is of videos only, not of {data.name}")
    share = data.image_to_video
    _require(0 <= share <= 1, "data.image_to_video", share, "must be between 0 and 1")
    _require(
        share == 0 or data.frames > 1, "data.image_to_video", share, "must be 0 for data.frames=1: an image is no video"
    )
    _require(
        text.where in ("device", "sidecar", "cached"),
        "text_encoder.where",
        text.where,
        "must be device, sidecar or cached",
    )
    _require(bool(text.path) or text.where == "device", "text_encoder.path", text.path, f"is needed for {text.where}")
    _require(
        videos or not text.path, "text_encoder.path", text.path, f"must be '' for {data.name}, which has a word table"
    )
    _require(not videos or bool(text.path), "text_encoder.path", text.path, "must be the folder of a text tower")
    known = re.fullmatch(r"full_concat|mean_pooling|pool_every_(n|[1-9]\d*)_layers_and_concat", text.strategy)
    _require(
        bool(known),
        "text_encoder.strategy",
        text.strategy,
        "must be full_concat, mean_pooling or pool_every_N_layers_and_concat",
    )
    _require(
        text.where != "cached" or text.dtype == "bfloat16",
        "text_encoder.dtype",
        text.dtype,
        "must be bfloat16 for cached, which is how features are stored",
    )
    prompts = config.prepare.prompts
    _require(
        not prompts or text.where != "sidecar",
        "text_encoder.where",
        text.where,
        "must be device or cached for prepare.prompts: no sidecar runs while clips are prepared",
    )
    _require(
        not prompts or bool(config.prepare.out),
        "prepare.out",
        config.prepare.out,
        "must be a folder for the synthetic clips of prepare.prompts, apart from those of data.path",
    )
    model = config.model
    _require(model.weights in ("raw", "ema"), "model.weights", model.weights, "must be raw or ema")
    _require(
        not (model.checkpoint and config.pretrain.from_run),
        "pretrain.from_run",
        config.pretrain.from_run,
        f"must be '' with model.checkpoint={model.checkpoint!r}: a run starts from one of them",
    )
    _require(
        not (model.checkpoint and config.pretrain.steps),
        "pretrain.steps",
        config.pretrain.steps,
        "must be 0 with model.checkpoint, which is pre-trained",
    )
    export = config.export
    formats = ("safetensors", "pt", "diffusers")
    _require(export.format in formats, "export.format", export.format, "must be safetensors, pt or diffusers")
    _require(export.weights in ("raw", "ema"), "export.weights", export.weights, "must be raw or ema")
    _require(export.lora in ("merged", "separate"), "export.lora", export.lora, "must be merged or separate")
    _require(
        export.lora == "merged" or (config.lora.rank > 0 and export.format != "pt"),
        "export.lora",
        export.lora,
        "needs lora.rank above 0, and export.format safetensors (peft's layout) or diffusers",
    )
    lora = config.lora
    _require(lora.rank >= 0, "lora.rank", lora.rank, "must be at least 0")
    _require(
        lora.rank == 0 or bool(model.checkpoint), "lora.rank", lora.rank, "needs model.checkpoint, whose adapter it is"
    )
    _require(lora.alpha > 0, "lora.alpha", lora.alpha, "must be above 0")
    _require(len(lora.targets) > 0, "lora.targets", tuple(lora.targets), "must name at least one layer")


def _validate_methods(config: ConfigDict) -> None:
    """What the methods need of each other's fields."""
    name, ro, adv = config.objective.name, config.rollout, config.advantage
    _require(adv.kind in ("group", "partition"), "advantage.kind", adv.kind, "must be group or partition")
    _require(adv.beta > 0, "advantage.beta", adv.beta, "must be above 0")
    _require(
        adv.best_of % 2 == 0 and adv.best_of <= ro.group_size,
        "advantage.best_of",
        adv.best_of,
        f"must be even and at most rollout.group_size={ro.group_size}; 0 trains on all",
    )
    _require(
        adv.best_of == 0 or name in (*RATIO_OBJECTIVES, "nft"),
        "advantage.best_of",
        adv.best_of,
        f"must be 0 for {name}, which weighs no rollouts",
    )
    _require(
        adv.kind == "group" or name in RATIO_OBJECTIVES,
        "advantage.kind",
        adv.kind,
        f"must be group for {name}",
    )
    _require(
        adv.kind == "group" or config.reward.mix == "sum",
        "reward.mix",
        config.reward.mix,
        "must be sum for advantage.kind=partition, whose reward is one number",
    )
    _require(config.reward.mix in ("sum", "normalised"), "reward.mix", config.reward.mix, "must be sum or normalised")
    _require(
        not ro.ema or config.train.ema_rate > 0,
        "rollout.ema",
        ro.ema,
        "needs an EMA: train.ema_rate above 0",
    )
    _require(not ro.ema or name != "nft", "rollout.ema", ro.ema, "must be False for nft: its old policy rolls out")
    _require(
        ro.guidance == config.train.guidance
        or name not in RATIO_OBJECTIVES
        or (config.train.updates_per_rollout == 1 and not ro.ema),
        "train.guidance",
        config.train.guidance,
        f"must be rollout.guidance={ro.guidance:g} when a rollout serves several updates or comes from the EMA: "
        "the ratio would compare two different policies",
    )
    data_fields = ("data_beta", "loss_scale", "data_draws", "data_levels", "cond_dropout")
    read = {"sft": data_fields, "rft": data_fields, "nft": (*data_fields, "kl_beta")}
    for field, value in config.objective.items():
        known = value is None or field == "name" or name in RATIO_OBJECTIVES or field in read[name]
        _require(
            known, f"objective.{field}", value, f"is not read by {name}, which reads {', '.join(read.get(name, ()))}"
        )
    _require(
        config.train.guidance == 0 or name not in ("rft", "sft"),
        "train.guidance",
        config.train.guidance,
        f"must be 0 for {name}: the data loss is never guided",
    )
    _require(
        ro.steps == "fixed" or name in RATIO_OBJECTIVES,
        "rollout.steps",
        ro.steps,
        f"must be fixed for {name}, which trains on no steps",
    )
    _require(
        adv.kind == "group" or not config.reward.gates,
        "reward.gates",
        config.reward.gates.to_dict(),
        "must be empty for advantage.kind=partition, whose Z is of the plain reward",
    )
    _require(config.nft.beta > 0, "nft.beta", config.nft.beta, "must be above 0")
    _require(config.nft.adv_clip > 0, "nft.adv_clip", config.nft.adv_clip, "must be above 0")
    _require(config.nft.decay_rate >= 0, "nft.decay_rate", config.nft.decay_rate, "must be at least 0")
    _require(0 <= config.nft.decay_max < 1, "nft.decay_max", config.nft.decay_max, "must be at least 0 and below 1")
    beta = config.objective.data_beta
    _require(
        name != "rft" or config.objective.data_levels in (None, "training"),
        "objective.data_levels",
        config.objective.data_levels,
        "must be training for rft, which records no steps",
    )
    _require(
        name != "nft" or not beta or config.objective.data_levels in (None, "training"),
        "objective.data_levels",
        config.objective.data_levels,
        "must be training for nft, which records no steps",
    )
    monitor = config.monitor
    _require(
        monitor.on_hacking in ("warn", "stop", "rollback"),
        "monitor.on_hacking",
        monitor.on_hacking,
        "must be warn, stop or rollback",
    )
    _require(
        config.pretrain.from_stage in ("pretrain", "ddrl"),
        "pretrain.from_stage",
        config.pretrain.from_stage,
        "must be pretrain or ddrl",
    )
    _require(
        config.pretrain.from_stage == "pretrain" or bool(config.pretrain.from_run),
        "pretrain.from_stage",
        config.pretrain.from_stage,
        "needs pretrain.from_run, the run whose last weights to start from",
    )


def _validate_rollout(config: ConfigDict) -> None:
    rollout, train = config.rollout, config.train
    batch = rollout.conditions * rollout.group_size
    ends_still = config.process.name in ("edm_churn", "flow_cps")  # no noise after the last step
    last = rollout.num_steps - (2 if ends_still else 1)
    steps = tuple(rollout.trained_steps)
    _require(
        rollout.steps in ("fixed", "random", "window"),
        "rollout.steps",
        rollout.steps,
        "must be fixed, random or window",
    )
    _require(
        rollout.steps != "random" or rollout.num_steps >= 2,
        "rollout.num_steps",
        rollout.num_steps,
        "must be at least 2 for rollout.steps=random, which draws from all but the last",
    )
    _require(0 < rollout.random_fraction <= 1, "rollout.random_fraction", rollout.random_fraction, "must be in (0, 1]")
    _require(
        rollout.steps != "window" or config.process.name != "edm_churn",
        "rollout.steps",
        rollout.steps,
        "needs a flow process (flow_sde, dance_sde or flow_cps): edm_churn noises before its step",
    )
    _require(
        rollout.steps != "window" or rollout.window <= rollout.num_steps - 1,
        "rollout.window",
        rollout.window,
        f"must be at most rollout.num_steps - 1 = {rollout.num_steps - 1}",
    )
    if rollout.steps != "fixed":
        steps = ()
    why = f"; the last step of {config.process.name} has no noise after it" if ends_still else ""
    for step in steps:
        whole = isinstance(step, int) and not isinstance(step, bool)
        _require(whole, "rollout.trained_steps", steps, f"{step!r} is a {type(step).__name__}, not an int")
        _require(
            0 <= step <= last,
            "rollout.trained_steps",
            steps,
            f"{step} is outside the schedule: with rollout.num_steps={rollout.num_steps} "
            f"steps 0 to {last} can be trained{why}",
        )
    _require(
        rollout.steps != "fixed" or (len(steps) > 0 and len(set(steps)) == len(steps)),
        "rollout.trained_steps",
        tuple(rollout.trained_steps),
        "must be distinct",
    )
    for field, size in (("train.micro_batch", train.micro_batch), ("rollout.micro_batch", rollout.micro_batch)):
        _require(size >= 0, field, size, "must be at least 0")
        _require(
            size == 0 or size % rollout.group_size == 0 or rollout.group_size % size == 0,
            field,
            size,
            f"must be a multiple of rollout.group_size={rollout.group_size}, or divide it",
        )
        _require(
            size == 0 or batch % size == 0,
            field,
            size,
            f"must divide the batch, rollout.conditions * rollout.group_size = {batch}",
        )
    _require(
        batch % (train.micro_batch * train.updates_per_rollout) == 0,
        "train.updates_per_rollout",
        train.updates_per_rollout,
        f"updates times train.micro_batch={train.micro_batch} must divide the {batch} rollouts of an iteration",
    )
    size = config.pretrain.batch_size
    _require(
        config.pretrain.steps == 0 or size % min(train.micro_batch, size) == 0,
        "pretrain.batch_size",
        size,
        f"must be a multiple of train.micro_batch={train.micro_batch}, or smaller",
    )


def get(config: ConfigDict, field: str) -> Any:
    """`config["a"]["b"]` for "a.b"; a field whose name holds a dot is not reached this way."""
    value: Any = config
    for part in field.split("."):
        value = value[part]
    return value


def flatten(tree: dict, prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, name + ".") if isinstance(value, dict) and value else {name: value}
    return flat


def to_json(config: ConfigDict) -> str:
    return json.dumps(config.to_dict(), indent=2, sort_keys=True) + "\n"


def differences(config: ConfigDict, saved: dict) -> list[tuple[str, Any, Any]]:
    """(field, saved value, value now) of every field that differs; tuples and lists are equal, as in JSON."""
    # A run of an older version has the default in a field that did not exist then.
    known = flatten(json.loads(to_json(default())))
    now = flatten(json.loads(to_json(config)))
    then = {f: v for f, v in known.items() if f in now and not f.startswith("reward.weights")} | flatten(saved)
    # An empty block beside one with entries is no difference of its own.
    fields = [f for f in sorted(now | then) if {now.get(f, {}) == {}, then.get(f, {}) == {}} != {True}]
    return [(f, then.get(f), now.get(f)) for f in fields if now.get(f) != then.get(f)]


def check_same_run(config: ConfigDict, workdir: Path) -> list[str]:
    """Lines that say what differs from the config saved in `workdir`, or ConfigError where it may not."""
    path = workdir / "config.json"
    if not path.exists():
        return []
    try:
        saved = json.loads(path.read_text())
        if not isinstance(saved, dict):
            raise ValueError("it holds no object")
    except (ValueError, OSError) as error:
        raise ConfigError(f"workdir={str(workdir)!r}: its config.json is not JSON ({error}); take a new one") from None
    lines = []
    for field, then, now in differences(config, saved):
        if not any(field == free or field.startswith(free + ".") for free in MAY_DIFFER):
            raise ConfigError(
                f"config.{field}={now!r}: workdir={str(workdir)!r} holds a run with {then!r}; "
                "take that value, or another --workdir"
            )
        lines.append(f"config.{field}: {then!r} when the run was started, {now!r} now")
    return lines


def bad_flag(arguments: list[str], known: ConfigDict) -> str | None:
    """The message for the first `--config.x=` whose field does not exist or is a number and given none, or None."""
    fields = flatten(known.to_dict())
    names = set(fields) | {f.rsplit(".", n)[0] for f in fields for n in range(1, f.count(".") + 1)}
    for argument in arguments:
        if argument.startswith("--config."):
            name, _, value = argument.removeprefix("--config.").partition("=")
            if name not in names:
                close = difflib.get_close_matches(name, fields, n=1, cutoff=0.4)
                hint = f"; did you mean config.{close[0]}?" if close else ""
                return f"config.{name}={value!r}: there is no such field{hint}"
            kind = type(fields.get(name))
            if kind in (int, float) and not _is_number(kind, value):
                return f"config.{name}={value!r}: must be a {'whole ' if kind is int else ''}number"
    return None


def _is_number(kind: type, text: str) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


def locate(argument: str) -> str:
    """`--config=configs/x.py` -> the shipped file where the current folder has none; anything else as it is."""
    name = argument.removeprefix("--config=")
    if name == argument or Path(name).is_file() or not name.startswith("configs/"):
        return argument
    package = Path(__file__).parent
    # In a wheel configs/ lies inside the package, in a checkout beside it.
    found = [p for p in (package / name, package.parent / name) if p.is_file()]
    return f"--config={found[0]}" if found else argument


def load(file: str) -> ConfigDict:
    """The config that a file's get_config() returns. Raises ConfigError for whatever is wrong with the file."""
    file = locate(f"--config={file}").removeprefix("--config=")
    try:
        config = runpy.run_path(file)["get_config"]()
    except Exception as error:  # A user's code: what it raises is not ours to foresee.
        what = "it has no get_config()" if isinstance(error, KeyError) and error.args == ("get_config",) else error
        text = " ".join(str(what).split())
        raise ConfigError(f"--config={file!r}: {type(error).__name__}: {text}") from error
    if not isinstance(config, ConfigDict):
        raise ConfigError(f"--config={file!r}: get_config() returned a {type(config).__name__}, not a ConfigDict")
    return config
