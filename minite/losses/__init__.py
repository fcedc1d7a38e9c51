"""Advantages, gap corrections and the GRPO loss: pure functions on packed 1-D tensors. See README.md."""
