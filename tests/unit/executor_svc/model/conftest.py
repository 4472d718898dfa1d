"""The default model, prepared once into the cache that services use."""

from pathlib import Path

import pytest

from executor_svc.model.prepare import DEFAULT_CACHE_DIR, DEFAULT_MODEL, prepare_model


@pytest.fixture(scope="session")
def default_model_folder() -> Path:
    return prepare_model(DEFAULT_MODEL, DEFAULT_CACHE_DIR, print)
