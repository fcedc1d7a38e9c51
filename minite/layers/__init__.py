"""Autograd functions, modules and the shared operations of a block. See README.md."""
