"""Inspection of steps on a machine without a GPU."""

import pytest
import torch

from common.errors import StartupError
from executor_svc.step_inspection import InspectionSettings, inspect_steps, missing_parts


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what it takes")
def test_what_is_missing_is_said() -> None:
    assert "CUDA" in " ".join(missing_parts())
    with pytest.raises(StartupError, match="on a GPU, and this machine lacks"):
        next(inspect_steps(InspectionSettings()))
