"""Settings: flag before environment before default, clear refusals, masked secrets."""

import logging
from pathlib import Path

import pytest
from pydantic import Field, SecretStr, ValidationError

from common.errors import StartupError
from common.settings import ServiceSettings, load_settings, log_settings, settings_config


class FakeSettings(ServiceSettings):
    """Settings of a service that does not exist."""

    model_config = settings_config("OCTAVO_FAKE_", "fake_svc")

    listen: str = Field("127.0.0.1:1", description="where")
    peers: list[str] = Field(default_factory=list, description="addresses")
    num_blocks: int = Field(8, ge=1, description="blocks")
    folder: Path | None = Field(None, description="a folder")
    token: SecretStr = Field(SecretStr(""), description="a secret")
    insecure: bool = Field(False, description="a switch")


def test_a_flag_beats_the_environment_and_the_environment_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_FAKE_LISTEN", "from-environment:1")
    monkeypatch.setenv("OCTAVO_FAKE_NUM_BLOCKS", "3")

    settings = load_settings(FakeSettings, ["--listen", "from-flag:1"])

    assert (settings.listen, settings.num_blocks, settings.log_level) == ("from-flag:1", 3, "INFO")


def test_flags_are_kebab_case_switches_need_no_value_and_lists_repeat() -> None:
    settings = load_settings(
        FakeSettings, ["--num-blocks", "5", "--insecure", "--peers", "a", "--peers", "b", "--folder", "/tmp"]
    )

    assert settings.num_blocks == 5
    assert settings.insecure
    assert settings.peers == ["a", "b"]
    assert settings.folder == Path("/tmp")


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--num-blocks", "0"], "--num-blocks: Input should be greater than or equal to 1"),
        (["--num-blocks", "many"], "--num-blocks: Input should be a valid integer"),
        (["--grace-s", "-1"], "--grace-s: Input should be greater than or equal to 0"),
        (["--bogus", "1"], "unrecognized arguments: --bogus"),
        (["--num-blocks"], "expected one argument"),
    ],
)
def test_a_bad_flag_is_refused_by_name(argv: list[str], problem: str) -> None:
    with pytest.raises(StartupError) as caught:
        load_settings(FakeSettings, argv)

    assert problem in caught.value.message


def test_a_list_in_the_environment_is_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_FAKE_PEERS", '["a", "b"]')

    assert load_settings(FakeSettings, []).peers == ["a", "b"]


@pytest.mark.parametrize("value", ["a,b", "[broken"])
def test_a_bad_list_in_the_environment_is_refused_with_its_name_and_its_form(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_FAKE_PEERS", value)

    with pytest.raises(StartupError, match=r"peers.*a list in the environment is JSON"):
        load_settings(FakeSettings, [])


def test_a_bad_number_in_the_environment_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_FAKE_NUM_BLOCKS", "many")

    with pytest.raises(StartupError, match="--num-blocks"):
        load_settings(FakeSettings, [])


def test_settings_do_not_change() -> None:
    settings = load_settings(FakeSettings, [])

    with pytest.raises(ValidationError):
        settings.num_blocks = 9


def test_secrets_are_masked_where_settings_are_shown(caplog: pytest.LogCaptureFixture) -> None:
    settings = load_settings(FakeSettings, ["--token", "hunter2"])

    with caplog.at_level(logging.INFO, logger="common.settings"):
        log_settings(settings)

    assert settings.token.get_secret_value() == "hunter2"
    assert "hunter2" not in caplog.text + repr(settings) + str(settings.shown())
    assert "num_blocks=8" in caplog.text


def test_help_ends_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_settings(FakeSettings, ["--help"])

    assert caught.value.code == 0
    assert "--num-blocks" in capsys.readouterr().out
