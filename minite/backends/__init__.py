"""Backends: how a GEMM or a quantizer is computed. See registry.get_backend."""
