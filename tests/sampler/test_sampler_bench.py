"""`minite bench sampler`: fixed-output serving of a recipe and its BF16 twin."""

import pytest
from tiny_engine import MOE, config

from minite.errors import UserError
from minite.sampler import bench


def test_every_batch_is_served_by_the_recipe_and_in_bf16():
    cfg = config(MOE, "w4a4")
    rows = bench.measure(cfg, turns=1, tokens=3, batches=(1, 2))
    assert [(row["batch"], row["run"]) for row in rows] == [(1, "BF16"), (1, "tiny"), (2, "BF16"), (2, "tiny")]
    assert all(row["tokens/s"] > 0 and row["update s"] > 0 for row in rows)
    assert rows[1]["speedup"] == rows[1]["tokens/s"] / rows[0]["tokens/s"]
    assert len(bench.table(rows, cfg).splitlines()) == 6


def test_more_tokens_than_the_model_has_room_for_are_refused():
    with pytest.raises(UserError, match="--tokens 49, but the model has room for 48"):
        bench.measure(config(MOE, "w4a4"), turns=1, tokens=49)
