"""Starts the block store: python -m kvstore_svc [--help]."""

import asyncio
import sys

from common.errors import StartupError
from common.logs import setup_logging
from common.settings import load_settings, log_settings
from common.switch_interval import switch_often
from kvstore_svc.app import serve
from kvstore_svc.settings import KvStoreSettings


def main() -> None:
    """Reads settings, serves until SIGTERM; a StartupError is one line and exit status 1."""
    try:
        settings = load_settings(KvStoreSettings, sys.argv[1:])
        setup_logging("kvstore", settings.log_level)
        log_settings(settings)
        switch_often()
        asyncio.run(serve(settings))
    except StartupError as error:
        sys.exit(f"kvstore_svc: {error.message}")


if __name__ == "__main__":
    main()
