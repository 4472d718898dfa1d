"""Triton's kernels run in its interpreter here, which is chosen when they are decorated: before any of them is imported.

Kept in the unit tests' topmost folder, because modules beside the kernels import them too.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"
