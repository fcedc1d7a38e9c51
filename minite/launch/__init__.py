"""A recipe as a run of slime: its arguments, files and environment. See README.md."""
