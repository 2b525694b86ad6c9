"""What the command line was given to build the model of a profile: the target, its settings, and from where."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from profiler.made_here import is_proof, proof_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRecord:
    """A target as it was given, so that its workload can be built again.

    Attributes:
        text: ``zoo:NAME``, ``path/to/file.py:function`` or ``package.module:function``.
        settings: of ``--set``, as ``key=value``.
        device: of ``--device``; None where none was given.
        folder: the one in which paths and modules of ``text`` were looked up; empty for the zoo.
        proof: that a user gave it on a machine, for that user there; empty for the zoo, and where no proof can be kept.
    """

    text: str
    settings: tuple[str, ...] = ()
    device: str | None = None
    folder: str = ""
    proof: str = ""

    @property
    def of_zoo(self) -> bool:
        """Whether it names a model of the zoo, and so none of anyone's code."""
        return self.text.strip().rpartition(":")[0] == "zoo"

    @property
    def made_here(self) -> bool:
        """Whether the user who asks gave it on this machine."""
        return is_proof(self.proof, *self._said)

    @property
    def _said(self) -> tuple[str, tuple[str, ...], str | None, str]:
        return self.text, self.settings, self.device, self.folder

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
        record = cls(text=text, settings=tuple(settings or ()), device=device)
        return record if record.of_zoo else replace(record, folder=os.getcwd()).proven()

    def proven(self) -> TargetRecord:
        """With the proof that this user gave it here; only for what the user gave, or has allowed."""
        return self if self.of_zoo else replace(self, proof=proof_of(*self._said))

    def with_changes(self, settings: Sequence[str], device: str | None) -> TargetRecord:
        """With other values for the keys in ``settings``, and another device where one is given; without its proof."""
        changed = {_key(pair) for pair in settings}
        kept = [pair for pair in self.settings if _key(pair) not in changed]
        return replace(self, settings=(*kept, *settings), device=device or self.device, proof="")


def _key(pair: str) -> str:
    return pair.partition("=")[0].strip()
