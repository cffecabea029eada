"""ImageReward (Xu et al. 2023, arXiv 2304.05977): a BLIP reads the prompt while looking at the picture; a head rates.

    overall = (head(h) - 0.16717362830052426) / 1.0333394966054072      ImageReward/ImageReward.py of THUDM/ImageReward

h is the text encoder's first hidden state, with cross-attention to all image tokens; the head is the five linear layers
of `score_head`; the two numbers bring scores to mean 0 and std 1 on the authors' data. Prompts are cut and filled to 35
tokens. The published network is a ViT-L/16 at 224 and a BERT with cross-attention: transformers' BLIP classes,
with the names of the published checkpoint brought over.

Weights: ImageReward.pt and med_config.json of THUDM/ImageReward, also zai-org/ImageReward (revision
5736be03b2652728fb87788c9797b0570450ab72), and the tokenizer files of bert-base-uncased (revision
86b5e0934494bd15c9632b12f734a8a67f723594) beside them. The revisions are those that public code pins; no file hash was
read.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from torch import Tensor

from .backbones import (
    cropped_pixels,
    fill,
    folder_of,
    pixels_of,
    quiet_transformers,
    read_state,
    score_head,
    tokenizer_of,
    torch_dtype,
)

MEAN, STD = 0.16717362830052426, 1.0333394966054072
TOKENS = 35
_FILE, _CONFIG = "ImageReward.pt", "med_config.json"
_NEEDS = f"{_FILE}, {_CONFIG} and the tokenizer of bert-base-uncased"
_HEAD_WIDTH = 64  # of the ViT's attention heads, in every size that BLIP has
_VISION = {
    "cls_token": "embeddings.class_embedding",
    "pos_embed": "embeddings.position_embedding",
    "patch_embed.proj.": "embeddings.patch_embedding.",
    "blocks.": "encoder.layers.",
    "norm.": "post_layernorm.",
}


def vision_name(name: str) -> str:
    """A name in the published ViT -> in transformers' BlipVisionModel."""
    for old, new in _VISION.items():
        if name.startswith(old):
            name = new + name.removeprefix(old)
            break
    name = re.sub(r"\.norm([12])\.", r".layer_norm\1.", name)
    return name.replace(".attn.qkv.", ".self_attn.qkv.").replace(".attn.proj.", ".self_attn.projection.")


class ImageReward:
    """Scores overall, the mean over evenly chosen frames."""

    name, batch_size, frames = "image_reward", 8, 4
    requirements: tuple[str, ...] = ("pillow>=11", "transformers>=5")

    def load(self, weights: str | None, device: str, *, dtype: str = "float32") -> None:
        folder = folder_of(weights, _NEEDS, _CONFIG)
        state, transformers = read_state(folder, _FILE), quiet_transformers()
        self.device, self.dtype = device, torch_dtype(dtype)
        vision = {vision_name(k): v for k, v in _under(state, "blip.visual_encoder.").items()}
        text = _under(state, "blip.text_encoder.")
        if "embeddings.patch_embedding.weight" not in vision or "embeddings.position_embedding" not in vision:
            raise ValueError(f"weights: {_FILE} in {weights!r} is not ImageReward: no blip.visual_encoder in it")
        width, _, patch, _ = vision["embeddings.patch_embedding.weight"].shape
        self.size = patch * round((vision["embeddings.position_embedding"].shape[1] - 1) ** 0.5)
        config = transformers.BlipVisionConfig(
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=len({k.split(".")[2] for k in vision if k.startswith("encoder.layers.")}),
            num_attention_heads=width // _HEAD_WIDTH,
            image_size=self.size,
            patch_size=patch,
            layer_norm_eps=1e-6,
        )
        self.vision = transformers.BlipVisionModel(config)
        fill(self.vision, vision, _FILE)
        self.text = transformers.BlipTextModel._from_config(
            _text_config(transformers, folder, width), add_pooling_layer=False, attn_implementation="eager"
        )
        fill(self.text, text, _FILE)
        self.head = score_head(self.text.config.hidden_size)
        fill(self.head, _under(state, "mlp.layers."), _FILE)
        words = self.text.config.vocab_size
        self.tokenizer = tokenizer_of(transformers.BertTokenizer, folder, words, _NEEDS)
        for part in (self.vision, self.text):
            part.eval().to(device, self.dtype)
        self.head.eval().to(device)

    def features(self, pixels_NCHW: Tensor, prompts: list[str]) -> Tensor:
        """The text encoder's first state, one a picture and its prompt: (N,D) float32."""
        tokens = self.tokenizer(
            prompts, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt"
        ).to(self.device)
        image = self.vision(pixel_values=pixels_NCHW.to(self.device, self.dtype)).last_hidden_state
        read = self.text(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask, encoder_hidden_states=image)
        return read.last_hidden_state[:, 0].float()

    def score(self, videos: Any, prompts: list[str]) -> dict[str, list[float]]:
        pixels = pixels_of(videos, self.frames, lambda p: cropped_pixels(p, self.size, centre="round"))
        f = len(pixels) // len(prompts)
        features = self.features(pixels, [prompt for prompt in prompts for _ in range(f)])
        reward = (self.head(features).double().cpu() - MEAN) / STD
        return {"overall": reward.view(len(prompts), f).mean(1).tolist()}


def _under(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _text_config(transformers: Any, folder: Path, vision_width: int) -> Any:
    """med_config.json, a BERT's, as a BlipTextConfig. Raises ValueError."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "max_position_embeddings", "hidden_act", "layer_norm_eps")  # fmt: skip
    try:
        config = json.loads((folder / _CONFIG).read_text())
        sizes = {name: config[name] for name in names}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"weights: {_CONFIG} in {str(folder)!r} is no BERT's config: {error}") from error
    return transformers.BlipTextConfig(**sizes, encoder_hidden_size=vision_width, is_decoder=True)
