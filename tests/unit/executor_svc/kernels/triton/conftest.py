"""Kernels run in Triton's interpreter here, which is chosen when they are decorated: before any of them is imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"
