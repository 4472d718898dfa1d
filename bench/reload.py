"""What the services cost around a prompt whose KV is there already: milliseconds to the first token, without copies.

    python -m bench.reload        16,000 tokens: on the device, in shared memory

Real processes and gRPC; a model so small that a block has 4 KiB and a step takes next to nothing, so what is left is the way of
a request: its keys, look-ups, leases, block tables, messages. The executor's own steps are taken out of the figures. Knows
workloads and services; knows no GPU.
"""

import argparse
import json
import re
import statistics
import tempfile
import time
from pathlib import Path

from bench import workloads
from bench.clients import running_clients
from bench.models import CONFIGS
from bench.serving import Served
from tests.e2e.stack import StackConfig

_MODEL = CONFIGS["tiny"] | {
    "hidden_size": 256,
    "intermediate_size": 2048,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 65536,
}
_LIMIT_S = 60.0


def stack_config(folder: Path, num_blocks: int, more_scheduler: tuple[str, ...]) -> StackConfig:
    """A device that holds num_blocks, above a store that holds more."""
    executor = ("--load-format", "random", "--device", "cpu", "--num-blocks", str(num_blocks), "--max-num-seqs", "8")
    return StackConfig(
        model=folder,
        executor_flags=(*executor, "--max-num-batched-tokens", "8192", "--log-level", "DEBUG"),
        scheduler_flags=("--log-level", "DEBUG", *more_scheduler),
        store_flags=("--capacity-bytes", str(256 << 20)),
        num_threads=1,
    )


class Rig:
    """Services, and one client that asks for one token at a time."""

    def __init__(self, served: Served, num_tokens: int):
        self._served = served
        self._num_tokens = num_tokens

    def first_token_ms(self, seed: int) -> tuple[float, float]:
        """To the first token of a prompt, in all and of that outside of steps."""
        before = self._served.counters()
        run = self._served.run(workloads.prefill(1, self._num_tokens, seed), _LIMIT_S)
        after = self._served.counters()
        ms = 1e3 * run.first_token_s[0]
        return ms, ms - 1e3 * (after.busy_s - before.busy_s)

    def reloaded_ms(self, seed: int) -> tuple[float, float]:
        """The same, after the device has forgotten everything."""
        self._served.flush_device()
        return self.first_token_ms(seed)

    def loads_ms(self) -> list[float]:
        """Of every whole load so far, by the scheduler's log."""
        log = self._served.log_of("scheduler")
        found = re.findall(r"load \d+: (\d+) blocks in ([0-9.]+) s", log)
        return [1e3 * float(seconds) for num, seconds in found if int(num) >= self._num_tokens // 16 - 1]


def say(what: str, figures: list[tuple[float, float]]) -> None:
    """One line: medians."""
    all_ms, ours_ms = (statistics.median(column) for column in zip(*figures, strict=True))
    line = {"case": what, "first token ms": round(all_ms, 1), "outside of steps ms": round(ours_ms, 1), "n": len(figures)}
    print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16_000)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--scheduler-flags", default="", help="for experiments, separated by spaces")
    options = parser.parse_args()
    num_blocks = options.tokens // 16
    num_others = 3
    with tempfile.TemporaryDirectory() as parent, running_clients(1) as clients:
        folder = Path(parent) / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(_MODEL))
        config = stack_config(folder, num_others * num_blocks, tuple(options.scheduler_flags.split()))
        served = Served(config, clients, workloads.decode(1, 9, 8, 2), _LIMIT_S)
        try:
            rig = Rig(served, options.tokens)
            say("16 tokens, nothing is there", [Rig(served, 16).first_token_ms(seed) for seed in range(50, 55 + options.repeats)])
            say("cold", [rig.first_token_ms(seed) for seed in range(num_others)])
            time.sleep(1.0)  # the last one's blocks are saved
            say("on the device", [rig.first_token_ms(num_others - 1) for _ in range(options.repeats)])
            say("in shared memory", [rig.reloaded_ms(round_no % num_others) for round_no in range(options.repeats)])
            loads = rig.loads_ms()[-options.repeats :]
            line = {"case": "of that, the executor's load", "ms": round(statistics.median(loads), 1) if loads else None}
            print(json.dumps({**line, "n": len(loads)}), flush=True)
        finally:
            served.stop()


if __name__ == "__main__":
    main()
