"""Where a server keeps what should outlive it: below the user's home, one folder for each address. Knows paths only."""

import re
from pathlib import Path

STATE_FOLDER = Path("~/.local/state/octavo")


def kv_folder(address: str) -> Path:
    """Folder of the block store's disk tier, of the server at an address; "~" stands for the user's home."""
    return STATE_FOLDER / "kv" / re.sub(r"[^\w.-]+", "_", address)
