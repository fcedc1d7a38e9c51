"""Runs that are hurt at random times and must end as if they had not been: fault_campaign.py --out OUT

Every run is a `minite train` of its own, with its own Ray, on the tiny recipe fault_campaign.yaml. Each fault comes
once a run, at a random step. Every second run leaves out the reward function's faults: its metrics must then equal,
number for number, those of a run without faults. At its end each run is asked for as many lines and optimizer steps as
without faults, every prompt counted once, no token of other weights (strict mode: a gap above 1e-8 tells), a newest
checkpoint that leads a step further, and no process left.

OUT/results.jsonl gets a line as each run ends. The same command goes on where it was stopped; unfinished runs are begun
anew. Results of another seed, of other steps, faults, timeout or device, or of other code are refused: give another
--out. Folders of runs that ended well are removed, others are kept with their log.txt.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import statistics
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import psutil
from fault_kinds import FAULTS, Fault
from fault_run import ROOT, Running, Stopped, problems


class Campaign:
    """All runs and their results."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.out, self.stop = args, args.out.resolve(), threading.Event()
        self.faults = [FAULTS[name] for name in args.faults] if args.faults else list(FAULTS.values())
        devices = [f"{role}.device={args.device}" for role in ("learner", "sampler")]
        self.settings = [f"driver.steps={args.steps}", f"driver.timeout={args.timeout:g}", *devices]
        self.identity = {name: getattr(args, name) for name in ("seed", "steps", "timeout", "device")}
        self.identity |= {"faults": [fault.name for fault in self.faults], "code": _digest_of_code()}
        self.file, self.kept = self.out / "results.jsonl", self.out / "reference.json"
        self.out.mkdir(parents=True, exist_ok=True)
        self.results = {r["run"]: r for r in self._read(self.file) if r["done"]}
        self._read(self.kept)

    def _read(self, file: Path) -> list[dict[str, Any]]:
        """The lines of a file of this campaign. Ends the program when they are another's."""
        records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        for record in records:
            theirs = record.get("campaign", {})
            for name, mine in self.identity.items():
                if theirs.get(name) != mine:
                    print(
                        f"{file}: made with {name} {theirs.get(name)}, now {mine}: give another --out", file=sys.stderr
                    )
                    raise SystemExit(2)
        return records

    def reference(self) -> list[dict[str, Any]]:
        """Lines of the run without faults, made once."""
        if not self.kept.exists():
            run = Running(self.out / "reference", self.settings, self.args.patience, self.stop)
            try:
                if run.wait_for_end() != 0 or (wrong := problems(run, self.args.steps, None)):
                    raise SystemExit(f"the run without faults failed: {wrong}; see {run.folder}/log.txt")
                lines = run.lines()[: self.args.steps + 1]
                self.kept.write_text(json.dumps({"campaign": self.identity, "lines": lines}))
            finally:
                run.end()
            shutil.rmtree(run.folder)
        (kept,) = self._read(self.kept)
        reference: list[dict[str, Any]] = kept["lines"]
        return reference

    def one(self, number: int, reference: Future[list[dict[str, Any]]]) -> dict[str, Any]:
        """A run with its faults, and its line of results. Waits for the reference where it needs it: at the end."""
        rng = random.Random(1000 * self.args.seed + number)
        whole = number % 2 == 0
        chosen = [f for f in self.faults if f.same_numbers or not whole]
        times = sorted(rng.uniform(1, 0.9 * self.args.steps) for _ in chosen)
        rng.shuffle(chosen)
        result: dict[str, Any] = {"run": number, "done": False, "faults": [], "problems": []}
        started = time.monotonic()
        run = Running(self.out / f"run_{number:03d}", self.settings, self.args.patience, self.stop)
        try:
            for at, fault in zip(times, chosen, strict=True):
                run.wait_for_step(int(at))
                time.sleep(rng.uniform(0, 0.5))
                if not run.alive:  # the faults before took it to its end
                    break
                result["faults"].append({"fault": fault.name, "step": run.step(), "survived": False})
                result["faults"][-1] |= {"seconds": _inject(run, fault, self.args.steps), "survived": True}
                print(f"run {number}: step {run.step()}, {fault.name}: outlived", flush=True)
            code = run.wait_for_end()
            result["problems"] += (
                [f"exit code {code}"] if code else problems(run, self.args.steps, reference.result() if whole else None)
            )
            result["done"] = True
        except Stopped:
            result["faults"] = [fault for fault in result["faults"] if fault["survived"]]
        except (TimeoutError, RuntimeError, OSError, psutil.Error) as error:
            result["problems"].append(f"{type(error).__name__}: {error}")
            result["done"] = True
        finally:
            run.end()
        result["seconds"] = round(time.monotonic() - started, 1)
        if result["done"] and not result["problems"]:
            shutil.rmtree(run.folder, ignore_errors=True)
        return result

    def go(self) -> None:
        """All runs that are still to be done, args.jobs at a time, until the time is over."""
        timer = threading.Timer(60 * self.args.minutes, self.stop.set)
        timer.daemon = True
        timer.start()
        try:
            left = [i for i in range(self.args.runs) if i not in self.results]
            if not left:
                return
            with ThreadPoolExecutor(self.args.jobs) as pool:
                reference = pool.submit(self.reference)
                waiting = [pool.submit(self._unless_stopped, i, reference) for i in left]
                try:
                    for future in as_completed(waiting):
                        self._keep(future.result())
                except KeyboardInterrupt:
                    self.stop.set()
                    for future in waiting:
                        self._keep(future.result())
                except SystemExit:  # the reference failed
                    self.stop.set()
                    raise
        except (KeyboardInterrupt, Stopped):
            self.stop.set()

    def _unless_stopped(self, number: int, reference: Future[list[dict[str, Any]]]) -> dict[str, Any] | None:
        return None if self.stop.is_set() else self.one(number, reference)

    def _keep(self, result: dict[str, Any] | None) -> None:
        if result is None or self.results.get(result["run"], {}).get("done"):
            return
        self.results[result["run"]] = result
        with self.file.open("a") as file:
            file.write(json.dumps(result | {"campaign": self.identity}) + "\n")
        state = "stopped" if not result["done"] else "; ".join(result["problems"]) or "ended well"
        done = sum(r["done"] for r in self.results.values())
        print(
            f"run {result['run']}: {len(result['faults'])} faults, {result['seconds']:.0f} s, {state} "
            f"({done} of {self.args.runs})",
            flush=True,
        )


