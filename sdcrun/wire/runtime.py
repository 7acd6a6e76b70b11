"""The runtime file: where this node's controller listens and the job's secret, for this user's eyes only."""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Callable
from typing import Any


def read_runtime(path: str) -> dict[str, Any] | None:
    """{host, port, secret} of the file, or None when it is missing, malformed, or readable by anybody else."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
            return None
        values = json.loads(os.read(fd, 65536))
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
    return checked_address(values)


def checked_address(values: Any) -> dict[str, Any] | None:
    """`values` when it is an address {host, port, secret} with a usable secret, else None."""
    if not isinstance(values, dict):
        return None
    host, port, secret = values.get("host"), values.get("port"), values.get("secret")
    if not (isinstance(host, str) and host and type(port) is int and 0 < port < 65536):
        return None
    if not (isinstance(secret, str) and len(secret) >= 32):
        return None
    return {"host": host, "port": port, "secret": secret}


def write_runtime(path: str, host: str, port: int, secret: str) -> None:
    """Replace the file atomically; it is 0600 from its first byte on. Raises OSError."""
    temporary = f"{path}.{os.getpid()}.{secrets.token_hex(4)}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            os.write(fd, json.dumps({"host": host, "port": port, "secret": secret}).encode())
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise


def runtime_address(path: str) -> Callable[[], dict[str, Any] | None]:
    """An `address` for `Link` that reads the runtime file anew each time, so that a moved controller is found."""
    return lambda: read_runtime(path)


def new_secret() -> str:
    """A fresh per-job secret: 256 random bits as hex text."""
    return secrets.token_hex(32)
