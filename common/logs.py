"""The one log format of all processes. Knows the standard library's logging only."""

import logging
import sys


def setup_logging(process_name: str, level: str = "INFO") -> None:
    """Sends the log to standard error, one line an entry: time, process, level, message."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s.%(msecs)03d {process_name:<11} %(levelname)-7s %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
