"""sync.clock: a phase within a phase counts for itself."""

import time

from minite.sync.clock import Clock


def test_phases_are_exclusive_and_add_up():
    clock = Clock()

    def slow():
        for i in range(3):
            time.sleep(0.02)
            yield i

    def slower(items):
        for i in items:
            time.sleep(0.05)
            yield i

    start = time.perf_counter()
    with clock.timed("outer"):
        assert list(clock.during("pack", slower(clock.during("gather", slow())))) == [0, 1, 2]
    took = time.perf_counter() - start
    assert 0.06 <= clock.seconds["gather"] < 0.15 <= clock.seconds["pack"]
    assert clock.seconds["outer"] < 0.06
    assert abs(sum(clock.seconds.values()) - took) < 0.01
