"""What a drift leads to, alone and in a run: its plan changes on both sides, and a resume goes on under the new one."""

from __future__ import annotations

import shutil

import pytest
from tiny_run import STRICT, config, lines

from minite.config import PrecisionPlan, resolve_plan
from minite.config.checks import SIGNALS as WORDS
from minite.config.plan_switch import with_bf16_inputs
from minite.diagnostics.monitor import SIGNALS
from minite.driver import checkpoint, loop
from minite.driver.gap.subject import open_subject
from minite.driver.watch import Watch
from minite.errors import UserError

WATCH = ("monitor.watch=[gap,tail]", "monitor.baseline=5", "monitor.window=2")
SWITCH = (*WATCH, "monitor.on_drift=switch", "monitor.switch=['**.mlp.experts.**','**.self_attn.**']")
CALM = {"gap/abs_mean": 0.01, "gap/p1": -0.05, "entropy/mean": 1.0, "ratio/ess": 0.99}


def watch(folder, *settings) -> tuple[Watch, list[str]]:
    made, notes = config(folder, *settings), []
    return Watch(made, resolve_plan(made), folder / "run", notes.append), notes


def feed(watched: Watch, first: int, *gaps: float) -> list[dict[str, float]]:
    return [watched.observe(i, {**CALM, "gap/abs_mean": gap}) for i, gap in enumerate(gaps, first)]


def test_the_recipe_names_every_signal_there_is():
    assert tuple(SIGNALS) == WORDS


def test_rolling_means_and_a_calm_run(tmp_path):
    watched, notes = watch(tmp_path, *WATCH)
    told = feed(watched, 1, 0.01, 0.02, 0.03)[-1]
    assert told["monitor/gap"] == pytest.approx(0.025) and told["monitor/tail"] == pytest.approx(-0.05)
    assert told["monitor/entropy"] == 1.0 and told["monitor/ess"] == pytest.approx(0.99)
    assert "monitor/router" not in told and told["monitor/drift"] == 0 and not notes


def test_off_says_nothing(tmp_path):
    watched, notes = watch(tmp_path)
    assert feed(watched, 1, *[0.01] * 30, *[9.0] * 30) == [{}] * 60 and not notes


def test_warn_names_the_step(tmp_path):
    watched, notes = watch(tmp_path, *WATCH)
    told = feed(watched, 1, *[0.01] * 8, 1.0, 1.0, 1.0)
    assert notes == ["step 11: gap has drifted since step 9; going on"]
    assert [t["monitor/drift"] for t in told] == [0.0] * 10 + [1.0] and told[-1]["monitor/lr_scale"] == 1.0


def test_lower_lr_and_stop(tmp_path):
    watched, notes = watch(tmp_path, *WATCH, "monitor.on_drift=lower_lr", "monitor.lr_factor=0.1")
    feed(watched, 1, *[0.01] * 5, 1.0, 1.0, 1.0, *[1.0] * 5, 50.0, 50.0, 50.0)
    assert watched.lr_scale == pytest.approx(0.01) and len(notes) == 2
    watched, _ = watch(tmp_path, *WATCH, "monitor.on_drift=stop")
    with pytest.raises(UserError, match="step 8: gap has drifted since step 6; stopped as monitor.on_drift says"):
        feed(watched, 1, *[0.01] * 5, 1.0, 1.0, 1.0)


def test_switch_takes_one_group_a_drift_and_keeps_it_through_a_resume(tmp_path):
    watched, notes = watch(tmp_path, *SWITCH)
    begun = watched.plan
    feed(watched, 1, *[0.01] * 5, 1.0, 1.0, 1.0)
    first = watched.plan
    changed = {e.name for e in first if e != begun[e.name]}
    assert changed == {e.name for e in begun if ".experts." in e.name} and first.digest != begun.digest
    assert all(first[name].input == "bf16" and first[name].weight == "nvfp4_1d" for name in changed)
    again, _ = watch(tmp_path, *SWITCH, "monitor.on_drift=warn", "monitor.watch=[]", "monitor.switch=[]")
    again.load_state_dict(watched.state_dict())
    assert again.plan.digest == first.digest  # also with the monitor off
    feed(watched, 9, *[1.0] * 5, 50.0, 50.0, 50.0, *[50.0] * 5, *[900.0] * 3)
    assert watched.plan["model.layers.0.self_attn.q_proj"].input == "bf16"
    assert "every group of monitor.switch is switched; going on" in notes[-1]


