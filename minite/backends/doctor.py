"""What this machine can run and whether its numbers are right: the text of `minite doctor`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from minite import __version__
from minite.backends.base import Backend
from minite.backends.registry import explain, get_backend
from minite.errors import UserError
from minite.formats import QTensor, nvfp4

PACKAGES = ("torch", "numba", "megatron-core", "ray", "transformers", "sglang", "triton", "tensorboard")

# Every E2M1 value, then every tie between two of them, which rounds to the even code; both signs. By construction the
# block scale is 448 and the outer scale a power of two, so the codes below follow from the format's definition alone.
_LADDER = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0)
_EXPECTED_CODES = ("1032547698badcfe", "20426476a8caecfe")


def examine() -> tuple[str, bool]:
    """(the report, whether every check passed). Runs in about a second on a CPU."""
    lines = [f"miniTE {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"]
    lines += [f"  {name:15} {_installed(name)}" for name in PACKAGES]
    lines += ["devices", f"  cpu: {len(os.sched_getaffinity(0))} cores, torch uses {torch.get_num_threads()} threads"]
    lines += [f"  {line}" for line in _gpus()] or ["  no CUDA device: native kernels cannot run here"]
    healthy = True
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        for strict in (False, True):
            lines.append(f"backends on {device}{', strict alignment' if strict else ''}")
            for verdict in explain(device=device, strict=strict):
                if verdict.refusal is not None:
                    lines.append(f"  {verdict.name}: refused, {verdict.refusal}")
                    continue
                lines.append(f"  {verdict.name} ({verdict.kind}): can run")
                backend = get_backend(verdict.name, device=device, strict=strict)
                lines += [f"    {path}" for path in backend.paths]
                for what, fault in check_backend(backend, device):
                    healthy = healthy and fault is None
                    lines.append(f"    {what}: " + ("ok" if fault is None else f"FAILED, {fault}"))
    lines.append("all checks passed" if healthy else "SOME CHECKS FAILED: do not trust results of this machine")
    return "\n".join(lines), healthy


def check_backend(backend: Backend, device: str) -> Iterator[tuple[str, str | None]]:
    """(what was checked, None or what is wrong) by check."""
    checks: dict[str, Callable[[Backend, str], str | None]] = {
        "NVFP4 codes of known values": _check_codes,
        "quantizer equals the reference, byte for byte": _check_quantizer,
        "GEMM within the bound of its summation": _check_gemm,
    }
    if backend.strict:
        checks["a row's result does not depend on its batch"] = _check_invariance
    for what, check in checks.items():
        try:
            yield what, check(backend, device)
        except UserError as error:
            yield what, str(error)


def _check_codes(backend: Backend, device: str) -> str | None:
    rows = [[*row, *(-value for value in row)] for row in (_LADDER, _TIES)]
    x_MK = torch.tensor(rows, dtype=torch.bfloat16, device=device)
    got = [bytes(row.tolist()).hex() for row in _quantized(backend, x_MK, "nvfp4_row").codes.cpu()]
    wrong = [
        f"row {i} is {a}, expected {b}" for i, (a, b) in enumerate(zip(got, _EXPECTED_CODES, strict=True)) if a != b
    ]
    return wrong[0] if wrong else None


def _check_quantizer(backend: Backend, device: str) -> str | None:
    x_MK = _random(96, 256, seed=1).to(device)
    for how, block, outer in (
        ("nvfp4_1d", (1, 16), "tensor"),
        ("nvfp4_2d", (16, 16), "tensor"),
        ("nvfp4_row", (1, 16), "row"),
    ):
        expected = nvfp4.quantize(x_MK.cpu(), block, outer)
        difference = _quantized(backend, x_MK, how).to("cpu").first_difference(expected)
        if difference is not None:
            return f"{how}: {difference}"
    return None


def _check_gemm(backend: Backend, device: str) -> str | None:
    """FP32 sums of K exact products, in any order, are off by at most (K - 1) u sum |a b|, u = 2^-24 (Higham, Accuracy
    and Stability of Numerical Algorithms, section 3.5); 8 u more cover the scales and the rounding of the result.
    """
    k = 512
    a, b = (_random(rows, k, seed).to(device) for rows, seed in ((64, 2), (48, 3)))
    a_q, b_q = _quantized(backend, a, "nvfp4_row"), _quantized(backend, b, "nvfp4_1d")
    got_MN = backend.gemm(a_q, backend.prepare(b_q), torch.float32).double().cpu()
    a_MK, b_NK = (q.to("cpu").dequantize(torch.float32).double() for q in (a_q, b_q))
    bound_MN = (k + 8) * 2.0**-24 * (a_MK.abs() @ b_NK.abs().T)
    excess_MN = (got_MN - a_MK @ b_NK.T).abs() / bound_MN
    worst = float(excess_MN.nan_to_num(nan=torch.inf).max())
    return None if worst <= 1 else f"error is {worst:.3g} times the bound"


def _check_invariance(backend: Backend, device: str) -> str | None:
    x_MK, w_NK = _random(33, 512, seed=4).to(device), _random(64, 512, seed=5).to(device)
    weight = backend.prepare(_quantized(backend, w_NK, "nvfp4_1d"))
    together_MN = backend.gemm(_quantized(backend, x_MK, "nvfp4_row"), weight, torch.float64)
    for row in (0, 17, 32):
        alone_1N = backend.gemm(_quantized(backend, x_MK[row : row + 1], "nvfp4_row"), weight, torch.float64)
        if not torch.equal(alone_1N[0], together_MN[row]):
            return f"row {row} alone differs from the same row among 33"
    return None


def _quantized(backend: Backend, x_MK: Tensor, how: str) -> QTensor:
    q = backend.quantize(x_MK, how)
    assert isinstance(q, QTensor)
    return q


def _random(rows: int, k: int, seed: int) -> Tensor:
    """BF16 [rows, k] whose rows differ in size by powers of two, as activations do."""
    generator = torch.Generator().manual_seed(seed)
    size_M1 = torch.exp2(torch.randint(-4, 5, (rows, 1), generator=generator).float())
    return (torch.randn(rows, k, generator=generator) * size_M1).bfloat16()


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _gpus() -> list[str]:
    if not torch.cuda.is_available():
        return []
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [f"cuda:{i} {g.name}, sm_{g.major}{g.minor}, {g.total_memory / 2**30:.0f} GiB" for i, g in enumerate(gpus)]
