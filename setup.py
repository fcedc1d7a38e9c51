"""Packaging. Tool settings (ruff, mypy, pytest, coverage) are in pyproject.toml; tested versions in constraints.txt."""

import re
from glob import glob
from pathlib import Path

from setuptools import find_packages, setup

VERSION = re.search(r'__version__ = "(.+)"', Path("minite/__init__.py").read_text())[1]
SGLANG = ["sglang>=0.5.15"]
HF = ["transformers>=5.0"]
CPU = ["numba>=0.63"]
PROMETHEUS = ["prometheus-client>=0.20"]
SMOLLM2 = [*HF, "gguf>=0.17"]

setup(
    name="minite",
    version=VERSION,
    description="Native NVFP4 (W4A4) reinforcement learning: one precision plan for the learner and the sampler",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["minite*", "slime_plugin*"]),
    package_data={"minite": ["**/*.cu", "**/*.cuh", "**/*.h", "**/*.hpp", "py.typed"]},
    data_files=[
        ("share/minite/recipes", glob("recipes/*.yaml")),
        ("share/minite/recipes/base", glob("recipes/base/*.yaml")),
        ("share/minite/recipes/precision", glob("recipes/precision/*.yaml")),
    ],
    install_requires=[
        "torch>=2.11",
        "numpy>=2.0",
        "safetensors>=0.5",
        "pyyaml>=6.0",
        "megatron-core>=0.16.1,<0.17",  # 0.17 and later need Python 3.12 and import triton
        "psutil>=6",  # the driver clears up behind Ray with it
        "ray>=2.40",
        "rich>=13.0",
        "tensorboard>=2.16",
    ],
    extras_require={
        "hf": HF,  # Hugging Face tokenizers
        "smollm2": SMOLLM2,  # scripts/smollm2.py: the pretrained test model
        "sglang": SGLANG,  # SGLang as the sampler
        # slime itself comes from its repository: the package of that name elsewhere is unrelated
        "slime": [*SGLANG, "math-verify>=0.9", "requests>=2.31"],
        "reasoning": ["reasoning-gym>=0.1.20"],  # data.kind reasoning_gym; brings matplotlib
        "prometheus": PROMETHEUS,  # driver.prometheus_port
        "wandb": ["wandb>=0.19"],  # driver.wandb
        "lm-eval": ["lm-eval>=0.4.13"],  # minite eval --tasks lm-eval:NAME
        "cpu": CPU,  # compiles the NVFP4 quantizer of a CPU at first use; without it: the same bytes, slower
        "dev": [
            *CPU,
            *PROMETHEUS,
            *SMOLLM2,  # the tests compare models with the Hugging Face implementation
            "pytest>=8.4",
            "pytest-cov>=6.0",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "ruff>=0.9",
            "mypy>=1.15",
            "types-PyYAML",
            # tests read the machine code of the CUDA kernels
            "nvidia-cuda-cuobjdump>=13.0; platform_system == 'Linux'",
            "nvidia-cuda-nvdisasm>=13.0; platform_system == 'Linux'",
        ],
    },
    entry_points={
        "console_scripts": ["minite = minite.cli:main"],
        "sglang.srt.plugins": ["minite = minite.sampler.sglang.plugin:register"],
    },
)
