"""The leaf that everything may use: one JSON text for a value, hashes, and files that are whole or absent."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from repro.errors import UserError


class WriteError(UserError):
    """A file cannot be written; the message names it, and the disk if that is full."""


#: of an OSError: a disk, or this user's share of it, is full
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def canonical_json(value: Any) -> str:
    """The one JSON text of a value: sorted keys, no spaces, ASCII, shortest floats; NaN and infinity are refused."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def pretty_json(value: Any) -> bytes:
    """JSON for people: indented, in the given order (that of a row's entries is that of its columns)."""
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def read_json(source: Path | bytes) -> dict[str, Any]:
    """The object in a JSON file or text; an empty one if it is absent or damaged."""
    try:
        content = json.loads(source if isinstance(source, bytes) else source.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def sha256_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_json(value: Any) -> str:
    """The hash of a value as JSON."""
    return sha256_text(canonical_json(value))


def sha256_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomically(path: Path, content: bytes, durable: bool = True) -> None:
    """Write `content` so that `path` is at every moment the old file, the new file or absent.

    Without `durable` this holds when the process is killed, but not when the machine loses its power. Raises WriteError
    naming the file when the disk is full, the folder read-only or in the way."""
    temporary = temporary_name(path, ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise WriteError(
            f"cannot write {path}: {error.strerror or error}{_remedy(error, path)}, or name another folder with "
            "REPRO_RESULTS_DIR and REPRO_FIGURES_DIR"
        ) from error


def _remedy(error: OSError, path: Path) -> str:
    if error.errno not in NO_SPACE:
        return "; make its folder writable"
    disk = next((folder for folder in path.absolute().parents if folder.is_mount()), path.parent)
    return f"; free space on the disk at {disk}"


def temporary_name(path: Path, suffix: str) -> Path:
    """A hidden name beside `path` that belongs to this process."""
    return path.with_name(f".{path.name}.{os.getpid()}{suffix}")


def leftovers(folder: Path) -> list[Path]:
    """The temporary files in a folder whose processes are gone: killed runs could not remove them."""
    return [path for path in sorted(folder.glob(".*.*.*")) if _owner_is_gone(path)]


def _owner_is_gone(path: Path) -> bool:
    owner = path.name.split(".")[-2]
    if not (owner.isascii() and owner.isdigit()):
        return False
    try:
        os.kill(int(owner), 0)
    except (OSError, OverflowError) as error:  # any other error: alive, but another user's
        return isinstance(error, ProcessLookupError)
    return False
