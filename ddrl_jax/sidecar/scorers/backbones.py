"""What picture scorers share: frames of a clip, how CLIP's users prepare a picture, CLIP itself, and reading weights.

Pictures are uint8 (H,W,3) until they are pixels, float32 (3,S,S), normalised. Dims: B sample, F frame of a sample, D
embedding. Networks are transformers' own; nothing here downloads: a folder of weights is read, or refused in one line.
"""

from __future__ import annotations

import itertools
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from .ocr import pictures

# Of OpenAI's CLIP, and of all that grew from it.
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def torch_dtype(dtype: str) -> torch.dtype:
    """Raises ValueError for a dtype that no scorer computes in."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype: {dtype!r}; {', '.join(DTYPES)} is needed")
    return DTYPES[dtype]


# --- frames and pixels ---


def frame_indices(total: int, wanted: int) -> list[int]:
    """The middle frames of `wanted` equal parts of a clip; every frame where there are no more than that."""
    return [(2 * i + 1) * total // (2 * wanted) for i in range(wanted)] if total > wanted else list(range(total))


def frames_of(videos_BCTHW: Tensor, wanted: int) -> np.ndarray:
    """Clips in [-1,1] -> evenly chosen frames, uint8 (B,F,H,W,3)."""
    return pictures(videos_BCTHW[:, :, frame_indices(videos_BCTHW.shape[2], wanted)])


def normalised(unit_3HW: Tensor) -> Tensor:
    """Values in [0,1] -> what CLIP was trained on."""
    return (unit_3HW - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def unit_tensor(picture_HW3: np.ndarray) -> Tensor:
    """uint8 (H,W,3) -> float32 (3,H,W) in [0,1]."""
    return torch.from_numpy(np.array(picture_HW3).transpose(2, 0, 1)).float() / 255


def shortest_side(picture_HW3: np.ndarray, size: int, *, centre: str) -> np.ndarray:
    """Pillow's bicubic resize of the shortest side to `size`, then the middle square.

    Where the middle is half a pixel off, transformers' image processor takes the "floor"; torchvision, which OpenAI's
    CLIP and ImageReward use, Python's "round".
    """
    h, w = picture_HW3.shape[:2]
    short, long = min(h, w), max(h, w)
    new_h, new_w = (size, int(size * long / short)) if h <= w else (int(size * long / short), size)
    resized = np.asarray(Image.fromarray(picture_HW3).resize((new_w, new_h), Image.Resampling.BICUBIC))
    offset: Callable[[int], int] = {"floor": lambda d: d // 2, "round": lambda d: round(d / 2)}[centre]
    top, left = offset(new_h - size), offset(new_w - size)
    return resized[top : top + size, left : left + size]


def cropped_pixels(picture_HW3: np.ndarray, size: int, *, centre: str) -> Tensor:
    """CLIP's preparation: `shortest_side`, then normalised (3,S,S)."""
    return normalised(unit_tensor(shortest_side(picture_HW3, size, centre=centre)))


def pixels_of(videos_BCTHW: Tensor, frames: int, prepare: Callable[[np.ndarray], Tensor]) -> Tensor:
    """The chosen frames of all clips, each prepared: (B*F,3,S,S), a clip's frames consecutive."""
    return torch.stack([prepare(picture) for sample in frames_of(videos_BCTHW, frames) for picture in sample])


# --- weights ---


def folder_of(weights: str | None, needs: str, *files: str) -> Path:
    """The weights' folder, if it has `files`. Raises ValueError, in one line that says what else it `needs`."""
    if not weights:
        raise ValueError(f"weights: none given; a folder with {needs} is needed")
    folder = Path(weights)
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"weights: no {missing[0]} in {weights!r}; a folder with {needs} is needed")
    return folder


