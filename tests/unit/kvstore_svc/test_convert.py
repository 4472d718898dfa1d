"""What clients send is checked field by field, and the limit is named."""

import pytest
from google.protobuf import duration_pb2

from common.errors import InvalidParameter
from kvstore_svc import convert
from kvstore_svc.core.block import Layout
from octavo.kvstore.v1 import kv_store_service_pb2 as pb


def test_keys_of_the_right_length_pass() -> None:
    assert convert.keys_from_pb([b"k" * 32]) == [b"k" * 32]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([b"k" * 32, b"short"], r"keys\[1\]: has 5 bytes, must have 32"),
        ([b"k" * 32] * (convert.MAX_KEYS + 1), "keys: 65537 keys, at most 65536"),
    ],
)
def test_bad_keys_are_refused(keys: list[bytes], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        convert.keys_from_pb(keys)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (pb.Layout(fingerprint=b"f", block_bytes=1), "layout.fingerprint: has 1 bytes, must have 32"),
        (pb.Layout(fingerprint=b"f" * 32), "layout.block_bytes: is 0, must be 1 to 8192"),
        (pb.Layout(fingerprint=b"f" * 32, block_bytes=8193), "layout.block_bytes: is 8193, must be 1 to 8192.*--slab-bytes"),
    ],
)
def test_bad_layouts_are_refused(layout: pb.Layout, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        convert.layout_from_pb(layout, 8192)


def test_a_good_layout_passes() -> None:
    layout = pb.Layout(fingerprint=b"f" * 32, block_bytes=8192)

    assert convert.layout_from_pb(layout, 8192) == Layout(b"f" * 32, 8192)


@pytest.mark.parametrize("client_id", ["", "x" * 129])
def test_bad_client_ids_are_refused(client_id: str) -> None:
    with pytest.raises(InvalidParameter, match=r"client_id.*1 to 128"):
        convert.client_id_from_pb(client_id)


@pytest.mark.parametrize("wait", [duration_pb2.Duration(seconds=-1), duration_pb2.Duration(seconds=61)])
def test_bad_waits_are_refused(wait: duration_pb2.Duration) -> None:
    with pytest.raises(InvalidParameter, match=r"max_wait.*0 to 60 s"):
        convert.wait_s_from_pb(wait, "max_wait")


def test_durations_keep_their_value() -> None:
    assert convert.wait_s_from_pb(convert.duration_to_pb(1.25), "max_wait") == 1.25


def test_a_checksum_has_sixteen_bytes() -> None:
    with pytest.raises(InvalidParameter, match=r"commits\[0\].checksum: has 8 bytes, must have 16"):
        convert.check_checksum(b"c" * 8, "commits[0].checksum")
