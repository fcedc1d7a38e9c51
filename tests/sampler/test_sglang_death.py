"""Real SGLang whose scheduler dies halfway through an update. It takes its process along, as the driver expects."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import psutil
from real_sglang import NEEDS_SGLANG, sglang_engine
from tiny_engine import DENSE, load, shipment

pytestmark = NEEDS_SGLANG
PATIENCE = 120.0  # SGLang looks once a second, then asks py-spy where the dead were; the machine may be busy [s]


def half_an_update(told: Connection) -> None:
    """An engine in a process of its own, as the driver has it."""
    cfg, sglang = sglang_engine(DENSE, "w4a16")
    buckets, version = shipment(cfg)
    load(sglang, buckets, version)
    scheduler = psutil.Process(sglang.states()[0]["minite"]["pid"])
    told.send([child.pid for child in psutil.Process().children(recursive=True)])
    sglang.begin_update(version)
    scheduler.kill()
    load(sglang, buckets, version)


def test_a_scheduler_that_dies_ends_its_engine_and_leaves_nothing():
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    engine = multiprocessing.get_context("spawn").Process(target=half_an_update, args=(theirs,))
    engine.start()
    theirs.close()
    try:
        children = [psutil.Process(pid) for pid in ours.recv()]
        engine.join(PATIENCE)
        assert engine.exitcode == -9  # it finished no update, nor did it stop at an error
        _, alive = psutil.wait_procs(children, timeout=PATIENCE)
        assert len(children) >= 2 and not alive
    finally:
        engine.kill()