def tokenizer_of(cls: Any, folder: Path, words: int, needs: str) -> Any:
    """A folder's tokenizer, by transformers' class for it.

    Raises ValueError where the folder has none (transformers would make an empty one) or one with ids beyond the
    network's `words`.
    """
    if not any(all((folder / f).is_file() for f in files) for files in _TOKENIZER_FILES[cls.__name__]):
        raise ValueError(f"weights: no tokenizer in {str(folder)!r}; a folder with {needs} is needed")
    try:
        tokenizer = cls.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError) as error:
        why = " ".join(str(error).split())[:300]
        raise ValueError(f"weights: the tokenizer in {str(folder)!r} cannot be read: {why}") from error
    if len(tokenizer) > words:
        raise ValueError(f"weights: the tokenizer in {str(folder)!r} has {len(tokenizer)} tokens, the network {words}")
    return tokenizer


_TOKENIZER_FILES = {
    "CLIPTokenizer": (("tokenizer.json",), ("vocab.json", "merges.txt")),
    "BertTokenizer": (("tokenizer.json",), ("vocab.txt",)),
}


def read_state(folder: Path, *names: str) -> dict[str, Tensor]:
    """The tensors of the first of these files that a folder has; `.safetensors` of the same name is looked for first.

    Torch files are read with the weights-only unpickler; a state dict may be under "state_dict". Raises ValueError.
    """
    candidates = [candidate for name in names for candidate in (Path(name).with_suffix(".safetensors").name, name)]
    file = next((folder / name for name in candidates if (folder / name).is_file()), None)
    if file is None:
        raise ValueError(f"weights: none of {', '.join(candidates)} in {str(folder)!r}")
    if file.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(file)
        except SafetensorError as error:
            raise ValueError(f"weights: {str(file)!r} is no safetensors file, and whole: {error}") from error
    try:
        state = torch.load(file, map_location="cpu", mmap=zipfile.is_zipfile(file), weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, ValueError, TypeError, AttributeError) as error:
        kind = type(error).__name__  # torch's own text goes on with advice to load without the safeguard
        raise ValueError(f"weights: {str(file)!r} is not a torch file of tensors alone, and whole ({kind})") from error
    if isinstance(state, Mapping) and isinstance(state.get("state_dict"), Mapping):
        state = state["state_dict"]
    if not isinstance(state, Mapping):
        raise ValueError(f"weights: {str(file)!r} holds a {type(state).__name__}; a dict of tensors is needed")
    return {str(name): value for name, value in state.items() if isinstance(value, Tensor)}


def fill(module: nn.Module, state: dict[str, Tensor], what: str) -> None:
    """Loads every weight of a module. Tensors that it does not know are left; ValueError for one that lacks or is of
    another shape."""
    try:
        missing = module.load_state_dict(state, strict=False).missing_keys
    except RuntimeError as error:  # shapes
        raise ValueError(f"weights: {what}: {' '.join(str(error).split())[:300]}") from error
    if missing:
        raise ValueError(f"weights: {what} lacks {len(missing)} tensors, the first being {missing[0]}")


def score_head(width: int) -> nn.Sequential:
    """Five linear layers without activations between them, as the LAION aesthetic predictor and ImageReward have them;
    the gaps in the numbering are their dropouts."""
    sizes = (width, 1024, 128, 64, 16, 1)
    linear = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    gap = nn.Identity
    return nn.Sequential(linear[0], gap(), linear[1], gap(), linear[2], gap(), linear[3], linear[4])


# --- CLIP ---

CLIP_FILES = "a CLIP of transformers (config.json, model.safetensors) and its tokenizer"


def quiet_transformers() -> Any:
    """transformers, without its progress bars and its word on every weight."""
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"this environment lacks {error.name}; pip install transformers") from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


