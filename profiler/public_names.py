"""Names of a package that are imported when they are first used, so that importing the package loads nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, names: Mapping[str, str], submodules: tuple[str, ...] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """A package's ``__getattr__``, ``__dir__`` and ``__all__``.

    Args:
        package: the package's ``__name__``.
        names: the public names in each module, parted by spaces.
        submodules: the submodules that are attributes without being imported, beside the public names.

    Raises:
        AttributeError: by ``__getattr__``, for all other names.
    """
    homes = {name: module for module, found in names.items() for name in found.split()}

    def get(name: str) -> Any:
        if name in submodules:
            return import_module(f"{package}.{name}")
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def directory() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes, *submodules})

    return get, directory, sorted(homes)
