import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.token_ids import pack_token_ids, unpack_token_ids


@given(token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_token_ids_survive_the_wire(token_ids: list[int]) -> None:
    data = pack_token_ids(token_ids)
    assert len(data) == 4 * len(token_ids)
    assert unpack_token_ids(data).tolist() == token_ids


def test_the_bytes_are_the_same_on_every_machine() -> None:
    assert pack_token_ids([1, 0x01020304]) == bytes([1, 0, 0, 0, 4, 3, 2, 1])


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_half_an_id_is_an_error(size: int) -> None:
    with pytest.raises(ValueError, match=f"{size} bytes"):
        unpack_token_ids(bytes(size))
