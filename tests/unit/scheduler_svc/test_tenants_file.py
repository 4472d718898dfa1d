from pathlib import Path

import pytest

from common.errors import StartupError
from scheduler_svc.core.request import ServiceClass
from scheduler_svc.core.tenants import TenantTerms
from scheduler_svc.tenants_file import read_tenants


def test_terms_of_those_who_are_named_and_of_others(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(
        """
        [others]
        default_class = "batch"
        [tenants.acme]
        weight = 4
        default_class = "interactive"
        max_waiting_requests = 2
        max_waiting_tokens = 300
        tokens_per_s = 20.5
        burst_tokens = 400
        token = "secret"
        """
    )
    found = read_tenants(path)
    assert found.tenants.terms("acme") == TenantTerms(4.0, ServiceClass.INTERACTIVE, 2, 300, 20.5, 400)
    assert found.tenants.terms("somebody") == TenantTerms(default_class=ServiceClass.BATCH)
    assert list(found.tenant_of_token.values()) == ["acme"]
    assert "secret" not in repr(found)


def test_without_a_file_all_are_equal() -> None:
    assert read_tenants(None).tenants.terms("anybody") == TenantTerms()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[others]\nweight = 0", "others.weight: Input should be greater than or equal to 0.001"),
        ("[tenants.a]\nweight = inf", "tenants.a.weight: Input should be a finite number"),
        (
            "[tenants.a]\ndefault_class = 'urgent'",
            "tenants.a.default_class: Input should be 'interactive', 'standard' or 'batch'",
        ),
        ("[tenants.a]\ntokens_per_s = 5", "tokens_per_s and burst_tokens go together"),
        ("[tenants.a]\nspeed = 5", "tenants.a.speed: Extra inputs are not permitted"),
        ("[tenants.a]\ntoken = ''", "tenants.a.token"),
        ("[tenants.a]\ntoken = 'x'\n[tenants.b]\ntoken = 'x'", "tenants.b.token: is also that of a"),
        ("[tenants", "tenants.toml: Expected"),
    ],
)
def test_a_bad_value_is_named_with_its_limit(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(content)
    with pytest.raises(StartupError) as error:
        read_tenants(path)
    assert problem in error.value.message
    assert str(path) in error.value.message


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="No such file"):
        read_tenants(tmp_path / "none.toml")
