"""Calls of a core as records. Knows the core's types and the format; no file, and no text: see outlines.py.

One method for each of the core's, with its arguments and what it returned. Runs beside the scheduler, in the order of the calls.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence

from common.block_hash import chain_keys
from common.errors import OctavoError
from common.ids import RequestId, SeqId
from octavo.recording.v1 import recording_pb2 as pb
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.plan import LoadPlan, SavePlan, SequenceUpdate, StepPlan
from scheduler_svc.core.request import FinishReason, Request
from scheduler_svc.core.step_time import StepWork
from scheduler_svc.recording import digests
from scheduler_svc.recording.outlines import DrawnTokens, Outline, Outliner
from scheduler_svc.recording.requests import sent_of, write_request
from scheduler_svc.recording.start import start_of


class CallEncoder:
    """See the module's first lines. Of one executor.

    Args:
        secret: of the substitutes.
    """

    def __init__(self, secret: bytes):
        self._secret = secret
        self._outliner = Outliner(secret, 1, is_keyed=False)
        self._numbers = itertools.count(1)
        self._request_numbers: dict[RequestId, int] = {}
        self._drawn: dict[SeqId, DrawnTokens] = {}
        self._seq_ids: dict[RequestId, set[SeqId]] = {}

    def start(self, config: SchedulerConfig, run_ahead: int, policy: str, device: tuple[str, str, str]) -> pb.Call:
        """A core is made; nothing is in it. Of its device: model, backend, dtype."""
        self._outliner = Outliner(self._secret, config.block_size, is_keyed=config.prefix_caching)
        start = start_of(config, run_ahead, policy, self._tenant)
        start.model, start.backend, start.dtype = device
        self._drawn.clear()
        self._seq_ids.clear()
        self._request_numbers.clear()
        return pb.Call(start=start)

    def add(self, request: Request, result: tuple[SeqId, ...] | OctavoError) -> pb.Call:
        """Scheduler.add, accepted or refused."""
        call = pb.Call()
        outliner = self._outliner
        is_new = not isinstance(result, OctavoError)
        prompt_keys = request.keys_of_prompt(outliner.block_size) if outliner.is_keyed else []
        add = call.add
        add.request = next(self._numbers) if is_new else self._request_numbers.get(request.request_id, 0)
        add.prompt.CopyFrom(_outline(outliner.outline(request.root_key, request.prompt_token_ids, prompt_keys)))
        write_request(request, add)
        add.root, add.tenant = outliner.root(request.root_key), self._tenant(request.tenant)
        chains = []
        for generated in request.generated or ((),) * request.n:
            if generated is None:
                add.samples.add()
                continue
            token_ids = [*request.prompt_token_ids, *generated]
            keys = prompt_keys
            if generated and outliner.is_keyed:
                keys = chain_keys(request.root_key, token_ids, outliner.block_size)
            if request.generated:
                add.samples.append(_outline(outliner.outline(request.root_key, token_ids, keys)))
            chains.append(DrawnTokens(outliner, request.root_key, token_ids, keys))
        if isinstance(result, OctavoError):
            call.digest, call.blocks_digest = digests.of_error(result)
            return call
        call.digest = digests.of_numbers(result)
        self._request_numbers[request.request_id] = add.request
        self._seq_ids[request.request_id] = set(result)
        self._drawn.update(zip(result, chains, strict=True))
        return call

    def cancel(self, request_id: RequestId, was_here: bool) -> pb.Call:
        """Scheduler.cancel."""
        call = pb.Call(cancel=pb.Cancel(request=self._request_numbers.get(request_id, 0)), digest=1 + was_here)
        self._forget(request_id)
        return call

    def finish_sequence(self, seq_id: SeqId) -> pb.Call:
        """Scheduler.finish_sequence."""
        self._drawn.pop(seq_id, None)
        return pb.Call(finish_sequence=pb.FinishSequence(seq_id=seq_id))

    def begin_load(self, request_id: RequestId, num_blocks: int, plan: LoadPlan | None) -> pb.Call:
        """Scheduler.begin_load."""
        load = pb.BeginLoad(request=self._request_numbers.get(request_id, 0), num_blocks=num_blocks)
        return _call(digests.of_transfer(plan.load_id, plan.block_ids) if plan else digests.NOTHING, begin_load=load)

    def end_load(self, load_id: int, num_loaded: int, num_by_tier: dict[str, int]) -> pb.Call:
        """Scheduler.end_load."""
        return pb.Call(end_load=pb.EndLoad(load_id=load_id, num_loaded=num_loaded, num_by_tier=num_by_tier))

    def schedule(self, now_s: float, plan: StepPlan | None) -> pb.Call:
        """Scheduler.schedule."""
        return _call(digests.of_plan(plan), schedule=pb.Schedule(now_s=now_s))

    def apply(
        self, step_id: int, token_ids: Mapping[SeqId, int], failed: Iterable[SeqId], updates: Iterable[SequenceUpdate]
    ) -> pb.Call:
        """Scheduler.apply."""
        apply = pb.Apply(step_id=step_id, failed_seq_ids=failed)
        taken = {update.seq_id: update for update in updates if update.token_ids}
        for place, (seq_id, token_id) in enumerate(token_ids.items()):
            update, chain = taken.get(seq_id), self._drawn.get(seq_id)
            token = 0  # the sequence had ended: nobody looks at it
            if update is not None and chain is not None:
                is_stop = update.finish_reason is FinishReason.STOP
                token = chain.take(token_id, is_stop=is_stop)
                if is_stop:
                    apply.stops.append(place)
            apply.seq_ids.append(seq_id)
            apply.tokens.append(token)
        self._note_ends(updates)
        return _call(digests.of_updates(updates), apply=apply)

    def expire(self, now_s: float, updates: Sequence[SequenceUpdate]) -> pb.Call:
        """Scheduler.expire."""
        self._note_ends(updates)
        return _call(digests.of_updates(updates), expire=pb.Expire(now_s=now_s))

    def take_saves(self, max_blocks: int, plan: SavePlan | None) -> pb.Call:
        """Scheduler.take_saves."""
        result = digests.of_transfer(plan.save_id, plan.block_ids) if plan else digests.NOTHING
        return _call(result, take_saves=pb.TakeSaves(max_blocks=max_blocks))

    def end_save(self, save_id: int) -> pb.Call:
        """Scheduler.end_save."""
        return pb.Call(end_save=pb.EndSave(save_id=save_id))

    def flush_cache(self, num_blocks: int) -> pb.Call:
        """Scheduler.flush_cache."""
        return _call((digests.of_numbers((num_blocks,)), 0), flush_cache=pb.FlushCache())

    def reset(self) -> pb.Call:
        """Scheduler.reset."""
        return pb.Call(reset=pb.Reset())

    def drain(self, requests: Sequence[Request]) -> pb.Call:
        """Scheduler.drain."""
        return _call(self._taken_out(requests), drain=pb.Drain())

    def evacuate(self, requests: Sequence[Request]) -> pb.Call:
        """Scheduler.evacuate."""
        return _call(self._taken_out(requests), evacuate=pb.Evacuate())

    def due(self, now_s: float, due_s: float | None) -> pb.Call:
        """RunAhead.due_s."""
        return pb.Call(due=pb.Due(now_s=now_s, due_s=due_s))

    def sent(self, work: StepWork, now_s: float) -> pb.Call:
        """RunAhead.note_sent."""
        return pb.Call(sent=sent_of(work, now_s))

    def ended(self, seconds: float, idle_s: float, now_s: float) -> pb.Call:
        """RunAhead.note_ended."""
        return pb.Call(ended=pb.Ended(seconds=seconds, idle_s=idle_s, now_s=now_s))

    def restart(self) -> pb.Call:
        """RunAhead.restart."""
        return pb.Call(restart=pb.Restart())

    def _tenant(self, name: str) -> str:
        """A name that says nothing; the same for the same tenant."""
        return f"{self._outliner.digest(name.encode()):08x}" if name else ""

    def _taken_out(self, requests: Sequence[Request]) -> digests.Digests:
        numbers = [self._request_numbers.get(request.request_id, 0) for request in requests]
        for request in requests:
            self._forget(request.request_id)
        return digests.of_requests(numbers, requests)

    def _note_ends(self, updates: Iterable[SequenceUpdate]) -> None:
        for update in updates:
            if update.finish_reason is None:
                continue
            self._drawn.pop(update.seq_id, None)
            left = self._seq_ids.get(update.request_id, set())
            left.discard(update.seq_id)
            if not left:
                self._forget(update.request_id)

    def _forget(self, request_id: RequestId) -> None:
        self._request_numbers.pop(request_id, None)
        for seq_id in self._seq_ids.pop(request_id, ()):
            self._drawn.pop(seq_id, None)


def _outline(outline: Outline) -> pb.Outline:
    return pb.Outline(num_tokens=outline.num_tokens, blocks=outline.blocks, tail=outline.tail)


def _call(result: digests.Digests, **call: object) -> pb.Call:
    return pb.Call(digest=result[0], blocks_digest=result[1], **call)  # type: ignore[arg-type]
