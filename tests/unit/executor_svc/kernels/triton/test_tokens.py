"""The ends of a step in Triton's interpreter against plain torch."""

import pytest
import torch

from executor_svc.cuda.sampler import NO_TOKEN, TorchTokens
from executor_svc.kernels.triton.tokens import TritonTokens

CPU = torch.device("cpu")


def test_ids_that_only_the_device_knows_are_read_by_row() -> None:
    last = torch.tensor([40, 41, 42, 43])
    ids = torch.tensor([7, -1, -4, 0, 9, -3])

    assert TritonTokens(4, CPU).read(ids, last).tolist() == [7, 40, 43, 0, 9, 42]
    assert TorchTokens().read(ids, last).tolist() == [7, 40, 43, 0, 9, 42]


@pytest.mark.parametrize(("num_rows", "size"), [(1, 1000), (3, 130), (2, 64), (5, 33)])
def test_the_largest_logit_is_chosen_and_kept_for_the_next_step(num_rows: int, size: int) -> None:
    logits = torch.randn(num_rows, size, generator=torch.Generator().manual_seed(size))
    logits[0, 20] = logits[0, 30] = 50.0
    rows = torch.randperm(num_rows + 2, generator=torch.Generator().manual_seed(1))[:num_rows]
    last, expected_last = torch.full((num_rows + 2,), -5), torch.full((num_rows + 2,), -5)
    tokens = TritonTokens(8, CPU, block=32)

    for _ in range(2):  # the counters are as before
        found = tokens.choose(logits, rows, last)
        expected = TorchTokens().choose(logits, rows, expected_last)
        assert found.tolist() == expected.tolist() == logits.argmax(dim=1).tolist()
        assert last.tolist() == expected_last.tolist()
    assert found[0] == 20, "the lowest id among equals"


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_without_numbers_has_no_choice(value: float) -> None:
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(0))
    logits[1, 77] = value
    logits[2] = -torch.inf
    last = torch.full((3,), 9)

    found = TritonTokens(4, CPU, block=32).choose(logits, torch.arange(3), last)

    assert found.tolist() == TorchTokens().choose(logits, torch.arange(3), torch.full((3,), 9)).tolist()
    assert found.tolist() == [int(logits[0].argmax()), NO_TOKEN, NO_TOKEN]
    assert last.tolist()[1:] == [0, 0]
