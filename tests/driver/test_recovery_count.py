"""Repairs are counted, bounded, and said."""

from __future__ import annotations

import pytest

from minite.driver.recovery import Recovery
from minite.errors import ProcessDied


def test_too_many_repairs_without_a_new_step_raise_the_failure():
    said: list[str] = []
    recovery, error = Recovery(2, said.append), ProcessDied("a sampler died")
    for step in (1, 2):
        recovery.spend(error, "again")
        recovery.step_done(step)  # a step forward
    recovery.spend(error, "again")
    recovery.step_done(2)  # the same step after going back is none
    recovery.spend(error, "again")
    with pytest.raises(ProcessDied) as raised:
        recovery.spend(error, "again")
    assert raised.value is error
    assert said[-1] == "a sampler died; again (repair 2 of at most 2 in a row: driver.retries)"


def test_none_are_allowed_where_the_recipe_says_so():
    with pytest.raises(ProcessDied):
        Recovery(0, print).spend(ProcessDied("x"), "again")


def test_metrics_are_taken_once_and_hold_failed_repairs_only_as_time():
    recovery = Recovery(1, print)
    with recovery.repairing("recovery/resyncs"):
        pass
    with pytest.raises(ZeroDivisionError), recovery.repairing("recovery/sampler_restarts"):
        raise ZeroDivisionError
    taken = recovery.take_metrics()
    assert taken.pop("recovery/seconds") >= 0 and taken == {"recovery/resyncs": 1.0}
    assert recovery.take_metrics() == {}
    recovery.add({"recovery/resyncs": 2.0})
    recovery.count("recovery/resyncs")
    assert recovery.take_metrics() == {"recovery/resyncs": 3.0}
