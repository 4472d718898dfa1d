"""Nothing that decides is left out of recordings: no field of an input, no call of the core."""

import inspect
from dataclasses import dataclass, fields, replace

import pytest

from common.block_hash import root_key
from common.ids import RequestId, SeqId
from octavo.recording.v1 import recording_pb2 as pb
from scheduler_svc.core.request import Request, SamplingParams, ServiceClass, StopConditions
from scheduler_svc.core.run_ahead import RunAhead
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step_time import StepWork
from scheduler_svc.core.tenants import Tenants, TenantTerms
from scheduler_svc.recording.calls import CallEncoder
from scheduler_svc.recording.core import RecordedRunAhead, RecordedScheduler
from scheduler_svc.recording.plain_fields import PlainFields
from scheduler_svc.recording.replay import Replay
from scheduler_svc.recording.requests import request_of, sent_of, work_of
from scheduler_svc.recording.start import config_of, start_of
from tests.unit.scheduler_svc.core.rig import make_config

ASKS_ONLY = {
    "admitted_at_s", "cached_tokens", "check_integrity", "expected_wait_s", "has_work", "missing_keys", "next_in_line",
    "num_clean_blocks", "num_device_tokens", "num_prefill_tokens_ahead", "num_unsaved_blocks", "stats", "waiting_keys",
}  # fmt: skip
"""Of a scheduler: they change nothing, so a recording need not know of them."""
NAMELESS = {"request_id", "root_key", "tenant"}
"""Of a request: something else stands for them."""
NOT_RECORDED = {"sampling", "prompt_keys"}
"""Of a request: they decide nothing, or come from what is recorded."""


def public(kind: type) -> set[str]:
    return {
        name
        for name, member in vars(kind).items()
        if not name.startswith("_") and (callable(member) or isinstance(member, property))
    }


@pytest.mark.parametrize(
    ("plain", "recorded", "asks"), [(Scheduler, RecordedScheduler, ASKS_ONLY), (RunAhead, RecordedRunAhead, {"busy_s"})]
)
def test_every_call_that_changes_a_core_is_noted(plain: type, recorded: type, asks: set[str]) -> None:
    assert public(plain) == public(recorded) | asks
    for name in public(recorded):
        assert inspect.signature(getattr(plain, name)) == inspect.signature(getattr(recorded, name)), name


def test_every_record_is_written_and_run_again() -> None:
    for call in pb.Call.DESCRIPTOR.oneofs_by_name["call"].fields:
        if call.name != "over":  # the recorder's own
            assert hasattr(CallEncoder, call.name), f"nobody writes {call.name}"
            assert hasattr(Replay, f"_{call.name}") or call.name == "due", f"nobody runs {call.name}"


def test_a_request_comes_back_with_every_field_that_decides() -> None:
    request = Request(
        request_id=RequestId("a"), prompt_token_ids=(5, 6, 7), sampling=SamplingParams(), stop=StopConditions(9),
        root_key=root_key(bytes(32)), arrival_s=1.5, n=2, queue_deadline_s=3.5, generated=((8,), None),
        tenant="t", service_class=ServiceClass.BATCH, priority=-4, ttft_target_s=0.25, tpot_target_s=0.125, deadline_s=9.5,
    )  # fmt: skip
    unlike = [f.name for f in fields(Request) if f.default == getattr(request, f.name)]
    assert set(unlike) <= NOT_RECORDED, "a field that has its default value shows nothing"
    encoder = CallEncoder(b"s" * 32)
    encoder.start(make_config(prefix_caching=False), 2, "fair", ("m", "cpu", "float32"))
    found = request_of(encoder.add(request, (SeqId(1),)).add, 4, set())

    for name in {f.name for f in fields(Request)} - NAMELESS - NOT_RECORDED - {"prompt_token_ids", "generated", "stop"}:
        assert getattr(found, name) == getattr(request, name), name
    assert len(found.prompt_token_ids) == 3
    assert [None if one is None else len(one) for one in found.generated] == [1, None]
    assert found.stop.max_tokens == 9
    assert found.tenant


def test_limits_come_back_with_every_field() -> None:
    terms = TenantTerms(2.0, ServiceClass.BATCH, 3, 4, 5.0, 6)
    config = make_config(max_waiting_requests=7, save_blocks=True, tenants=Tenants({"a": terms}, replace(terms, weight=1.5)))
    config = replace(config, max_wait_s=2.5)

    assert config_of(start_of(config, 4, "fair", lambda name: name)) == config


def test_work_comes_back_with_every_field() -> None:
    work = StepWork(*range(1, 1 + len(fields(StepWork))))

    assert work_of(sent_of(work, 3.5)) == work


@dataclass(frozen=True)
class Grown:
    """A step's work that somebody gave a field."""

    num_decodes: int = 0
    num_images: int = 0


def test_a_field_without_a_counterpart_is_an_error_at_once() -> None:
    with pytest.raises(TypeError, match=r"num_images of Grown is not in recordings: .*octavo\.recording\.v1\.Sent"):
        PlainFields(Grown, pb.Sent)
    PlainFields(Grown, pb.Sent, elsewhere=("num_images",))
    with pytest.raises(TypeError, match="has no fields num_pictures"):
        PlainFields(StepWork, pb.Sent, elsewhere=("num_pictures",))
