"""API keys: a file of hashes, who owns them and what they may; `python -m http_frontend.keys` makes one.

A key is 256 random bits, so its plain SHA-256 is as hard to turn back as the key is to guess. The file is
JSON, one list of objects; it is read again when it has changed. A file that can't be read keeps the keys
that were there before.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import hmac
import os
import secrets
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from http_frontend.incoming import Caller

PREFIX: Final = "lo-"


class KeyEntry(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """One key of the file."""

    name: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"\A[!-~]+\Z")]
    sha256: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    tenant: Annotated[str, Meta(max_length=64)] = ""  # "": the name; fairness is between tenants
    priority: Annotated[int, Meta(ge=0, le=9)] = 5  # the best that its requests may ask for
    requests_per_minute: Annotated[int, Meta(ge=0)] = 0  # 0: no limit; each frontend counts for itself
    tokens_per_minute: Annotated[int, Meta(ge=0)] = 0

    def caller(self) -> Caller:
        """Who the key's owner is to the rest of the frontend."""
        return Caller(
            self.name,
            self.tenant or self.name,
            self.priority,
            self.requests_per_minute,
            self.tokens_per_minute,
        )


_file = msgspec.json.Decoder(list[KeyEntry])


class KeyFileError(ValueError):
    """The file can't be used; the sentence says why."""


class Keys:
    """The keys of a file, as they are now."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._keys: list[tuple[bytes, Caller]] = []

    def reload(self) -> bool:
        """Read the file if it has changed since; returns whether it had.

        Raises:
            KeyFileError: it can't be used; the keys stay as they were, and it isn't tried again until
                the file changes.
        """
        try:
            found = self._path.stat()
            stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
            if stamp == self._stamp:
                return False
            self._stamp = stamp
            self._keys = _read(self._path)
        except OSError as problem:
            raise KeyFileError(f"{self._path}: {problem.strerror}") from None
        return True

    def owner(self, authorization: str) -> Caller | None:
        """Whose key an ``Authorization`` header carries; None if it is nobody's.

        ``Bearer KEY``, or ``Basic`` with the key as its password: browsers ask for that by themselves.
        Every key is compared, in constant time, so that time tells nothing about any of them.
        """
        digest = digest_of(_presented(authorization))
        owner = None
        for known, caller in self._keys:
            if hmac.compare_digest(known, digest):
                owner = caller
        return owner


def _presented(authorization: str) -> str:
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(key.strip(), validate=True).decode().partition(":")[2]
    except ValueError:
        return ""


def digest_of(key: str) -> bytes:
    """What is compared and kept of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _read(path: Path) -> list[tuple[bytes, Caller]]:
    try:
        entries = _file.decode(path.read_bytes())
    except msgspec.MsgspecError as problem:
        raise KeyFileError(f"{path}: {problem}") from None
    names = [entry.name for entry in entries]
    if len(set(names)) < len(names):
        raise KeyFileError(f"{path}: two keys have the same name")
    return [(bytes.fromhex(entry.sha256), entry.caller()) for entry in entries]


def add(path: Path, entry: KeyEntry) -> None:
    """Write the file anew with one more key; readers see the old file or the new one.

    Raises:
        KeyFileError: the file can't be used, or has a key of that name.
    """
    entries = _file.decode(path.read_bytes()) if path.exists() else []
    if any(known.name == entry.name for known in entries):
        raise KeyFileError(f"{path}: there is a key named {entry.name} already")
    text = msgspec.json.format(msgspec.json.encode([*entries, entry]), indent=2)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "wb") as file:
        file.write(text + b"\n")
        os.fchmod(file.fileno(), 0o600)
    os.replace(name, path)


def main(argv: list[str]) -> int:
    """Make a key, write its hash into the file, print the key: nobody can see it again."""
    parser = argparse.ArgumentParser(prog="python -m http_frontend.keys", description=main.__doc__)
    parser.add_argument("--file", required=True, type=Path, help="the file of --api-keys; made if missing")
    parser.add_argument("--name", required=True, help="who the key is for")
    parser.add_argument("--tenant", default="", help="whom it shares its turn with; its name if not given")
    parser.add_argument("--priority", default=5, type=int, help="0 to 9, 0 is served first")
    parser.add_argument("--requests-per-minute", default=0, type=int, help="0: no limit")
    parser.add_argument("--tokens-per-minute", default=0, type=int, help="0: no limit")
    given = parser.parse_args(argv)
    key = PREFIX + secrets.token_urlsafe(32)
    fields = {name: value for name, value in vars(given).items() if name != "file"}
    try:
        add(given.file, msgspec.convert({**fields, "sha256": digest_of(key).hex()}, KeyEntry))
    except (msgspec.ValidationError, msgspec.DecodeError, KeyFileError, OSError) as problem:
        print(f"python -m http_frontend.keys: {problem}", file=sys.stderr)
        return 1
    print(key)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
