"""python -m scheduler_svc: the public API. Exits 0 after a clean stop and 1 when it cannot start."""

import asyncio
import logging
import sys

from common.errors import StartupError
from common.logs import setup_logging
from common.settings import load_settings, log_settings
from scheduler_svc.app import serve
from scheduler_svc.settings import SchedulerSettings


def main() -> int:
    """Reads settings and runs until told to stop."""
    setup_logging("scheduler")
    try:
        settings = load_settings(SchedulerSettings, sys.argv[1:])
        setup_logging("scheduler", settings.log_level)
        log_settings(settings)
        asyncio.run(serve(settings))
    except StartupError as error:
        logging.getLogger(__name__).error("cannot start: %s", error.message)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
