"""Who pays for which chunks: pure sums over manifests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from kernelproxy.errors import StoreError
from kernelproxy.snapshot.manifest import Manifest


@dataclass(frozen=True)
class Entry:
    """A manifest file: its place, its length in bytes, and its content unless it is unreadable."""

    owner: str
    name: str
    file_bytes: int
    manifest: Manifest | None


@dataclass(frozen=True)
class Sizes:
    """Bytes of a stored snapshot.

    `logical` is what it restores, `stored` what it takes on disk, `exclusive` the part of that
    which deleting it would free.
    """

    logical: int
    stored: int
    exclusive: int


@dataclass(frozen=True)
class Limits:
    """Bytes that the whole store and each owner may use; None: any number."""

    store: int | None = None
    owner: int | None = None


class Ledger:
    """Distinct chunks of the whole store and of each owner."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        #: Bytes of every chunk's file.
        self.chunks: dict[str, int] = {}
        self._by_owner: dict[str, dict[str, int]] = {}
        self._file_bytes: Counter[str] = Counter()
        self._users: Counter[str] = Counter()
        for entry in entries:
            self._file_bytes[entry.owner] += entry.file_bytes
            own = self._by_owner.setdefault(entry.owner, {})
            # An unreadable one takes at least its own length; nobody knows its chunks.
            if entry.manifest is not None:
                stored = {key: size.stored for key, size in entry.manifest.chunks.items()}
                self.chunks |= stored
                own |= stored
                self._users.update(stored.keys())

    def usage(self, owner: str | None = None) -> int:
        """Bytes that an owner, or the whole store, pays for: each distinct chunk once."""
        if owner is None:
            return sum(self.chunks.values()) + self._file_bytes.total()
        return sum(self._by_owner.get(owner, {}).values()) + self._file_bytes[owner]

    def known(self, owner: str | None, key: str) -> bool:
        """Whether an owner, or the whole store, pays for a chunk already."""
        return key in (self.chunks if owner is None else self._by_owner.get(owner, {}))

    def sizes(self, manifest: Manifest, file_bytes: int) -> Sizes:
        """Sizes of a manifest, which is one of the entries."""
        exclusive = sum(
            size.stored for key, size in manifest.chunks.items() if self._users[key] == 1
        )
        return Sizes(
            logical=manifest.logical_bytes,
            stored=manifest.stored_bytes + file_bytes,
            exclusive=exclusive + file_bytes,
        )


class Allowance:
    """What one more snapshot of an owner may take.

    Parameters
    ----------
    ledger : Ledger
        All manifests but the one that will be replaced.
    owner : str
        Who pays.
    limits : Limits
        For all and for each.
    beside : int
        Bytes that something else takes of the limit for all.
    """

    def __init__(self, ledger: Ledger, owner: str, limits: Limits, beside: int = 0) -> None:
        self._ledger = ledger
        self._accounts = [
            (scope, limit, whose)
            for scope, limit, whose in (
                (None, limits.store, f"The store{_and_beside(beside)}"),
                (owner, limits.owner, f"What {owner} stores"),
            )
            if limit is not None
        ]
        self._used = {scope: ledger.usage(scope) for scope, _, _ in self._accounts}
        if None in self._used:
            self._used[None] += beside

    def charge(self, stored: int, key: str | None = None) -> None:
        """Take bytes for a chunk, once for each, or for something that is no chunk.

        Raises
        ------
        StoreError
            ``quota`` if a limit is exceeded.
        """
        for scope, limit, whose in self._accounts:
            if key is None or not self._ledger.known(scope, key):
                self._used[scope] += stored
            if self._used[scope] > limit:
                raise StoreError(
                    f"{whose} would take more than its quota of {limit >> 20} MiB: delete "
                    "something stored, or raise the quota.",
                    "quota",
                )


def _and_beside(count: int) -> str:
    return f", with {count >> 20} MiB of kernels that hibernate," if count else ""
