"""A process of its own: slime's real parser on the words given, its namespace as JSON on the last line.

    python parse_arguments.py SLIME_DIR MEGATRON_DIR WORDS...

Exits with 3 and names them when words were left that no parser of slime, Megatron or SGLang took: slime ignores those.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import stand_ins

slime_dir, megatron_dir, *words = sys.argv[1:]
stand_ins.install(Path(slime_dir), Path(megatron_dir))
sys.argv = ["train.py", *words]

unknown: list[set[str]] = []
real_parse = argparse.ArgumentParser.parse_known_args


def parse_and_remember(self: argparse.ArgumentParser, *args: object, **kwargs: object) -> tuple[object, list[str]]:
    namespace, rest = real_parse(self, *args, **kwargs)
    unknown.append({word for word in rest if word.startswith("--")})
    return namespace, rest


argparse.ArgumentParser.parse_known_args = parse_and_remember  # type: ignore[method-assign]

from slime.utils.arguments import parse_args  # noqa: E402

namespace = parse_args()
lost = set.intersection(*unknown)
if lost:
    print(f"no parser knows {sorted(lost)}")
    sys.exit(3)
print(json.dumps(vars(namespace), default=str))
