"""Small stages, one per habit of an op or a module, to be run with a choice of their ops running again."""

from tests.support.op_cases import autograd, in_place, numbers, of_modules
from tests.support.op_cases.registry import CASES, Case

__all__ = ["CASES", "Case", "autograd", "in_place", "numbers", "of_modules"]
