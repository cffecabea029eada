"""Features of pictures for a Fréchet distance where no independent net is at hand: principal components of pixels.

Linear and fitted on real clips alone, so nothing is learnt that a policy could fool, and nothing of what the pictures
mean is seen: the distance is of layout, contrast, sharpness and noise. numpy only.

Shape legend: N clips, C channels, T frames, H rows, W columns, P pixels, F features.
"""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class PixelFeatures:
    """The leading principal components in units of their standard deviation, and the log of what they leave over.

    Attributes:
      mean_P: float32, of the clips fitted on.
      basis_PF: float32, columns of length 1.
      scale_F: float32, each component's standard deviation.
      rest: mean and standard deviation, over the clips fitted on, of ln(mean squared residual).
    """

    mean_P: np.ndarray
    basis_PF: np.ndarray
    scale_F: np.ndarray
    rest: tuple[float, float]

    @classmethod
    def fit(cls, videos_NCTHW: np.ndarray, components: int) -> PixelFeatures:
        """Fits to real clips.

        Args:
          videos_NCTHW: float (N,C,T,H,W).
          components: at least 1, below N and below the pixels of a clip.

        Raises:
          ValueError: `components` is out of range.
        """
        x_NP = np.asarray(videos_NCTHW, np.float32).reshape(len(videos_NCTHW), -1)
        if not 1 <= components < min(x_NP.shape):
            raise ValueError(f"components = {components}: must be at least 1 and below {min(x_NP.shape)}")
        mean_P = x_NP.mean(0)
        centred_NP = (x_NP - mean_P).astype(np.float64)
        # Of the smaller of the two Gram matrices: both have the same eigenvalues.
        wide = centred_NP.shape[0] < centred_NP.shape[1]
        gram = centred_NP @ centred_NP.T if wide else centred_NP.T @ centred_NP
        values, vectors = np.linalg.eigh(gram)
        leading = vectors[:, ::-1][:, :components]
        basis_PF = centred_NP.T @ leading if wide else leading
        basis_PF = (basis_PF / np.linalg.norm(basis_PF, axis=0)).astype(np.float32)
        scale_F = np.sqrt(values[::-1][:components] / (len(x_NP) - 1)).astype(np.float32)
        unscaled = cls(mean_P, basis_PF, scale_F, (0.0, 1.0))
        rest_N = unscaled(videos_NCTHW)[:, -1]
        return dataclasses.replace(unscaled, rest=(float(rest_N.mean()), float(rest_N.std()) or 1.0))

    def __call__(self, videos_NCTHW: np.ndarray) -> np.ndarray:
        """Clips of the shape fitted on -> float32 (N,F+1). A clip's features do not depend on its batch-mates."""
        x_NP = np.asarray(videos_NCTHW, np.float32).reshape(len(videos_NCTHW), -1) - self.mean_P
        rows = []
        for x_P in x_NP:  # one by one: a matrix product sums in another order for another number of rows
            part_F = x_P @ self.basis_PF
            left = np.log(((x_P - self.basis_PF @ part_F) ** 2).mean() + 1e-6)
            rows.append([*part_F / self.scale_F, (left - self.rest[0]) / self.rest[1]])
        return np.array(rows, np.float32)
