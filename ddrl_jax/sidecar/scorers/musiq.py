"""MUSIQ (Ke et al. 2021, arXiv 2108.05997): image quality from patches of a picture at three sizes.

Written from the paper and from what google-research/musiq and pyiqa compute, for pyiqa's checkpoint trained on SPAQ,
whose tensors' names these are. One picture in, one mean opinion score out, about 0 to 100.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .backbones import fill

PATCH = 32
LONGER_SIDES = (224, 384)  # of the two smaller pictures; the third is the picture itself


def same_padding(x: Tensor, kernel: int, stride: int) -> Tensor:
    """Zeros around a picture as TensorFlow's SAME, the odd one after: an output for every `stride` pixels begun."""
    pad = [max((math.ceil(n / stride) - 1) * stride + kernel - n, 0) for n in x.shape[:-3:-1]]  # columns, rows
    return F.pad(x, (pad[0] // 2, pad[0] - pad[0] // 2, pad[1] // 2, pad[1] - pad[1] // 2))


class StdConv(nn.Conv2d):
    """Convolution with SAME padding whose kernels have mean 0 and (unbiased) deviation 1."""

    def forward(self, x: Tensor) -> Tensor:
        std, mean = torch.std_mean(self.weight, (1, 2, 3), keepdim=True)
        x = same_padding(x, self.kernel_size[0], self.stride[0])
        return F.conv2d(x, (self.weight - mean) / (std + 1e-5), stride=self.stride)


class Bottleneck(nn.Module):
    def __init__(self, inside: int, outside: int):
        super().__init__()
        self.conv1 = StdConv(inside, inside, 1, bias=False)
        self.gn1 = nn.GroupNorm(32, inside, eps=1e-4)
        self.conv2 = StdConv(inside, inside, 3, bias=False)
        self.gn2 = nn.GroupNorm(32, inside, eps=1e-4)
        self.conv3 = StdConv(inside, outside, 1, bias=False)
        self.gn3 = nn.GroupNorm(32, outside, eps=1e-4)
        self.conv_proj = StdConv(inside, outside, 1, bias=False)
        self.gn_proj = nn.GroupNorm(32, outside, eps=1e-4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.gn1(self.conv1(x)))
        y = F.relu(self.gn2(self.conv2(y)))
        return F.relu(self.gn3(self.conv3(y)) + self.gn_proj(self.conv_proj(x)))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        q, k, v = (f(x_BLD).unflatten(2, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
        # -1000, not minus infinity: a row of padding is then uniform, not NaN.
        scores = scores.masked_fill(~(mask_BL[:, None, :, None] & mask_BL[:, None, None, :]), -1e3)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, width: int, inner: int, heads: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attention, self.mlp = Attention(width, heads), Mlp(width, inner)

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        x_BLD = x_BLD + self.attention(self.norm1(x_BLD), mask_BL)
        return x_BLD + self.mlp(self.norm2(x_BLD))


class Places(nn.Module):
    """A learned embedding for every place on the lattice."""

    def __init__(self, places: int, width: int):
        super().__init__()
        self.position_emb = nn.Parameter(torch.randn(1, places, width) * 0.02)


class Scales(nn.Module):
    """A learned embedding for every size of the picture."""

    def __init__(self, scales: int, width: int):
        super().__init__()
        self.scale_emb = nn.Parameter(torch.randn(scales, width) * 0.02)


class Encoder(nn.Module):
    def __init__(self, width: int, inner: int, heads: int, layers: int, grid: int):
        super().__init__()
        self.posembed_input = Places(grid * grid, width)
        self.scaleembed_input = Scales(len(LONGER_SIDES) + 1, width)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.encoder_norm = nn.LayerNorm(width, eps=1e-6)
        self.transformer = nn.ModuleDict({f"encoderblock_{i}": Block(width, inner, heads) for i in range(layers)})

    def forward(self, x_BLD: Tensor, place_L: Tensor, scale_L: Tensor, mask_L: Tensor) -> Tensor:
        x_BLD = x_BLD + self.posembed_input.position_emb[0, place_L] + self.scaleembed_input.scale_emb[scale_L]
        x_BLD = torch.cat([self.cls.expand(len(x_BLD), -1, -1), x_BLD], dim=1)
        mask_BL = F.pad(mask_L, (1, 0), value=True).expand(len(x_BLD), -1)
        for block in self.transformer.values():
            x_BLD = block(x_BLD, mask_BL)
        return self.encoder_norm(x_BLD)


def patches(picture_B3HW: Tensor, scale: int, length: int | None, grid: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Patches (B,L,3,32,32), their places on a grid x grid lattice, their scale and which are real, each (L,).

    length: how many there are to be: the rest is zeros, at place and scale 0; None: as many as there are.
    """
    b, _, h, w = picture_B3HW.shape
    x = F.unfold(same_padding(picture_B3HW, PATCH, PATCH), PATCH, stride=PATCH).transpose(1, 2)
    lattice = torch.arange(grid, dtype=torch.float32)[None, None]
    row, column = (F.interpolate(lattice, math.ceil(n / PATCH), mode="nearest")[0, 0].long() for n in (h, w))
    place = (row[:, None] * grid + column).flatten()
    extra = 0 if length is None else length - len(place)
    x, place = F.pad(x, (0, 0, 0, extra)), F.pad(place, (0, extra))
    real = torch.arange(len(place)) < len(place) - extra
    return x.reshape(b, len(place), 3, PATCH, PATCH), place, real * scale, real


class Musiq(nn.Module):
    """The network. The sizes are those of pyiqa's checkpoints; heads have 64 channels."""

    def __init__(self, width: int = 384, inner: int = 1152, layers: int = 14, grid: int = 10):
        super().__init__()
        self.grid = grid
        self.conv_root = StdConv(3, 64, 7, 2, bias=False)
        self.gn_root = nn.GroupNorm(32, 64, eps=1e-6)
        self.block1 = Bottleneck(64, 256)
        self.embedding = nn.Linear(256 * (PATCH // 4) ** 2, width)
        self.transformer_encoder = Encoder(width, inner, width // 64, layers, grid)
        self.head = nn.Linear(width, 1)

    @classmethod
    def of(cls, state: dict[str, Tensor]) -> Musiq:
        """The network of the sizes of a checkpoint, with its tensors. Raises ValueError where they are not MUSIQ's."""
        try:
            encoder = "transformer_encoder."
            inner, width = state[f"{encoder}transformer.encoderblock_0.mlp.fc1.weight"].shape
            layers = sum(name.endswith(".mlp.fc1.weight") for name in state)
            net = cls(width, inner, layers, math.isqrt(state[f"{encoder}posembed_input.position_emb"].shape[1]))
        except KeyError as error:
            raise ValueError(f"weights: not MUSIQ's, {error} is not there") from None
        fill(net, state, "MUSIQ")
        return net

    def forward(self, pictures_B3HW: Tensor) -> Tensor:
        """Pictures in [0,1] -> scores (B,)."""
        x = (pictures_B3HW - 0.5) * 2
        h, w = x.shape[2:]
        parts = []
        for scale, side in enumerate(LONGER_SIDES):
            size = tuple(round(n * side / max(h, w)) for n in (h, w))
            small = F.interpolate(x, size, mode="bicubic", align_corners=False)
            parts.append(patches(small, scale, math.ceil(side / PATCH) ** 2, self.grid))
        parts.append(patches(x, len(LONGER_SIDES), None, self.grid))
        tokens = torch.cat([p[0] for p in parts], dim=1)
        place, scale_, real = (torch.cat([p[i] for p in parts]).to(x.device) for i in (1, 2, 3))
        y = F.relu(self.gn_root(self.conv_root(tokens.flatten(0, 1))))
        y = self.block1(F.max_pool2d(same_padding(y, 3, 2), 3, 2))
        y = self.embedding(y.permute(0, 2, 3, 1).flatten(1)).unflatten(0, tokens.shape[:2])  # channels last, as trained
        return self.head(self.transformer_encoder(y, place, scale_, real)[:, 0])[:, 0]
