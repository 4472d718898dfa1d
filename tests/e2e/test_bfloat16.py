"""bf16 serves the same model as fp32, within what bf16 can say."""

from pathlib import Path

import pytest
import torch

from executor_svc.kernels.batch import AttentionBatch
from executor_svc.kernels.cpu.backend import CpuBackend
from executor_svc.kvcache.pool import KvPool
from executor_svc.model.forward_context import ForwardContext
from executor_svc.model.load import LoadedModel, load_model
from tests.e2e.reference import Reference

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

BLOCK_SIZE = 16
CHUNK = 64


def paged_logits(model: LoadedModel, backend: CpuBackend, token_ids: list[int]) -> torch.Tensor:
    """float32 [len(token_ids), vocab_size]: teacher-forced, in chunks through a paged pool."""
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    pool = KvPool(model.layer_specs, num_blocks, BLOCK_SIZE, model.dtype)
    caches = {spec.layer_idx: cache for spec, cache in zip(model.layer_specs, pool.layer_caches, strict=True)}
    rows = []
    for start in range(0, len(token_ids), CHUNK):
        stop = min(start + CHUNK, len(token_ids))
        batch = AttentionBatch(
            slot_mapping=torch.arange(start, stop),
            block_tables=torch.arange(num_blocks, dtype=torch.int32)[None],
            cu_seqlens_q=torch.tensor([0, stop - start], dtype=torch.int32),
            seq_lens=torch.tensor([stop], dtype=torch.int32),
            num_decodes=int(stop - start == 1),
            max_seqlen_q=stop - start,
            max_seqlen_k=stop,
            block_size=BLOCK_SIZE,
        )
        with torch.inference_mode():
            rows.append(
                model.compute_logits(
                    ForwardContext(batch, backend, caches),
                    torch.tensor(token_ids[start:stop]),
                    torch.arange(start, stop),
                    torch.arange(stop - start),
                )
            )
    return torch.cat(rows)


def test_bfloat16_logits_are_close_and_tokens_differ_only_at_ties(
    model_folder: Path, reference: Reference, prompts: list[list[int]]
) -> None:
    """Teacher-forced logits within 2e-2 of fp32; another greedy token only where fp32's top two are one bf16 unit apart."""
    backend = CpuBackend()
    model = load_model(model_folder, dtype="bfloat16", backend=backend)
    num_tokens = num_different = 0
    for prompt in [p for p in prompts if len(p) in (17, 129, 513)]:
        expected = reference.logits(prompt)
        logits = paged_logits(model, backend, prompt)

        assert float((logits - expected).norm() / expected.norm()) < 2e-2

        top = expected.topk(2, dim=1).values
        # The distance between neighbouring bf16 numbers of this size: 8 bits of significand.
        unit = torch.exp2(torch.floor(torch.log2(top[:, 0].abs())) - 7)
        different = logits.argmax(dim=1) != expected.argmax(dim=1)
        assert bool((top[:, 0] - top[:, 1])[different].le(unit[different]).all())
        num_tokens += len(prompt)
        num_different += int(different.sum())
    print(f"{num_different} of {num_tokens} greedy tokens differ, all at ties")
