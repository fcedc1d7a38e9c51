"""NVFP4 one number at a time, in NumPy float32: slow, and written from the formulas alone, to check the fast one.

Nothing here is shared with minite.formats: E2M1 is decided by thresholds, E4M3 by searching all its values.
"""

from __future__ import annotations

import numpy as np

F = np.float32
FLT_MAX = np.finfo(F).max
E4M3_VALUES = [(m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10)) for e in range(16) for m in range(8)][:127]


def e2m1(y: F) -> int:
    """Code of y by the decision thresholds of round to nearest even."""
    if np.isnan(y):
        return 7
    m = abs(float(y))
    upper = ((0.25, True), (0.75, False), (1.25, True), (1.75, False), (2.5, True), (3.5, False), (5.0, True))
    code = next((c for c, (t, inclusive) in enumerate(upper) if m < t or (inclusive and m == t)), 7)
    return code | (8 if np.signbit(y) else 0)


def e4m3(x: F) -> int:
    """Byte of the nearest E4M3 value of x >= 0, ties to the even byte, saturating."""
    if x >= 448:
        return 126
    distance = [abs(float(x) - v) for v in E4M3_VALUES]  # exact in float64
    nearest = min(distance)
    tied = [byte for byte, d in enumerate(distance) if d == nearest]
    return tied[0] if len(tied) == 1 else next(byte for byte in tied if byte % 2 == 0)


def outer_encode(amax: F) -> F:
    s_enc = min(F(2688) / amax, FLT_MAX) if amax != 0 else F(1)
    return F(1) if s_enc == 0 else s_enc


def quantize(x: np.ndarray, amax_rows: np.ndarray, block_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """(codes [M, K], scale bytes [M, K/16]) of float32 x [M, K], given the outer amax of each row."""
    m, k = x.shape
    codes, scales = np.zeros((m, k), np.uint8), np.zeros((m, k // 16), np.uint8)
    with np.errstate(over="ignore", under="ignore", divide="ignore"):
        for row in range(m):
            s_enc = outer_encode(F(amax_rows[row]))
            first = row - row % block_rows
            for block in range(k // 16):
                columns = slice(block * 16, block * 16 + 16)
                block_amax = F(np.abs(x[first : first + block_rows, columns]).max())
                byte = e4m3(min(F(block_amax * F(s_enc * F(F(1) / F(6)))), FLT_MAX))
                encode = min(F(1) / F(F(E4M3_VALUES[byte]) * F(F(1) / s_enc)), FLT_MAX)
                scales[row, block] = byte
                codes[row, columns] = [e2m1(F(v * encode)) for v in x[row, columns]]
    return codes, scales
