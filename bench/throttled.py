"""Time to first token when the blocks of a prompt are in a slow tier, beside the time to compute them again.

    python -m bench.throttled [--model FOLDER] [--tokens 1024] [--prompts 4] [--rates 5e6,2e7,1e8,1e9] [--latency 0]
                              [--executor-flags "..."] [--num-blocks N]

Real processes. Every prompt is computed once and its blocks are written to disk; then the store is restarted with the disk
throttled to each rate in turn, so that nothing is in shared memory, and the prompts are asked for again, each between two new
ones, so that a machine whose speed wanders makes all of them slower. A time is a multiple of the mean of its two neighbours'.
A row: the tier's bytes per second; median and worst multiple of the prompts that the tier has; the same of new prompts, which is
how far computing alone varies by this measure; the share of tokens that came from the tier; whether the answers were the same.
"""

import argparse
import random
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.stack import Answer, Stack, StackConfig, running_stack

_NUM_OUTPUT_TOKENS = 4
_QUIET_S = 0.5
"""Before each request: blocks of the one before are being saved."""


@dataclass(frozen=True)
class Row:
    """What was measured at one rate, beside computing.

    Attributes:
        loaded: times of prompts that the tier has, as multiples of their neighbours'.
        computed: of new prompts, likewise.
    """

    bytes_per_s: float
    loaded: list[float]
    computed: list[float]
    num_cached_tokens: int
    num_tokens: int
    is_same: bool

    def __str__(self) -> str:
        share, same = self.num_cached_tokens / self.num_tokens, "same" if self.is_same else "DIFFERENT"
        return f"{self.bytes_per_s / 1e9:8.3f} GB/s   {_spread(self.loaded)}   {_spread(self.computed)}   {share:5.0%}   {same}"


def _spread(multiples: list[float]) -> str:
    return f"{statistics.median(multiples):5.2f} x {max(multiples):5.2f} x"


def beside(times_s: Sequence[float], before_s: Sequence[float], behind_s: Sequence[float]) -> list[float]:
    """Each time as a multiple of the mean of those before and behind it."""
    return [2 * s / (before + behind) for s, before, behind in zip(times_s, before_s, behind_s, strict=True)]


class ThrottledStore:
    """A running stack whose disk tier has the blocks of some prompts."""

    def __init__(self, stack: Stack, prompts: list[list[int]], rng: random.Random, vocab: int, block_size: int = 16):
        self._stack = stack
        self._rng = rng
        self._vocab = vocab
        self._prompts = prompts
        self.cold = [self._ask(prompt) for prompt in prompts]
        stack.wait_disk_blocks(sum((len(prompt) - 1) // block_size for prompt in prompts))

    def measure(self, bytes_per_s: float, latency_s: float, num_passes: int) -> Row:
        """Asks again with the disk at this speed, each prompt between two that are computed, for the state of the machine."""
        loaded: list[float] = []
        computed: list[float] = []
        is_same, num_cached_tokens = True, 0
        for _ in range(num_passes):
            self._stack.restart_store(("--throttle", f"disk={bytes_per_s}:{latency_s}"))
            self._stack.flush_device()
            self._warm_up()
            new_s = [self._ask(self._another(len(self._prompts[0]))).first_token_s]
            again_s: list[float] = []
            for prompt, cold in zip(self._prompts, self.cold, strict=True):
                again = self._ask(prompt)
                again_s.append(again.first_token_s)
                new_s.append(self._ask(self._another(len(prompt))).first_token_s)
                is_same = is_same and again.token_ids == cold.token_ids
                num_cached_tokens += again.usage.cached_tokens
            loaded += beside(again_s, new_s[:-1], new_s[1:])
            computed += beside(new_s[1:-1], new_s[:-2], new_s[2:])
        num_tokens = num_passes * sum(map(len, self._prompts))
        return Row(bytes_per_s, loaded, computed, num_cached_tokens, num_tokens, is_same)

    def _another(self, num_tokens: int) -> list[int]:
        return [self._rng.randrange(10, self._vocab) for _ in range(num_tokens)]

    def _ask(self, prompt: list[int]) -> Answer:
        time.sleep(_QUIET_S)
        return self._stack.ask(prompt, _NUM_OUTPUT_TOKENS)

    def _warm_up(self) -> None:
        """After its restart the executor finds the store with the next save or load; prompts of nobody make it do both."""
        for number in range(3):
            self._ask([5 + number] * 40)


def main() -> int:
    """Parses the options, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model folder; not given: the default model, prepared")
    parser.add_argument("--tokens", type=int, default=1024, help="of each prompt")
    parser.add_argument("--prompts", type=int, default=4, help="how many")
    parser.add_argument("--passes", type=int, default=2, help="restarts of the store at each rate")
    parser.add_argument("--rates", default="5e6,2e7,5e7,1e8,1e9", help="bytes per second, separated by commas")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds of each read")
    parser.add_argument("--vocab", type=int, default=40_000, help="token ids are below")
    parser.add_argument("--disk-dir", help="folder of the disk tier; not given: a temporary one")
    parser.add_argument("--threads", type=int, default=2, help="of the executor")
    parser.add_argument("--store-bytes", type=int, default=1 << 30, help="of shared memory")
    parser.add_argument("--disk-bytes", type=int, default=8 << 30, help="of the disk tier")
    parser.add_argument("--executor-flags", default="", help="more flags of executor_svc")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    rng = random.Random(7)
    prompts = [[rng.randrange(10, arguments.vocab) for _ in range(arguments.tokens)] for _ in range(arguments.prompts)]
    with tempfile.TemporaryDirectory(prefix="octavo-disk-") as parent:
        folder = arguments.model or _default_model()
        config = StackConfig(
            model=folder,
            executor_flags=tuple(shlex.split(arguments.executor_flags)),
            store_flags=(
                *("--disk-dir", arguments.disk_dir or parent, "--disk-capacity-bytes", str(arguments.disk_bytes)),
                *("--disk-admission-touches", "1", "--capacity-bytes", str(arguments.store_bytes)),
            ),
            num_threads=arguments.threads,
        )
        with running_stack(config) as stack:
            for number in range(4):  # kernels are compiled, speeds are learned
                stack.ask([rng.randrange(10, arguments.vocab) for _ in range(arguments.tokens // (number + 1))], 1)
            store = ThrottledStore(stack, prompts, rng, arguments.vocab)
            cold_s = [answer.first_token_s for answer in store.cold]
            print(f"prompts of {arguments.tokens} tokens, computed in {statistics.median(cold_s):.3f} s (median)")
            print("disk at           in the tier: median, worst   computed   loaded   tokens")
            for rate in arguments.rates.split(","):
                print(store.measure(float(rate), arguments.latency, arguments.passes), flush=True)
    return 0


def _default_model() -> Path:
    from executor_svc.model.prepare import prepare_model
    from executor_svc.settings import default_cache_dir

    return prepare_model("smollm2-135m-instruct", default_cache_dir(), print)


if __name__ == "__main__":
    sys.exit(main())
