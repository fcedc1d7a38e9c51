"""A process of its own: slime's real parser on several command lines.

    python parse_arguments.py SLIME_DIR MEGATRON_DIR CASES.json

CASES.json is {case: words}. Prints {case: {"args": namespace, "unknown": words}} on the last line. Unknown are the
words that no parser of slime, Megatron or SGLang took: slime ignores them in silence.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import stand_ins
import torch

slime_dir, megatron_dir, cases = sys.argv[1:]
stand_ins.install(Path(slime_dir), Path(megatron_dir))

torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=10)  # Megatron asks; a Blackwell GPU answers

from slime.utils.arguments import parse_args  # noqa: E402

rests: list[set[str]] = []
real_parse = argparse.ArgumentParser.parse_known_args


def parse_and_remember(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> tuple[Any, list[str]]:
    namespace, rest = real_parse(self, *args, **kwargs)
    rests.append({word for word in rest if word.startswith("--")})
    return namespace, rest


argparse.ArgumentParser.parse_known_args = parse_and_remember  # type: ignore[assignment, method-assign]

results = {}
for case, words in json.loads(Path(cases).read_text()).items():
    rests.clear()
    sys.argv = ["train.py", *words]
    namespace = parse_args()
    results[case] = {"args": vars(namespace), "unknown": sorted(set.intersection(*rests))}
print(json.dumps(results, default=str))
