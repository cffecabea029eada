"""What a compiled program computes and sends, read from its optimised HLO: every operation, times how often it runs.

XLA's own `cost_analysis` counts a loop's body once; here each operation is weighted by the trip counts of the loops
around it. Counted are matrix products (dots, convolutions, cuBLAS calls, whatever of them is inside fusions), fused
attention (cuDNN's and Pallas splash kernels, by the products that they do) and collectives with the mesh axes that
they go over. Knows the text of a program and the sizes of a mesh, and nothing of models.

FLOPs and bytes are one device's.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# Kernels that hold matrix products: (what the target, or splash's name, contains, products of L x S x K each).
_FUSED = (
    ("fmhaSoftmaxBackward", 5),  # S = QK^T again, dV, dP, dQ, dK
    ("fmhaSoftmax", 2),
    ("splash_mha_dq", 3),  # S, dP, dQ
    ("splash_mha_dkv", 5),  # with dQ, a part for each block of keys; 4 where another kernel makes dQ
    ("splash_mha_fwd", 2),
)
# Targets of custom calls that do no matrix products.
_NO_PRODUCTS = re.compile(
    r"TopK|threefry|Sharding|SPMD|Memory|AllocateBuffer|AssumeGatherIndices|annotate_device_placement|ConcatBitcast|"
    r"MoveToHost|MoveToDevice|PadToStatic|SliceToDynamic|X64|Sort|cub\$|barrier|xla\.sdy|Pin|Unpin"
)
_ARRAY = re.compile(r"([a-z]+[0-9a-z]*)\[([0-9,<=]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product, or a kernel of several, and how often it runs.

    Attributes:
      kind: "product", or "attention forward" or "attention backward" of a fused kernel.
      flops: of one run, two a multiplication and addition.
      contraction: length of the summed axis of a plain product.
      outputs: elements of its result.
      loops: trip counts of the loops around it, the outermost first.
    """

    kind: str
    flops: int
    contraction: int
    outputs: int
    loops: tuple[int, ...]
    name: str

    @property
    def times(self) -> int:
        return math.prod(self.loops)


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective operation and how often it runs.

    Attributes:
      axes: the mesh axes that it goes over, in the mesh's order.
      group: devices that exchange among themselves.
      shapes: of the arrays that each device puts in.
      bytes: of the whole array on one device: what is gathered, reduced, scattered or exchanged.
      loops: trip counts of the loops around it, the outermost first.
      body: the innermost loop's own name; "" outside of loops.
      name: the operation of the traced program that it belongs to.
    """

    kind: str
    axes: tuple[str, ...]
    group: int
    shapes: tuple[tuple[int, ...], ...]
    bytes: int
    loops: tuple[int, ...]
    body: str
    name: str

    @property
    def times(self) -> int:
        return math.prod(self.loops)

    @property
    def sent(self) -> float:
        """Bytes that a device sends in one run, by the cheapest algorithm on a ring."""
        if self.kind.startswith("collective"):
            return self.bytes
        return self.bytes * (self.group - 1) / self.group * (2 if self.kind == "all-reduce" else 1)


@dataclasses.dataclass(frozen=True)
class Program:
    """What was found. `uncounted`: targets of custom calls that may hold products unknown to this reader, and how often
    they run; `unknown_loops`: loops whose trip count is not known, counted as one."""

    products: tuple[Product, ...]
    collectives: tuple[Collective, ...]
    uncounted: dict[str, int]
    unknown_loops: int

    @property
    def flops(self) -> int:
        """Of all matrix products, on one device."""
        return sum(p.flops * p.times for p in self.products)

    @property
    def fused_attention(self) -> bool:
        """Whether attention is done by a fused kernel."""
        return any(p.kind != "product" for p in self.products)


def read(text: str, axes: Mapping[str, int]) -> Program:
    """Reads `compiled.as_text()`; `axes` are the mesh's names and sizes, in its order (`mesh.shape`)."""
    return _Reader(text, axes).program()


# ------------------------------------------------------------------------------------------------------------ text


@dataclasses.dataclass(frozen=True)
class _Op:
    name: str
    kind: str
    type: str
    inside: str  # what is between its brackets: operands, or a constant's value
    attributes: str

    @property
    def operands(self) -> list[str]:
        return _NAME.findall(self.inside)

    @property
    def arrays(self) -> list[tuple[str, tuple[int, ...]]]:
        return _arrays(self.type)

    def attribute(self, pattern: str) -> str:
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""

    @property
    def source(self) -> str:
        return self.attribute(r'op_name="([^"]*)"')


