"""Settings of the executor: names that two modules share, and the way to the worker."""

from pydantic import SecretStr

from executor_svc.model import prepare
from executor_svc.settings import DEFAULT_MODEL, ExecutorSettings, default_cache_dir


def test_the_default_model_and_its_cache_are_those_of_preparation() -> None:
    assert prepare.DEFAULT_MODEL == DEFAULT_MODEL
    assert default_cache_dir() == prepare.DEFAULT_CACHE_DIR


def test_the_worker_reads_the_settings_that_the_front_has() -> None:
    settings = ExecutorSettings(num_blocks=7, token=SecretStr("a"), kvstore_token=SecretStr("b"), executor_id="e")

    assert ExecutorSettings.from_json(settings.to_json()) == settings
    assert "b" not in settings.shown().values()
