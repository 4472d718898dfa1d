"""The limits of a core as a record, and back. Knows both shapes; makes no core."""

from collections.abc import Callable

from octavo.recording.v1 import recording_pb2 as pb
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.request import ServiceClass
from scheduler_svc.core.tenants import Tenants, TenantTerms

_PLAIN = (
    "num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_chunk_tokens", "max_waiting_requests",
    "max_waiting_tokens", "prefix_caching", "save_blocks",
)  # fmt: skip
_OPTIONAL_TERMS = ("max_waiting_requests", "max_waiting_tokens", "tokens_per_s")
_OTHERS = ""


def start_of(config: SchedulerConfig, run_ahead: int, policy: str, tenant: Callable[[str], str]) -> pb.Start:
    """The record of a core that is made.

    Args:
        config: its limits.
        run_ahead: most steps under way.
        policy: name of it.
        tenant: what stands for a tenant's name.
    """
    start = pb.Start(run_ahead=run_ahead, policy=policy, **{name: getattr(config, name) for name in _PLAIN})
    if config.max_wait_s is not None:
        start.max_wait_s = config.max_wait_s
    for name, terms in {**config.tenants.by_name, _OTHERS: config.tenants.others}.items():
        record = start.tenants[tenant(name)]
        record.weight, record.default_class, record.burst_tokens = terms.weight, terms.default_class, terms.burst_tokens
        for limit in _OPTIONAL_TERMS:
            if (value := getattr(terms, limit)) is not None:
                setattr(record, limit, value)
    return start


def config_of(start: pb.Start) -> SchedulerConfig:
    """The limits of a recorded core."""
    terms = {
        name: TenantTerms(
            record.weight,
            ServiceClass(record.default_class),
            burst_tokens=record.burst_tokens,
            **{limit: getattr(record, limit) for limit in _OPTIONAL_TERMS if record.HasField(limit)},  # type: ignore[arg-type]
        )
        for name, record in start.tenants.items()
    }
    others = terms.pop(_OTHERS, TenantTerms())
    return SchedulerConfig(
        **{name: getattr(start, name) for name in _PLAIN},
        max_wait_s=start.max_wait_s if start.HasField("max_wait_s") else None,
        tenants=Tenants(terms, others),
    )
