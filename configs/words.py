"""Rendered words: pictures of 32 x 96 with a word of four letters, rewarded by an OCR engine and judged by another.

Pre-trains a Cosmos DiT (48 tokens a picture), then DDRL: groups of 8, 10 steps, every other one trained. The reward is
one minus the normalised edit distance of what RapidOCR reads; ddddocr, whose weight is 0, is asked in evaluations only.
Evaluations take words that training never sees; after 5,000 steps RapidOCR reads 97 % of their letters, after 2,500 it
read 70 % (two CPU cores: not timed alone, 45 minutes beside other work). Both engines need an environment of their own,
once:

    python -m ddrl_jax.sidecar build --scorer ocr
"""

from ml_collections import ConfigDict

from ddrl_jax.config import default


def get_config():
    config = default()
    config.data.name, config.data.frames, config.data.size = "words", 1, 32  # rows; three times as many columns
    config.codec.factor, config.codec.mean, config.codec.std = 4, 0.638, 0.522  # of the pixels of training clips
    config.text.length = 6
    config.model.width, config.model.context_dim, config.model.adaln_rank = 96, 96, 24

    config.process.sigma_max = 80.0
    config.process.train_mean = 0.0
    config.process.train_std = 1.2
    config.process.train_multiplier = 1.0
    config.process.high_sigma_ratio = 0.0

    config.pretrain.steps = 5000
    config.pretrain.learning_rate = 2e-3

    with config.unlocked():
        config.reward.weights = ConfigDict({"ocr/text": 1.0, "ocr_judge": 0.0})
    config.reward.scorers = ("ocr", "ocr_judge")
    config.rollout.num_steps, config.rollout.trained_steps = 10, (0, 2, 4, 6, 8)
    config.objective.name = "ddrl"
    config.objective.data_beta = 0.1
    config.train.steps = 80
    config.train.learning_rate = 3e-5
    config.train.warmup_steps = 5

    config.eval.num_steps = 10
    config.eval.every, config.eval.clips, config.eval.clips_during = 20, 456, 114  # twelve and three of each word
    config.eval.chunk, config.eval.heldout_clips = 114, 342
    return config
