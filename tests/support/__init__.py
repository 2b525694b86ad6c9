"""What tests share: models, chains, graphs, ways to compare; no test module imports from another one."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # of the repository
