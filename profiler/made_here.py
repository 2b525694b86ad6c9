"""A proof that this user made something on this machine, which only the user's own secret can make and check."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import platform
import secrets
import stat
import tempfile
from pathlib import Path
from typing import Any

_SECRET_BYTES = 32


def proof_of(*said: Any) -> str:
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


def is_proof(proof: str, *said: Any) -> bool:
    """Whether ``proof_of`` gave this for the same values here."""
    own = proof_of(*said)
    return bool(own) and hmac.compare_digest(own.encode(), proof.encode())


def _secret() -> bytes:
    """The user's secret on this machine; empty where what is there may not be the user's own."""
    if not hasattr(os, "geteuid"):
        return b""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    machine = hashlib.sha256(platform.node().encode()).hexdigest()[:16]
    path = (state if state.is_absolute() else Path.home() / ".local" / "state") / "sublinear-planner" / machine
    if not path.exists():
        _make(path)
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        about = os.fstat(handle)
        own = stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o077
        secret = file.read(_SECRET_BYTES + 1) if own else b""
    return secret if len(secret) == _SECRET_BYTES else b""


def _make(path: Path) -> None:
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
