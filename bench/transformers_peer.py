"""Generate of transformers itself on the same weights, threads and dtype: the peer of the CPU workloads. Left-padded batches."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from bench.workloads import Workload


@dataclass(frozen=True)
class PeerRun:
    """One run of a workload.

    Attributes:
        first_token_s: time to the first token; generate gives all requests theirs at once.
        total_s: until the longest output is done.
    """

    first_token_s: float
    total_s: float


class TransformersPeer:
    """A loaded model."""

    def __init__(self, folder: Path, dtype: str, num_threads: int):
        torch.set_num_threads(num_threads)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def run(self, workload: Workload) -> PeerRun:
        """All requests as one batch, once for one token and once for all."""
        longest = max(len(item.prompt_token_ids) for item in workload.items)
        rows = [[0] * (longest - len(i.prompt_token_ids)) + list(i.prompt_token_ids) for i in workload.items]
        masks = [[0] * (longest - len(i.prompt_token_ids)) + [1] * len(i.prompt_token_ids) for i in workload.items]
        ids, mask = torch.tensor(rows), torch.tensor(masks)
        first = self._generate(ids, mask, 1)
        total = self._generate(ids, mask, max(item.num_output_tokens for item in workload.items))
        return PeerRun(first, total)

    def _generate(self, ids: torch.Tensor, mask: torch.Tensor, max_tokens: int) -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=max_tokens, eos_token_id=None, pad_token_id=0
            )
        return time.perf_counter() - start
