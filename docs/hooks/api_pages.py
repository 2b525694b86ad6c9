"""Makes the API reference: a page of public names for each package, and a page for each room of the architecture.

Nothing is listed by hand: public names are a package's ``__all__``, rooms are the table in docs/architecture.md, and
what is said of them are their docstrings, which mkdocstrings reads. A name that cannot be found fails the build.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.hooks.rooms_table import each_room, first_sentence, modules_of, rooms

SECTION = "API reference"
_PUBLIC = re.compile(r"^<!-- public names of ([\w.]+) -->$", re.M)
_ROOMS = re.compile(r"^<!-- rooms of (\w+) -->$", re.M)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of rooms into the navigation."""
    section = next(entry[SECTION] for entry in config.nav or [] if SECTION in entry)
    packages: dict[str, list[dict[str, str]]] = {}
    for package, room in each_room():
        packages.setdefault(package, []).append({room: _page(package, room)})
    section += [{f"Rooms of {package}": pages} for package, pages in packages.items()]
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages of rooms."""
    for package, room in each_room():
        files.append(File.generated(config, _page(package, room), content=_room_text(package, room)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in the public names and the rooms of a package."""
    named = _PUBLIC.sub(lambda match: "\n".join(_public_names(match[1])), markdown)
    return _ROOMS.sub(lambda match: "\n".join(_room_rows(match[1])), named)


def _page(package: str, room: str) -> str:
    return f"api/{package}/{room}.md"


def _room_rows(package: str) -> Iterator[str]:
    yield "| room | what it holds |\n| --- | --- |"
    for owner, room in each_room():
        if owner == package:
            yield f"| [{room}]({package}/{room}.md) | {first_sentence(f'{package}.{room}')} |"


def _room_text(package: str, room: str) -> str:
    """A room's docstring, and every module of it with what it defines; public names lead to their own place."""
    name = f"{package}.{room}"
    modules = modules_of(package, room)
    intro = "" if modules == [name] else f"{first_sentence(name)}\n\n"
    return f"# {name}\n\n{intro}" + "\n".join(_module_text(module) for module in modules)


def _module_text(module: str) -> str:
    public = {path.rpartition(".")[2]: shown for path, shown in public_places().items() if _parent(path) == module}
    filters = ["!^_", *(f"!^{name}$" for name in public)]
    links = ", ".join(f"[{shown}](../{shown.partition('.')[0]}.md#{shown})" for shown in public.values())
    return f"::: {module}\n    options:\n      filters: {filters}\n\n" + (f"Public names: {links}.\n" if links else "")


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


@cache
def public_places() -> dict[str, str]:
    """Where each public name is defined, and what users write for it: its name in the first package that has it."""
    found: dict[str, str] = {}
    for package in ("planner", "planner.errors", "planner.results", *rooms()):
        for name, path in _exported(package).items():
            found.setdefault(path, f"{package}.{name}")
    return found


def _exported(package: str) -> dict[str, str]:
    module = importlib.import_module(package)
    names = sorted(getattr(module, "__all__", ()), key=str.lower)
    return {name: _defined_at(package, name, getattr(module, name)) for name in names}


def _defined_at(package: str, name: str, value: Any) -> str:
    if isinstance(value, ModuleType):
        return value.__name__
    module, qualified = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
    return f"{module}.{qualified}" if module and qualified else f"{package}.{name}"


def _public_names(package: str) -> Iterator[str]:
    """A directive for each public name under the name that users write; a link where it is described elsewhere."""
    for name, path in _exported(package).items():
        shown, home = f"{package}.{name}", public_places()[path]
        yield f'<a id="{shown}"></a>\n'
        if home != shown:
            yield f"## {shown}\n\nThe same as [{home}]({home.partition('.')[0]}.md#{home}).\n"
        elif path in {module for owner, room in each_room() for module in modules_of(owner, room)}:
            yield f"## {shown}\n\nThe module [{path}]({'/'.join(path.split('.')[:2])}.md#{path}).\n"
        else:
            yield f"::: {path}\n    options:\n      heading: {shown}\n      toc_label: {name}\n"
