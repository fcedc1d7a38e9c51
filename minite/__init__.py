"""miniTE: native NVFP4 (W4A4) reinforcement learning. See README.md."""

__version__ = "0.1.0"
