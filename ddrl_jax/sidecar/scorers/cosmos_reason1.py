"""Cosmos-Reason1's reward, as cosmos-rl asks for it: the probability that a video has no anomalies.

A Qwen2.5-VL that was trained to begin its answer with "Yes" or "No"; the reward is the softmax of the two logits at
the answer's first token, taken for "No". Weights: nvidia/Cosmos-Reason1-7B-Reward; the system message that it was
trained with comes with them, as prompt.txt.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from . import qwen_video
from .backbones import folder_of, torch_dtype

# The system message, and the sha256 of its text at nvidia-cosmos/cosmos-rl 89f2e5b, no line feed at either end.
PROMPT = "SYSTEM_PROMPT of github.com/nvidia-cosmos/cosmos-rl, reward_service/cosmos_rl_reward/model/cosmos_reason1.py"
PROMPT_SHA256 = "c0833d49668a7550673e8f5cf118701b50a4d8df0bdaad36e13332972772d897"
QUESTION = "Does the video contain any anomalies or artifacts?"  # what the model was trained with
_TOKENS, _MIN_TOKENS, _MAX_FRAMES = 9216, 16, 160  # tokens of a whole video, of a frame; frames of a video


def sample(total: int, video_fps: float) -> tuple[list[int], float]:
    """Indices of every n-th frame, 160 at most and an even number, and how many of them there are a second."""
    every = (total - 1) // _MAX_FRAMES + 1
    indices = list(range(0, total, every))
    return indices[: len(indices) // 2 * 2], video_fps / every


def resize(frames_TCHW: Tensor, size: tuple[int, int]) -> Tensor:
    """Levels resized by Pillow, bicubic, as cosmos-rl does."""
    shape = (len(frames_TCHW), size[0], size[1], 3)
    out = torch.empty(shape, dtype=torch.uint8)
    for t, frame in enumerate(frames_TCHW.permute(0, 2, 3, 1).contiguous().numpy()):
        picture = Image.fromarray(frame).resize((size[1], size[0]), Image.Resampling.BICUBIC)
        out[t] = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).reshape(shape[1:])
    return out.permute(0, 3, 1, 2)


def positions(ids_S: Tensor, video_token: int, grid_1x3: Tensor, per_patch: float) -> Tensor:
    """Qwen2.5-VL's rotary positions (3,1,S) of one video among text: time, row, column; text counts on all three.

    Text goes on after the video's largest position, as in transformers 4; in version 5 after a frame's longer side.

    Args:
      per_patch: positions from one pair of frames to the next, what adds up rounded down.
    """
    t, h, w = (int(n) for n in grid_1x3[0] // torch.tensor([1, qwen_video.MERGE, qwen_video.MERGE]))
    start = int((ids_S == video_token).nonzero()[0])
    times = (torch.arange(t) * per_patch).long()
    time, row, column = torch.meshgrid(times, torch.arange(h), torch.arange(w), indexing="ij")
    video = torch.stack([time.flatten(), row.flatten(), column.flatten()]) + start
    after = torch.arange(len(ids_S) - start - t * h * w) + int(video.max()) + 1
    return torch.cat([torch.arange(start).expand(3, -1), video, after.expand(3, -1)], dim=1)[:, None]


class CosmosReason1:
    """Scores overall, the probability of "No", and yes_logit and no_logit.

    The question is the prompt, as in cosmos-rl, or the one of the training where the prompt is empty. A prompt with a
    special token of the tokenizer in it gets NaN.
    """

    name = "cosmos_reason1"
    batch_size = 1
    wants_infos = True
    requirements: tuple[str, ...] = ("pillow>=11", "transformers>=5")

    def load(self, weights: str | None, device: str, dtype: str = "float32") -> None:
        """weights: the folder of nvidia/Cosmos-Reason1-7B-Reward, with prompt.txt in it."""
        from transformers import Qwen2_5_VLForConditionalGeneration

        folder = folder_of(weights, "nvidia/Cosmos-Reason1-7B-Reward", "config.json")
        self.system = qwen_video.read_prompt(weights, PROMPT, PROMPT_SHA256)
        self.tokenizer = qwen_video.load_tokenizer(folder)
        network: Any = Qwen2_5_VLForConditionalGeneration
        self.model, info = network.from_pretrained(
            folder, dtype=torch_dtype(dtype), local_files_only=True, output_loading_info=True
        )
        if wrong := sorted(map(str, info["missing_keys"] | info["mismatched_keys"])):
            raise ValueError(f"weights: {len(wrong)} tensors are missing or of another shape, {wrong[0]} first")
        self.model.eval().to(device)
        self.device = device
        self.yes, self.no = (self.tokenizer.encode(word, add_special_tokens=False)[0] for word in ("Yes", "No"))

    def score(self, videos: Any, prompts: list[str], infos: list[dict[str, Any]]) -> dict[str, list[float]]:
        scores: dict[str, list[float]] = {"overall": [], "yes_logit": [], "no_logit": []}
        for video, prompt, info in zip(videos, prompts, infos, strict=True):
            plain = qwen_video.is_plain(self.tokenizer, prompt)
            yes, no = (
                self.logits(video, prompt if prompt.strip() else QUESTION, info) if plain else (math.nan, math.nan)
            )
            for name, value in zip(scores, (1 / (1 + math.exp(min(yes - no, 700.0))), yes, no), strict=True):
                scores[name].append(value)
        return scores

    def logits(self, video_CTHW: Tensor, question: str, info: dict[str, Any]) -> tuple[float, float]:
        """Logits of Yes and No as the first word of the answer to one question."""
        frames = qwen_video.levels(video_CTHW)
        indices, fps = sample(len(frames), qwen_video.frames_per_second(info))
        token = qwen_video.FACTOR**2 * qwen_video.FRAMES
        height, width = frames.shape[2:]
        size = qwen_video.fit(height, width, _MIN_TOKENS * token, _TOKENS * token // len(indices))
        pixels, grid = qwen_video.patches(resize(frames[indices], size))
        ids = qwen_video.chat(self.tokenizer, self.system, question, grid)
        config = self.model.config
        # With fractions of a second, as transformers 4.51 and the newest have it; some versions between drop them.
        per_patch = config.vision_config.tokens_per_second * (qwen_video.FRAMES / fps)
        logits = self.model(
            input_ids=ids.to(self.device),
            position_ids=positions(ids[0], config.video_token_id, grid, per_patch).to(self.device),
            pixel_values_videos=pixels.to(self.device),
            video_grid_thw=grid.to(self.device),
            use_cache=False,
            logits_to_keep=1,
        ).logits[0, -1]
        return float(logits[self.yes]), float(logits[self.no])
