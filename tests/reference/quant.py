"""Quantisation by NumPy loops, from the formula W ~ S * L[I] (+ Z): slow, plain, and independent of torch.

Scales, offsets and levels are given as float32; the float operations follow docs/quantization.md, so that the
results of the package must equal these exactly.
"""

from __future__ import annotations

import numpy as np

F32 = np.float32
NF4 = (
    "-1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 "
    "-0.18477343022823334 -0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725 "
    "0.24611230194568634 0.33791524171829224 0.44070982933044434 0.5626170039176941 0.7229568362236023 1.0"
)
IQ4_NL = "-127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113"


def levels(name: str, bits: int) -> np.ndarray:
    """The grid, ascending."""
    count = 2**bits
    table = {
        "balanced": lambda: [n - (count - 1) / 2 for n in range(count)],
        "int": lambda: [n - count // 2 for n in range(count)],
        "affine": lambda: list(range(count)),
        "ternary": lambda: [-1, 0, 1],
        "nf4": lambda: [float(word) for word in NF4.split()],
        "iq4_nl": lambda: [float(word) for word in IQ4_NL.split()],
    }
    return np.array(table[name](), dtype=F32)


def column(i: int, columns: int, in_features: int, group_size: int) -> int:
    """The column of a scale [O, C] that weight i of a row uses."""
    if columns == 1:
        return 0
    return i if columns == in_features else i // group_size


def code(unit: np.float32, grid: np.ndarray, is_even_grid: bool) -> int:
    """The nearest level: half to even on a grid of step one, the lower level on a midpoint of a table."""
    if is_even_grid:
        half = F32(grid[0] - np.floor(grid[0]))
        level = np.rint(F32(unit - half)) + half
        return int(np.clip(level, grid[0], grid[-1]) - grid[0])
    return sum(int(unit > F32(F32(low + high) * F32(0.5))) for low, high in zip(grid, grid[1:], strict=False))


def quantize(weight, scale, grid, offset, group_size: int, is_even_grid: bool) -> np.ndarray:
    """Codes [O, I]."""
    rows, columns = weight.shape
    codes = np.zeros((rows, columns), dtype=np.uint8)
    for o in range(rows):
        for i in range(columns):
            s = scale[o, column(i, scale.shape[1], columns, group_size)]
            inverse = F32(1) / s if s != 0 else np.finfo(F32).max
            inverse = np.clip(inverse, np.finfo(F32).min, np.finfo(F32).max)
            w = weight[o, i]
            if offset is not None:
                w = F32(w - offset[o, column(i, offset.shape[1], columns, group_size)])
            with np.errstate(over="ignore"):
                codes[o, i] = code(F32(w * inverse), grid, is_even_grid)
    return codes


def dequantize(codes, scale, grid, offset, group_size: int) -> np.ndarray:
    """S * L[I] (+ Z), product and sum rounded one after the other."""
    rows, columns = codes.shape
    weight = np.zeros((rows, columns), dtype=F32)
    for o in range(rows):
        for i in range(columns):
            value = F32(grid[codes[o, i]] * scale[o, column(i, scale.shape[1], columns, group_size)])
            if offset is not None:
                value = F32(value + offset[o, column(i, offset.shape[1], columns, group_size)])
            weight[o, i] = value
    return weight


def gradients(grad, codes, scale, grid, offset, group_size: int) -> dict[str, np.ndarray]:
    """d(sum grad * W) for the scale, the levels and the offset, codes held, in float64."""
    rows, columns = codes.shape
    d_scale, d_levels = np.zeros(scale.shape), np.zeros(grid.shape)
    d_offset = np.zeros((rows, 1) if offset is None else offset.shape)
    for o in range(rows):
        for i in range(columns):
            c, g, n = column(i, scale.shape[1], columns, group_size), float(grad[o, i]), codes[o, i]
            d_scale[o, c] += g * float(grid[n])
            d_levels[n] += g * float(scale[o, c])
            d_offset[o, column(i, d_offset.shape[1], columns, group_size)] += g
    return {"weight": grad.astype(np.float64), "scale": d_scale, "levels": d_levels, "offset": d_offset}


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Planes of 8, 4, 2 or 1 bits: byte p of a plane holds columns p, p + P, .. from its lowest bits up."""
    rows, columns = codes.shape
    packed_rows = []
    for o in range(rows):
        packed: list[int] = []
        shift = 0
        for width in {2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}[bits]:
            length = (columns * width + 7) // 8
            plane = [0] * length
            for i in range(columns):
                field = (int(codes[o, i]) >> shift) % 2**width
                plane[i % length] += field << (width * (i // length))
            packed += plane
            shift += width
        packed_rows.append(packed)
    return np.array(packed_rows, dtype=np.uint8)


def least_error(weights: np.ndarray, grid: np.ndarray, both_signs: bool) -> float:
    """The least sum of (w - S * nearest level)^2 over all scales S of one group, by trying every set of codes.

    The codes change only where a weight lies on a midpoint, S = w / m. Between two such scales the best is in closed
    form, <w, L> / <L, L>.
    """
    best = float(np.sum(weights.astype(np.float64) ** 2))
    for levels_of_sign in [grid.astype(np.float64), np.sort(-grid.astype(np.float64))][: 2 if both_signs else 1]:
        middles = (levels_of_sign[1:] + levels_of_sign[:-1]) / 2
        borders = sorted({w / m for w in weights.tolist() for m in middles.tolist() if m != 0 and w / m > 0})
        for low, high in zip([0.0, *borders], [*borders, 2 * borders[-1]], strict=True):
            unit = weights / ((low + high) / 2)
            chosen = levels_of_sign[np.abs(unit[:, None] - levels_of_sign[None, :]).argmin(1)]
            if np.sum(chosen**2) > 0:
                scale = np.sum(weights * chosen) / np.sum(chosen**2)
                best = min(best, float(np.sum((weights - scale * chosen) ** 2)))
    return best
