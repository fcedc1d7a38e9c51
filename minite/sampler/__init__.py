"""Rollout engines behind one protocol (engine.py). See README.md."""
