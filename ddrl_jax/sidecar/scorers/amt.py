"""AMT-S (Li et al. 2023, arXiv 2304.09790): the frame halfway between two frames.

Written from the paper and from what the authors' network computes, whose tensors' names these are. All-pairs
correlations of the two frames correct, at three resolutions, the flows from the wanted frame to each of the two; three
flows a pixel are then warped, mixed and merged.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MULTIPLE = 16  # of rows and columns; and at least MIN_SIDE of them
MIN_SIDE = 128  # the coarsest correlations have 2 rows and columns then; one could not be interpolated
CHANNELS = (20, 32, 44, 56)
_SKIP, _FLOWS, _LEVELS, _RADIUS = 20, 3, 4, 3


def conv(inside: int, outside: int, kernel: int = 3, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inside, outside, kernel, stride, kernel // 2)


def conv_prelu(inside: int, outside: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(conv(inside, outside, stride=stride), nn.PReLU(outside))


def resize(x: Tensor, factor: float) -> Tensor:
    return F.interpolate(x, scale_factor=factor, mode="bilinear", align_corners=False)


def grid(h: int, w: int, device: torch.device) -> Tensor:
    """Pixel coordinates (1,2,h,w): x, then y."""
    y, x = torch.meshgrid(torch.arange(h, device=device), torch.arange(w, device=device), indexing="ij")
    return torch.stack([x, y])[None].float()


def sample(x: Tensor, at_BHW2: Tensor, outside: str) -> Tensor:
    """`x` at pixel coordinates (x, y), bilinear."""
    last = at_BHW2.new_tensor([x.shape[-1] - 1, x.shape[-2] - 1])
    return F.grid_sample(x, at_BHW2 / last * 2 - 1, padding_mode=outside, align_corners=True)


def warp(x: Tensor, flow_B2HW: Tensor) -> Tensor:
    """x(p + flow(p)), the border going on outside."""
    h, w = flow_B2HW.shape[2:]
    at = grid(h, w, flow_B2HW.device) + flow_B2HW
    return sample(x, at.permute(0, 2, 3, 1), "border")


class Residual(nn.Module):
    """A bottleneck with instance norms, which have no weights."""

    def __init__(self, inside: int, outside: int, stride: int):
        super().__init__()
        self.conv1 = conv(inside, outside // 4, 1)
        self.conv2 = conv(outside // 4, outside // 4, 3, stride)
        self.conv3 = conv(outside // 4, outside, 1)
        self.downsample = nn.Sequential(conv(inside, outside, 1, stride)) if stride != 1 else None

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in (self.conv1, self.conv2, self.conv3):
            y = F.relu(F.instance_norm(layer(y)))
        return F.relu(y + (x if self.downsample is None else F.instance_norm(self.downsample(x))))


class Features(nn.Module):
    """Features to correlate, an eighth of the size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = conv(3, 32, 7, 2)
        self.layer1 = nn.Sequential(Residual(32, 32, 1), Residual(32, 32, 1))
        self.layer2 = nn.Sequential(Residual(32, 64, 2), Residual(64, 64, 1))
        self.layer3 = nn.Sequential(Residual(64, 96, 2), Residual(96, 96, 1))
        self.conv2 = conv(96, 84, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.instance_norm(self.conv1(x)))
        return self.conv2(self.layer3(self.layer2(self.layer1(x))))


class Pyramid(nn.Module):
    """Features of a half, a quarter, an eighth and a sixteenth of the size."""

    def __init__(self) -> None:
        super().__init__()
        for i, (inside, outside) in enumerate(pairwise((3, *CHANNELS)), 1):
            self.add_module(f"pyramid{i}", nn.Sequential(conv_prelu(inside, outside, 2), conv_prelu(outside, outside)))

    def forward(self, x: Tensor) -> list[Tensor]:
        out = []
        for stage in self.children():
            x = stage(x)
            out.append(x)
        return out


