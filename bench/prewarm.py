"""Time to first token of later turns, with and without bringing their blocks up before they come.

    python -m bench.prewarm [--model FOLDER] [--users 8] [--turns 5] [--first 384] [--new 64] [--output 16] [--disk 1e8]
                            [--think 0.3] [--shares 0,0.5] [--repeat 1]

Real processes, and the `turns` workload in small: users come one after another, in each turn in the same order, so that whoever
is next is the one whose blocks are the oldest. The device holds the blocks of about two users and shared memory those of about
four; those of the others are on a disk that is throttled. A row: median and 90th percentile of the time to first token from the
third turn on, and the share of prompt tokens that were not computed, by tier.
"""

import argparse
import random
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench.workloads import Turns, turns
from tests.e2e.stack import Stack, StackConfig, running_stack

_FIRST_MEASURED_TURN = 2
"""Turns before teach how long it takes until the next one."""
_BLOCK_SIZE = 16


@dataclass(frozen=True)
class Row:
    """What was measured with one share of shared memory for turns that are expected.

    Attributes:
        first_token_s: of each later turn.
        tokens_by_tier: prompt tokens of all turns that were not computed.
        answers: tokens of all turns, to be the same in every row.
    """

    share: float
    first_token_s: list[float]
    num_prompt_tokens: int
    tokens_by_tier: dict[str, int]
    answers: list[list[int]]

    def __str__(self) -> str:
        median = statistics.median(self.first_token_s)
        high = statistics.quantiles(self.first_token_s, n=10)[-1]
        tiers = ", ".join(f"{tier} {num / self.num_prompt_tokens:.0%}" for tier, num in sorted(self.tokens_by_tier.items()))
        return f"share {self.share:4.2f}   TTFT p50 {1000 * median:6.0f} ms   p90 {1000 * high:6.0f} ms   {tiers}"


def measure(stack: Stack, workload: Turns, think_s: float, share: float) -> Row:
    """Plays the conversations, one request at a time."""
    histories: list[list[int]] = [[] for _ in workload.conversations]
    first_token_s, answers, num_prompt_tokens, tokens_by_tier = [], [], 0, dict[str, int]()
    for turn in range(len(workload.conversations[0].new_token_ids)):
        for history, conversation in zip(histories, workload.conversations, strict=True):
            history += conversation.new_token_ids[turn]
            answer = stack.ask(history, workload.num_output_tokens)
            history += answer.token_ids[0]
            answers.append(answer.token_ids[0])
            if turn >= _FIRST_MEASURED_TURN:
                first_token_s.append(answer.first_token_s)
                num_prompt_tokens += answer.usage.prompt_tokens
                for tier, num in answer.usage.cached_tokens_by_tier.items():
                    tokens_by_tier[tier] = tokens_by_tier.get(tier, 0) + num
            time.sleep(think_s)
    return Row(share, first_token_s, num_prompt_tokens, tokens_by_tier, answers)


def main() -> int:
    """Parses the options, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model folder; not given: the default model, prepared")
    parser.add_argument("--users", type=int, default=8, help="conversations")
    parser.add_argument("--turns", type=int, default=5, help="of each")
    parser.add_argument("--first", type=int, default=384, help="tokens of the first turn")
    parser.add_argument("--new", type=int, default=64, help="new tokens of each later turn")
    parser.add_argument("--output", type=int, default=16, help="tokens of each answer")
    parser.add_argument("--disk", type=float, default=1e8, help="bytes per second of the disk")
    parser.add_argument("--think", type=float, default=0.3, help="seconds between one answer and the next request")
    parser.add_argument("--shares", default="0,0.5", help="of shared memory for turns that are expected, separated by commas")
    parser.add_argument("--repeat", type=int, default=1, help="rounds over the shares")
    parser.add_argument(
        "--block-bytes", type=int, default=16 * 46_080, help="of the model's blocks, for the size of shared memory"
    )
    parser.add_argument("--threads", type=int, default=2, help="of the executor")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    workload = turns(arguments.users, arguments.turns, 1, arguments.first, arguments.new, arguments.output)
    longest = arguments.first + arguments.turns * (arguments.new + arguments.output)
    blocks_of_one = -(-longest // _BLOCK_SIZE)
    rows: list[Row] = []
    for share in [float(text) for text in arguments.shares.split(",")] * arguments.repeat:
        with tempfile.TemporaryDirectory(prefix="octavo-disk-") as parent:
            store_bytes = 4 * blocks_of_one * arguments.block_bytes
            config = StackConfig(
                model=arguments.model or _default_model(),
                executor_flags=("--num-blocks", str(2 * blocks_of_one)),
                scheduler_flags=("--prewarm-share", str(share)),
                store_flags=(
                    *("--disk-dir", parent, "--disk-capacity-bytes", str(8 << 30), "--disk-admission-touches", "1"),
                    *("--capacity-bytes", str(store_bytes), "--slab-bytes", str(store_bytes)),
                    *("--throttle", f"disk={arguments.disk}:0.0005"),
                ),
                num_threads=arguments.threads,
            )
            with running_stack(config) as stack:
                rng = random.Random(7)
                for number in range(4):  # kernels are compiled, speeds are learned
                    stack.ask([rng.randrange(10, 30_000) for _ in range(arguments.first // (number + 1))], 4)
                rows.append(measure(stack, workload, arguments.think, share))
                print(rows[-1], flush=True)
    if any(row.answers != rows[0].answers for row in rows):
        print("the answers differ", file=sys.stderr)
        return 1
    return 0


def _default_model() -> Path:
    from executor_svc.model.prepare import prepare_model
    from executor_svc.settings import default_cache_dir

    return prepare_model("smollm2-135m-instruct", default_cache_dir(), print)


if __name__ == "__main__":
    sys.exit(main())
