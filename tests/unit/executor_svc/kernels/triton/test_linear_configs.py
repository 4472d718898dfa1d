"""Every product that a configuration is given out for can be computed with it."""

import pytest
import torch

from executor_svc.kernels.triton.linear import MAX_REDUCE_ROWS, StreamWorkspace, padded_rows
from executor_svc.kernels.triton.linear_configs import ProductShape, by_rule, by_table, candidates, choose
from executor_svc.kernels.triton.linear_measured import MEASURED

ROWS = [1, 2, 3, 4, 7, 8, 13, 16, 32, 33, 64]
OTHERS = [(576, 576, False), (49152, 576, False), (1536, 576, True), (2560, 9728, False), (28672, 8192, True), (100, 70, False)]
WORKSPACE = StreamWorkspace.for_device(torch.device("cpu"))


def check(shape: ProductShape, config, reduce: bool) -> None:  # type: ignore[no-untyped-def]
    width = config.block_n // 2 if shape.is_gated and not reduce else config.block_n
    assert not reduce or (shape.num_rows <= MAX_REDUCE_ROWS and config.split_k == 1)
    assert WORKSPACE.fits(config, -(-shape.num_outputs // width), padded_rows(shape.num_rows))
    assert reduce or (shape.depth + 255) // config.block_k >= config.split_k


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("num_rows", ROWS)
def test_the_rule_fits_every_shape(num_rows: int, dtype: str) -> None:
    for outputs, depth, is_gated in [*MEASURED, *OTHERS]:
        shape = ProductShape(num_rows, outputs, depth, is_gated, dtype)
        choice = by_rule(shape)
        if choice.config is not None:
            check(shape, choice.config, choice.reduce)


@pytest.mark.parametrize("num_rows", ROWS)
def test_the_table_fits_its_shapes(num_rows: int) -> None:
    for outputs, depth, is_gated in MEASURED:
        shape = ProductShape(num_rows, outputs, depth, is_gated, "bfloat16")
        choice = by_table(shape)
        assert choice is not None
        if choice.config is not None:
            check(shape, choice.config, choice.reduce)


def test_candidates_fit() -> None:
    for outputs, depth, is_gated in [*MEASURED, *OTHERS]:
        for num_rows in (1, 4, 16, 64):
            shape = ProductShape(num_rows, outputs, depth, is_gated, "bfloat16")
            assert len(list(candidates(shape))) >= 2


def test_many_rows_are_the_librarys() -> None:
    assert choose(ProductShape(300, 4096, 4096, False, "bfloat16")).config is None


def test_float32_never_meets_tensor_cores() -> None:
    assert choose(ProductShape(8, 4096, 4096, False, "float32")).config is None