class Clip:
    """A CLIP and its tokenizer in a folder of transformers' layout. Embeddings come out float64, of length one.

    With `state`, which has open_clip's names, the folder's config and tokenizer are used and not its weights.
    """

    def __init__(self, folder: Path, device: str, dtype: str, state: dict[str, Tensor] | None = None):
        transformers = quiet_transformers()
        self.device, self.dtype = device, torch_dtype(dtype)
        try:
            if state is None:
                model, found = transformers.CLIPModel.from_pretrained(
                    folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
                )
                missing = sorted(found["missing_keys"]) + [str(m[0]) for m in found["mismatched_keys"]]
                if missing:
                    raise ValueError(f"it lacks {len(missing)} tensors, the first being {missing[0]}")
            else:
                config = transformers.CLIPConfig.from_pretrained(folder, local_files_only=True)
                model = transformers.CLIPModel(config)
                fill(model, from_open_clip(state), "the CLIP checkpoint")
        except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
            raise ValueError(f"weights: no CLIP in {str(folder)!r}: {' '.join(str(error).split())[:300]}") from error
        words = model.config.text_config.vocab_size
        self.tokenizer = tokenizer_of(transformers.CLIPTokenizer, folder, words, CLIP_FILES)
        self.model = model.eval().to(device, self.dtype)
        self.size: int = model.config.vision_config.image_size
        self.length: int = model.config.text_config.max_position_embeddings
        self.scale = float(model.logit_scale.detach().double().exp())

    def image(self, pixels_NCHW: Tensor) -> Tensor:
        """(N,3,S,S) -> (N,D)."""
        pooled = self.model.vision_model(pixel_values=pixels_NCHW.to(self.device, self.dtype)).pooler_output
        return _unit(self.model.visual_projection(pooled))

    def text(self, prompts: list[str]) -> Tensor:
        """(B,D). Always padded to the full length: no prompt's rounding depends on how long the others are."""
        ids = self.tokenizer(
            prompts, padding="max_length", truncation=True, max_length=self.length, return_tensors="pt"
        ).input_ids
        # No mask: attention is causal, and what is pooled is the first end of text, before all padding.
        return _unit(self.model.text_projection(self.model.text_model(input_ids=ids.to(self.device)).pooler_output))

    def cosines(self, image_ND: Tensor, prompts: list[str]) -> Tensor:
        """Of every frame and its sample's prompt: (B,F)."""
        text_B1D = self.text(prompts)[:, None]
        return (image_ND.view(len(prompts), -1, image_ND.shape[-1]) * text_B1D).sum(-1)


def _unit(x_ND: Tensor) -> Tensor:
    return F.normalize(x_ND.double(), dim=-1).cpu()


_OPEN_CLIP = {
    r"visual\.conv1\.": "vision_model.embeddings.patch_embedding.",
    r"visual\.class_embedding$": "vision_model.embeddings.class_embedding",
    r"visual\.positional_embedding$": "vision_model.embeddings.position_embedding.weight",
    r"visual\.ln_pre\.": "vision_model.pre_layrnorm.",  # spelt so in transformers
    r"visual\.ln_post\.": "vision_model.post_layernorm.",
    r"visual\.transformer\.resblocks\.": "vision_model.encoder.layers.",
    r"token_embedding\.": "text_model.embeddings.token_embedding.",
    r"positional_embedding$": "text_model.embeddings.position_embedding.weight",
    r"transformer\.resblocks\.": "text_model.encoder.layers.",
    r"ln_final\.": "text_model.final_layer_norm.",
}
_PROJECTIONS = {"visual.proj": "visual_projection.weight", "text_projection": "text_projection.weight"}
_BLOCK = {"ln_1.": "layer_norm1.", "ln_2.": "layer_norm2.", "mlp.c_fc.": "mlp.fc1.", "mlp.c_proj.": "mlp.fc2.",
          "attn.out_proj.": "self_attn.out_proj."}  # fmt: skip


def from_open_clip(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """open_clip's names and shapes -> transformers': projections transposed, one tensor for q, k and v cut in three."""
    renamed = {}
    for name, value in state.items():
        if name in _PROJECTIONS:
            renamed[_PROJECTIONS[name]] = value.swapaxes(0, -1)
            continue
        for pattern, prefix in _OPEN_CLIP.items():
            if re.match(pattern, name):
                name = re.sub(f"^{pattern}", prefix, name)
                break
        for old, new in _BLOCK.items():
            name = name.replace(f".{old}", f".{new}")
        if ".attn.in_proj_" in name:
            stem, kind = name.split("attn.in_proj_")
            for part, third in zip("qkv", value.chunk(3), strict=True):
                renamed[f"{stem}self_attn.{part}_proj.{kind}"] = third
        else:
            renamed[name] = value
    return renamed
