"""One Ray for all runs inside a test process: starting it costs more than a tiny run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.driver.tiny_run import config


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Three CPUs, by Ray's bookkeeping; runs find it and leave it running."""
    from minite.driver.cluster import cluster

    with cluster(config(tmp_path_factory.mktemp("ray"), "driver.num_cpus=3")):
        yield


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache directory of the test process, for warm starts."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINITE_CACHE_DIR", str(folder))
        yield folder
