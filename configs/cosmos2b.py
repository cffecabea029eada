"""Cosmos-Predict2.5-2B with DDRL: the released recipe, from a folder of captioned videos and the published weights.

Needs, in `checkpoints/` or wherever the fields marked below point: the 2B network (official .pt or .safetensors, or a
diffusers folder), the Wan2.1 VAE, the Cosmos-Reason1-7B folder with its tokenizer; a sidecar environment with a scorer
of yours (docs/rewards.md); and `data/videos/videos/*.mp4` with `data/videos/metas/*.txt`. `--mode=check` looks whether
all of it fits before anything long starts; videos are encoded once, in the first run or by `--mode=prepare`.

The paper trained it on 256 H100s and reports that human raters prefer DDRL's videos to the base's and to the baselines'
(arXiv 2512.04332); nothing of that was run here. Memory for this and other machines: docs/scaling.md.
Values are those of the reference's recipe; tests/test_recipes.py compares them with its table field by field.
"""

from ml_collections import ConfigDict

from ddrl_jax.config import default


def get_config():
    config = default()

    # --- what to set for your machine ---
    config.model.checkpoint = "checkpoints/cosmos-predict2.5-2b/model.pt"
    config.codec.path = "checkpoints/wan2.1-vae/tokenizer.pth"
    config.text_encoder.path = "checkpoints/cosmos-reason1-7b"
    config.data.path = "data/videos"
    config.reward.scorers = ("brightness",)  # a stand-in that needs no weights: put yours here
    with config.unlocked():
        config.reward.weights = ConfigDict({"brightness": 1.0})

    # --- data: 93 frames at 16 fps, 1280x720 or 720x1280 -> latents 24x90x160 or 24x160x90 ---
    config.data.name = "videos"
    config.data.frames, config.data.fps = 93, 16.0
    config.data.size, config.data.long_size = 720, 1280
    config.data.image_to_video = 0.5  # none or one latent frame given, 1:1
    config.codec.name, config.codec.dtype = "wan_vae", "bfloat16"
    config.text.length, config.text.dim = 512, 100_352
    config.text_encoder.strategy = "full_concat"

    # --- network ---
    config.model.width, config.model.depth, config.model.heads = 2048, 28, 16
    config.model.mlp_ratio, config.model.adaln_rank, config.model.context_dim = 4.0, 256, 1024
    config.model.dtype, config.model.remat = "bfloat16", "save-attention-mlp"
    config.model.use_rf_ckpts = False

    # --- sampler and method ---
    config.process.name = "edm_churn"  # its defaults are this recipe's: 200 to 0.01, rho 7, 2ab, churn 1
    config.rollout.conditions, config.rollout.group_size = 16, 8
    config.rollout.num_steps, config.rollout.trained_steps = 20, tuple(range(0, 20, 2))
    config.objective.name = "ddrl"
    config.objective.data_beta, config.objective.kl_beta = 0.01, 0.0
    config.objective.clip_range, config.objective.loss_scale = 1e-4, 10.0
    config.objective.data_levels = "rollout"  # the full data loss: every trained step, at the rollout's level and noise
    config.objective.cond_dropout = 0.2
    config.advantage.reward_clip = 5.0

    # --- optimizer ---
    config.train.steps = 500
    config.train.micro_batch = 128
    config.train.learning_rate, config.train.warmup_steps = 1e-5, 50
    config.train.b1, config.train.b2, config.train.eps = 0.9, 0.99, 1e-8
    config.train.weight_decay, config.train.grad_clip = 1e-4, 1.0
    config.train.ema_rate = 0.1

    # --- rewards, evaluation, devices ---
    config.reward.wire, config.reward.fps, config.reward.timeout_s = "bfloat16", 16.0, 3600.0
    config.eval.num_steps, config.eval.guidance = 35, 7.0
    config.eval.clips, config.eval.clips_during, config.eval.heldout_clips, config.eval.chunk = 128, 32, 128, 8
    config.checkpoint.every = 10  # an iteration takes many minutes
    config.mesh.replica, config.mesh.fsdp, config.mesh.context = -1, 8, 2
    return config
