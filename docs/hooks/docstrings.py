"""Prepares docstrings for the site: examples are shown as code, and names that share a description get one each."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLES = re.compile(r"(?:^[ \t]*(?:>>>|\.\.\.).*\n?(?:^(?![ \t]*$)(?![ \t]*>>>).*\n?)*)+", re.M)
_SECTION = re.compile(r"^(?:Args|Attributes):\n(?:[ \t]+.*\n?)+", re.M)
_SHARED = re.compile(r"^( +)(\w+(?:, \w+)+)(: .*(?:\n\1 +.*)*)", re.M)


class Prepared(griffe.Extension):
    """Rewrites the docstring of every object before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite one of them."""
        if obj.docstring is not None:
            obj.docstring.value = one_name_each(with_fences(obj.docstring.value))


def with_fences(text: str) -> str:
    """Examples in fences: in the middle of a docstring they would be read as quotations.

    >>> with_fences("One.\\n\\n>>> 1 + 1\\n2\\n")
    'One.\\n\\n```pycon\\n>>> 1 + 1\\n2\\n```\\n'
    """
    return _EXAMPLES.sub(lambda match: f"```pycon\n{match[0].rstrip()}\n```\n", text)


def one_name_each(text: str) -> str:
    """Descriptions of several arguments or attributes, once for each: every name is then checked to exist.

    >>> one_name_each("Args:\\n    a, b: as there.\\n")
    'Args:\\n    a: as there.\\n    b: as there.\\n'
    """
    return _SECTION.sub(lambda section: _SHARED.sub(_separately, section[0]), text)


def _separately(match: re.Match[str]) -> str:
    indent, names, description = match.groups()
    return "\n".join(f"{indent}{name}{description}" for name in names.split(", "))
