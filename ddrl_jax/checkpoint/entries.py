"""How a file's tensors and our parameters correspond: one entry a parameter, for every family of networks.

Knows neither files nor networks; a family's table lists entries, `weights` reads and writes by them.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Entry:
    """One of our parameters and the tensors of a file that hold it.

    Attributes:
      ours: dotted path in the network's state, "blocks.self_attn.q.kernel".
      name: the file's tensor name; with "{}" for a stacked parameter, whose row n is the tensor named with n.
      axes: our row's axes in terms of the file's: ours = file.transpose(axes). (1, 0) for a matrix of torch's
        (out, in); (2, 3, 4, 1, 0) for its 3-D convolutions. None: the same.
      ones: how many axes of length 1 the file has behind ours ((C, 1, 1, 1) for our (C,) has 3), not in `axes`.
      rows: of a stacked parameter, how many; 0 for one that is not stacked.
    """

    ours: str
    name: str
    axes: tuple[int, ...] | None = None
    ones: int = 0
    rows: int = 0

    @property
    def names(self) -> list[str]:
        """The file's names, one a row."""
        return [self.name.format(row) for row in range(self.rows)] if self.rows else [self.name]

    def file_shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of each of the file's tensors, from our parameter's (with its leading row axis where stacked)."""
        row = ours[1:] if self.rows else ours
        if self.axes is not None:
            row = tuple(size for _, size in sorted(zip(self.axes, row, strict=True)))
        return row + (1,) * self.ones
