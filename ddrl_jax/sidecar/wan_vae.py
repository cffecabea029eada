"""The Wan2.1 autoencoder's decoder in plain torch: latents that came over the wire to video.

The same network as the trainer's (`specs/cosmos.md` section 5), run one latent frame at a time with what its causal
layers keep of the frames before, so that memory does not grow with the clip. The modules are named as in the official
files; diffusers' names are translated while reading.

Dims: B batch, C channel, T frame, H W rows and columns.
"""

from __future__ import annotations

import collections
import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import nn

from .convert import read_torch, weight_files

log = logging.getLogger("ddrl_jax.sidecar")

# Per-channel statistics of the published autoencoder's latents (`specs/cosmos.md` section 5).
LATENTS_MEAN = (
    *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
    *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
)
LATENTS_STD = (
    *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
    *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
)
_DIFFUSERS_CLASS = "AutoencoderKLWan"
# The decoder is all that is needed; the encoder's tensors, known by these, are not read.
_ENCODER = ("encoder.", "conv1.", "quant_conv.")


class Kept:
    """What the causal layers keep from one chunk to the next, in the order in which they run."""

    def __init__(self) -> None:
        self.first = True
        self._old: list[torch.Tensor] = []
        self._new: list[torch.Tensor] = []

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """x behind the two frames before it, which are zeros at the start of the clip."""
        before = x.new_zeros(*x.shape[:2], 2, *x.shape[3:]) if self.first else self._old[len(self._new)]
        joined = torch.cat([before, x], 2)
        self._new.append(joined[:, :, -2:].clone())
        return joined

    def next_chunk(self) -> None:
        self.first, self._old, self._new = False, self._new, []


class Gain(nn.Module):
    """x / |x| sqrt(C) gamma, |x| the length over channels, at least 1e-12; in float32."""

    def __init__(self, width: int, axes: int):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width, *(1,) * axes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        inverse = torch.rsqrt(wide.square().sum(1, keepdim=True).clamp_min(1e-24))
        return (wide * inverse * (x.shape[1] ** 0.5 * self.gamma.float())).to(x.dtype)


class CausalConv(nn.Conv3d):
    """3x3x3 over a frame and the two before it."""

    def __init__(self, d_in: int, d_out: int):
        super().__init__(d_in, d_out, 3, padding=(0, 1, 1))

    def causal(self, x: torch.Tensor, kept: Kept) -> torch.Tensor:
        return self(kept.join(x))


class Residual(nn.Module):
    """Norm, SiLU, convolution, twice; plus x. The gaps in the numbering are the official modules without weights."""

    def __init__(self, d_in: int, d_out: int):
        super().__init__()
        self.residual = nn.ModuleDict(
            {"0": Gain(d_in, 3), "2": CausalConv(d_in, d_out), "3": Gain(d_out, 3), "6": CausalConv(d_out, d_out)}
        )
        self.shortcut = nn.Conv3d(d_in, d_out, 1) if d_in != d_out else nn.Identity()

    def forward(self, x: torch.Tensor, kept: Kept) -> torch.Tensor:
        layers: Any = self.residual
        h = layers["2"].causal(F.silu(layers["0"](x)), kept)
        h = layers["6"].causal(F.silu(layers["3"](h)), kept)
        return h + self.shortcut(x)


