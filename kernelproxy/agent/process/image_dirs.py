"""Directories of process images: one for each process that is being saved, or that hibernates.

They lie beside the spilled states, readable for their owner alone, because they hold all that a
process had in memory. Images that replace a process count against the same quota; those of a
checkpoint do not, because they are removed once it is stored. Each daemon has a directory of its
own with an owner record: what a dead daemon left is removed by the next one.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path

from kernelproxy.agent.daemon_id import DaemonId
from kernelproxy.common.untrusted import parse_json

#: The file that CRIU writes last: the images are complete when it exists.
COMPLETE = "inventory.img"
_OWNER = "owner.json"
_ASLEEP = "asleep-"


class ImageDirs:
    """Makes and removes the directories; all methods block.

    Parameters
    ----------
    root : Path
        Directory of all daemons' images; made when first needed.
    mark : DaemonId
        Of this daemon.
    """

    def __init__(self, root: Path, mark: DaemonId) -> None:
        self._root, self._mark = root, mark
        self._ours = root / mark.key
        self._expected: dict[Path, int] = {}
        self._made: set[Path] = set()  # by this process, so not left by a dead agent

    def make(self, session: str, expected: int | None = None) -> Path:
        """Make an empty directory.

        Parameters
        ----------
        session : str
            Its id.
        expected : int, optional
            For a process that is to end: the bytes that its images may take.

        Raises
        ------
        OSError
            If it cannot be made.
        """
        self._ours.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = self._ours / _OWNER
        if not owner.exists():
            temporary = owner.with_suffix(f".{secrets.token_hex(4)}")
            temporary.write_text(json.dumps(self._mark.record))
            temporary.rename(owner)
        name = f"{session}-{secrets.token_hex(4)}"
        found = self._ours / (name if expected is None else f"{_ASLEEP}{name}")
        if expected is not None:
            self._expected[found] = expected
        self._made.add(found)  # before `tidy` can see it in another thread
        found.mkdir(mode=0o700)
        return found

    def usage(self) -> int:
        """Return the bytes of all images that replace processes, of all daemons here.

        Incomplete images count as their expected size if that is larger.
        """
        return sum(
            self._bytes(each)
            for daemon in _listed(self._root)
            for each in _listed(daemon)
            if each.name.startswith(_ASLEEP)
        )

    def _bytes(self, directory: Path) -> int:
        files = {}
        for file in _listed(directory):
            with contextlib.suppress(OSError):  # it is being removed
                files[file.name] = file.stat().st_blocks * 512
        expected = 0 if COMPLETE in files else self._expected.get(directory, 0)
        return max(expected, sum(files.values()))

    def remove(self, directory: Path) -> None:
        """Remove one; if that is not possible now, the next daemon does it."""
        self._expected.pop(directory, None)
        if directory.parent == self._ours:
            shutil.rmtree(directory, ignore_errors=True)
        self._made.discard(directory)

    def tidy(self, kept: Iterable[Path]) -> None:
        """Remove what dead daemons left, and of this daemon's directories all but `kept`."""
        keep = set(kept)
        for daemon in _listed(self._root):
            if daemon == self._ours:
                for each in _listed(daemon):
                    if each not in keep and each not in self._made and each.name != _OWNER:
                        shutil.rmtree(each, ignore_errors=True)
            elif self._is_orphan(daemon):
                shutil.rmtree(daemon, ignore_errors=True)

    def _is_orphan(self, daemon: Path) -> bool:
        """Return True if the daemon of a directory is gone for good, as far as visible here."""
        try:
            return self._mark.is_orphan(parse_json((daemon / _OWNER).read_text()))
        except (OSError, ValueError):
            return False  # without an owner record it is being made


def _listed(directory: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return sorted(directory.iterdir())
    return []
