"""All models, from the modules that build them."""

from __future__ import annotations

from benchmarks.packages import language, science, vision
from benchmarks.packages.training import MODELS

__all__ = ["MODELS", "language", "science", "vision"]
