"""Other Pythons of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path


def interpreter(minor: int) -> str | None:
    """A Python 3.`minor` that really runs: a shim of pyenv may be on the path for a version that is switched off."""
    versions = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    found = [shutil.which(f"python3.{minor}"), *map(str, sorted(versions.glob(f"3.{minor}*/bin/python"), reverse=True))]
    for candidate in filter(None, found):
        answer = subprocess.run(
            [candidate, "-c", "import sys; print(sys.version_info[1])"], capture_output=True, text=True, check=False
        )
        if answer.returncode == 0 and answer.stdout.strip() == str(minor):
            return candidate
    return None
