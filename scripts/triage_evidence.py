"""Does TRIAGE help? Paired runs of a tiny Qwen3-MoE: corrections x precisions x seeds, and a table with intervals.

    python scripts/triage_evidence.py --out DIR [--seeds 5] [--corrections none,tis,icepop,triage]
        [--precisions unaligned,aligned] [--steps N] [--jobs N] [--device cpu] [-o section.key=value ...]

Learner and sampler of a run share one process and one core; nothing starts Ray. Finished runs in DIR are not repeated,
and one that was stopped goes on from its last checkpoint. DIR/results.json holds every number of table and curves.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

from triage_cases import ARMS, PRECISIONS, write_questions

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
    parser.add_argument("--seeds", type=int, default=5, help="paired seeds 0 .. N-1 (default: %(default)s)")
    parser.add_argument("--corrections", default=",".join(ARMS), help="of %(default)s")
    parser.add_argument("--precisions", default=",".join(PRECISIONS), help="of %(default)s")
    parser.add_argument("--steps", type=int, default=1000, help="rollouts of a run (default: %(default)s)")
    parser.add_argument("--sync-every", type=int, default=1, help="steps between two weight syncs (default: 1)")
    parser.add_argument("--checkpoint-every", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (default: 1)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seconds", type=float, help="stop after this time; the same command goes on later")
    parser.add_argument("-o", dest="overrides", action="append", default=[], metavar="section.key=value")
    return parser.parse_args()


def run(args: argparse.Namespace) -> None:
    from triage_table import write_results  # torch, which --help need not wait for

    until = time.time() + args.seconds if args.seconds else float("inf")
    args.out.mkdir(parents=True, exist_ok=True)
    jobs = make_jobs(args)
    work(jobs, args.jobs, until)
    print(write_results(args.out, jobs))


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
    data = args.out / "questions.jsonl"
    if not data.exists():
        write_questions(data)
    overrides = (f"learner.device={args.device}", f"sampler.device={args.device}", *args.overrides)
    return [
        Job(precision, arm, seed, args.steps, args.sync_every, args.checkpoint_every,
            args.out / "runs" / precision / arm / f"seed{seed}", data, overrides)
        for seed in range(args.seeds) for precision in precisions for arm in arms
    ]  # fmt: skip


def chosen(option: str, text: str, known: dict) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in known:
            raise UserError(
                f"{option}: got {name!r}; expected some of {', '.join(known)}; {nearest(name, sorted(known))}"
            )
    return names


def work(jobs: list, processes: int, until: float) -> None:
    """The warm start of each seed once, then every run; a line of progress now and then."""
    from triage_run import go, start_weights

    spawn = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        firsts = {job.seed: job for job in reversed(jobs)}.values()
        follow([pool.submit(start_weights, job) for job in firsts], "warm starts", [])
        follow([pool.submit(go, job, until) for job in jobs], "runs", jobs)


def follow(futures: list[Future], what: str, jobs: list) -> None:
    """Wait for all of them. The first failure ends the rest."""
    started, waiting = time.time(), set(futures)
    while waiting:
        done, waiting = wait(waiting, timeout=REPORT_EVERY, return_when=FIRST_COMPLETED)
        for future in done:
            if future.exception() is not None:
                for other in waiting:
                    other.cancel()
                raise future.exception() or AssertionError
        if not done or not waiting:
            ended = len(futures) - len(waiting)
            print(f"[{time.time() - started:.0f} s] {what}: {ended} of {len(futures)}{standing(jobs)}", flush=True)


def standing(jobs: list) -> str:
    """Steps done so far, over all runs."""
    from triage_run import read_metrics

    if not jobs:
        return ""
    done = [len(read_metrics(job.folder)) for job in jobs]
    return f", {sum(done)} of {sum(job.steps for job in jobs)} steps"


if __name__ == "__main__":
    main()