def test_patterns_that_cannot_be_switched_are_told(tmp_path):
    made = config(tmp_path)
    plan = resolve_plan(made)
    for pattern, words in (
        ("**.mlp.gate", "matches no linear whose input is quantized"),
        ("**.q_proj", "mixed"),
        ("**.q_pr*", "whole segment"),
    ):
        with pytest.raises(UserError, match=words):
            with_bf16_inputs(made, plan, [pattern])
    assert with_bf16_inputs(made, plan, []).digest == plan.digest


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["monitor.watch=[gab]"], "'gab' is no signal; nearest is 'gap'"),
        (["monitor.on_drift=stop"], "needs a signal to watch"),
        (["monitor.watch=[gap]", "monitor.switch=['**']"], "set monitor.on_drift: switch"),
        (["monitor.watch=[gap]", "monitor.on_drift=switch"], "needs patterns"),
        (["monitor.watch=[router]", "algo.router_replay=false", STRICT], "router needs"),
    ],
)
def test_settings_that_do_not_fit(tmp_path, settings, words):
    with pytest.raises(UserError, match=words):
        config(tmp_path, *settings)


@pytest.fixture
def planted(monkeypatch):
    """The gap that the monitor sees is 0.01 up to step 5, then 1, and 100 from step 14 on; what is measured stays in
    gap/abs_max."""
    inner, step = loop.gap_metrics, [0]

    def metrics(summary):
        step[0] += 1
        return inner(summary) | {
            "gap/abs_mean": 0.01 if step[0] <= 5 else 1.0 if step[0] <= 13 else 100.0,
            "gap/p1": -0.05,
        }

    monkeypatch.setattr(loop, "gap_metrics", metrics)
    return step


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_switches_both_sides_and_resumes_under_the_new_plan(ray_cluster, cache, tmp_path, planted):
    settings = (*SWITCH, STRICT, "driver.eval_every=100", "driver.checkpoint_every=9", "driver.steps=10")
    whole = tmp_path / "whole"
    loop.train(config(tmp_path, *settings), whole)
    told = lines(whole)
    assert [t["monitor/drift"] for t in told[1:]] == [0, 0, 0, 0, 0, 0, 0, 1, 0, 0]
    assert [t["monitor/switched"] for t in told[1:]] == [0] * 7 + [1] * 3
    assert all(t["gap/abs_max"] <= 1e-8 for t in told[1:])  # learner and sampler obey the same plan after it too
    assert all(t["router/flip_frac"] == 0 for t in told[1:])
    begun = PrecisionPlan.from_json((whole / "plan.json").read_text())
    now = PrecisionPlan.from_json((whole / "plan.step_00000008.json").read_text())
    assert begun.digest != now.digest and now["model.layers.1.mlp.experts.0.up_proj"].input == "bf16"
    shutil.rmtree(checkpoint.checkpoint_dir(whole, 10))
    planted[0] = 9
    assert open_subject(whole, (), None, print).plan.digest == now.digest
    loop.resume(whole)
    assert lines(whole) == told


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_stops_then_goes_on_slower_then_only_warns(ray_cluster, cache, tmp_path, planted, capsys):
    """The other three actions, each in the run itself: one drift at step 8 and, from a new baseline, one at step 16."""
    settings = (*WATCH, STRICT, "driver.eval_every=100", "driver.checkpoint_every=3", "driver.steps=9")
    run_dir = tmp_path / "run"
    with pytest.raises(UserError, match="step 8: gap has drifted since step 6; stopped as monitor.on_drift says"):
        loop.train(config(tmp_path, *settings, "monitor.on_drift=stop"), run_dir)
    assert [line["step"] for line in lines(run_dir)] == [*range(8)]
    planted[0] = 6
    loop.resume(run_dir, ["monitor.on_drift=lower_lr", "monitor.lr_factor=0.25"])
    rates = [line["learner/lr"] for line in lines(run_dir)[1:]]
    assert rates[:8] == [rates[0]] * 8 and rates[8] == pytest.approx(rates[0] / 4)
    loop.resume(run_dir, ["monitor.on_drift=warn", "driver.steps=17"])
    told = lines(run_dir)
    assert [line["step"] for line in told if line.get("monitor/drift")] == [8, 16]
    assert told[17]["learner/lr"] == pytest.approx(rates[8])  # what was lowered stays so, and nothing more is done
    out = capsys.readouterr().out
    assert "step 8: gap has drifted since step 6; the learning rate is now 0.25 of the recipe's" in out
    assert "step 16: gap has drifted since step 14; going on" in out
