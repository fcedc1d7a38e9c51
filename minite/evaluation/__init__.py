"""How good a checkpoint still is under a precision plan. See README.md."""
