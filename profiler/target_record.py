"""The target and settings that built a profile's model, with a proof that this user gave them on this machine."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import platform
import secrets
import shlex
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRecord:
    """A target as it was given, so that its workload can be built again.

    Attributes:
        text: ``zoo:NAME``, ``path/to/file.py:function`` or ``package.module:function``.
        settings: the values of ``--set``, as ``key=value``.
        device: the value of ``--device``; None where none was given.
        folder: the one in which paths and modules of ``text`` were looked up; empty for the zoo.
        proof: the proof, for that user there, that a user gave it on a machine; empty for the zoo, and where none can
            be kept.
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
        return _is_proof(self.proof, *self._said)

    @property
    def _said(self) -> tuple[str, tuple[str, ...], str | None, str]:
        return self.text, self.settings, self.device, self.folder

    @property
    def arguments(self) -> str:
        """The arguments as they are written at a command line.

        >>> TargetRecord(text="zoo:mlp", settings=("layers=8",), device="cpu").arguments
        'zoo:mlp --set layers=8 --device cpu'
        """
        settings = ["--set", *self.settings] if self.settings else []
        return shlex.join([self.text, *settings, *(["--device", self.device] if self.device else [])])

    @classmethod
    def given(cls, text: str, settings: Sequence[str] | None, device: str | None) -> TargetRecord:
        """Makes the record of the arguments of a command that runs in the current folder."""
        record = cls(text=text, settings=tuple(settings or ()), device=device)
        return record if record.of_zoo else replace(record, folder=os.getcwd()).proven()

    def proven(self) -> TargetRecord:
        """Returns the record with the proof that this user gave it here; for what the user gave or allowed only."""
        return self if self.of_zoo else replace(self, proof=_proof_of(*self._said))

    def with_changes(self, settings: Sequence[str], device: str | None) -> TargetRecord:
        """Returns the record with other ``settings``, and another device where one is given; without its proof."""
        changed = {_key(pair) for pair in settings}
        kept = [pair for pair in self.settings if _key(pair) not in changed]
        return replace(self, settings=(*kept, *settings), device=device or self.device, proof="")


def _key(pair: str) -> str:
    return pair.partition("=")[0].strip()


def _proof_of(*said: Any) -> str:
    """A proof that this user said these plain values here; empty where there is no secret, and no place for one.

    The secret is random, is made when it is first needed, lies in the user's state folder (``XDG_STATE_HOME``, else
    ``~/.local/state``) and is for this user's eyes alone. Each machine has its own, by name: what shares a home, or was
    built into a container's image, proves nothing elsewhere.
    """
    try:
        secret = _secret()
    except (OSError, RuntimeError):  # No home, or one that cannot be written to.
        return ""
    return hmac.new(secret, json.dumps(said).encode(), "sha256").hexdigest() if secret else ""


def _is_proof(proof: str, *said: Any) -> bool:
    """Whether ``_proof_of`` gave this for the same values here."""
    own = _proof_of(*said)
    return bool(own) and hmac.compare_digest(own.encode(), proof.encode())


def _secret() -> bytes:
    """The user's secret on this machine; empty where what is there may not be the user's own."""
    if not hasattr(os, "geteuid"):
        return b""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    machine = hashlib.sha256(platform.node().encode()).hexdigest()[:16]
    path = (state if state.is_absolute() else Path.home() / ".local" / "state") / "sublinear-planner" / machine
    if not path.exists():
        _make_secret(path)
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        about = os.fstat(handle)
        own = stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o077
        secret = file.read(_SECRET_BYTES + 1) if own else b""
    return secret if len(secret) == _SECRET_BYTES else b""


def _make_secret(path: Path) -> None:
    """A new secret, whole or not at all; of processes that make one at the same time, the first wins."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent)  # Of mode 0600.
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(_SECRET_BYTES))
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        os.unlink(temporary)
