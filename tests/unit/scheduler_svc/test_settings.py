import pytest

from common.errors import StartupError
from common.settings import load_settings
from scheduler_svc.settings import SchedulerSettings


def test_flags_of_a_command_line() -> None:
    settings = load_settings(
        SchedulerSettings,
        ["--executors", "a:1", "--executors", "unix:/b", "--no-prefix-caching", "--insecure", "--run-ahead", "3"],
    )
    assert settings.executors == ["a:1", "unix:/b"]
    assert (settings.prefix_caching, settings.insecure, settings.run_ahead) == (False, True, 3)


def test_executors_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_SCHEDULER_EXECUTORS", '["a:1", "b:2"]')
    assert load_settings(SchedulerSettings, []).executors == ["a:1", "b:2"]


def test_an_executor_may_be_named_once_only() -> None:
    with pytest.raises(StartupError, match=r"--executors.*twice"):
        load_settings(SchedulerSettings, ["--executors", "a:1", "--executors", "a:1"])


def test_an_edge_process_gets_everything_secrets_included() -> None:
    settings = load_settings(SchedulerSettings, ["--token", "secret", "--executors", "a:1", "--model", "/m", "--grace-s", "3"])
    assert SchedulerSettings.from_json(settings.to_json()) == settings


def test_secrets_are_not_shown() -> None:
    settings = load_settings(SchedulerSettings, ["--token", "secret", "--cache-salt", "pepper"])
    assert "secret" not in str(settings.shown()) and "pepper" not in str(settings.shown())
    assert settings.security().token == "secret"


@pytest.mark.parametrize("flag", ["--run-ahead=0", "--max-waiting-requests=0", "--grace-s=-1", "--max-chunk-tokens=x"])
def test_a_value_out_of_range_names_its_flag(flag: str) -> None:
    with pytest.raises(StartupError, match=flag.partition("=")[0]):
        load_settings(SchedulerSettings, [flag])
