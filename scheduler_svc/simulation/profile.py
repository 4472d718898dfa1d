"""What a simulated executor is like: how large, and how long its steps take. Plain data; learned ones come from recordings."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from common.errors import StartupError
from scheduler_svc.core.step_time import MANY_PREFILL_TOKENS, StepTimeModel, StepWork


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """Of one executor.

    Attributes:
        name: for people.
        coefficients: of StepTimeModel.
        decode_ratios, short_prefill_ratios, prefill_ratios: measured to predicted times of steps without prompt tokens, with at
            most MANY_PREFILL_TOKENS and with more; each step draws one.
        round_trip_s: from a plan's departure to its result, beside the step itself.
        between_steps_s: from a step's end to the next one's start where its plan is there already.
        hitches_s: that the executor waits before such a step and says so; each step draws one. Rare and short, but a scheduler
            that sees them sends its plans earlier, and who comes later waits for more.
        host_step_s, host_token_s: that the scheduler is busy with a step's result, and more with each of its tokens.
        num_blocks, block_size, max_num_seqs, max_num_batched_tokens: see octavo.executor.v1.ExecutorInfo.
    """

    name: str
    coefficients: tuple[float, ...]
    decode_ratios: tuple[float, ...] = (1.0,)
    short_prefill_ratios: tuple[float, ...] = (1.0,)
    prefill_ratios: tuple[float, ...] = (1.0,)
    round_trip_s: float = 0.001
    between_steps_s: float = 0.0
    hitches_s: tuple[float, ...] = (0.0,)
    host_step_s: float = 0.0002
    host_token_s: float = 15e-6
    num_blocks: int = 54_000
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192

    def step_times(self) -> StepTimeModel:
        """The model of its steps."""
        return StepTimeModel.of(self.coefficients)

    def ratios_of(self, work: StepWork) -> tuple[float, ...]:
        """Measured to predicted times of steps like this one."""
        if work.num_prefill_tokens > MANY_PREFILL_TOKENS:
            return self.prefill_ratios
        return self.short_prefill_ratios if work.num_prefill_tokens else self.decode_ratios

    def with_blocks(self, num_blocks: int | None) -> "DeviceProfile":
        """The same with another pool; None: as it is."""
        return self if num_blocks is None else replace(self, num_blocks=num_blocks)

    def to_json(self) -> str:
        """Everything, for a file."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def read(cls, path: Path) -> "DeviceProfile":
        """What to_json wrote.

        Raises:
            StartupError: it is not.
        """
        try:
            values: dict[str, Any] = json.loads(path.read_text())
            fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
            return cls(**fields)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise StartupError(f"{path}: no profile of a device: {error}") from error


# Seconds in the units of StepTimeModel: of a step; more of one with prompts, and with many prompt tokens; of 1,000 prompt
# tokens, 10^6 pairs, 100 decodes, 10^5 keys that they read.
PROFILES = {
    profile.name: profile
    for profile in (
        DeviceProfile("h200-llama-8b", (0.0040, 0.0003, 0.0012, 0.0208, 0.00091, 0.0012, 0.0032)),
        DeviceProfile(
            "cpu-smollm2-135m", (0.0468, 0.0049, 0.0, 0.82, 0.0, 0.041, 0.80),
            decode_ratios=(0.94, 0.96, 0.97, 0.98, 0.99, 1.0, 1.02, 1.04, 1.06, 1.1),
            short_prefill_ratios=(0.92, 0.93, 0.96, 0.99, 1.01, 1.03, 1.04, 1.06, 1.15, 1.26),
            num_blocks=1456, max_num_seqs=256, max_num_batched_tokens=512, round_trip_s=0.0009, between_steps_s=0.0009,
        ),
    )
}  # fmt: skip
"""The GPU's from recorded steps of one day, of an earlier version.

The CPU's from 392 steps of 75 requests, one thread, float32, prompts of 32 to 256 tokens: what pairs cost did not show, so long
prompts take longer than it says. Made by `python -m bench.simulation --rates 2.5 --seconds 30 --folder F` and `octavo simulate
--trace F/2.5-one/*.octrec --save-profile FILE`, rounded. A recording of one's own is better.
"""
