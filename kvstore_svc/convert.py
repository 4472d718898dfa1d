"""Between the wire and the core: checks of what clients send, and messages of what the core says. Holds no state."""

from collections.abc import Sequence

from google.protobuf import duration_pb2

from common.block_hash import KEY_BYTES
from common.errors import InvalidParameter
from common.ids import BlockKey, Epoch
from common.patience import Patience
from common.shm.checksum import CHECKSUM_BYTES
from kvstore_svc.core.block import Layout
from kvstore_svc.core.block_store import Refusal
from kvstore_svc.core.event_log import EventKind
from kvstore_svc.core.session import Lease, Session
from kvstore_svc.event_feed import EventBatch
from kvstore_svc.tiers.base import TierCounts
from kvstore_svc.tiers.fills import Lane
from kvstore_svc.tiers.shm import ShmTier
from octavo.kvstore.v1 import kv_store_service_pb2 as pb

MAX_KEYS = 65_536
MAX_CLIENT_ID_LEN = 128
MAX_WAIT_S = 60.0
FINGERPRINT_BYTES = 32
TIERS = {"shm": pb.TIER_SHM, "disk": pb.TIER_DISK, "redis": pb.TIER_REDIS}
TRANSPORTS = {pb.TRANSPORT_SHM: "shm", pb.TRANSPORT_INLINE: "inline"}
EVENT_KINDS = {EventKind.STORED: pb.BLOCK_EVENT_KIND_STORED, EventKind.REMOVED: pb.BLOCK_EVENT_KIND_REMOVED}
REFUSALS = {
    Refusal.PRESENT: pb.BLOCK_STATUS_PRESENT,
    Refusal.BUSY: pb.BLOCK_STATUS_BUSY,
    Refusal.FULL: pb.BLOCK_STATUS_FULL,
}


def keys_from_pb(keys: Sequence[bytes]) -> list[BlockKey]:
    """Checked keys of a request.

    Raises:
        InvalidParameter: too many, or one that is no key.
    """
    if len(keys) > MAX_KEYS:
        raise InvalidParameter("keys", f"{len(keys)} keys, at most {MAX_KEYS} in one call")
    checked = [BlockKey(key) for key in keys]
    if any(length != KEY_BYTES for length in map(len, checked)):
        for index, key in enumerate(checked):
            check_key(key, f"keys[{index}]")
    return checked


def check_key(key: bytes, field: str) -> BlockKey:
    """A checked key.

    Raises:
        InvalidParameter: it has another length than block keys have.
    """
    if len(key) != KEY_BYTES:
        raise InvalidParameter(field, f"has {len(key)} bytes, must have {KEY_BYTES}")
    return BlockKey(key)


def check_checksum(value: bytes, field: str) -> bytes:
    """A checked checksum.

    Raises:
        InvalidParameter: it has another length than checksums have.
    """
    if len(value) != CHECKSUM_BYTES:
        raise InvalidParameter(field, f"has {len(value)} bytes, must have {CHECKSUM_BYTES}")
    return value


def layout_from_pb(layout: pb.Layout, largest_place_bytes: int) -> Layout:
    """The checked layout of a session.

    Raises:
        InvalidParameter: no fingerprint, or blocks that can never be stored here.
    """
    if len(layout.fingerprint) != FINGERPRINT_BYTES:
        raise InvalidParameter("layout.fingerprint", f"has {len(layout.fingerprint)} bytes, must have {FINGERPRINT_BYTES}")
    if not 1 <= layout.block_bytes <= largest_place_bytes:
        raise InvalidParameter(
            "layout.block_bytes",
            f"is {layout.block_bytes}, must be 1 to {largest_place_bytes}: a block lies in one slab (--slab-bytes)",
        )
    return Layout(layout.fingerprint, layout.block_bytes)


def layout_to_pb(layout: Layout) -> pb.Layout:
    """A layout on the wire."""
    return pb.Layout(fingerprint=layout.fingerprint, block_bytes=layout.block_bytes)


