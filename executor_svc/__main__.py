"""python -m executor_svc: reads settings, runs the executor, says in one line what is wrong when it cannot."""

import asyncio
import logging
import sys

from common.errors import StartupError
from common.logs import setup_logging
from common.settings import load_settings, log_settings
from executor_svc.settings import ExecutorSettings

log = logging.getLogger("executor_svc")


def main() -> int:
    """Returns the exit status."""
    setup_logging("executor")
    try:
        settings = load_settings(ExecutorSettings, sys.argv[1:])
        setup_logging(settings.executor_id, settings.log_level)
        log_settings(settings)
        from executor_svc.app import serve

        return asyncio.run(serve(settings))
    except StartupError as error:
        log.error("cannot start: %s", error.message)
        return 1


if __name__ == "__main__":
    sys.exit(main())
