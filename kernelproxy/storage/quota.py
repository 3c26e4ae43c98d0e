"""Who pays for which chunks: pure sums over manifests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kernelproxy.common.errors import StoreError
from kernelproxy.common.readable import bytes_text
from kernelproxy.storage.manifest import Manifest


@dataclass(frozen=True)
class Entry:
    """A manifest file: its place, its length in bytes, and its content unless it is unreadable."""

    owner: str
    name: str
    file_bytes: int
    manifest: Manifest | None

    @property
    def payer(self) -> str:
        """Who pays for it: the owner, of one that cannot be read."""
        return self.owner if self.manifest is None else self.manifest.label.payer


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
    """Bytes that the whole store, each payer, and certain payers may use; None: any number.

    What is said of certain payers counts before what is said of each, and may change meanwhile.
    """

    store: int | None = None
    owner: int | None = None
    payers: Mapping[str, int] = field(default_factory=dict)

    def of(self, payer: str) -> int | None:
        """What a payer may use."""
        return self.payers.get(payer, self.owner)


class Ledger:
    """Distinct chunks of the whole store and of each payer."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        #: Bytes of every chunk's file.
        self.chunks: dict[str, int] = {}
        self._by_payer: dict[str, dict[str, int]] = {}
        self._file_bytes: Counter[str] = Counter()
        self._users: Counter[str] = Counter()
        for entry in entries:
            self._file_bytes[entry.payer] += entry.file_bytes
            own = self._by_payer.setdefault(entry.payer, {})
            # An unreadable one takes at least its own length; nobody knows its chunks.
            if entry.manifest is not None:
                stored = {key: size.stored for key, size in entry.manifest.chunks.items()}
                self.chunks |= stored
                own |= stored
                self._users.update(stored.keys())

    def usage(self, payer: str | None = None) -> int:
        """Bytes that somebody, or the whole store, pays for: each distinct chunk once."""
        if payer is None:
            return sum(self.chunks.values()) + self._file_bytes.total()
        return sum(self._by_payer.get(payer, {}).values()) + self._file_bytes[payer]

    def known(self, payer: str | None, key: str) -> bool:
        """Whether somebody, or the whole store, pays for a chunk already."""
        return key in (self.chunks if payer is None else self._by_payer.get(payer, {}))

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
    """What one more snapshot may take.

    Parameters
    ----------
    ledger : Ledger
        All manifests but the one that will be replaced.
    payer : str
    limits : Limits
        For all and for each.
    beside : int
        Bytes that something else takes of the limit for all.
    """

    def __init__(self, ledger: Ledger, payer: str, limits: Limits, beside: int = 0) -> None:
        self._ledger = ledger
        self._accounts = [
            (scope, limit, whose)
            for scope, limit, whose in (
                (None, limits.store, f"The store{_and_beside(beside)}"),
                (payer, limits.of(payer), f"What {payer} stores"),
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
                    f"{whose} would take more than its quota of {bytes_text(limit)}: delete "
                    "something stored, or raise the quota.",
                    "quota",
                )


def _and_beside(count: int) -> str:
    return f", with {bytes_text(count)} of kernels that hibernate," if count else ""
