"""Products as they were fastest on an H200 (bfloat16, CUDA graph, weights of many layers in turn). Knows shapes only.

One and two rows are for the kernel without tensor cores, more are rounded up to a power of two from 8 on; None: the library's.
"""

from executor_svc.kernels.triton.linear import StreamConfig

_AT_ONCE = 1 << 30
"""As "ahead": the next kernel may be launched at once."""

# By (columns of the result, depth, gated): by rows of x.
MEASURED: dict[tuple[int, int, bool], dict[int, StreamConfig | None]] = {
    # 4,096 wide with 32 + 2 * 8 heads of 128 and 14,336 between: Llama 3 8B, Mistral 7B and others
    (6144, 4096, False): {
        1: StreamConfig(1, 4096, 8, 1, 1, 1024),
        2: StreamConfig(4, 2048, 8, 1, 1, 256),
        8: StreamConfig(64, 256, 4, 3, 4, 256, _AT_ONCE),
        16: StreamConfig(64, 64, 4, 6, 4, 256, _AT_ONCE),
        32: StreamConfig(64, 128, 4, 6, 1, 256, _AT_ONCE),
        64: StreamConfig(64, 128, 4, 4, 1, 256, _AT_ONCE),
    },
    (4096, 4096, False): {
        1: StreamConfig(1, 4096, 8, 1, 1, 1024),
        2: StreamConfig(4, 2048, 8, 1, 1, 256),
        8: StreamConfig(64, 128, 4, 4, 2, 512),
        16: StreamConfig(64, 128, 4, 4, 2, 512),
        32: StreamConfig(64, 128, 4, 4, 2, 512),
        64: StreamConfig(64, 128, 4, 6, 1, 256, _AT_ONCE),
    },
    (14336, 4096, True): {
        1: StreamConfig(2, 2048, 8, 1, 1, 256),
        2: StreamConfig(2, 2048, 8, 1, 1, 256),
        8: StreamConfig(32, 128, 4, 4),
        16: StreamConfig(64, 128, 4, 4),
        32: StreamConfig(64, 128, 4, 4),
        64: StreamConfig(128, 128, 8, 4),
    },
    (4096, 14336, False): {
        1: StreamConfig(4, 1024, 4, 1, 1, 1024),
        2: StreamConfig(8, 512, 4, 4, 1, 1024),
        8: StreamConfig(128, 128, 8, 4, 8, 256, _AT_ONCE),
        16: StreamConfig(128, 128, 8, 4, 4, 256, _AT_ONCE),
        32: StreamConfig(64, 256, 4, 3, 2, 256, _AT_ONCE),
        64: StreamConfig(64, 128, 4, 4, 2, 256, _AT_ONCE),
    },
    (128256, 4096, False): {
        1: StreamConfig(2, 2048, 8, 1),
        2: StreamConfig(4, 2048, 8, 1),
        8: StreamConfig(32, 256, 4, 3),
        16: StreamConfig(64, 128, 4, 4),
        32: StreamConfig(64, 128, 4, 4),
        64: StreamConfig(128, 128, 8, 4),
    },
    # 1,024 wide with 16 + 2 * 8 heads of 128 and 3,072 between: Qwen3 0.6B
    (4096, 1024, False): {
        1: StreamConfig(4, 1024, 4, 1),
        2: StreamConfig(8, 512, 2, 1, 1, 1024),
        8: StreamConfig(32, 128, 4, 4, 1, 512),
        16: StreamConfig(64, 64, 4, 6, 2, 512),
        32: StreamConfig(32, 128, 4, 4, 1, 512),
        64: None,
    },
    (1024, 2048, False): {
        1: StreamConfig(1, 1024, 4, 1),
        2: StreamConfig(1, 1024, 4, 1),
        8: StreamConfig(16, 128, 2, 6, 2, 512),
        16: StreamConfig(16, 128, 2, 6, 2, 512),
        32: StreamConfig(16, 128, 2, 6, 2, 512),
        64: StreamConfig(16, 128, 2, 6, 4),
    },
    (3072, 1024, True): {
        1: StreamConfig(2, 1024, 4, 1),
        2: StreamConfig(2, 1024, 2, 1),
        8: StreamConfig(64, 64, 4, 6, 2, 512),
        16: StreamConfig(64, 64, 4, 6, 2, 512),
        32: StreamConfig(32, 256, 4, 3, 1, 512),
        64: None,
    },
    (1024, 3072, False): {
        1: StreamConfig(1, 1024, 4, 1),
        2: StreamConfig(1, 1024, 2, 1),
        8: StreamConfig(64, 64, 4, 6, 8, 256, 1),
        16: StreamConfig(32, 128, 4, 4, 4, 512),
        32: StreamConfig(32, 128, 4, 4, 4, 512),
        64: StreamConfig(32, 128, 4, 4, 4, 512),
    },
    (151936, 1024, False): {
        1: StreamConfig(4, 1024, 4, 1),
        2: StreamConfig(4, 512, 2, 1),
        8: StreamConfig(32, 256, 4, 3),
        16: StreamConfig(64, 128, 4, 4),
        32: StreamConfig(64, 128, 4, 4),
        64: StreamConfig(128, 128, 8, 4),
    },
}
