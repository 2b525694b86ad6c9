"""Files of the user's that hide this project's packages, as a ``profiler.py`` beside a script does."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("profiler", "solvers")


def refuse_hidden_packages() -> None:
    """Refuse to go on where a package of another origin stands for one of ours.

    Raises:
        ImportError: names the file, and says what to do.
    """
    for name in PACKAGES:
        own = _ROOT / name / "__init__.py"
        found = _file_of(name)
        if found is not None and own.is_file() and found.resolve() != own:
            raise ImportError(
                f"planner: expected its own package {name!r} at {own.parent}, got {found}, which hides it; "
                f"rename {found.parent if found.name == '__init__.py' else found}",
                name=name,
                path=str(found),
            )


def _file_of(name: str) -> Path | None:
    """The file of a package's ``__init__``, or of a module, without importing it."""
    if name in sys.modules:
        file = sys.modules[name].__file__
    else:
        spec = find_spec(name)
        file = spec.origin if spec is not None and spec.has_location else None
    return None if file is None else Path(file)


def files_named_alike(folder: Path) -> list[Path]:
    """Modules in a folder of the user's that are imported by the names of our packages, which come first."""
    paths = [folder / place for name in ("planner", *PACKAGES) for place in (f"{name}.py", f"{name}/__init__.py")]
    return [] if folder.resolve() == _ROOT else [path for path in paths if path.is_file()]