def client_id_from_pb(client_id: str) -> str:
    """The checked name of a client.

    Raises:
        InvalidParameter: it is empty or too long.
    """
    if not 1 <= len(client_id) <= MAX_CLIENT_ID_LEN:
        raise InvalidParameter("client_id", f"has {len(client_id)} characters, must have 1 to {MAX_CLIENT_ID_LEN}")
    return client_id


def wait_s_from_pb(wait: duration_pb2.Duration, field: str) -> float:
    """A checked wait of a request.

    Raises:
        InvalidParameter: it is negative or too long.
    """
    seconds = wait.ToNanoseconds() / 1e9
    if not 0 <= seconds <= MAX_WAIT_S:
        raise InvalidParameter(field, f"is {seconds} s, must be 0 to {MAX_WAIT_S:.0f} s")
    return seconds


def patience_from_pb(request: pb.AcquireBlocksRequest | pb.GetBlocksRequest) -> Patience:
    """How long a request waits for its blocks.

    Raises:
        InvalidParameter: a wait is negative or too long.
    """
    return Patience(
        wait_s_from_pb(request.max_wait, "max_wait"), wait_s_from_pb(request.max_wait_per_block, "max_wait_per_block")
    )


def duration_to_pb(seconds: float) -> duration_pb2.Duration:
    """Seconds on the wire."""
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def handle_to_pb(lease: Lease, shm: ShmTier) -> pb.BlockHandle:
    """Where a leased block's bytes lie."""
    block = lease.block
    return pb.BlockHandle(
        slab_id=block.place.slab_id,
        offset_bytes=shm.offset_bytes(block.place),
        length_bytes=block.layout.block_bytes,
        generation=block.place.generation,
        lease_id=lease.lease_id,
        checksum=block.checksum,
    )


def offer_to_pb(shm: ShmTier, socket_path: str, ticket: bytes, abi: int) -> pb.ShmOffer:
    """Where a client fetches the slabs."""
    slabs = [pb.Slab(slab_id=offer.slab_id, size_bytes=offer.size_bytes, nonce=offer.nonce) for offer in shm.offers()]
    return pb.ShmOffer(socket_path=socket_path, ticket=ticket, slabs=slabs, abi=abi)


def tier_stats_to_pb(name: str, counts: TierCounts) -> pb.TierStats:
    """One tier of GetStats."""
    return pb.TierStats(
        tier=TIERS[name],
        capacity_bytes=counts.capacity_bytes,
        used_bytes=counts.used_bytes,
        num_blocks=counts.num_blocks,
        num_hits=counts.num_hits,
        num_misses=counts.num_misses,
        num_evictions=counts.num_evictions,
        num_writes=counts.num_writes,
        unavailable_reason=counts.unavailable_reason,
    )


def lane_stats_to_pb(lane: Lane) -> pb.TierStats:
    """One lower tier of GetStats."""
    stats, meter = tier_stats_to_pb(lane.tier.name, lane.tier.counts()), lane.meter
    stats.num_verify_failures, stats.num_timeouts = meter.num_verify_failures, meter.num_timeouts
    stats.read_bytes, stats.read_s, stats.read_latency_s = meter.read_bytes, meter.read_s, meter.latency_s
    return stats


def session_stats_to_pb(session: Session) -> pb.SessionStats:
    """One session of GetStats."""
    transport = next((value for value, name in TRANSPORTS.items() if name == session.transport), pb.TRANSPORT_UNSPECIFIED)
    return pb.SessionStats(
        client_id=session.client_id,
        transport=transport,
        transport_reason=session.transport_reason,
        num_leases=len(session.leases),
        fenced=session.is_fenced,
    )


def event_batch_to_pb(batch: EventBatch, epoch: Epoch) -> pb.WatchEventsResponse:
    """Some events."""
    return pb.WatchEventsResponse(
        epoch=epoch,
        sequence=batch.sequence,
        resync=batch.is_resync,
        events=[pb.BlockEvent(kind=EVENT_KINDS[event.kind], key=event.key, tier=TIERS[event.tier]) for event in batch.events],
    )