class SideResidual(nn.Module):
    """Every other convolution sees the last channels only."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv1, self.conv3 = conv_prelu(channels, channels), conv_prelu(channels, channels)
        self.conv2, self.conv4 = conv_prelu(_SKIP, _SKIP), conv_prelu(_SKIP, _SKIP)
        self.conv5, self.prelu = conv(channels, channels), nn.PReLU(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(x)
        y = self.conv3(torch.cat([y[:, :-_SKIP], self.conv2(y[:, -_SKIP:])], 1))
        y = self.conv5(torch.cat([y[:, :-_SKIP], self.conv4(y[:, -_SKIP:])], 1))
        return self.prelu(x + y)


class Decoder(nn.Module):
    """Features of both frames -> flows and features in between, or (the last) what is merged, twice the size."""

    def __init__(self, inside: int, width: int, outside: int):
        super().__init__()
        self.convblock = nn.Sequential(
            conv_prelu(inside, width), SideResidual(width), nn.ConvTranspose2d(width, outside, 4, 2, 1)
        )

    def forward(self, *x: Tensor) -> Tensor:
        return self.convblock(torch.cat(x, 1))


class Update(nn.Module):
    """What the correlations at the flows' ends say is wrong with the flows and features, `factor` times the size."""

    def __init__(self, features: int, factor: int):
        super().__init__()
        self.factor = factor
        self.convc1 = conv(2 * _LEVELS * (2 * _RADIUS + 1) ** 2, 64, 1)
        self.convf1, self.convf2 = conv(4, 40, 7), conv(40, 20)
        self.conv = conv(84, 68)
        self.gru = _two(68 + 4 + features, 76)
        self.feat_head, self.flow_head = _two(76, features), _two(76, 4)

    def forward(self, features: Tensor, flows: Tensor, correlations: Tensor) -> tuple[Tensor, Tensor]:
        if self.factor != 1:
            features = resize(features, 1 / self.factor)
        c = _leaky(self.convc1(correlations))
        f = _leaky(self.convf2(_leaky(self.convf1(flows))))
        x = self.gru(torch.cat([_leaky(self.conv(torch.cat([c, f], 1))), flows, features], 1))
        features, flows = self.feat_head(x), self.flow_head(x)
        if self.factor != 1:
            features, flows = resize(features, self.factor), self.factor * resize(flows, self.factor)
        return features, flows


def _leaky(x: Tensor) -> Tensor:
    return F.leaky_relu(x, 0.1)


def _two(inside: int, outside: int) -> nn.Sequential:
    return nn.Sequential(conv(inside, 76), nn.LeakyReLU(0.1), conv(76, outside))


class Correlations:
    """Products of all pairs of features, both ways, at four resolutions."""

    def __init__(self, a_BCHW: Tensor, b_BCHW: Tensor):
        b, c, h, w = a_BCHW.shape
        products = a_BCHW.flatten(2).transpose(1, 2) @ b_BCHW.flatten(2) / c**0.5
        self.levels = []
        for one_way in (products, products.transpose(1, 2)):
            volume = one_way.reshape(b * h * w, 1, h, w)
            self.levels.append([volume])
            for _ in range(_LEVELS - 1):
                self.levels[-1].append(F.avg_pool2d(self.levels[-1][-1], 2))

    def at(self, *ends_B2HW: Tensor) -> Tensor:
        """The 7 x 7 values around where each pixel of a frame ends in the other, (B, 2*4*49, h, w)."""
        b, _, h, w = ends_B2HW[0].shape
        steps = torch.arange(-_RADIUS, _RADIUS + 1, device=ends_B2HW[0].device).float()
        # x moves along the first axis of the window, as in RAFT, and so the weights were trained.
        window = torch.stack(torch.meshgrid(steps, steps, indexing="ij"), -1)
        out = []
        for levels, end in zip(self.levels, ends_B2HW, strict=True):
            centre = end.permute(0, 2, 3, 1).reshape(b * h * w, 1, 1, 2)
            found = [sample(volume, centre / 2**i + window, "zeros") for i, volume in enumerate(levels)]
            out.append(torch.cat([x.reshape(b, h, w, -1) for x in found], -1))
        return torch.cat(out, -1).permute(0, 3, 1, 2)


