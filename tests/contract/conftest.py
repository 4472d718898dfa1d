"""The scheduler of the integration tests."""

from tests.integration.scheduler_svc.conftest import model_folder, num_edges, serve

__all__ = ["model_folder", "num_edges", "serve"]
