"""Packages that an integration needs and the planner does not: what to install where one is missing."""

from __future__ import annotations

from importlib.util import find_spec


def require(install: str, *packages: str) -> None:
    """Refuse to go on where a package is missing.

    Args:
        install: what pip is to install, one name or several.
        packages: names by which they are imported.

    Raises:
        ImportError: with the command that installs them.
    """
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise ImportError(
            f"planner.integrations: expected {' and '.join(packages)}, got no {' and no '.join(missing)}; "
            f"run pip install {install}"
        )
