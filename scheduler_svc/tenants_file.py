"""The file of tenants: TOML, read once at the start. Knows the format and its limits; what terms mean is core/tenants.py.

[others]                      # everybody who is not named, each for itself
weight = 1.0

[tenants.acme]
weight = 4.0                  # four times the share of others that wait
default_class = "interactive"
max_waiting_requests = 200
max_waiting_tokens = 500000
tokens_per_s = 20000          # prompt tokens and max_tokens, in the long run
burst_tokens = 400000
token = "secret"              # calls with this bearer token are acme's
"""

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from common.errors import StartupError
from scheduler_svc.core.request import ServiceClass
from scheduler_svc.core.tenants import Tenants, TenantTerms


@dataclass(frozen=True, slots=True)
class TenantsFile:
    """What a file says.

    Attributes:
        tenants: their terms.
        tenant_of_token: those that have a token, by SHA-256 of it, hexadecimal.
    """

    tenants: Tenants = field(default_factory=Tenants)
    tenant_of_token: Mapping[str, str] = field(default_factory=dict)


def read_tenants(path: Path | None) -> TenantsFile:
    """Reads a file; None: nobody has terms of its own.

    Raises:
        StartupError: it cannot be read, or a value is out of its range; the message names it.
    """
    if path is None:
        return TenantsFile()
    try:
        content = _Content.model_validate(tomllib.loads(path.read_text()))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise StartupError(f"--tenants {path}: {error}") from error
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(str(part) for part in e['loc'])}: {e['msg']}" for e in error.errors())
        raise StartupError(f"--tenants {path}: {problems}") from error
    tokens: dict[str, str] = {}
    for name, entry in content.tenants.items():
        if entry.token is not None:
            digest = hashlib.sha256(entry.token.get_secret_value().encode()).hexdigest()
            if digest in tokens:
                raise StartupError(f"--tenants {path}: tenants.{name}.token: is also that of {tokens[digest]}")
            tokens[digest] = name
    terms = {name: entry.terms() for name, entry in content.tenants.items()}
    return TenantsFile(Tenants(terms, content.others.terms()), tokens)


class _Terms(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    weight: float = Field(1.0, ge=0.001, le=1000.0, allow_inf_nan=False)
    default_class: Literal["interactive", "standard", "batch"] = "standard"
    max_waiting_requests: int | None = Field(None, ge=1)
    max_waiting_tokens: int | None = Field(None, ge=1)
    tokens_per_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    burst_tokens: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _burst_has_a_rate(self) -> "_Terms":
        if (self.tokens_per_s is None) != (self.burst_tokens is None):
            raise ValueError("tokens_per_s and burst_tokens go together")
        return self

    def terms(self) -> TenantTerms:
        return TenantTerms(
            self.weight,
            ServiceClass[self.default_class.upper()],
            self.max_waiting_requests,
            self.max_waiting_tokens,
            self.tokens_per_s,
            self.burst_tokens or 0,
        )


class _Tenant(_Terms):
    token: Annotated[SecretStr, Field(min_length=1)] | None = None


class _Content(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    others: _Terms = _Terms()
    tenants: dict[Annotated[str, Field(min_length=1, max_length=128)], _Tenant] = Field(default_factory=dict)
