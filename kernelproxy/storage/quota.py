"""Accounting of chunks to payers. Pure: sums over manifests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kernelproxy.common.errors import StoreError
from kernelproxy.common.units import bytes_text
from kernelproxy.storage.manifest import Manifest


@dataclass(frozen=True)
class ManifestFile:
    """A manifest file: owner, name, length in bytes, and content (None if it is unreadable)."""

    owner: str
    name: str
    file_bytes: int
    manifest: Manifest | None

    @property
    def payer(self) -> str:
        """Payer of the snapshot; of an unreadable one, the owner."""
        return self.owner if self.manifest is None else self.manifest.label.payer


@dataclass(frozen=True)
class Sizes:
    """Bytes of a stored snapshot.

    `logical` is the restored size, `stored` the size on disk, and `exclusive` the part of `stored`
    that its deletion would free.
    """

    logical: int
    stored: int
    exclusive: int


@dataclass(frozen=True)
class StoreLimits:
    """Limits in bytes of the whole store, of each payer, and of certain payers; None: no limit.

    The limits of certain payers take precedence over that of each payer, and may change later.
    """

    store: int | None = None
    owner: int | None = None
    payers: Mapping[str, int] = field(default_factory=dict)

    def of(self, payer: str) -> int | None:
        """Return the limit of a payer; None: no limit."""
        return self.payers.get(payer, self.owner)


class ChunkUsage:
    """Distinct chunks of the whole store and of each payer."""

    def __init__(self, entries: Iterable[ManifestFile]) -> None:
        #: Length of every chunk's file.
        self.chunks: dict[str, int] = {}
        self._by_payer: dict[str, dict[str, int]] = {}
        self._file_bytes: Counter[str] = Counter()
        self._users: Counter[str] = Counter()
        for entry in entries:
            self._file_bytes[entry.payer] += entry.file_bytes
            own = self._by_payer.setdefault(entry.payer, {})
            # An unreadable manifest counts with its own length only, as its chunks are unknown.
            if entry.manifest is not None:
                stored = {key: size.stored for key, size in entry.manifest.chunks.items()}
                self.chunks |= stored
                own |= stored
                self._users.update(stored.keys())

    def usage(self, payer: str | None = None) -> int:
        """Return the bytes of a payer, or of the whole store: each distinct chunk counts once."""
        if payer is None:
            return sum(self.chunks.values()) + self._file_bytes.total()
        return sum(self._by_payer.get(payer, {}).values()) + self._file_bytes[payer]

    def known(self, payer: str | None, key: str) -> bool:
        """True if a chunk already counts for a payer, or for the whole store."""
        return key in (self.chunks if payer is None else self._by_payer.get(payer, {}))

    def sizes(self, manifest: Manifest, file_bytes: int) -> Sizes:
        """Return the sizes of a snapshot, whose manifest must be one of the entries."""
        exclusive = sum(
            size.stored for key, size in manifest.chunks.items() if self._users[key] == 1
        )
        return Sizes(
            logical=manifest.logical_bytes,
            stored=manifest.stored_bytes + file_bytes,
            exclusive=exclusive + file_bytes,
        )


class RemainingQuota:
    """Remaining quota for one more snapshot.

    Parameters
    ----------
    ledger : Ledger
        All manifests except the one that will be replaced.
    payer : str
    limits : Limits
        Limits of the store and of payers.
    beside : int
        Bytes outside of the store that count against its limit.
    """

    def __init__(
        self, ledger: ChunkUsage, payer: str, limits: StoreLimits, beside: int = 0
    ) -> None:
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
        """Charge bytes: for a chunk only if it is new, or for other data (`key` is None).

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
