"""Fills the object store of a running Ray and holds it full until its standard input ends: fault_hog.py ADDRESS"""

from __future__ import annotations

import logging
import sys

import numpy as np

from minite.config import env

PART = 16 << 20  # bytes


def main(address: str) -> None:
    """Says "full" when more is held than the store takes. Held views cannot be moved to the disk."""
    env.apply_ray_env()
    import ray  # it looks for them when it is imported

    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    size = int(ray.cluster_resources()["object_store_memory"])
    held = []
    while len(held) * PART < size:
        ref = ray.put(np.ones(PART, dtype=np.uint8))
        held.append((ref, ray.get(ref)))
    print("full", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1])
