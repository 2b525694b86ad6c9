"""Which target a command that has a file runs: the one that is named, or the file's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from profiler.target_record import TargetRecord

RECORDED = "recorded"  # what stands for an option's TARGET where none is written: the file's own


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRequest:
    """What the command line says of the target: all of it, or what differs from the file's own.

    Attributes:
        text: of the target; None and ``RECORDED`` for the file's own.
        settings: of ``--set``.
        device: of ``--device``.
        option: where the target is written, for errors.
    """

    text: str | None
    settings: Sequence[str] | None
    device: str | None = None
    option: str = "TARGET"

    def chosen(self, recorded: TargetRecord | None, file: Path | None) -> TargetRecord:
        """The target that is named, else the recorded one with the settings and the device given here.

        Args:
            recorded: of a plan or a profile; None where it has none.
            file: that it would be in; None where there is none.

        Raises:
            ValueError: neither is there.
        """
        if self.text not in (None, RECORDED):
            return TargetRecord.given(self.text, self.settings, self.device)
        if recorded is not None:
            return recorded.with_changes(self.settings or (), self.device)
        got = "none" if file is None else f"none, and {file} records none (Python made it, or an older release)"
        raise ValueError(
            f"{self.option}: expected the model to train, got {got}; name it: zoo:NAME or path/to/file.py:function"
        )
