"""What one executor can be expected to do: when it would be through with a request, how much it can do at all.

Knows the core's figures and the learned times of steps. Decides nothing.
"""

from common.ids import ExecutorId
from octavo.executor.v1 import executor_service_pb2 as pb
from scheduler_svc.core.forecast.capacity import ExecutorCapacity, measured_capacity
from scheduler_svc.core.forecast.wait import Backlog, WaitForecast
from scheduler_svc.core.placement import Candidate
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step_time import StepTimeModel
from scheduler_svc.generation import Generation


class Outlook:
    """Of one executor with the limits that it has in a session.

    Args:
        executor_id: for placement.
        scheduler: its core.
        info: its limits.
        step_times: learned from its steps.
    """

    def __init__(self, executor_id: ExecutorId, scheduler: Scheduler, info: pb.ExecutorInfo, step_times: StepTimeModel):
        self._executor_id = executor_id
        self._scheduler = scheduler
        self._info = info
        self._step_times = step_times
        self._waits = WaitForecast(step_times, info.max_num_batched_tokens)

    def capacity(self, mean_sequence_tokens: float) -> ExecutorCapacity | None:
        """What the executor can do, see measured_capacity; None: not known yet."""
        info = self._info
        num_cache_tokens = info.num_blocks * info.block_size
        return measured_capacity(
            self._step_times, info.max_num_batched_tokens, info.max_num_seqs, num_cache_tokens, mean_sequence_tokens
        )

    def candidate(self, generation: Generation, num_output_tokens: float, num_arriving_tokens: int) -> Candidate:
        """What placement weighs.

        Args:
            generation: to be placed.
            num_output_tokens: that it will probably get.
            num_arriving_tokens: of prompts that are on their way here and in no queue yet.
        """
        scheduler, stats = self._scheduler, self._scheduler.stats()
        num_device_tokens, finish_s = 0, None
        if scheduler.config.prefix_caching:
            keys = generation.prompt_keys(scheduler.config.block_size)
            num_device_tokens = scheduler.num_device_tokens(generation.request.root_key, keys)
        if self._waits.is_known:
            backlog = Backlog(
                num_prompt_tokens=stats.num_waiting_tokens + num_arriving_tokens + scheduler.num_prefill_tokens_ahead,
                num_waiting=stats.num_waiting_requests,
                num_running=stats.num_running_sequences,
                num_seats=self._info.max_num_seqs,
                num_blocks=stats.num_blocks,
                num_used_blocks=stats.num_used_blocks,
                block_size=self._info.block_size,
                num_output_tokens=num_output_tokens,
            )
            num_prompt_tokens = len(generation.request.prompt_token_ids)
            finish_s = self._waits.expected_finish_s(backlog, num_prompt_tokens, num_device_tokens, num_output_tokens)
        return Candidate(
            executor_id=self._executor_id,
            num_device_tokens=num_device_tokens,
            num_waiting_tokens=stats.num_waiting_tokens + num_arriving_tokens,
            num_running_sequences=stats.num_running_sequences,
            num_free_blocks=stats.num_blocks - stats.num_used_blocks,
            finish_s=finish_s,
        )
