"""VideoAlign's reward (Liu et al. 2025, arXiv 2501.13918): visual quality, motion quality and text alignment.

Qwen2-VL reads the video and a questionnaire with three reward tokens; a linear head on their last hidden states gives
the rewards, each less its mean and over its standard deviation in the checkpoint's config; `overall` is their sum.
Weights: KwaiVGI/VideoReward and Qwen/Qwen2-VL-2B-Instruct; the questionnaire comes with them, as prompt.txt. What
cosmos-rl calls `dance_grpo`.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import qwen_video
from .backbones import folder_of, read_state, torch_dtype

# The questionnaire, and the sha256 of its text at KwaiVGI/VideoAlign 219ab9d, first and last line feed included.
PROMPT = (
    "DETAILED_PROMPT_WITH_SPECIAL_TOKEN of github.com/KwaiVGI/VideoAlign, prompt_template.py, with {text_prompt} in it"
)
PROMPT_SHA256 = "fdb6309bac618dd0c8b1b589d3a0970a974f7856eecbb355a190b2dce54af700"
SYSTEM = "You are a helpful assistant."
REWARDS = {"vq": "VQ", "mq": "MQ", "ta": "TA"}  # our name -> that of the reward token and of the config's fields
_MIN_PIXELS = 128 * qwen_video.FACTOR**2
_MIN_FRAMES, _MAX_FRAMES = 4, 768
_WHAT = "KwaiVGI/VideoReward (model_config.json and checkpoint-N) and, in it or beside it, Qwen2-VL-2B-Instruct"


def frame_indices(total: int, video_fps: float, fps: float, number: int | None = None) -> list[int]:
    """Evenly chosen frames with both ends: `number` of them, or `fps` a second and 4 to 768. An even number.

    Raises ValueError where the video has fewer.
    """
    if number is None:
        most = min(_MAX_FRAMES, total) // 2 * 2
        number = round(min(max(total / video_fps * fps, _MIN_FRAMES), most) / 2) * 2
    else:
        number = round(number / 2) * 2
    if not 2 <= number <= total:
        raise ValueError(f"a video of {total} frames; {max(number, 2)} are needed")
    return torch.linspace(0, total - 1, number).round().long().tolist()


def read_checkpoint(folder: Path, base: Path, config: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """The newest checkpoint's tensors by the names of Qwen2-VL as first released, LoRA merged into the weights.

    Reads `model.pth`, or `adapter_model.safetensors` and `non_lora_state_dict.pth` on top of the base's weights.
    """
    from safetensors.torch import load_file

    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    if not found:
        raise ValueError(f"weights: no checkpoint-N in {str(folder)!r}; a folder with {_WHAT} is needed")
    state = dict[str, Tensor]()
    if (found[-1] / "adapter_model.safetensors").is_file():
        for file in sorted(base.glob("*.safetensors")):
            state |= load_file(file)
        state |= _bare(read_state(found[-1], "non_lora_state_dict.pth"))
        state |= _bare(load_file(found[-1] / "adapter_model.safetensors"))
    else:
        state = _bare(read_state(found[-1], "model.pth"))
    lora = config.get("peft_lora_config", {})
    rank, alpha = int(lora.get("lora_r", 16)), float(lora.get("lora_alpha", 32))
    return merge_lora(state, alpha / (math.sqrt(rank) if lora.get("use_rslora") else rank), dtype)


def _bare(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("base_model.model."): value for name, value in state.items()}


def merge_lora(state: dict[str, Tensor], scale: float, dtype: torch.dtype) -> dict[str, Tensor]:
    """W + scale * B A for every adapted W, summed in float32. Raises ValueError for adapters of another kind."""
    adapters = {name for name in state if ".lora_" in name}
    merged = {
        name.replace(".base_layer.", ".").replace(".modules_to_save.default.", "."): value
        for name, value in state.items()
        if name not in adapters and ".original_module." not in name
    }
    for name in adapters:
        layer, _, rest = name.partition(".lora_")
        if rest not in ("A.weight", "B.weight", "A.default.weight", "B.default.weight"):
            raise ValueError(f"weights: {name} is no plain LoRA weight, and nothing else is merged")
        if rest.startswith("A"):
            a, b = state[name].float(), state[f"{layer}.lora_B{rest[1:]}"].float()
            merged[f"{layer}.weight"] = (merged[f"{layer}.weight"].float() + scale * (b @ a)).to(dtype)
    return merged


def load_tower(base: Path, state: dict[str, Tensor], dtype: torch.dtype) -> Any:
    """Qwen2-VL without its language head: sizes of `base`, tensors of `state`. ValueError unless they are all."""
    from transformers import Qwen2VLConfig, Qwen2VLModel

    tensors = {
        re.sub(r"^model\.(visual|language_model)?\.?", lambda m: f"{m[1] or 'language_model'}.", name): value
        for name, value in state.items()
        if not name.startswith(("lm_head.", "rm_head."))
    }
    table = tensors.get("language_model.embed_tokens.weight")
    if table is None:
        raise ValueError("weights: the checkpoint has no embed_tokens.weight; it is not VideoAlign's")
    network: Any = Qwen2VLModel
    config: Any = Qwen2VLConfig.from_pretrained(base, local_files_only=True)
    config.text_config.vocab_size = len(table)  # the reward tokens changed it
    tower, info = network.from_pretrained(
        None, config=config, state_dict=tensors, dtype=dtype, output_loading_info=True
    )
    for kind in ("missing", "unexpected", "mismatched"):
        if wrong := sorted(map(str, info[f"{kind}_keys"])):
            raise ValueError(f"weights: {len(wrong)} tensors are {kind}, {wrong[0]} first: not Qwen2-VL of {base.name}")
    return tower.eval()


class VideoAlign:
    """Scores vq, mq, ta and overall. A prompt with a special token of the tokenizer in it gets NaN."""

    name = "video_align"
    batch_size = 1
    wants_infos = True
    requirements: tuple[str, ...] = ("pillow>=11", "transformers>=5")

    def load(self, weights: str | None, device: str, dtype: str = "float32") -> None:
        """weights: the folder of VideoReward with prompt.txt, and in it or beside it the folder of its base model."""
        folder = folder_of(weights, _WHAT, "model_config.json")
        try:
            config = json.loads((folder / "model_config.json").read_text())
            data, model = config["data_config"], config["model_config"]
            self.fps, self.number, self.max_pixels = data["fps"], data.get("num_frames"), data["max_frame_pixels"]
            called = Path(model["model_name_or_path"]).name
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"weights: {folder}/model_config.json is not VideoAlign's ({error!r})") from error
        for field, value, known in (
            ("prompt_template_type", data.get("prompt_template_type"), "detailed_special"),
            ("sample_type", data.get("sample_type", "uniform"), "uniform"),
            ("use_special_tokens", model.get("use_special_tokens"), True),
        ):
            if value != known:
                raise ValueError(f"weights: {field} is {value!r} in model_config.json; only {known!r} is known here")
        base = next((b for b in (folder / called, folder.parent / called) if (b / "config.json").is_file()), None)
        if base is None:
            raise ValueError(f"weights: no folder {called} with a config.json in {str(folder)!r} or beside it")

        self.questionnaire = qwen_video.read_prompt(weights, PROMPT, PROMPT_SHA256)
        tokens = [f"<|{name}_reward|>" for name in REWARDS.values()]
        if re.findall(r"<\|\w+_reward\|>", self.questionnaire) != tokens or "{text_prompt}" not in self.questionnaire:
            raise ValueError(
                f"weights: prompt.txt in {str(folder)!r} needs a place {{text_prompt}} and, "
                f"once each and in this order, {', '.join(tokens)}"
            )

        kind = torch_dtype(dtype)
        self.tokenizer = qwen_video.load_tokenizer(base)
        self.tokenizer.add_tokens(tokens, special_tokens=True)
        self.reward_ids = torch.tensor(self.tokenizer.convert_tokens_to_ids(tokens))
        state = read_checkpoint(folder, base, config, kind)
        self.tower = load_tower(base, state, kind).to(device)
        if len(state["rm_head.weight"]) not in (1, 3):
            raise ValueError(f"weights: a reward head of {len(state['rm_head.weight'])} outputs; 1 or 3 are known here")
        self.head = state["rm_head.weight"].to(device, kind)
        self.device = device
        unit = config.get("inference_config") or {}
        self.mean_std = [(unit.get(f"{n}_mean", 0.0), unit.get(f"{n}_std", 1.0)) for n in REWARDS.values()]

    def score(self, videos: Any, prompts: list[str], infos: list[dict[str, Any]]) -> dict[str, list[float]]:
        scores: dict[str, list[float]] = {name: [] for name in (*REWARDS, "overall")}
        for video, prompt, info in zip(videos, prompts, infos, strict=True):
            plain = qwen_video.is_plain(self.tokenizer, prompt)
            rewards = self.rewards(video, prompt, info) if plain else [math.nan] * 3
            for name, value in zip(scores, [*rewards, sum(rewards)], strict=True):
                scores[name].append(value)
        return scores

    def rewards(self, video_CTHW: Tensor, prompt: str, info: dict[str, Any]) -> list[float]:
        """VQ, MQ and TA of one video."""
        frames = qwen_video.levels(video_CTHW)
        frames = frames[frame_indices(len(frames), qwen_video.frames_per_second(info), self.fps, self.number)]
        height, width = frames.shape[2:]
        frames = qwen_video.resize(frames, qwen_video.fit(height, width, _MIN_PIXELS, self.max_pixels))
        pixels, grid = qwen_video.patches(frames)
        ids = qwen_video.chat(self.tokenizer, SYSTEM, self.questionnaire.replace("{text_prompt}", prompt), grid)
        # Counted along the sequence on all three axes, video tokens too: the original's forward pass (trainer.py, with
        # transformers 4.45) never asks for Qwen2-VL's positions in time and space, and so it was trained.
        positions = torch.arange(ids.shape[1]).expand(3, 1, -1)
        hidden = self.tower(
            input_ids=ids.to(self.device),
            position_ids=positions.to(self.device),
            pixel_values_videos=pixels.to(self.device),
            video_grid_thw=grid.to(self.device),
            use_cache=False,
        ).last_hidden_state[0]
        logits = hidden[torch.isin(ids[0], self.reward_ids).to(hidden.device)] @ self.head.T
        raw = logits[:, 0] if logits.shape[1] == 1 else logits.diagonal()
        return [(r - mean) / std for r, (mean, std) in zip(raw.double().tolist(), self.mean_std, strict=True)]