def _arrays(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """(element type, shape) of every array of a type."""
    return [(kind, _numbers(dims)) for kind, dims in _ARRAY.findall(text)]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"-?\d+", text))


def _bytes(arrays: list[tuple[str, tuple[int, ...]]]) -> int:
    total = 0
    for kind, shape in arrays:
        bits = re.search(r"\d+", kind)
        total += math.prod(shape) * (int(bits[0]) if bits else 8 * (kind == "pred"))
    return total // 8


def _closing(text: str, start: int) -> int:
    """Index after the bracket that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i + 1
    raise ValueError(f"HLO text has a bracket that is never closed: {text[start : start + 80]!r}")


def _lines(text: str) -> list[str]:
    """Without comments; an operation whose metadata are written over several lines is one."""
    lines: list[str] = []
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if lines and lines[-1].startswith("  ") and line.strip() and not line.startswith("  ") and line != "}":
            lines[-1] += line
        else:
            lines.append(line)
    return lines


def _parse(line: str) -> _Op | None:
    head = _LINE.match(line)
    if not head:
        return None
    start = head.end()
    stop = _closing(line, start) if line[start] == "(" else line.index(" ", start)
    opening = line.index("(", stop)
    closing = _closing(line, opening)
    return _Op(head[1], line[stop:opening].strip(), line[start:stop], line[opening + 1 : closing - 1], line[closing:])


class _Reader:
    def __init__(self, text: str, axes: Mapping[str, int]) -> None:
        self.axes = dict(axes)
        self.computations: dict[str, dict[str, _Op]] = {}
        self.entry, ops = "", None
        for line in _lines(text):
            if opened := _COMPUTATION.match(line):
                ops = self.computations[opened[2]] = {}
                self.entry = opened[2] if opened[1] else self.entry
            elif line == "}":
                ops = None
            elif ops is not None and (op := _parse(line)):
                ops[op.name] = op
        if not self.entry:
            raise ValueError("HLO text has no ENTRY computation")
        self.busy: dict[str, bool] = {}
        self.uncounted: Counter[str] = Counter()
        self.unknown_loops = 0

    def program(self) -> Program:
        found = list(self._walk(self.entry, (), ""))
        return Program(
            tuple(x for x in found if isinstance(x, Product)),
            tuple(x for x in found if isinstance(x, Collective)),
            dict(self.uncounted),
            self.unknown_loops,
        )

    def _walk(self, computation: str, loops: tuple[int, ...], body: str) -> Iterator[Product | Collective]:
        ops = self.computations[computation]
        for op in ops.values():
            kind = op.kind.removesuffix("-start")
            if kind in COLLECTIVES:
                yield from self._collective(op, kind, ops, loops, body)
            elif kind in ("dot", "convolution"):
                yield self._product(op, kind, ops, loops)
            elif kind == "custom-call":
                yield from self._custom(op, ops, loops)
            elif kind == "while":
                inside = op.attribute(r"body=%?([\w.\-]+)")
                yield from self._walk(inside, (*loops, self._trip_count(op)), inside)
            elif not op.kind.endswith(("-done", "-update")):
                for called in _called(op):
                    if self._is_busy(called):
                        yield from self._walk(called, loops, body)

    def _is_busy(self, computation: str) -> bool:
        """Whether anything counted is in a computation, or in those that it calls."""
        if computation not in self.busy:
            kinds = (*COLLECTIVES, "dot", "convolution", "custom-call", "while")
            ops = self.computations[computation].values()
            self.busy[computation] = any(
                op.kind.removesuffix("-start") in kinds or any(self._is_busy(c) for c in _called(op)) for op in ops
            )
        return self.busy[computation]

    def _trip_count(self, op: _Op) -> int:
        known = op.attribute(r'known_trip_count":\{"n":"(\d+)"')
        if known:
            return int(known)
        # A counter from 0 by 1 up to a constant, as jax writes a scan.
        condition = op.attribute(r"condition=%?([\w.\-]+)")
        tests = list(self._all_ops(condition))
        limits = {int(op.inside) for op in tests if op.kind == "constant" and op.inside.isdigit()}
        if len(limits) == 1 and any(op.kind == "compare" and "direction=LT" in op.attributes for op in tests):
            return limits.pop()
        self.unknown_loops += 1
        return 1

    def _all_ops(self, computation: str) -> Iterator[_Op]:
        for op in self.computations[computation].values():
            yield op
            for called in _called(op):
                yield from self._all_ops(called)

    # -------------------------------------------------------------------------------------------------- products

    def _product(self, op: _Op, kind: str, ops: dict[str, _Op], loops: tuple[int, ...]) -> Product:
        lhs, rhs = (ops[name].arrays[0][1] for name in op.operands[:2])
        outputs = math.prod(op.arrays[0][1])
        if kind == "dot":
            contraction = math.prod(lhs[i] for i in _numbers(op.attribute(r"lhs_contracting_dims=\{([\d,]*)\}")))
            flops = 2 * outputs * contraction
        else:
            flops = _convolution_flops(op, lhs, rhs)
            contraction = flops // (2 * outputs)
        return Product("product", flops, contraction, outputs, loops, op.source)

    def _custom(self, op: _Op, ops: dict[str, _Op], loops: tuple[int, ...]) -> Iterator[Product]:
        target = op.attribute(r'custom_call_target="([^"]*)"')
        arrays = [array for name in op.operands for array in ops[name].arrays[:1]]
        if target.startswith("__cublas$"):
            outputs = math.prod(op.arrays[0][1])
            dims = _numbers(op.attribute(r'lhs_contracting_dimensions":\[([\d,"]*)\]'))
            contraction = math.prod(arrays[0][1][i] for i in dims)
            yield Product("product", 2 * outputs * contraction, contraction, outputs, loops, op.source)
            return
        for part, products in _FUSED:
            if part in (target if "fmha" in target else op.name):
                # Before queries, keys and values splash has tables of which blocks to visit.
                q, k = [shape for kind, shape in arrays if kind in ("bf16", "f16", "f32")][:2]
                partial = part == "splash_mha_dkv" and all(len(shape) <= len(q) for _, shape in op.arrays)
                yield _attention(op, part, products - partial, q, k, loops)
                return
        for called in _called(op):
            yield from (p for p in self._walk(called, loops, "") if isinstance(p, Product))
        if not _NO_PRODUCTS.search(target):
            self.uncounted[target] += math.prod(loops)

    # ----------------------------------------------------------------------------------------------- collectives

    def _collective(
        self, op: _Op, kind: str, ops: dict[str, _Op], loops: tuple[int, ...], body: str
    ) -> Iterator[Collective]:
        if kind == "collective-permute":
            pairs = np.array(_numbers(op.attribute(r"source_target_pairs=\{(.*?)\}\}"))).reshape(-1, 2)
            groups = pairs[pairs[:, 0] != pairs[:, 1]]
        else:
            groups = _groups(op.attributes, math.prod(self.axes.values()))
        if groups.size == 0 or groups.shape[1] == 1:
            return  # nothing leaves the device
        arrays = [array for name in op.operands for array in ops[name].arrays]
        size = _bytes(arrays) * (groups.shape[1] if kind == "all-gather" else 1)
        shapes = tuple(shape for _, shape in arrays)
        yield Collective(kind, self._axes_of(groups), groups.shape[1], shapes, size, loops, body, op.source)

    def _axes_of(self, groups: np.ndarray) -> tuple[str, ...]:
        """The axes along which members of a group differ. Devices are numbered in the mesh's order."""
        at = np.array(np.unravel_index(groups, tuple(self.axes.values())))
        differ = (at != at[:, :, :1]).any(axis=(1, 2))
        return tuple(name for name, differs in zip(self.axes, differ, strict=True) if differs)


