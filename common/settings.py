"""Settings of a process: one frozen, typed object, from flags and environment. Nothing else reads os.environ.

class SchedulerSettings(ServiceSettings):
    model_config = settings_config("OCTAVO_SCHEDULER_")
    listen: str = Field("127.0.0.1:50051", description="...")

settings = load_settings(SchedulerSettings, argv)      # --listen beats OCTAVO_SCHEDULER_LISTEN beats the default
"""

import logging
from collections.abc import Sequence
from typing import TypeVar

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict, SettingsError

from common.errors import StartupError

log = logging.getLogger(__name__)


class ServiceSettings(BaseSettings):
    """What every service can be told."""

    log_level: str = Field("INFO", description="DEBUG, INFO, WARNING or ERROR")
    metrics_listen: str = Field("", description="host:port for Prometheus metrics over HTTP; empty: none")
    grace_s: float = Field(10.0, ge=0, description="seconds that running calls get to finish after SIGTERM")

    def shown(self) -> dict[str, str]:
        """Settings by name for people, secrets masked."""
        return {name: str(value) for name, value in self if not isinstance(value, SecretStr) or value.get_secret_value()}


SettingsT = TypeVar("SettingsT", bound=ServiceSettings)


def settings_config(env_prefix: str, prog: str) -> SettingsConfigDict:
    """The model_config of a settings class.

    Args:
        env_prefix: of its environment variables, for example "OCTAVO_SCHEDULER_".
        prog: program name in --help.
    """
    return SettingsConfigDict(
        env_prefix=env_prefix,
        frozen=True,
        extra="forbid",
        cli_prog_name=prog,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )


def load_settings(settings_class: type[SettingsT], argv: Sequence[str]) -> SettingsT:
    """Reads flags and environment.

    Raises:
        StartupError: a value is out of range or a flag is unknown; the message names it.
        SystemExit: --help was asked for.
    """
    try:
        return CliApp.run(settings_class, cli_args=list(argv), cli_exit_on_error=False)
    except ValidationError as error:
        problems = "; ".join(f"--{'.'.join(str(p) for p in e['loc']).replace('_', '-')}: {e['msg']}" for e in error.errors())
        raise StartupError(f"bad settings: {problems}") from error
    except SettingsError as error:
        hint = '; a list in the environment is JSON, for example ["a", "b"]' if "EnvSettingsSource" in str(error) else ""
        raise StartupError(f"bad settings: {error}{hint}") from error


def log_settings(settings: ServiceSettings) -> None:
    """Writes every setting into the log, secrets masked."""
    log.info("settings %s", " ".join(f"{name}={value}" for name, value in settings.shown().items()))
