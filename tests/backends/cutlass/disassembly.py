"""Machine code of compiled objects, by kernel: cuobjdump (packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm)."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest


def kernels(built: Path) -> dict[str, list[str]]:
    """Mangled kernel name -> its instructions' names with modifiers, in order ("UTCOMMA.2CTA.4X")."""
    env = {**os.environ, "PATH": os.pathsep.join([str(_tools()), os.environ["PATH"]])}  # cuobjdump calls nvdisasm
    run = subprocess.run(["cuobjdump", "-sass", str(built)], env=env, capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = {}
    for line in run.stdout.splitlines():
        if name := re.match(r"\s*Function : (\S+)", line):
            current = found.setdefault(name[1], [])
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", line):
            current.append(instruction[1])
    return found


def _tools() -> Path:
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(place, "cu13", "bin") for place in (spec.submodule_search_locations if spec else None) or []]
    on_path = shutil.which("cuobjdump")
    folders += [Path(on_path).parent] if on_path else []
    for folder in folders:
        if (folder / "cuobjdump").is_file():
            return folder
    pytest.skip("no cuobjdump: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
