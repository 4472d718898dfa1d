"""Which kernel computes a product of few rows, and cut up how: tuned before, or by rule. Knows shapes, no tensors of a model.

The rule is what a sweep over the shapes of two models gave on an H200 (docs/experiments.md); `tune_product` measures a shape on
the machine at hand and keeps the result (configs.py).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from executor_svc.kernels.triton.configs import Config, lookup, register_defaults, tune
from executor_svc.kernels.triton.linear import MAX_REDUCE_ROWS, MAX_ROWS, StreamConfig

KERNEL = "stream_linear"
LIBRARY, REDUCE, TENSOR, BY_RULE = 0, 1, 2, 3
"""Values of "kind" in a configuration: the library's product, one of the two kernels, or whatever the rule says."""

register_defaults(KERNEL, {80: {"kind": BY_RULE}})


@dataclass(frozen=True)
class ProductShape:
    """What a configuration depends on.

    Attributes:
        num_rows: of x.
        num_outputs: columns of the result.
        depth: columns of the weight.
        is_gated: whether there is a second weight row for each output.
        dtype: of the weight, for example "bfloat16".
    """

    num_rows: int
    num_outputs: int
    depth: int
    is_gated: bool
    dtype: str

    def key(self) -> Mapping[str, int | str | bool]:
        """For the cache of configurations: rows are rounded up to those that are computed anyway."""
        rows = self.num_rows if self.num_rows <= MAX_REDUCE_ROWS else max(8, 1 << (self.num_rows - 1).bit_length())
        return {"rows": rows, "outputs": self.num_outputs, "depth": self.depth, "gated": self.is_gated, "dtype": self.dtype}


@dataclass(frozen=True)
class ProductChoice:
    """How to compute a product.

    Attributes:
        config: of the kernel; None: the library's product.
        reduce: which kernel.
    """

    config: StreamConfig | None
    reduce: bool = False


def choose(shape: ProductShape) -> ProductChoice:
    """The tuned choice for a shape, or that of the rule."""
    if shape.num_rows > MAX_ROWS:
        return ProductChoice(None)
    found = lookup(KERNEL, shape.key())
    if found["kind"] == BY_RULE:
        return by_rule(shape)
    return _choice(found)


def by_rule(shape: ProductShape) -> ProductChoice:
    """The choice where nothing was tuned."""
    if shape.num_rows <= MAX_REDUCE_ROWS:
        block_k = 1024 if shape.depth >= 1024 else max(128, 1 << (shape.depth.bit_length() - 1))
        block_n = 8 if shape.num_outputs >= 4096 else 4
        return ProductChoice(StreamConfig(block_n, block_k, 4, 1, 1, 1024), reduce=True)
    if shape.num_rows > 32 or shape.dtype == "float32":
        return ProductChoice(None)
    block_k = 64 if shape.is_gated else 128
    tiles = -(-shape.num_outputs // 64)
    split = 1
    # Programs for every processor, as long as each has enough to read.
    while tiles * split < 256 and shape.depth % (block_k * split * 2) == 0 and shape.depth // (split * 2) >= 4 * block_k:
        split *= 2
    return ProductChoice(StreamConfig(64, block_k, 4, 4, split, 256))


def candidates(shape: ProductShape) -> Iterator[Config]:
    """Configurations worth measuring for a shape, the library's product among them."""
    yield {"kind": LIBRARY}
    if shape.num_rows <= MAX_REDUCE_ROWS:
        for block_n, block_k, warps, stages in (
            (4, 1024, 4, 1), (8, 1024, 4, 1), (8, 512, 4, 4), (4, 2048, 8, 1), (2, 2048, 8, 1), (4, 512, 2, 1), (2, 1024, 4, 1),
        ):  # fmt: skip
            if block_k <= shape.depth:
                yield _config(REDUCE, StreamConfig(block_n, block_k, warps, stages, 1, 1024))
    for block_n, block_k, warps, stages in ((16, 256, 4, 4), (32, 128, 4, 5), (64, 128, 4, 4), (64, 64, 4, 6), (128, 64, 4, 4)):
        for split in (1, 2, 4, 8):
            if shape.depth % (block_k * split) == 0 and -(-shape.num_outputs // block_n) * split <= 1024:
                yield _config(TENSOR, StreamConfig(block_n, block_k, warps, stages, split, 256))


def tune_product(shape: ProductShape, run: Callable[[ProductChoice], float]) -> ProductChoice:
    """Measures all candidates with run, which returns seconds, and keeps the best."""
    return _choice(tune(KERNEL, shape.key(), candidates(shape), lambda config: run(_choice(config))))


def _choice(config: Config) -> ProductChoice:
    if config["kind"] not in (REDUCE, TENSOR):
        return ProductChoice(None)
    return ProductChoice(
        StreamConfig(
            block_n=config["block_n"],
            block_k=config["block_k"],
            num_warps=config["num_warps"],
            num_stages=config["num_stages"],
            split_k=config["split_k"],
            fetch_k=config["fetch_k"],
        ),
        reduce=config["kind"] == REDUCE,
    )


def _config(kind: int, config: StreamConfig) -> Config:
    return {
        "kind": kind,
        "block_n": config.block_n,
        "block_k": config.block_k,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "split_k": config.split_k,
        "fetch_k": config.fetch_k,
    }
