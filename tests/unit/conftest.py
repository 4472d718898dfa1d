"""What all unit tests share.

Triton's kernels run in its interpreter here, which is chosen when they are decorated: before any of them is imported. Kept in the
unit tests' topmost folder, because modules beside the kernels import them too.

Hypothesis measures no time: an example that is slow on a busy machine says nothing about the code.
"""

import os

from hypothesis import HealthCheck, settings

os.environ["TRITON_INTERPRET"] = "1"
settings.register_profile("octavo", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("octavo")
