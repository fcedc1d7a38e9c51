"""One Ray for all runs inside a test process: starting it costs more than a tiny run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from minite.config import resolve_plan
from tests.driver.tiny_run import config


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs find it and leave it running. Eight CPUs, by Ray's books: the actors of several runs are alive at once."""
    from minite.driver.cluster import cluster

    run_config = config(tmp_path_factory.mktemp("ray"), "driver.num_cpus=8")
    with cluster(run_config, resolve_plan(run_config)):
        yield


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache directory of the test process, for warm starts."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINITE_CACHE_DIR", str(folder))
        yield folder