def _digest_of_code() -> str:
    """Of all that decides what a run does."""
    digest = hashlib.sha256()
    for path in sorted([*(ROOT / "minite").rglob("*.py"), *(ROOT / "scripts").glob("fault_*")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _inject(run: Running, fault: Fault, steps: int) -> float:
    """Do it and wait until the run is further than it was. How long that took. [s]"""
    mark = run.mark()
    fault.do(run)
    run.step()
    started, before = time.monotonic(), run.furthest
    run.wait(lambda: run.says(fault.said, mark), f"the log says '{fault.said}' after: {fault.name}")
    run.wait_for_step(min(before + 1, steps))
    return round(time.monotonic() - started, 1)


def table(results: list[dict[str, Any]]) -> str:
    """Faults by name: how often, how many outlived, how long it took until the run was further than before."""
    lines = [f"{'fault':26}{'injected':>9}{'survived':>9}{'median [s]':>12}{'longest [s]':>12}"]
    faults = [fault for result in results for fault in result["faults"]]
    for name in FAULTS:
        mine = [fault for fault in faults if fault["fault"] == name]
        if mine:
            times = [fault["seconds"] for fault in mine if fault["survived"]] or [float("nan")]
            survived = sum(fault["survived"] for fault in mine)
            lines.append(f"{name:26}{len(mine):9}{survived:9}{statistics.median(times):12.1f}{max(times):12.1f}")
    done = [result for result in results if result["done"]]
    well = sum(not result["problems"] for result in done)
    lines.append(f"{well} of {len(done)} finished runs ended well; {len(results) - len(done)} stopped before their end")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    words = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=words)
    parser.add_argument("--out", type=Path, required=True, help="directory of results, logs and runs")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=500, help="of each run")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; each wants two cores and 3 GB")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after so long with what there is")
    parser.add_argument("--timeout", type=float, default=60.0, help="driver.timeout, after which a process hangs [s]")
    parser.add_argument("--patience", type=float, default=400.0, help="longest wait for the next step [s]")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="of learner and sampler")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, metavar="NAME", help=f"of: {', '.join(FAULTS)}")
    parser.add_argument("--seed", type=int, default=0, help="of the times")
    campaign = Campaign(parser.parse_args(argv))
    campaign.go()
    results = [campaign.results[i] for i in sorted(campaign.results)]
    for result in results:
        for problem in result["problems"]:
            print(f"run {result['run']}: {problem}")
    print(table(results))
    return int(any(result["problems"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
