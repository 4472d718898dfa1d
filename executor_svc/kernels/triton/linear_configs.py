"""Which kernel computes a product of few rows, and cut up how: tuned before, or by rule. Knows shapes, no tensors of a model.

Shapes of well-known models have entries from sweeps on an H200 (linear_measured.py), which hold from compute capability 9.0 on;
all others go by a rule made from them. `tune_product` measures a shape on the machine at hand and keeps the result (configs.py).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from executor_svc.kernels.triton.configs import Config, lookup, register_defaults, tune
from executor_svc.kernels.triton.linear import MAX_REDUCE_ROWS, MAX_ROWS, StreamConfig
from executor_svc.kernels.triton.linear_measured import MEASURED

KERNEL = "stream_linear"
LIBRARY, REDUCE, TENSOR, BY_RULE, BY_TABLE = range(5)
"""Values of "kind" in a configuration: the library's product, one of the two kernels, by the rule, or as measured."""

_FEW_ROWS = 2
"""So many rows are faster without tensor cores; from three on, their sums take too many registers."""
_MOST_ROWS = 64
"""Beyond, the library reads weights as fast."""
_SMALL_BYTES = 24 << 20
"""Weights below it are read within a few microseconds: what counts is that every processor begins at once."""

_REDUCE_CANDIDATES = [
    StreamConfig(1, 4096, 8, 1, 1, 1024),
    StreamConfig(2, 2048, 8, 1, 1, 256),
    StreamConfig(4, 2048, 8, 1, 1, 256),
    StreamConfig(4, 1024, 4, 1, 1, 1024),
    StreamConfig(8, 512, 4, 4, 1, 1024),
    StreamConfig(4, 1024, 4, 1),
    StreamConfig(1, 1024, 4, 1),
    StreamConfig(2, 1024, 2, 1),
    StreamConfig(4, 512, 2, 1),
]
_TILES = [(16, 128, 2, 6), (32, 128, 4, 4), (32, 256, 4, 3), (64, 64, 4, 6), (64, 128, 4, 4), (64, 256, 4, 3), (128, 128, 8, 4)]
"""Candidates of the tensor kernel: block_n, block_k, num_warps, num_stages."""

register_defaults(KERNEL, {80: {"kind": BY_RULE}, 90: {"kind": BY_TABLE}})


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
        rows = 1 << (self.num_rows - 1).bit_length()
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
    if found["kind"] == BY_TABLE:
        return by_table(shape) or by_rule(shape)
    return by_rule(shape) if found["kind"] == BY_RULE else _choice(found)


def by_table(shape: ProductShape) -> ProductChoice | None:
    """The choice that was measured, if the shape is one of those."""
    entries = MEASURED.get((shape.num_outputs, shape.depth, shape.is_gated))
    if entries is None or shape.dtype == "float32":
        return None
    rows = max(8, 1 << (shape.num_rows - 1).bit_length()) if shape.num_rows > _FEW_ROWS else shape.num_rows
    return ProductChoice(entries[rows], reduce=shape.num_rows <= _FEW_ROWS) if rows in entries else None


def by_rule(shape: ProductShape) -> ProductChoice:
    """The choice where nothing was measured."""
    if shape.num_rows <= _FEW_ROWS or (shape.dtype == "float32" and shape.num_rows <= MAX_REDUCE_ROWS):
        return ProductChoice(_reduce_rule(shape), reduce=True)
    if shape.num_rows > _MOST_ROWS or shape.dtype == "float32":
        return ProductChoice(None)
    return ProductChoice(_tensor_rule(shape))


def _reduce_rule(shape: ProductShape) -> StreamConfig:
    """Few rows: short programs that have all of their loads on the way at once."""
    if shape.depth < 4096 or shape.dtype == "float32":
        block_k = max(128, min(1024, 1 << (shape.depth.bit_length() - 1)))
        return StreamConfig(4 if shape.num_outputs >= 4096 else 1, block_k, 4, 1)
    if shape.depth % 2048 == 0 and shape.depth <= 8192:
        return StreamConfig(2 if shape.is_gated or shape.num_outputs > 32768 else 4, 2048, 8, 1, 1, 256)
    return StreamConfig(4, 1024, 4, 1, 1, 1024)


def _tensor_rule(shape: ProductShape) -> StreamConfig:
    """More rows: tiles of the weight for every processor, as long as each program has enough to read."""
    num_rows = shape.num_outputs * (2 if shape.is_gated else 1)
    is_small = num_rows * shape.depth * 2 < _SMALL_BYTES
    block_n = 32 if is_small else 64
    tiles, split = -(-num_rows // block_n), 1
    longest = 8192 if shape.depth > 8192 else shape.depth
    while tiles * split < 128 and shape.depth % (256 * split) == 0 and longest // (split * 2) >= 512:
        split *= 2
    # What is fetched early by all programs together must stay in the second-level cache until it is read.
    return StreamConfig(block_n, 128, 4, 4, split, 512 if tiles * split <= 256 else 0)


def candidates(shape: ProductShape) -> Iterator[Config]:
    """Configurations worth measuring for a shape, the library's product and the rule's among them."""
    yield {"kind": LIBRARY}
    rule = by_rule(shape)
    if rule.config is not None:
        yield _config(REDUCE if rule.reduce else TENSOR, rule.config)
    if shape.num_rows <= MAX_REDUCE_ROWS:
        for config in _REDUCE_CANDIDATES:
            if config.block_k <= shape.depth:
                yield _config(REDUCE, config)
    rows = shape.num_outputs * (2 if shape.is_gated else 1)
    for block_n, block_k, warps, stages in _TILES if shape.num_rows > 1 else ():
        for split in (1, 2, 4, 8):
            programs = -(-rows // block_n) * split
            if split == 1 or (shape.depth % (block_k * split) == 0 and programs <= 1024):
                yield _config(TENSOR, StreamConfig(block_n, block_k, warps, stages, split, 512 if programs <= 256 else 0))


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
            ahead=config["ahead"],
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
        "ahead": config.ahead,
    }
