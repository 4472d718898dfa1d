"""The scheduler of the integration tests."""

from tests.integration.scheduler_svc.conftest import model_folder, serve

__all__ = ["model_folder", "serve"]
