"""The log format, in a process of its own: it changes the root logger."""

import re
import subprocess
import sys

_PROGRAM = """
import logging
from common.logs import setup_logging
setup_logging("kvstore", "warning")
setup_logging("kvstore", "warning")  # twice is once
logging.getLogger("x").info("hidden")
logging.getLogger("x").warning("shown")
"""


def test_one_line_an_entry_on_standard_error_with_time_process_and_level() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)

    assert done.stdout == ""
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} kvstore +WARNING shown\n", done.stderr)
