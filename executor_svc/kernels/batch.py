"""What a step's attention needs to know about its packed batch, and one layer's part of the device pool.

Knows shapes. Does not know who allocates blocks, which model runs, or how attention is computed. Layouts of the cache:
kernels/layout.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LayerCache:
    """One layer's KV in the pool: strided views, dimension 0 steps over whole blocks, the others are contiguous.

    Attributes:
        key: [num_blocks, num_kv_heads, head_dim_k, block_size] or [num_blocks, num_kv_heads, block_size, head_dim_k]: the
            backend's KvLayout says which.
        value: [num_blocks, num_kv_heads, block_size, head_dim_v], the dtype of key.
    """

    key: Tensor
    value: Tensor

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.value.shape[2]


@dataclass(frozen=True)
class Rotary:
    """A rotary embedding that attention applies to queries and keys: x * cos + rotate_half(x) * sin.

    Attributes:
        cos: [num_tokens, rotary_dim], contiguous, the dtype of the query; dimensions from rotary_dim on are not rotated.
        sin: same.
    """

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class SharedPrefixes:
    """Which decodes of a batch begin with the same blocks, so that those need to be read once for all of them.

    ```
    group 0, 3 members    | shared 1024 ................ | own |      own_starts 1024
                                                         | own ....|
                                                         | own |
    no group              | own ............... |                     own_starts 0
    ```

    Attributes:
        group_lens: int32 [max_groups], tokens that all members of a group share, a multiple of SHARED_MULTIPLE; 0: no group.
            max_groups is a power of two.
        group_ends: int32 [max_groups], end of each group in members; the first begins at 0, each other where the one before
            ends.
        members: int32 [num_decodes], decodes of the batch, group by group; from the last group's end on nothing is read.
        own_starts: int32 [num_decodes], group_lens of each decode's group, 0 for one that is in none; at most its seq_len.
    """

    group_lens: Tensor
    group_ends: Tensor
    members: Tensor
    own_starts: Tensor


@dataclass(frozen=True)
class AttentionBatch:
    """A packed batch of prefill chunks and decodes; sequences of one token come first.

    ```
    tokens     | seq 0 | seq 1 | seq 2 chunk .......... | seq 3 chunk ... |      num_decodes = 2
    cu_seqlens_q 0     1       2                         n                num_tokens
    KV of seq 2  [0, seq_lens[2] - n + 2) was cached before | [.., seq_lens[2]) is written by this step
    ```

    Attributes:
        slot_mapping: int64 [num_tokens]; block_id * block_size + offset that each token's KV goes to.
        block_tables: int32 [num_seqs, max_blocks_per_seq]; entries beyond a sequence's length are never read.
        cu_seqlens_q: int32 [num_seqs + 1]; first token of each sequence.
        seq_lens: int32 [num_seqs]; KV length of each sequence, this step's tokens included.
        num_decodes: the first num_decodes sequences have exactly one token.
        max_seqlen_q: the most tokens that one sequence has in this step.
        max_seqlen_k: the largest of seq_lens.
        block_size: tokens per block.
        query_lens: the lengths that cu_seqlens_q says, where they are known without asking the device; None: they are not.
        kv_lens: seq_lens, likewise.
        shared: what decodes have in common; None: nothing that is known. Results do not depend on it, speed does.
    """

    slot_mapping: Tensor
    block_tables: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    num_decodes: int
    max_seqlen_q: int
    max_seqlen_k: int
    block_size: int
    query_lens: Sequence[int] | None = None
    kv_lens: Sequence[int] | None = None
    shared: SharedPrefixes | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return self.slot_mapping.shape[0]

    @property
    def num_seqs(self) -> int:
        """Sequences of the step."""
        return self.seq_lens.shape[0]
