"""Where the files of a `SqliteStore` are, and whether they may be there.

Beside the database that the user names there are, with its name in front of each:

    shared.db                    durable texts and journals, synced at every commit
    shared.db-lock               taken with flock before every transaction on it
    shared.db-boot-<id>          texts of members, not synced: the machine that forgets them has lost the members too
    shared.db-boot-<id>-lock     taken before every transaction on that
    shared.db-members/           a lock and a socket for each member, a lock for each open journal

The id of the boot stands in the name because a file that is not synced may be damaged after a crash of the machine:
then the id is another one, and the file is deleted unread.
"""

from __future__ import annotations

import os
import re
import sys
from ctypes import CDLL, byref, c_size_t, create_string_buffer
from pathlib import Path
from typing import Final

from headgate.errors import InvalidArgument

MOUNTS: Path = Path("/proc/self/mountinfo")
"""Tells which file systems are mounted where. A test has another."""

BOOT: Path = Path("/proc/sys/kernel/random/boot_id")
"""Tells which run of the machine this is. A test has another."""

_NETWORK: Final = re.compile(
    r"nfs\d*|cifs|smb\d*|smbfs|ncpfs|afs|openafs|ceph|lustre|gpfs|beegfs|glusterfs|orangefs|pvfs2|9p|davfs"
    r"|fuse\.(sshfs|glusterfs|s3fs|rclone|gcsfuse|davfs2?|ceph|ceph-fuse|curlftpfs|juicefs|moosefs|mfs\w*|blobfuse2?"
    r"|smbnetfs|beegfs|seaweedfs|goofys|mountpoint-s3|afpfs|httpfs)"
)
"""File systems of other machines. Their locks are missing, or do not tell when a machine that held one is gone."""

_ESCAPED: Final = re.compile(r"\\([0-7]{3})")


class Place:
    """The paths of one store."""

    def __init__(self, path: Path) -> None:
        self.durable: Path = Path(os.path.realpath(path))
        """The file itself: whoever comes by a symbolic link must find the same files beside it."""
        boot = boot_id()
        self.is_boot_known: bool = boot is not None
        """If not, admission must be synced as well: nobody could tell a file of an earlier boot."""
        self.admission: Path = self._beside(f"-boot-{boot or 'unknown'}")
        self.members: Path = self._beside("-members")

    def _beside(self, ending: str) -> Path:
        return self.durable.with_name(self.durable.name + ending)

    def remove_other_boots(self) -> None:
        """Delete the admission files of earlier runs of the machine. What cannot be deleted does no harm."""
        mark = f"{self.durable.name}-boot-"
        try:
            for name in os.listdir(self.durable.parent):
                if name.startswith(mark) and not name.startswith(self.admission.name):
                    os.unlink(self.durable.with_name(name))
        except OSError:
            pass

    def check(self) -> None:
        """Raise InvalidArgument if no such store can be here."""
        if os.path.isdir(self.durable):  # not `is_dir`, which raises where nothing may be looked at
            raise InvalidArgument(
                f"{self.durable} is a directory", remedy="Pass the path of a file in it, such as 'shared.db'."
            )
        if kind := network_file_system(self.durable.parent):
            raise InvalidArgument(
                f"{self.durable} is on a network file system ({kind}): its locks do not tell whether a process of "
                f"another machine is alive, and SQLite can lose data there",
                remedy="Use a path on a disk of this machine, or PostgresStore to share between machines.",
            )


def boot_id() -> str | None:
    """Return what names this run of the machine; None if that cannot be known."""
    try:
        # Decoded from bytes: to open a text file imports a codec, which a fork in another thread leaves half imported.
        found = BOOT.read_bytes().decode("ascii").strip() if sys.platform != "darwin" else _darwin_boot_id()
    except (OSError, ValueError, AttributeError):
        return None
    return found if re.fullmatch(r"[0-9a-fA-F-]{8,64}", found) else None


def _darwin_boot_id() -> str:
    buffer = create_string_buffer(64)
    failed = CDLL(None).sysctlbyname(b"kern.bootsessionuuid", buffer, byref(c_size_t(len(buffer))), None, c_size_t(0))
    return "" if failed else buffer.value.decode("ascii")


def network_file_system(folder: Path) -> str | None:
    """Return the kind of the file system of a folder if that is one of the network; None if not, or unknown."""
    try:
        lines = MOUNTS.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return None
    where, longest, kind = os.path.realpath(folder), -1, ""
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 5 or not after:
            continue
        mounted = _ESCAPED.sub(lambda found: chr(int(found[1], 8)), fields[4]).rstrip("/")
        is_above = where == mounted or where.startswith(mounted + "/")
        if is_above and len(mounted) >= longest:  # a later mount of the same folder hides the earlier one
            longest, kind = len(mounted), after.split(" ")[0]
    return kind if _NETWORK.fullmatch(kind) else None
