"""Four over six one number at a time, in NumPy float32, from the formulas of the docstring alone."""

from __future__ import annotations

import numpy as np
from nvfp4_scalar import E4M3_VALUES, FLT_MAX, F, e2m1, e4m3

E2M1 = [F(v) for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]


def value(code: int) -> np.float32:
    return -E2M1[code & 7] if code & 8 else E2M1[code]


def quantize(x, amax_rows, block_rows, err, bound, fast_error):
    """(codes [M, K], scale bytes [M, K/16]) of float32 x [M, K], given the outer amax of each row."""
    m, k = x.shape
    codes, scales = np.zeros((m, k), np.uint8), np.zeros((m, k // 16), np.uint8)
    outer_max = F(6) * F(bound)
    with np.errstate(all="ignore"):
        for first in range(0, m, block_rows):
            rows = range(first, first + block_rows)
            for block in range(k // 16):
                columns = slice(block * 16, block * 16 + 16)
                block_amax = F(np.abs(x[first : first + block_rows, columns]).max())
                tried = []
                for expand in (F(1.5), F(1)):
                    results = [
                        _row(x[row, columns], block_amax, F(amax_rows[row]), outer_max, expand, err, fast_error)
                        for row in rows
                    ]
                    tried.append((_sum_rows([error for _, _, error in results]), results))
                (error4, four), (error6, six) = tried
                for row, (row_codes, byte, _) in zip(rows, four if error4 < error6 else six, strict=True):
                    codes[row, columns], scales[row, block] = row_codes, byte
    return codes, scales


def _row(x, block_amax, amax, outer_max, expand, err, fast_error):
    s_enc = min(outer_max / amax, FLT_MAX) if amax != 0 else F(1)
    byte = e4m3(min(F(F(F(block_amax / F(6)) * s_enc) * expand), F(448)))
    scale = F(E4M3_VALUES[byte])
    encode = min(F(1) / F(scale * F(F(1) / s_enc)), FLT_MAX)
    codes, error = [], F(0)
    for v in x:
        codes.append(e2m1(F(v * encode)))
        product = F(value(codes[-1]) * scale)
        d = F(product - F(v * s_enc)) if fast_error else F(F(F(product * amax) / outer_max) - v)
        error = F(error + (abs(d) if err == "mae" else F(d * d)))
    return codes, byte, error


def _sum_rows(errors):
    while len(errors) > 1:
        half = len(errors) // 2
        errors = [F(a + b) for a, b in zip(errors[:half], errors[half:], strict=True)]
    return errors[0]
