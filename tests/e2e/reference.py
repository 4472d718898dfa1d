"""What transformers itself answers: the oracle of the end-to-end tests."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


class Reference:
    """transformers' own model and generate, eager weights in one dtype."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def generate(self, token_ids: list[int], max_tokens: int) -> list[int]:
        """max_tokens greedy tokens; the end-of-text token does not stop it."""
        ids = torch.tensor([token_ids])
        with torch.inference_mode():
            output = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
        return [int(i) for i in output[0, len(token_ids) :]]

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """float32 [len(token_ids), vocab_size]: teacher-forced logits at every position."""
        with torch.inference_mode():
            logits: torch.Tensor = self.model(torch.tensor([token_ids]), use_cache=False).logits
            return logits[0].float()
