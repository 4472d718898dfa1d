"""Shapes of steps that are captured as graphs, and steps padded to them. Knows arrays; no tensors, no model.

    tokens   | decodes, padded to num_decodes | tokens of chunks, padded to num_tokens |
    sequences| one each                       | chunks, padded to num_chunks           |
    results  | one per sequence, also for those that do not sample and for padding     |
    groups   | of decodes that share a prefix, in shapes that have room for them       |

Padding has no keys (seq_len 0), no slot (-1), and gives its token to the spare row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from executor_svc.core.prefix_groups import MAX_GROUPS, NO_GROUPS, PrefixGroups

Ints = npt.NDArray[np.int64]
NUM_CHUNKS = 16
_CHUNK_TOKENS = (128, 256, 384, 512, 768, 1024)
"""Above, the device takes longer for a step than the host takes to launch it."""
_MANY_DECODES = (320, 384, 512, 640, 768, *range(1024, 4097, 256))
_DECODES_BESIDE_CHUNKS = (0, 16, 64, 128, 256)
_DECODES_WITH_GROUPS = (8, 16, 32, 48, 64, 96, 128, 192, 256, 512, *range(1024, 4097, 512))
_WITH_GROUPS_BESIDE_CHUNKS = (64, 256)
"""Fewer shapes than without groups, because each takes time and memory at the start."""


@dataclass(frozen=True, slots=True, order=True)
class GraphShape:
    """What a graph has room for.

    Attributes:
        num_decodes: sequences of one token.
        num_chunks: sequences of more tokens.
        num_tokens: tokens of all chunks.
        num_groups: groups of decodes that share a prefix; 0: each decode is computed by itself.
    """

    num_decodes: int
    num_chunks: int = 0
    num_tokens: int = 0
    num_groups: int = 0

    @property
    def num_rows(self) -> int:
        """Sequences, and so results."""
        return self.num_decodes + self.num_chunks

    @property
    def all_tokens(self) -> int:
        """Tokens of the step."""
        return self.num_decodes + self.num_tokens


class GraphShapes:
    """The shapes for a number of sequences.

    Attributes:
        shapes: all, decodes first, of either kind those of most work first.
    """

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int):
        sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, 257, 32), *_MANY_DECODES]
        most = min(max_num_batched_tokens, _CHUNK_TOKENS[-1])
        self._tokens = _up_to(most, _CHUNK_TOKENS)
        # By number of groups: decodes alone, and decodes beside chunks.
        self._decodes = {0: _up_to(max_num_seqs, sizes), MAX_GROUPS: _up_to(max_num_seqs, _DECODES_WITH_GROUPS)}
        self._beside = {
            0: _up_to(min(max_num_seqs, _DECODES_BESIDE_CHUNKS[-1]), _DECODES_BESIDE_CHUNKS),
            MAX_GROUPS: _up_to(min(max_num_seqs, _WITH_GROUPS_BESIDE_CHUNKS[-1]), _WITH_GROUPS_BESIDE_CHUNKS),
        }
        shapes = [GraphShape(size, num_groups=groups) for groups, sizes in self._decodes.items() for size in sizes]
        shapes += [
            GraphShape(decodes, NUM_CHUNKS, tokens, groups)
            for groups, sizes in self._beside.items()
            for decodes in sizes
            for tokens in self._tokens
        ]
        self.shapes: Sequence[GraphShape] = sorted(
            shapes, key=lambda shape: (shape.num_chunks, -shape.all_tokens, shape.num_groups)
        )

    def fit(self, num_decodes: int, num_chunks: int, num_tokens: int, *, with_groups: bool = False) -> GraphShape | None:
        """The smallest shape that has room; None: there is none. with_groups: for groups of decodes, too."""
        groups = MAX_GROUPS if with_groups else 0
        if num_chunks == 0:
            size = _at_least(self._decodes[groups], num_decodes)
            return None if size is None else GraphShape(size, num_groups=groups)
        decodes, tokens = _at_least(self._beside[groups], num_decodes), _at_least(self._tokens, num_tokens)
        if num_chunks > NUM_CHUNKS or decodes is None or tokens is None:
            return None
        return GraphShape(decodes, NUM_CHUNKS, tokens, groups)


def _up_to(most: int, sizes: Sequence[int]) -> list[int]:
    return [*(size for size in sizes if size < most), most]


def _at_least(sizes: Sequence[int], wanted: int) -> int | None:
    return next((size for size in sizes if size >= wanted), None)


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """A packed step, decodes first, as PackedStep.

    Attributes:
        input_ids: int64 [num_tokens], -row - 1 for a token that only the device knows.
        positions, slot_mapping: int64 [num_tokens].
        rows: int64 [num_seqs], of the batch.
        samples: bool [num_seqs], whether a token is drawn.
        cu_seqlens_q: int32 [num_seqs + 1].
        seq_lens: int32 [num_seqs].
        block_tables: int32 [num_seqs, width].
        num_decodes: sequences of one token.
        groups: of decodes; None: none that are worth it.
    """

    input_ids: Ints
    positions: Ints
    slot_mapping: Ints
    rows: Ints
    samples: npt.NDArray[np.bool_]
    cu_seqlens_q: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    num_decodes: int
    groups: PrefixGroups | None = None

    def padded(self, shape: GraphShape, spare_row: int) -> list[npt.NDArray[Any]]:
        """What a graph of that shape reads, block tables not counted.

        Returns:
            input_ids, positions, slot_mapping int64 [all_tokens]; sample_indices, rows int64 [num_rows]; cu_seqlens_q int32
            [num_rows + 1]; seq_lens int32 [num_rows]. Where the shape has groups: those of PrefixGroups.padded.
        """
        num, room = self.num_decodes, shape.num_decodes
        num_chunks, num_tokens = len(self.rows) - num, len(self.input_ids) - num
        tokens = np.zeros((3, shape.all_tokens), np.int64)
        tokens[2] = -1
        for row, column in zip(tokens, (self.input_ids, self.positions, self.slot_mapping), strict=True):
            row[:num] = column[:num]
            row[room : room + num_tokens] = column[num:]
        ends = np.empty(shape.num_rows + 1, np.int32)
        ends[: room + 1] = np.arange(room + 1)
        ends[room + 1 :] = room + num_tokens
        ends[room : room + num_chunks + 1] = self.cu_seqlens_q[num:] + (room - num)
        indices = np.zeros(shape.num_rows, np.int64)
        rows = np.full(shape.num_rows, spare_row, np.int64)
        places = self.places(shape)
        indices[places] = ends[places + 1] - 1
        rows[places] = self.rows[self.samples]
        seq_lens = np.zeros(shape.num_rows, np.int32)
        seq_lens[:num] = self.seq_lens[:num]
        seq_lens[room : room + num_chunks] = self.seq_lens[num:]
        padded = [tokens[0], tokens[1], tokens[2], indices, rows, ends, seq_lens]
        if shape.num_groups:
            padded += (self.groups or NO_GROUPS).padded(shape.num_decodes)
        return padded

    def places(self, shape: GraphShape) -> Ints:
        """Where the results of the sequences that sample are, in their order; int64 [number of them]."""
        places = np.flatnonzero(self.samples)
        places[places >= self.num_decodes] += shape.num_decodes - self.num_decodes
        return places
