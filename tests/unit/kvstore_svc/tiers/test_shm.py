"""Slabs for a capacity."""

import pytest

from common.errors import StartupError
from common.ids import Epoch
from common.shm.available_memory import available_memory_bytes
from common.shm.slab import PAGE_BYTES
from kvstore_svc.tiers.shm import create_slabs

MIB = 1 << 20


def test_capacity_is_divided_into_slabs_of_which_the_last_may_be_smaller() -> None:
    slabs = create_slabs(5 * MIB + 100, 2 * MIB, Epoch(1))

    assert [owned.slab.header.size_bytes for owned in slabs] == [2 * MIB, 2 * MIB, MIB]
    assert [owned.slab.header.slab_id for owned in slabs] == [0, 1, 2]
    assert len({owned.slab.header.nonce for owned in slabs}) == 3
    for owned in slabs:
        owned.close()


def test_a_remainder_too_small_for_a_slab_is_left_out() -> None:
    (owned,) = create_slabs(2 * MIB + PAGE_BYTES, 2 * MIB, Epoch(1))

    assert owned.slab.header.size_bytes == 2 * MIB
    owned.close()


def test_more_than_the_machine_has_is_refused_before_anything_is_taken() -> None:
    wanted_bytes = 2 * available_memory_bytes()

    with pytest.raises(StartupError, match=f"{wanted_bytes} bytes wanted.*lower --capacity-bytes"):
        create_slabs(wanted_bytes, 1 << 30, Epoch(1))
