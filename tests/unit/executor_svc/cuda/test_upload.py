"""A step's numbers in one copy: they arrive as they were, and a buffer that is still read is not written."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor_svc.cuda.upload import Array, Uploads
from tests.unit.executor_svc.cuda.host_queue import HostQueue

DTYPES = [np.int64, np.int32, np.float32, np.float64]


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 9), st.integers(0, 5)), max_size=6), st.booleans())
def test_arrays_arrive_as_they_were(specs: list[tuple[type, int, int]], into_own: bool) -> None:
    uploads = Uploads(HostQueue())
    arrays: list[Array] = [np.arange(rows * columns).reshape(rows, columns).astype(dtype) for dtype, rows, columns in specs]
    into = torch.full((4096,), 9, dtype=torch.uint8) if into_own else None

    tensors = uploads.send(arrays, into)

    for array, tensor in zip(arrays, tensors, strict=True):
        assert tensor.shape == array.shape
        assert np.array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype


def test_large_steps_and_many_steps_use_the_buffers_in_turn() -> None:
    queue = HostQueue()
    uploads = Uploads(queue)
    for step in range(100):
        array = np.full(1000 * (step % 7 + 1) * 40, step, np.int32)
        (tensor,) = uploads.send([array])
        uploads.guard(queue.mark())
        assert (tensor == step).all()


def test_a_step_may_send_more_often_than_there_are_buffers() -> None:
    uploads = Uploads(HostQueue())
    tensors = [uploads.send([np.full(3, i)])[0] for i in range(80)]

    assert [int(tensor[0]) for tensor in tensors] == list(range(80))
