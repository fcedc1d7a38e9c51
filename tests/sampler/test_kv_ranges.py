"""Slot ranges: never overlapping, never lost."""

import random

from minite.sampler.embedded.kv_cache import Ranges


def test_random_takes_and_gives_against_a_bitmap():
    rng = random.Random(0)
    for size in (1, 7, 64):
        ranges, owner, live = Ranges(size), [None] * size, {}
        for step in range(600):
            if live and rng.random() < 0.5:
                key = rng.choice(list(live))
                start, length = live.pop(key)
                assert owner[start : start + length] == [key] * length
                owner[start : start + length] = [None] * length
                ranges.give(start, length)
            else:
                length = rng.randint(1, max(1, size // 3))
                start = ranges.take(length)
                free_run = any(owner[i : i + length] == [None] * length for i in range(size - length + 1))
                assert (start is not None) == free_run
                if start is not None:
                    assert owner[start : start + length] == [None] * length
                    owner[start : start + length] = [step] * length
                    live[step] = (start, length)
            assert ranges.used == sum(o is not None for o in owner)
        for start, length in live.values():
            ranges.give(start, length)
        assert ranges.take(size) == 0


def test_a_whole_cache_can_be_taken_and_an_overfull_one_cannot():
    ranges = Ranges(8)
    assert ranges.take(9) is None
    assert ranges.take(8) == 0 and ranges.take(1) is None
