"""The Hopper backend: Triton kernels for quantizers, read-back, grouped GEMM and MoE. Only here is triton imported."""
