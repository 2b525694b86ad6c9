"""Small stages, one per habit of an op or a module."""

from tests.support.stage_cases import autograd, in_place, numbers, of_modules
from tests.support.stage_cases.registry import CASES, Case

__all__ = ["CASES", "Case", "autograd", "in_place", "numbers", "of_modules"]
