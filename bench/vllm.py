"""What vLLM reached on the same card: the bar. Plain figures; knows nothing of how Octavo is measured.

vLLM 0.24.0, one NVIDIA H200, torch 2.11 with CUDA 13.0, bf16, random weights of the published shapes, called in process
(no HTTP), FlashAttention-3, CUDA graphs and torch.compile at their defaults, prefix caching on, max_num_seqs 256; 2026-11-29.
Of two runs the better one.
"""

DECODE_BATCHES = (1, 8, 32, 128, 256)

_DECODE_MS = {
    "llama-8b": (4.99, 5.28, 6.41, 11.11, 18.23),
    "qwen3-0.6b": (1.58, 2.69, 2.52, 6.21, 10.52),
}

FIGURES: dict[tuple[str, str, str], float] = {
    **{
        (model, f"decode {batch}", "step"): value
        for model, values in _DECODE_MS.items()
        for batch, value in zip(DECODE_BATCHES, values, strict=True)
    },
    ("llama-8b", "prefill 1 x 1024", "ttft"): 38.5,
    ("llama-8b", "prefill 1 x 8192", "ttft"): 217.0,
    ("llama-8b", "prefill 1 x 32000", "ttft"): 1183.0,
    ("llama-8b", "prefill 16 x 8192", "prompt"): 37500.0,
    ("qwen3-0.6b", "prefill 1 x 1024", "ttft"): 35.3,
    ("qwen3-0.6b", "prefill 1 x 8192", "ttft"): 42.0,
    ("qwen3-0.6b", "prefill 1 x 32000", "ttft"): 277.0,
    ("qwen3-0.6b", "prefill 16 x 8192", "prompt"): 263000.0,
    ("llama-8b", "mixed", "output"): 9830.0,
    ("qwen3-0.6b", "mixed", "output"): 22900.0,
    ("llama-8b", "prefix", "cold"): 1.64,
    ("llama-8b", "prefix", "again"): 1.33,
    ("qwen3-0.6b", "prefix", "cold"): 1.01,
    ("qwen3-0.6b", "prefix", "again"): 0.89,
    ("llama-8b", "azure 16", "ttft p50"): 74.0,
    ("llama-8b", "azure 16", "ttft p99"): 267.0,
    ("llama-8b", "azure 16", "tpot p50"): 13.6,
    ("llama-8b", "azure 16", "tpot p99"): 26.1,
    ("llama-8b", "azure 28", "ttft p50"): 41.0,
    ("llama-8b", "azure 28", "ttft p99"): 2669.0,
    ("llama-8b", "azure 28", "tpot p50"): 11.4,
    ("llama-8b", "azure 28", "tpot p99"): 62.4,
    # Its first start; a second one was not measured.
    ("llama-8b", "start", "first"): 80.0,
    ("llama-8b", "start", "second"): 80.0,
    ("qwen3-0.6b", "start", "first"): 82.0,
    ("qwen3-0.6b", "start", "second"): 82.0,
    # Device KV capped at 160,000 tokens; "+ store": with a host tier of 60 GB.
    ("llama-8b", "turns 48:5:12", "total"): 50.1,
    ("llama-8b", "turns 48:5:12", "later ttft mean"): 467.0,
    ("llama-8b", "turns 48:5:12", "later ttft p99"): 2018.0,
    ("llama-8b", "turns 48:5:12 + store", "total"): 28.5,
    ("llama-8b", "turns 48:5:12 + store", "later ttft mean"): 256.0,
    ("llama-8b", "turns 48:5:12 + store", "later ttft p99"): 424.0,
    ("llama-8b", "turns 8:5:1", "later ttft mean"): 18.5,
    ("llama-8b", "reload 16000", "cold"): 490.0,
    ("llama-8b", "reload 16000", "device hit"): 24.0,
    ("llama-8b", "reload 16000 + store", "cold"): 490.0,
    ("llama-8b", "reload 16000 + store", "device hit"): 24.0,
    ("llama-8b", "reload 16000 + store", "after eviction"): 80.0,
    ("llama-8b", "mooncake 300 x 4", "total"): 121.3,
    ("llama-8b", "mooncake 300 x 4 + store", "total"): 121.6,
    ("", "attention 64 x 8192", "bandwidth"): 4.27,
    ("", "attention 256 x 1024", "bandwidth"): 3.74,
    ("", "attention 16 x 4096", "bandwidth"): 3.24,
    ("", "attention 1 x 32768", "bandwidth"): 1.81,
    ("", "attention 64 x 8192", "share of copy"): 1.00,
    ("", "attention 256 x 1024", "share of copy"): 0.87,
    ("", "attention 16 x 4096", "share of copy"): 0.76,
    ("", "attention 1 x 32768", "share of copy"): 0.42,
}
"""By model, workload and figure; units as Octavo's figures have them: ms, s, tokens/s, TB/s, x (a share)."""

HIGHER_IS_BETTER = frozenset({"tokens/s", "TB/s", "x"})
"""Units; of all others less is better."""
