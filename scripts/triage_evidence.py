"""Does TRIAGE help? Paired runs of a tiny Qwen3-MoE: corrections x precisions x seeds, and a table with intervals.

    python scripts/triage_evidence.py --out DIR [--seeds 5] [--corrections none,tis,icepop,triage]
        [--precisions unaligned,aligned] [--steps N] [--jobs N] [--seconds S] [-o section.key=value ...]

Learner and sampler of a run share one process and one core; nothing imports Ray. All runs of the first seed come
before those of the next, and so on. A precision without a mismatch is run without a correction only: it has no gap to
correct.
Every 25 steps a run appends a line of half a kilobyte to DIR/results.jsonl, so that a kill loses little;
scripts/triage_table.py reads what is there. Runs with their checkpoints are in --work: finished ones are not repeated,
one that was stopped goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import traceback
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

from triage_cases import ARMS, CONTROL, PRECISIONS, RESULTS, write_questions
from triage_table import report

from minite.config.build import nearest
from minite.errors import UserError

REPORT_EVERY = 30.0  # between two lines of progress [s]


def main() -> None:
    args = parse()
    try:
        run(args)
    except UserError as error:
        print(f"minite: error: {error}", file=sys.stderr)
        sys.exit(2)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--work", type=Path, metavar="DIR", help="runs and checkpoints (default: OUT/work)")
    parser.add_argument("--seeds", type=int, default=5, help="number of paired seeds (default: %(default)s)")
    parser.add_argument(
        "--first-seed", type=int, default=0, help="of them; machines that share the seeds append their results.jsonl"
    )
    parser.add_argument("--corrections", default=",".join(ARMS), help="of %(default)s")
    parser.add_argument(
        "--precisions", default="aligned,bf16,unaligned", help=f"of {','.join(PRECISIONS)} (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=1000, help="rollouts of a run (default: %(default)s)")
    parser.add_argument("--sync-every", type=int, default=1, help="steps between two weight syncs (default: 1)")
    parser.add_argument("--checkpoint-every", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (default: 1)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seconds", type=float, help="stop after this time; the same command goes on later")
    parser.add_argument("-o", dest="overrides", action="append", default=[], metavar="section.key=value")
    return parser.parse_args()


def run(args: argparse.Namespace) -> None:
    until = time.time() + args.seconds if args.seconds else float("inf")
    args.out.mkdir(parents=True, exist_ok=True)
    jobs = make_jobs(args)
    failed = work(jobs, args.jobs, until)
    print(report(args.out / RESULTS))
    if failed:
        raise UserError(f"{failed} of {len(jobs)} runs failed, see above; the others are in {args.out / RESULTS}")


def make_jobs(args: argparse.Namespace) -> list:
    """All runs, seed by seed: whatever time allows, what is there is paired."""
    from triage_run import Job

    if args.checkpoint_every % args.sync_every:
        raise UserError(
            f"--checkpoint-every: got {args.checkpoint_every}, expected a multiple of --sync-every {args.sync_every}, "
            "because a checkpoint does not hold the sampler's older weights"
        )
    arms, precisions = (
        chosen("--corrections", args.corrections, ARMS),
        chosen("--precisions", args.precisions, PRECISIONS),
    )
    work = args.work or args.out / "work"
    data = work / "questions.jsonl"
    if not data.exists():
        work.mkdir(parents=True, exist_ok=True)
        write_questions(data)
    overrides = (f"learner.device={args.device}", f"sampler.device={args.device}", *args.overrides)
    return [
        Job(precision, arm, seed, args.steps, args.sync_every, args.checkpoint_every,
            work / precision / arm / f"seed{seed}", args.out / RESULTS, data, overrides)
        for seed in range(args.first_seed, args.first_seed + args.seeds) for precision in precisions for arm in arms
        if arm == "none" or precision not in CONTROL.values()
    ]  # fmt: skip


def chosen(option: str, text: str, known: dict) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in known:
            raise UserError(
                f"{option}: got {name!r}; expected some of {', '.join(known)}; {nearest(name, sorted(known))}"
            )
    return names


def work(jobs: list, processes: int, until: float) -> int:
    """The warm start of each seed once, then every run; a line of progress now and then. Returns how many failed."""
    from triage_run import go, start_weights  # torch, which --help need not wait for

    spawn = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        firsts = list({job.seed: job for job in reversed(jobs)}.values())
        starts = follow({pool.submit(start_weights, job): job for job in firsts[::-1]}, "warm starts")
        return starts or follow({pool.submit(go, job, until): job for job in jobs}, "runs")


def follow(futures: dict[Future, Any], what: str) -> int:
    """Wait for all of them. One that fails says so and does not end the rest. Returns how many did."""
    started, waiting, failed = time.time(), set(futures), 0
    while waiting:
        done, waiting = wait(waiting, timeout=REPORT_EVERY, return_when=FIRST_COMPLETED)
        for future in done:
            error = future.exception()
            if error is not None:
                failed += 1
                print(f"{futures[future].name} failed: {''.join(traceback.format_exception(error))}", flush=True)
        if not done or not waiting:
            ended = len(futures) - len(waiting)
            steps = standing(list(futures.values())) if what == "runs" else ""
            print(f"[{time.time() - started:.0f} s] {what}: {ended} of {len(futures)}{steps}", flush=True)
    return failed


def standing(jobs: list) -> str:
    """Steps done so far, over all runs."""
    from triage_run import read_metrics

    done = [len(read_metrics(job.folder)) for job in jobs]
    return f", {sum(done)} of {sum(job.steps for job in jobs)} steps"


if __name__ == "__main__":
    main()
