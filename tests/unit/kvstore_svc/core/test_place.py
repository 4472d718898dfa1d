"""Places: disjoint runs of pages whose generation tells readers whether they read what they meant to read."""

import numpy as np
import pytest

from kvstore_svc.core.place import Place, PlaceTable

PAGE_BYTES = 4096


def make_places(*num_pages: int) -> tuple[PlaceTable, list[np.ndarray]]:
    cells = [np.zeros(n, np.uint64) for n in num_pages]
    return PlaceTable(cells, PAGE_BYTES), cells


def test_every_place_gets_a_generation_of_its_own_in_all_of_its_pages() -> None:
    places, (cells,) = make_places(8)

    first, second = places.allocate(3 * PAGE_BYTES), places.allocate(2 * PAGE_BYTES)

    assert first is not None
    assert second is not None
    assert cells.tolist() == [1, 1, 1, 2, 2, 0, 0, 0]
    places.free(first)
    assert cells.tolist() == [0, 0, 0, 2, 2, 0, 0, 0]


def test_a_place_given_out_again_has_a_new_generation() -> None:
    places, (cells,) = make_places(2)
    first = places.allocate(2 * PAGE_BYTES)
    assert first is not None
    places.free(first)

    second = places.allocate(2 * PAGE_BYTES)

    assert second is not None
    assert (second.start_page, second.generation) == (first.start_page, first.generation + 1)
    assert cells.tolist() == [second.generation] * 2


def test_a_place_lies_in_one_slab() -> None:
    places, _ = make_places(4, 4)

    assert places.allocate(5 * PAGE_BYTES) is None
    assert places.largest_place_bytes == 4 * PAGE_BYTES
    assert {place.slab_id for place in (places.allocate(4 * PAGE_BYTES), places.allocate(4 * PAGE_BYTES)) if place} == {0, 1}
    assert places.free_bytes == 0


def test_what_is_written_one_after_the_other_lies_so_and_fills_a_slab_before_the_next() -> None:
    places, _ = make_places(5, 8, 6)

    found = [places.allocate(2 * PAGE_BYTES) for _ in range(9)]

    assert [(place.slab_id, place.start_page) for place in found if place] == [
        *((0, 0), (0, 2)),
        *((1, 0), (1, 2), (1, 4), (1, 6)),
        *((2, 0), (2, 2), (2, 4)),
    ]
    assert places.free_bytes == PAGE_BYTES


def test_part_of_a_page_takes_the_page() -> None:
    places, _ = make_places(2)

    place = places.allocate(1)

    assert place == Place(0, 0, 1, 1)
    assert places.free_bytes == PAGE_BYTES


def test_blocks_of_odd_size_waste_nothing() -> None:
    """180 pages do not fill a buddy chunk of 256: the tails must not be lost."""
    places, _ = make_places(1800)

    taken = [places.allocate(180 * PAGE_BYTES) for _ in range(10)]

    assert all(place is not None for place in taken)
    assert places.free_bytes == 0
    for place in taken[::2]:
        assert place is not None
        places.free(place)
    assert all(places.allocate(180 * PAGE_BYTES) is not None for _ in range(5))


def test_freeing_twice_is_refused() -> None:
    places, _ = make_places(4)
    place = places.allocate(PAGE_BYTES)
    assert place is not None
    places.free(place)

    with pytest.raises(ValueError, match="free already"):
        places.free(place)


def test_integrity_check_finds_a_leak_and_an_overlap() -> None:
    places, _ = make_places(4)
    place = places.allocate(2 * PAGE_BYTES)
    assert place is not None
    places.check_integrity([place])

    with pytest.raises(AssertionError, match="page 0"):
        places.check_integrity([])
    with pytest.raises(AssertionError, match="overlap"):
        places.check_integrity([place, Place(0, 1, 1, 9)])
