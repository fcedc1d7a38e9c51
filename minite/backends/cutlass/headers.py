"""CUTLASS's headers: taken out of one pinned wheel whose bytes are checked. Nothing of it is in this repository."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from minite.config.env import cache_dir
from minite.errors import UserError

REQUIREMENT = "nvidia-cutlass==4.2.0.0"
SHA256 = "f9599ada45c7bcb6bf53f7d3f0a7d154183e53451c01bfa59eecd37dd4a693f6"
_FOLDERS = ("cutlass_library/source/include", "cutlass_library/source/tools/util/include")


def include_dirs(wheel: Path | None = None) -> list[Path]:
    """The include folders, extracted on first use into the cache; from ``wheel``, or downloaded by pip (6 MB).

    Raises UserError when the wheel cannot be had or its SHA-256 is another.
    """
    home = cache_dir() / f"cutlass-{SHA256[:16]}"
    if not home.is_dir():
        home.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home.parent, prefix="cutlass-") as folder:
            extracted = _extract(wheel or _download(Path(folder)), Path(folder) / "headers")
            try:
                os.replace(extracted, home)
            except OSError:  # another process was quicker; both hold the same files
                if not home.is_dir():
                    raise
    return [home / folder for folder in _FOLDERS]


def _download(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    run = subprocess.run([*pip, "--only-binary=:all:", "-d", str(folder), REQUIREMENT], capture_output=True, text=True)
    if run.returncode != 0:
        reason = (run.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise UserError(
            f"CUTLASS headers: pip could not download {REQUIREMENT}: {reason}; "
            "download it elsewhere (pip download --no-deps) and pass it with --wheel FILE"
        )
    return next(folder.glob("*.whl"))


def _extract(wheel: Path, to: Path) -> Path:
    if not wheel.is_file():
        raise UserError(f"CUTLASS headers: {wheel} is not a file; expected the wheel of {REQUIREMENT}")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != SHA256:
        raise UserError(f"CUTLASS headers: {wheel} has SHA-256 {found}; expected {SHA256}, the wheel of {REQUIREMENT}")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(to, [name for name in archive.namelist() if name.startswith(_FOLDERS)])
    return to