class FrameAttention(nn.Module):
    """One head over the cells of a frame; every frame by itself."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = Gain(width, 2)
        self.to_qkv = nn.Conv2d(width, 3 * width, 1)
        self.proj = nn.Conv2d(width, width, 1)

    def forward(self, x: torch.Tensor, kept: Kept) -> torch.Tensor:
        out = []
        for frame in x.unbind(2):  # one after the other: the weights of one 720p frame take 0.8 GB
            q, k, v = self.to_qkv(self.norm(frame)).flatten(2).transpose(1, 2).unsqueeze(1).chunk(3, -1)
            y = F.scaled_dot_product_attention(q.contiguous(), k.contiguous(), v.contiguous())
            out.append(frame + self.proj(y.squeeze(1).transpose(1, 2).reshape(frame.shape)))
        return torch.stack(out, 2)


class Upsample(nn.Module):
    """Twice the frames, if temporal, but the clip's first; then every pixel twice and 3x3 to half the channels."""

    def __init__(self, width: int, temporal: bool):
        super().__init__()
        self.resample = nn.ModuleDict({"1": nn.Conv2d(width, width // 2, 3, padding=1)})
        self.time_conv = nn.Conv3d(width, 2 * width, (3, 1, 1)) if temporal else None

    def forward(self, x: torch.Tensor, kept: Kept) -> torch.Tensor:
        if self.time_conv is not None:
            # The first frame passes through, and the convolution never sees it: the second frame has zeros before it.
            head, x = (x[:, :, :1], x[:, :, 1:]) if kept.first else (x[:, :, :0], x)
            joined = kept.join(x)
            if x.shape[2]:
                b, c, t, h, w = x.shape
                x = self.time_conv(joined).reshape(b, 2, c, t, h, w).transpose(1, 2).transpose(2, 3)
                x = x.reshape(b, c, 2 * t, h, w)
            x = torch.cat([head, x], 2)
        b, c, t, h, w = x.shape
        frames = x.transpose(1, 2).reshape(b * t, c, h, w)
        frames = frames.repeat_interleave(2, -2).repeat_interleave(2, -1)
        return self.resample["1"](frames).reshape(b, t, -1, 2 * h, 2 * w).transpose(1, 2)


class Decoder(nn.Module):
    """z (B,z_dim,t,h,w) -> video (B,3,T,H,W), chunk by chunk."""

    def __init__(self, z_dim: int, widths: tuple[int, ...], blocks: int, temporal: tuple[bool, ...]):
        super().__init__()
        self.conv1 = CausalConv(z_dim, widths[0])
        self.middle = nn.ModuleList([Residual(widths[0], widths[0]), FrameAttention(widths[0])])
        self.middle.append(Residual(widths[0], widths[0]))
        self.upsamples, d_in = nn.ModuleList(), widths[0]
        for level, width in enumerate(widths):
            for _ in range(blocks):
                self.upsamples.append(Residual(d_in, width))
                d_in = width
            if level < len(temporal):
                self.upsamples.append(Upsample(width, temporal[level]))
                d_in = width // 2
        self.head = nn.ModuleDict({"0": Gain(d_in, 3), "2": CausalConv(d_in, 3)})

    def forward(self, z: torch.Tensor, kept: Kept) -> torch.Tensor:
        head: Any = self.head
        x = self.conv1.causal(z, kept)
        for layer in (*self.middle, *self.upsamples):
            x = layer(x, kept)
        return head["2"].causal(F.silu(head["0"](x)), kept)


class WanDecoder(nn.Module):
    """The decoder with the product before it and the latents' statistics.

    Attributes:
      spatial: pixels a latent cell along H and along W.
      temporal: frames a latent frame, but for the first, which is one.
    """

    def __init__(self, z_dim: int, widths: tuple[int, ...], blocks: int, temporal: tuple[bool, ...]):
        super().__init__()
        self.z_dim, self.spatial, self.temporal = z_dim, 2 ** len(temporal), 2 ** sum(temporal)
        self.mean: tuple[float, ...] = (0.0,) * z_dim
        self.std: tuple[float, ...] = (1.0,) * z_dim
        self.conv2 = nn.Conv3d(z_dim, z_dim, 1)
        self.decoder = Decoder(z_dim, widths, blocks, temporal)

    @torch.inference_mode()
    def decode(self, latents_BCTHW: np.ndarray, tile: int = 0) -> np.ndarray:
        """Normalised latents (B,z_dim,t,h,w) -> video (B,3,1+4(t-1),8h,8w), float32, not clamped. Clip by clip.

        With `tile`, squares of so many latent rows and columns are decoded one after another, sharing a quarter with
        their neighbours and blended linearly there: an approximation near the seams.

        Raises:
          ValueError: the channels are not the autoencoder's.
        """
        b, c, t, h, w = latents_BCTHW.shape
        if c != self.z_dim or min(t, h, w) < 1:
            raise ValueError(f"latent is (B,C,T,H,W) = {latents_BCTHW.shape}; C must be {self.z_dim} (codec wan)")
        video = np.zeros((b, 3, (t - 1) * self.temporal + 1, h * self.spatial, w * self.spatial), np.float32)
        rows, columns = (tile_windows(n, min(tile or n, n), tile // 4, self.spatial) for n in (h, w))
        for clip, out in zip(latents_BCTHW, video, strict=True):
            for row, row_weight in zip(*rows, strict=True):
                for column, column_weight in zip(*columns, strict=True):
                    latent = clip[:, :, row:, column:][:, :, : min(tile or h, h), : min(tile or w, w)]
                    top, left = row * self.spatial, column * self.spatial
                    weight = row_weight[:, None] * column_weight
                    where = out[:, :, top : top + weight.shape[0], left : left + weight.shape[1]]
                    self._add(latent, weight.astype(np.float32), where)
        return video

    def _add(self, latent_CTHW: np.ndarray, weight_HW: np.ndarray, video_CTHW: np.ndarray) -> None:
        """Adds a clip's video times the weight, one latent frame at a time."""
        parameter = self.conv2.weight
        mean, std = (torch.tensor(value).view(1, -1, 1, 1, 1) for value in (self.mean, self.std))
        z = torch.from_numpy(np.ascontiguousarray(latent_CTHW, np.float32))[None] * std + mean
        kept, frame = Kept(), 0
        for n in range(z.shape[2]):
            part = self.decoder(self.conv2(z[:, :, n : n + 1].to(parameter.device, parameter.dtype)), kept)
            kept.next_chunk()
            pixels = part[0].float().cpu().numpy()
            video_CTHW[:, frame : frame + pixels.shape[1]] += pixels * weight_HW
            frame += pixels.shape[1]


def tile_windows(size: int, tile: int, overlap: int, scale: int) -> tuple[np.ndarray, np.ndarray]:
    """Starts (N,) in cells of the tiles of an axis, evenly spread, and the weights (N, tile*scale) of their pixels.

    Tiles share at least `overlap` cells with their neighbours; there the weights run linearly from one to the other. At
    every pixel they add up to 1. The trainer's decoder cuts and blends in the same way.
    """
    count = 1 if tile >= size else 1 + -(-(size - tile) // (tile - overlap))
    starts = np.round(np.linspace(0, size - tile, count)).astype(int)
    weights, total = np.ones((count, tile * scale)), np.zeros(size * scale)
    pixel = np.arange(tile * scale) + 0.5
    for n, start in enumerate(starts):
        if n > 0:
            weights[n] *= np.minimum(pixel / max((starts[n - 1] + tile - start) * scale, 1), 1)
        if n < count - 1:
            weights[n] *= np.minimum(pixel[::-1] / max((start + tile - starts[n + 1]) * scale, 1), 1)
        total[start * scale : (start + tile) * scale] += weights[n]
    for n, start in enumerate(starts):
        weights[n] /= total[start * scale : (start + tile) * scale]
    return starts, weights


# ---- files -----------------------------------------------------------------------------------------------------------


def load(path: str | Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> WanDecoder:
    """The decoder from an official `.pth` or `.safetensors` file, or from a diffusers folder or its file.

    Sizes come from the shapes. The latents' statistics are those of a diffusers folder's config.json, for official
    files the published model's. The encoder's tensors are not read. Gains stay float32.

    Raises:
      ValueError: nothing readable there, another network, or names and shapes that do not fit (all of them listed).
    """
    path = Path(path)
    tensors = _read(path)
    diffusers = any(name.startswith(("decoder.mid_block.", "post_quant_conv.")) for name in tensors)
    if not diffusers and not any(name.startswith(("decoder.upsamples.", "decoder.middle.")) for name in tensors):
        raise ValueError(f"{path} holds no Wan2.1 decoder: no decoder.upsamples.* and no decoder.mid_block.*")
    z_dim, widths, blocks, temporal = _sizes(tensors, diffusers)
    try:
        with torch.device("meta"):
            model = WanDecoder(z_dim, widths, blocks, temporal)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{path} holds no Wan2.1 decoder: widths {widths}, {z_dim} latent channels") from error
    theirs = {name: _file_name(name, blocks) if diffusers else name for name in model.state_dict()}
    _check(path, tensors, {theirs[name]: tuple(value.shape) for name, value in model.state_dict().items()})
    model.mean, model.std = _statistics(path, z_dim, diffusers)
    state = {
        name: tensors[theirs[name]].to(device, torch.float32 if name.endswith(".gamma") else dtype) for name in theirs
    }
    model.load_state_dict(state, assign=True)
    return model.eval().requires_grad_(False)


def _sizes(tensors: Mapping[str, torch.Tensor], diffusers: bool) -> tuple[int, tuple[int, ...], int, tuple[bool, ...]]:
    """Latent channels, widths of the levels, blocks a level, and which levels double T."""
    if diffusers:
        found = [re.match(r"decoder\.up_blocks\.(\d+)\.resnets\.(\d+)\.", name) for name in tensors]
        numbers = [(int(match[1]), int(match[2])) for match in found if match]
        levels, blocks = (max((pair[i] for pair in numbers), default=0) + 1 for i in (0, 1))
        ups = [f"decoder.up_blocks.{level}.upsamplers.0" for level in range(levels - 1)]
    else:
        found = [re.match(r"decoder\.upsamples\.(\d+)\.(resample|residual)\.", name) for name in tensors]
        resamples = sorted({int(match[1]) for match in found if match and match[2] == "resample"})
        last = max((int(match[1]) for match in found if match), default=0)
        levels, blocks = len(resamples) + 1, resamples[0] if resamples else last + 1
        ups = [f"decoder.upsamples.{number}" for number in resamples]
    temporal = tuple(f"{up}.time_conv.weight" in tensors or f"{up}.time_conv.bias" in tensors for up in ups)

    def vote(names: list[str], otherwise: int, axis: int = 0) -> int:
        """The most frequent length, so that one bad shape is reported as such."""
        names = [_file_name(name, blocks) for name in names] if diffusers else names
        shapes = [tensors[name].shape for name in names if name in tensors]
        lengths = collections.Counter(shape[axis] for shape in shapes if len(shape) > axis)
        return lengths.most_common(1)[0][0] if lengths else otherwise

    widths: list[int] = []
    for level in range(levels):
        layers = [f"decoder.upsamples.{level * (blocks + 1) + n}.residual" for n in range(blocks)]
        names = [f"{layer}.{part}" for layer in layers for part in ("2.bias", "3.gamma", "6.bias", "6.weight")]
        widths.append(vote(names, widths[-1] if widths else 1))
    z_dim = vote(["conv2.weight", "decoder.conv1.weight"], len(LATENTS_MEAN), axis=1)
    return z_dim, tuple(widths), blocks, temporal


_DIFFUSERS_ENDS = {"conv1": "conv_in", "head.0": "norm_out", "head.2": "conv_out"}
_DIFFUSERS_MIDDLE = {"0": "resnets.0", "1": "attentions.0", "2": "resnets.1"}
_DIFFUSERS_BLOCK = {
    "residual.0": "norm1", "residual.2": "conv1", "residual.3": "norm2", "residual.6": "conv2",
    "shortcut": "conv_shortcut",
}  # fmt: skip


def _file_name(official: str, blocks: int) -> str:
    """diffusers' name of a decoder's tensor with `blocks` residual blocks a level."""
    if official.startswith("conv2."):
        return f"post_quant_{official.replace('conv2', 'conv')}"
    stem, _, leaf = official.removeprefix("decoder.").rpartition(".")
    if stem in _DIFFUSERS_ENDS:
        return f"decoder.{_DIFFUSERS_ENDS[stem]}.{leaf}"
    group, number, rest = stem.split(".", 2)
    rest = _DIFFUSERS_BLOCK.get(rest, rest)
    if group == "middle":
        return f"decoder.mid_block.{_DIFFUSERS_MIDDLE[number]}.{rest}.{leaf}"
    level, n = divmod(int(number), blocks + 1)
    return f"decoder.up_blocks.{level}.{f'resnets.{n}' if n < blocks else 'upsamplers.0'}.{rest}.{leaf}"


def _check(path: Path, tensors: Mapping[str, torch.Tensor], wanted: Mapping[str, tuple[int, ...]]) -> None:
    parts = {
        "missing": [name for name in wanted if name not in tensors],
        "unexpected": sorted(set(tensors) - set(wanted)),
        "misshapen": [
            f"{name} is {tuple(tensors[name].shape)}, not {shape}"
            for name, shape in wanted.items()
            if name in tensors and tuple(tensors[name].shape) != shape
        ],
    }
    if any(parts.values()):
        listed = "; ".join(f"{len(names)} {word}: {', '.join(names)}" for word, names in parts.items() if names)
        raise ValueError(f"{path} does not fit a Wan2.1 decoder: {listed}")


def _statistics(path: Path, z_dim: int, diffusers: bool) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of the latents, one a channel."""
    where = path
    mean: tuple[float, ...] = LATENTS_MEAN
    std: tuple[float, ...] = LATENTS_STD
    if diffusers:
        where = (path if path.is_dir() else path.parent) / "config.json"
        try:
            config = json.loads(where.read_text())
            if config["_class_name"] != _DIFFUSERS_CLASS:
                raise ValueError(f"its _class_name is {config['_class_name']!r}")
            mean, std = (tuple(map(float, config[name])) for name in ("latents_mean", "latents_std"))
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{where} is not the config.json of an {_DIFFUSERS_CLASS}: {error}") from error
    if len(mean) != z_dim or len(std) != z_dim or not min(std) > 0:
        raise ValueError(f"{where}: {z_dim} latent channels, but {len(mean)} means and {len(std)} stds (all above 0)")
    return mean, std


def _read(path: Path) -> dict[str, torch.Tensor]:
    """A file's tensors, a folder's one file's, or those of shards with an index; without the encoder's."""
    files = [path]
    if path.is_dir():
        torch_files = sorted(path.glob("*.pth"))
        files = torch_files if len(torch_files) == 1 and not any(path.glob("*.safetensors*")) else weight_files(path)
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors |= _read_safetensors(file) if file.suffix == ".safetensors" else _read_torch(file)
    return tensors


def _read_safetensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(file, "pt") as opened:
            names = [name for name in opened.keys() if not name.startswith(_ENCODER)]  # noqa: SIM118 (it is no dict)
            return {name: opened.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is not a whole safetensors file: {error}") from error


def _read_torch(file: Path) -> dict[str, torch.Tensor]:
    if not file.is_file():
        raise ValueError(f"{file} does not exist; a .pth or .safetensors file, or a folder with one, is needed")
    try:
        state = read_torch(file, log.info)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    return {name: value for name, value in state.items() if not name.startswith(_ENCODER)}
