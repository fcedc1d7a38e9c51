"""Write a BF16 checkpoint of random weights in the shapes of a recipe's model, to measure conversion with.

    python scripts/synthetic_checkpoint.py RECIPE DIR [-o SECTION.KEY=VALUE ...]

4 GiB in the widths of Qwen3-30B-A3B:

    python scripts/synthetic_checkpoint.py recipes/qwen3_30b_a3b_w4a4_grpo.yaml DIR \
        -o model.num_layers=3 -o model.vocab_size=70400
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from minite.config import load_recipe
from minite.errors import UserError
from minite.models import get_model
from minite.models.hf_config import write_hf_config
from minite.sync.checkpoint import CheckpointWriter

FILE_BYTES = 1 << 30  # also what this script holds in memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", metavar="RECIPE")
    parser.add_argument("directory", type=Path, metavar="DIR", help="new directory")
    parser.add_argument("-o", "--override", action="append", default=[], metavar="SECTION.KEY=VALUE")
    args = parser.parse_args()
    try:
        make(args.recipe, args.override, args.directory)
    except UserError as error:
        sys.exit(f"error: {error}")


def make(recipe: str, overrides: list[str], directory: Path) -> None:
    """Normal weights of standard deviation ``init_std``, ones for norms; the same for the same recipe."""
    model = load_recipe(recipe, overrides).model
    generator = torch.Generator().manual_seed(0)
    with CheckpointWriter(directory, FILE_BYTES) as writer:
        for name, shape in get_model(model.kind).hf_tensors(model).items():
            tensor = torch.empty(shape, dtype=torch.bfloat16)
            writer.add(
                name, tensor.normal_(0, model.init_std, generator=generator) if len(shape) > 1 else tensor.fill_(1)
            )
        writer.write_json("config.json", write_hf_config(model))


if __name__ == "__main__":
    main()
