"""Ray's object store has room for the weights of a sync, or it is said that it has not."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import ray
import torch

from minite.backends.registry import get_backend
from minite.config import load_recipe, resolve_plan
from minite.config.memory import GIB, stored_bytes
from minite.driver import cluster, job
from minite.models import get_model
from minite.sync.export import pack
from minite.sync.transport import package
from tests.driver.tiny_run import ROOT, config, environment

Usage = namedtuple("Usage", "total used free")


def resolved(run_config):
    return run_config, resolve_plan(run_config)


@pytest.mark.parametrize("name", ["tiny_qwen3_moe_w4a4_grpo", "tiny_qwen3_moe_w4a8_grpo", "tiny_qwen3_moe_bf16_grpo"])
def test_the_bytes_that_a_sync_sends_are_those_that_were_reckoned(name):
    run_config, plan = resolved(load_recipe(ROOT / f"recipes/{name}.yaml"))
    shapes = get_model(run_config.model.kind).hf_tensors(run_config.model)
    named = ((name, torch.ones(shape, dtype=torch.bfloat16)) for name, shape in shapes.items())
    buckets, _ = package(pack(plan, named, get_backend("reference", device="cpu", strict=False), shapes=shapes), 0, "")
    tensors = {key: tensor for bucket in buckets[:-1] for key, tensor in bucket.items()}
    amax = sum(tensor.nbytes for key, tensor in tensors.items() if key.endswith("amax"))
    assert sum(tensor.nbytes for tensor in tensors.values()) - amax == stored_bytes(run_config, plan)
    assert amax < 0.01 * stored_bytes(run_config, plan)


def test_the_store_grows_with_the_weights(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 100 * GIB))
    monkeypatch.setattr(cluster, "estimate_available_memory", lambda: 100 * GIB)
    run_config, plan = resolved(load_recipe(ROOT / "recipes/qwen3_4b_w4a4_grpo.yaml"))
    size, said = cluster.store_bytes(run_config, plan)
    assert size == int((stored_bytes(run_config, plan) + (256 << 20)) / 0.8) and said is None
    sampler = dataclasses.replace(run_config.sampler, transport="model_dtype")
    size, said = cluster.store_bytes(dataclasses.replace(run_config, sampler=sampler), plan)
    sizes = get_model("qwen3").hf_tensors(run_config.model).values()
    whole = sum(torch.Size(shape).numel() for shape in sizes)
    assert size == int((2 * whole + (256 << 20)) / 0.8)


def test_a_store_leaves_memory_to_the_processes(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 500 * GIB))  # a container sees the host's
    monkeypatch.setattr(cluster, "estimate_available_memory", lambda: 6 * GIB)
    size, said = cluster.store_bytes(*resolved(load_recipe(ROOT / "recipes/qwen3_4b_w4a4_grpo.yaml")))
    assert size == 256 << 20 and "there are 3.0 of memory" in said


def test_too_little_shared_memory_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 64 << 20))
    tiny = resolved(config(tmp_path))
    assert cluster.store_bytes(*tiny) == (256 << 20, None)  # of a few kB nothing has to leave the store
    size, said = cluster.store_bytes(*resolved(load_recipe(ROOT / "recipes/qwen3_4b_w4a4_grpo.yaml")))
    assert size == 256 << 20 and "moves 2.9 GiB of weights through files in /tmp" in said and "0.1 of /dev/shm" in said
    monkeypatch.setattr(job, "store_bytes", lambda *_: (0, "so it is"))
    for callers_own in (True, False):  # its store is not ours
        monkeypatch.setattr(ray, "is_initialized", lambda own=callers_own: own)
        job.Job(*tiny, tmp_path)
        assert ("so it is" in capsys.readouterr().out) != callers_own


HOLD = """
import sys
from pathlib import Path
import numpy as np, ray
from minite.config import load_recipe, resolve_plan
from minite.config.memory import stored_bytes
from minite.driver import cluster

config = load_recipe(sys.argv[1], ["model.vocab_size=1048576", "model.hidden_size=128"])
plan = resolve_plan(config)
with cluster.cluster(config, plan):
    left, held = int(stored_bytes(config, plan)), []
    assert left > cluster.OBJECT_STORE_BYTES
    while left > 0:
        held.append(ray.put(np.zeros(min(left, 64 << 20), dtype=np.uint8)))
        left -= 64 << 20
    session = Path(ray._private.worker.global_worker.node.get_session_dir_path())
    print("moved", sum(1 for folder in session.glob("ray_spilled_objects*") for _ in folder.rglob("*")))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_set_of_weights_is_held_without_files(tmp_path):
    """536 MB of weights, of which a store of 256 MiB would move the most to the disk."""
    recipe = Path(ROOT) / "recipes/tiny_qwen3_moe_w4a4_grpo.yaml"
    done = subprocess.run(
        [sys.executable, "-c", HOLD, str(recipe)],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.stdout == "moved 0\n", done.stdout + done.stderr[-3000:]
