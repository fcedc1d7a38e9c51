"""The run: all that imports ray. See README.md."""