def _called(op: _Op) -> list[str]:
    """Computations that an operation runs once: fusions, calls, asynchronous wrappers, branches."""
    if op.kind in ("reduce", "reduce-window", "scatter", "sort", "select-and-scatter", "map", "while"):
        return []
    if op.kind.removesuffix("-start") in COLLECTIVES:
        return []
    lists = re.findall(r"(?:calls|to_apply|\w+_computations?)=(\{[^}]*\}|%?[\w.\-]+)", op.attributes)
    return [name for text in lists for name in re.findall(r"[\w.\-]+", text)]


def _attention(
    op: _Op, part: str, products: int, q: tuple[int, ...], k: tuple[int, ...], loops: tuple[int, ...]
) -> Product:
    """A fused attention: `products` products of (L, K) with (K, S) for every row and head. cuDNN's are (B, L, N, K) and
    (B, S, N, K), splash's (..., N, L, K) and (..., N, S, K)."""
    flops = 2 * math.prod(q) * (k[1] if part.startswith("fmha") else k[-2]) * products
    kind = "attention forward" if products == 2 else "attention backward"
    return Product(kind, flops, 0, math.prod(q), loops, op.source)


def _convolution_flops(op: _Op, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> int:
    """Of a convolution: products with what lies inside the input only, since TPUs write batched products so."""
    labels = op.attribute(r"dim_labels=(\S+?_\S+?->[0-9a-z?]+)")
    lhs_labels, rest = labels.split("_")
    rhs_labels, out_labels = rest.split("->")
    out, spatial = op.arrays[0][1], [c for c in lhs_labels if c.isdigit()]
    window = dict(re.findall(r"(\w+)=(\S+)", op.attribute(r"window=\{([^}]*)\}")))

    def per_axis(name: str, default: str) -> list[str]:
        return window[name].split("x") if name in window else [default] * len(spatial)

    settings = zip(
        *(per_axis(n, d) for n, d in (("stride", "1"), ("pad", "0_0"), ("lhs_dilate", "1"), ("rhs_dilate", "1"))),
        strict=True,
    )
    valid = 1
    for axis, (stride, pad, lhs_dilate, rhs_dilate) in zip(spatial, settings, strict=True):
        size, kernel = lhs[lhs_labels.index(axis)], rhs[rhs_labels.index(axis)]
        low = int(pad.split("_")[0])
        first = np.arange(out[out_labels.index(axis)]) * int(stride) - low
        inside = 0
        for tap in range(kernel):
            at = first + tap * int(rhs_dilate)
            inside += int(((at % int(lhs_dilate) == 0) & (at >= 0) & (at < size * int(lhs_dilate))).sum())
        valid *= inside
    groups = int(op.attribute(r"batch_group_count=(\d+)") or 1)
    batch = lhs[lhs_labels.index("b")] // groups
    return 2 * batch * out[out_labels.index("f")] * rhs[rhs_labels.index("i")] * valid


def _groups(attributes: str, devices: int) -> np.ndarray:
    """Groups of devices (groups, members), from each of the ways in which HLO writes them."""
    # mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}: along axes of a mesh, which may be parts of one ('b':(1)2)
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((\[.*?)\))? \{([^}]*)\}", attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh[1])}
        ids = _iota(mesh[2]) if mesh[2] else np.arange(math.prod(sizes.values()))
        return _along(ids, sizes, re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", mesh[3]))
    if iota := re.search(r"replica_groups=\[([\d,]*)\]<=(\[[\d,]*\](?:T\([\d,]*\))?)", attributes):
        return _iota(iota[2]).reshape(_numbers(iota[1]))
    listed = re.search(r"replica_groups=\{(\{[^=]*\})?\}", attributes)
    if not listed:
        raise ValueError(f"HLO text has replica groups of an unknown form: {attributes[:200]!r}")
    groups = [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", listed[1] or "")]
    return np.array(groups) if groups else np.arange(devices)[None]


def _iota(text: str) -> np.ndarray:
    """[dims]T(permutation): numbers from 0, flat."""
    dims, _, order = text.partition("T")
    ids = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
    return (ids.transpose(_numbers(order)) if order else ids).reshape(-1)


def _along(ids: np.ndarray, sizes: dict[str, int], over: list[tuple[str, str, str]]) -> np.ndarray:
    """Groups along some axes of a mesh; an axis may be split into (before, size, after) and its middle taken."""
    dims: list[int] = []
    taken: dict[tuple[str, str, str], int] = {}
    for name, size in sizes.items():
        parts = sorted((entry for entry in over if entry[0] == name), key=lambda entry: int(entry[1] or 1))
        done = 1
        for entry in parts:
            before, middle = int(entry[1] or 1), int(entry[2] or size)
            dims.append(before // done)
            taken[entry] = len(dims)
            dims.append(middle)
            done = before * middle
        dims.append(size // done)
    order = [taken[entry] for entry in over]
    rest = [axis for axis in range(len(dims)) if axis not in order]
    members = math.prod(dims[axis] for axis in order)
    return ids.reshape(dims).transpose(*rest, *order).reshape(-1, members)
