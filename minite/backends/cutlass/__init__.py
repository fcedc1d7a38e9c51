"""The backend "native": NVFP4 on FP4 tensor cores, through CUTLASS. See README.md beside this file."""