class AmtS(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        c1, c2, c3, c4 = CHANNELS
        self.feat_encoder, self.encoder = Features(), Pyramid()
        self.decoder4 = Decoder(2 * c4 + 1, 2 * c4, c3 + 4)
        self.decoder3 = Decoder(3 * c3 + 4, 3 * c3, c2 + 4)
        self.decoder2 = Decoder(3 * c2 + 4, 3 * c2, c1 + 4)
        self.decoder1 = Decoder(3 * c1 + 4, 3 * c1, 8 * _FLOWS)
        self.update4, self.update3, self.update2 = Update(c3, 1), Update(c2, 2), Update(c1, 4)
        self.comb_block = nn.Sequential(conv(3 * _FLOWS, 6 * _FLOWS), nn.PReLU(6 * _FLOWS), conv(6 * _FLOWS, 3))

    def forward(self, first_B3HW: Tensor, second_B3HW: Tensor) -> Tensor:
        """Frames in [0,1], rows and columns multiples of 16 and 128 at least -> the frame between, in [0,1]."""
        b, _, h, w = first_B3HW.shape
        mean = torch.cat([first_B3HW, second_B3HW], 2).mean((1, 2, 3), keepdim=True)
        first, second = first_B3HW - mean, second_B3HW - mean
        correlations = Correlations(self.feat_encoder(first), self.feat_encoder(second))
        firsts, seconds = self.encoder(first), self.encoder(second)
        start = grid(h // 8, w // 8, first.device)

        def corrected(flow0: Tensor, flow1: Tensor, features: Tensor, update: Update) -> tuple[Tensor, Tensor, Tensor]:
            small = [f if update.factor == 1 else resize(f, 1 / update.factor) / update.factor for f in (flow0, flow1)]
            # From halfway, twice the flow to one frame leads from the other one there.
            found = correlations.at(start + 2 * small[1], start + 2 * small[0])
            more, flows = update(features, torch.cat(small, 1), found)
            return flow0 + flows[:, :2], flow1 + flows[:, 2:], features + more

        halfway = first.new_full((b, 1, h // 16, w // 16), 0.5)
        out = self.decoder4(firsts[3], seconds[3], halfway)
        flow0, flow1, features = corrected(out[:, :2], out[:, 2:4], out[:, 4:], self.update4)
        for i, decoder, update in ((2, self.decoder3, self.update3), (1, self.decoder2, self.update2)):
            out = decoder(features, warp(firsts[i], flow0), warp(seconds[i], flow1), flow0, flow1)
            flow0, flow1 = out[:, :2] + 2 * resize(flow0, 2), out[:, 2:4] + 2 * resize(flow1, 2)
            flow0, flow1, features = corrected(flow0, flow1, out[:, 4:], update)
        out = self.decoder1(features, warp(firsts[0], flow0), warp(seconds[0], flow1), flow0, flow1)
        delta0, delta1, mask, rest = out.split([2 * _FLOWS, 2 * _FLOWS, _FLOWS, 3 * _FLOWS], 1)
        merged = []
        for k in range(_FLOWS):
            pair = slice(2 * k, 2 * k + 2)
            from_first = warp(first, delta0[:, pair] + 2 * resize(flow0, 2))
            from_second = warp(second, delta1[:, pair] + 2 * resize(flow1, 2))
            m = mask[:, k : k + 1].sigmoid()
            merged.append(m * from_first + (1 - m) * from_second + mean + rest[:, 3 * k : 3 * k + 3])
        between = torch.stack(merged).mean(0) + self.comb_block(torch.cat(merged, 1))
        return between.clamp(0, 1)


def pad(frames_B3HW: Tensor) -> tuple[Tensor, tuple[slice, slice]]:
    """Frames with their border repeated up to a multiple of 16, and where the frame is in them."""
    h, w = frames_B3HW.shape[2:]
    more = (-h % MULTIPLE, -w % MULTIPLE)
    top, left = more[0] // 2, more[1] // 2
    padded = F.pad(frames_B3HW, (left, more[1] - left, top, more[0] - top), mode="replicate")
    return padded, (slice(top, top + h), slice(left, left + w))
