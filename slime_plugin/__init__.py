"""miniTE in slime: hooks that slime loads by name. See README.md."""
