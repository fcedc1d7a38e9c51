"""A small GRPO job under slime's own train.py, cut in the middle and resumed: slime_job.py --out OUT

Makes a Qwen3-MoE of random weights, a tokenizer of single characters, prompts, and a recipe from slime_job.yaml;
writes the arguments with `minite launch`, starts train.py up to --cut, starts it again with --resume up to --rollouts,
and prints a line for each rollout. Needs one GPU, slime and the Megatron-LM it pins (--slime-dir, --megatron-dir or the
variables of `minite launch`) and what they import. A start takes minutes; OUT/part_K.log grows meanwhile.

    python scripts/slime_job.py --out /tmp/job --rollouts 10 --cut 5
    python scripts/slime_job.py --out /tmp/off -o precision.alignment=off -o algo.router_replay=false
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shlex
import string
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import slime_start
import yaml
from pass_through_router import HOST
from synthetic_checkpoint import make as make_checkpoint
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from minite.ports import free_port

HERE = Path(__file__).parent
LETTERS = string.digits + string.ascii_letters + "+-"  # 64 tokens, the vocabulary of slime_job.yaml
PROMPTS = 64
COLUMNS = ("rollout/rewards", "rollout/raw_reward", "rollout/gap/abs_mean", "rollout/triage/kept", "train/ppo_kl")
STARTS = re.compile(r"(rollout|step|perf|train) (\d+): (\{.*\})")


def make(out: Path, overrides: list[str]) -> Path:
    """Checkpoint, tokenizer, prompts and recipe in a new directory. Returns the recipe."""
    out.mkdir(parents=True)
    recipe = yaml.safe_load((HERE / "slime_job.yaml").read_text(encoding="utf-8"))
    recipe["extends"] = [str((HERE / base).resolve()) for base in recipe["extends"]]
    recipe["model"]["checkpoint"] = str(out / "bf16")
    recipe["data"]["path"] = str(out / "prompts.jsonl")
    recipe["slime"]["save"] = str(out / "save")
    path = out / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    made = [word for word in overrides if word.startswith("model.")]
    make_checkpoint(str(path), [*made, "model.checkpoint=null"], out / "bf16")
    make_tokenizer().save_pretrained(out / "bf16")
    with (out / "prompts.jsonl").open("w", encoding="utf-8") as file:
        for i in range(PROMPTS):
            prompt = "".join(LETTERS[(7 * i + 11 * j) % len(LETTERS)] for j in range(4 + i % 5))
            file.write(json.dumps({"prompt": prompt, "answer": ""}) + "\n")
    return path


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; the last two letters stand for the ends of a text."""
    words = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token=LETTERS[0]))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token=LETTERS[-1], pad_token=LETTERS[-2])


def launch(recipe: Path, directory: Path, args: argparse.Namespace, overrides: list[str], resume: bool) -> list[str]:
    """Writes the files of a launch. train.py and its arguments."""
    command = [sys.executable, "-m", "minite.cli", "launch", str(recipe), "--dry-run", "--out", str(directory)]
    command += ["--resume"] if resume else []
    for name in ("slime", "megatron"):
        given = getattr(args, f"{name}_dir")
        command += [f"--{name}-dir", given] if given else []
    for word in overrides:
        command += ["-o", word]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    script = (directory / "command.sh").read_text(encoding="utf-8")
    words = shlex.split(script.replace("\\\n", ""), comments=True)
    return words[words.index("python3") + 1 :]


def run(log: Path, runtime_env: Path, words: list[str], limit: float) -> float:
    """train.py to its end, into a log. Seconds. SystemExit when it failed."""
    paths = [str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    started = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "slime_start.py"), str(runtime_env), "1", *words],
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"},
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    text = log.read_text(encoding="utf-8", errors="replace")
    if slime_start.RETURNED not in text:
        raise SystemExit(f"train.py did not come to its end in {limit:.0f} s; {log} ends with:\n{text[-3000:]}")
    return time.monotonic() - started


def metrics(log: str) -> dict[int, dict[str, Any]]:
    """Rollout -> what slime logged of it and of the first optimizer step after it, whose ppo_kl is of no update yet."""
    found: dict[int, dict[str, Any]] = {}
    rollout = 0
    for kind, number, text in STARTS.findall(log):
        try:
            values = ast.literal_eval(re.sub(r"\binf\b", "1e999", re.sub(r"\bnan\b", "None", text)))
        except (ValueError, SyntaxError):
            continue
        if kind == "rollout":
            rollout = int(number)
        row = found.setdefault(rollout, {})
        for name, value in values.items():
            row.setdefault(name, value)
    return found


def table(found: dict[int, dict[str, Any]]) -> str:
    names = [name for name in COLUMNS if any(name in row for row in found.values())]
    lines = ["rollout " + "".join(f"{name:>24}" for name in names)]
    for rollout, row in sorted(found.items()):
        values = [float("nan") if row.get(name) is None else row[name] for name in names]
        lines.append(f"{rollout:7} " + "".join(f"{value:24.4g}" for value in values))
    return "\n".join(lines)


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--out", type=Path, required=True, help="new directory")
    parser.add_argument("--rollouts", type=int, default=10, help="in all; each is two optimizer steps")
    parser.add_argument("--cut", type=int, default=5, help="rollouts of the first part; 0 = no resume")
    parser.add_argument("--limit", type=float, default=900.0, help="of each part [s]")
    parser.add_argument("--slime-dir", default=os.environ.get("MINITE_SLIME_DIR"))
    parser.add_argument("--megatron-dir", default=os.environ.get("MINITE_MEGATRON_DIR"))
    parser.add_argument("-o", "--override", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--prepare", action="store_true", help="make the files and stop before slime starts")
    args = parser.parse_args()
    if not 0 <= args.cut < args.rollouts:
        parser.error(f"--cut {args.cut}: expected less than --rollouts {args.rollouts}, or 0 for no resume")
    out = args.out.resolve()
    recipe, port = make(out, args.override), free_port()
    ends = [end for end in (args.cut, args.rollouts) if end]
    parts = [out / f"launch_{part}" for part in range(len(ends))]

    def words_of(part: int) -> list[str]:
        settings = [f"driver.steps={ends[part]}", f"driver.checkpoint_every={ends[0]}"]
        words = launch(recipe, parts[part], args, [*args.override, *settings], resume=part > 0)
        return [*words, "--sglang-router-ip", HOST, "--sglang-router-port", str(port)]

    if args.prepare:
        print(shlex.join(words_of(0)))
        return
    with ExitStack() as stack:
        router = subprocess.Popen([sys.executable, str(HERE / "pass_through_router.py"), str(port)])
        stack.callback(router.wait)
        stack.callback(router.kill)
        print("stand-in for slime's build of sglang-router: pass_through_router.py", flush=True)
        found: dict[int, dict[str, Any]] = {}
        for part, directory in enumerate(parts):
            log = out / f"part_{part}.log"
            seconds = run(log, directory / "runtime_env.yaml", words_of(part), args.limit)
            print(f"part {part}: up to rollout {ends[part]} in {seconds:.0f} s", flush=True)
            text = log.read_text(encoding="utf-8", errors="replace")
            found |= metrics(text)
            (out / "metrics.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
            for line in re.findall(r"miniTE: .*", text):
                print(f"part {part}: {line}")
    print(table(found))


if __name__ == "__main__":
    main()
