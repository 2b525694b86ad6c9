"""Measuring training steps: bytes, seconds, what is alive, and the Profile made of it."""
