"""What the command line was given to build the model of a profile: the target, its settings, and from where."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRecord:
    """A target as it was given, so that its workload can be built again.

    Attributes:
        text: ``zoo:NAME``, ``path/to/file.py:function`` or ``package.module:function``.
        settings: of ``--set``, as ``key=value``.
        device: of ``--device``; None where none was given.
        folder: the one in which paths and modules of ``text`` were looked up; empty for the zoo.
    """

    text: str
    settings: tuple[str, ...] = ()
    device: str | None = None
    folder: str = ""

    @property
    def arguments(self) -> str:
        """As it is written at a command line.

        >>> TargetRecord(text="zoo:mlp", settings=("layers=8",), device="cpu").arguments
        'zoo:mlp --set layers=8 --device cpu'
        """
        settings = ["--set", *self.settings] if self.settings else []
        return shlex.join([self.text, *settings, *(["--device", self.device] if self.device else [])])

    @classmethod
    def given(cls, text: str, settings: Sequence[str] | None, device: str | None) -> TargetRecord:
        """Of what is given at a command line that runs in the current folder."""
        folder = "" if text.strip().startswith("zoo:") else os.getcwd()
        return cls(text=text, settings=tuple(settings or ()), device=device, folder=folder)

    def with_changes(self, settings: Sequence[str], device: str | None) -> TargetRecord:
        """With other values for the keys in ``settings``, and another device where one is given."""
        changed = {_key(pair) for pair in settings}
        kept = [pair for pair in self.settings if _key(pair) not in changed]
        return replace(self, settings=(*kept, *settings), device=device or self.device)


def _key(pair: str) -> str:
    return pair.partition("=")[0].strip()
