"""What becomes of sequences when results of steps come: they get their tokens, end, fail, or are computed again.

Knows requests, those that wait and a session. Does not know what is planned next.
"""

from collections.abc import Mapping
from operator import contains

from common.ids import SeqId
from scheduler_svc.core.admission import Admission
from scheduler_svc.core.decodes import DecodeStep
from scheduler_svc.core.outstanding import PlannedStep
from scheduler_svc.core.plan import SequenceUpdate
from scheduler_svc.core.request import FinishReason
from scheduler_svc.core.request_table import RequestTable
from scheduler_svc.core.sequence import Sequence, SequenceStatus
from scheduler_svc.core.session import Session
from scheduler_svc.core.updates import StepUpdates
from scheduler_svc.core.waiting_queue import WaitingQueue

_FIRST_MEAN_OUTPUT_TOKENS = 128.0
_MEAN_WEIGHT = 0.02


class Results:
    """See the module's first lines.

    Attributes:
        num_discarded_tokens: drawn by steps that did not count any more.
        mean_output_tokens: of sequences that ended by their tokens, a moving average.

    Args:
        saves_blocks: whether computed full blocks are offered to the store.
    """

    def __init__(self, requests: RequestTable, waiting: WaitingQueue, admission: Admission, *, saves_blocks: bool):
        self.num_discarded_tokens = 0
        self.mean_output_tokens = _FIRST_MEAN_OUTPUT_TOKENS
        self._requests = requests
        self._waiting = waiting
        self._admission = admission
        self._saves_blocks = saves_blocks

    def apply(
        self, session: Session, step: PlannedStep, token_ids: Mapping[SeqId, int], errors: Mapping[SeqId, str]
    ) -> StepUpdates:
        """Takes in a step's result.

        Args:
            session: in which it was planned.
            step: the oldest that was outstanding.
            token_ids: of the chunks that reached the end of their sequences' known tokens.
            errors: sequences that failed alone, with the reason.
        """
        updates = StepUpdates()
        failures = dict(errors)
        decodes = step.decodes
        seq_ids = decodes.rows.seq_ids
        if errors or not all(map(token_ids.__contains__, seq_ids)):
            for sequence in decodes.rows.sequences:
                self._take_chunk(session, step, sequence, 1, True, token_ids, failures, updates)
        else:
            self._take_decodes(session, step, decodes, list(map(token_ids.__getitem__, seq_ids)), updates)
        for sequence, num_tokens, is_sampling in step.chunks:
            self._take_chunk(session, step, sequence, num_tokens, is_sampling, token_ids, failures, updates)
        for seq_id, message in failures.items():
            self._void_blocks(session, step, seq_id)
            failed = self._requests.sequence(seq_id)
            if failed is not None and failed not in step.void:
                self.end(session, failed)
                updates.failed.append(failed.update(finish_reason=FinishReason.ERROR, error_message=message))
        return updates

    def end(self, session: Session, sequence: Sequence) -> None:
        """Takes a sequence out, whatever it is doing; its request too, if it was the last sample."""
        if sequence.status is SequenceStatus.RUNNING:
            session.running.stop(sequence)
        else:
            self._waiting.remove(sequence)
        session.outstanding.void(sequence)
        sequence.status = SequenceStatus.FINISHED
        state = self._requests.remove(sequence)
        if not state.sequences and state.is_queued:
            self._admission.count_out(state.request)

    def replay(self, session: Session, sequence: Sequence) -> None:
        """Goes back to the tokens that are known for certain: steps in flight are void."""
        if sequence.status is SequenceStatus.FINISHED:
            return
        is_running = sequence.status is SequenceStatus.RUNNING
        if is_running:
            session.running.stop(sequence)
        session.void(sequence)
        if is_running:
            self._waiting.insert(sequence)

    def _take_decodes(
        self, session: Session, step: PlannedStep, decodes: DecodeStep, tokens: list[int], updates: StepUpdates
    ) -> None:
        """What _take_chunk does, for a token each of many sequences of which few need a look."""
        rows, void = decodes.rows, step.void
        gone = [i for i, sequence in enumerate(rows.sequences) if sequence in void] if void else []
        if gone:
            self.num_discarded_tokens += len(gone)
            rows = rows.copy()
            for i in reversed(gone):
                rows.delete(i)
                del tokens[i]
        if self._saves_blocks:
            for sequence in decodes.filling:
                if sequence.status is SequenceStatus.RUNNING and sequence not in void:
                    sequence.num_applied_tokens = len(sequence.token_ids)
                    session.running.offer_saves(sequence)
        for output, token in zip(rows.outputs, tokens, strict=True):
            output.append(token)
        updates.samples += rows.samples
        updates.token_ids += tokens
        completing = [sequence for sequence in decodes.completing if sequence not in void]
        for sequence in completing:
            sequence.extend_keys()
        if session.outstanding.newest is not None:  # else their newest tokens are not planned
            session.running.list_blocks(sequence for sequence in completing if sequence.status is SequenceStatus.RUNNING)
        ended = {rows.seq_ids.index(sequence.seq_id) for sequence in decodes.last if sequence not in void}
        stops = list(map(contains, rows.stops, tokens))
        if True in stops:
            ended.update(i for i, is_stop in enumerate(stops) if is_stop)
        for i in sorted(ended):
            sequence = rows.sequences[i]
            reason = sequence.reason_to_end()
            assert reason is not None, f"sequence {sequence.seq_id} has not come to its end"
            updates.ended[sequence.seq_id] = self._finish(session, sequence, tokens[i], reason)

    def _take_chunk(
        self,
        session: Session,
        step: PlannedStep,
        sequence: Sequence,
        num_tokens: int,
        is_sampling: bool,
        token_ids: Mapping[SeqId, int],
        failures: dict[SeqId, str],
        updates: StepUpdates,
    ) -> None:
        seq_id = sequence.seq_id
        token_id = token_ids.get(seq_id) if is_sampling else None
        if sequence in step.void:
            self.num_discarded_tokens += token_id is not None
            return
        if seq_id in failures:
            return
        if sequence.status is SequenceStatus.RUNNING:
            sequence.num_applied_tokens = len(sequence.token_ids) if is_sampling else sequence.num_applied_tokens + num_tokens
            if self._saves_blocks:
                session.running.offer_saves(sequence)
        if token_id is None:
            if is_sampling:
                failures[seq_id] = f"the executor returned no token in step {step.step_id}"
            return
        reason = sequence.append(token_id)
        if sequence.status is SequenceStatus.RUNNING:
            session.running.list_blocks([sequence])
        updates.samples.append(sequence.sample)
        updates.token_ids.append(token_id)
        if reason is not None:
            updates.ended[seq_id] = self._finish(session, sequence, token_id, reason)

    def _finish(self, session: Session, sequence: Sequence, token_id: int, reason: FinishReason) -> SequenceUpdate:
        num_output_tokens = len(sequence.token_ids) - sequence.num_prompt_tokens
        self.mean_output_tokens += _MEAN_WEIGHT * (num_output_tokens - self.mean_output_tokens)
        self.end(session, sequence)
        stop_token_id = token_id if reason is FinishReason.STOP else None
        return sequence.update((token_id,), finish_reason=reason, stop_token_id=stop_token_id)

    def _void_blocks(self, session: Session, step: PlannedStep, seq_id: SeqId) -> None:
        """A sequence failed in a step. What later steps built on its blocks is computed again."""
        for block_id, owner in step.listed:
            if owner.seq_id == seq_id:
                session.pool.forget(block_id)
        for later in session.outstanding:
            for block_id, _ in later.listed:
                session.pool.forget(block_id)
            for sequence in later.attached:
                self.replay(session, sequence)
