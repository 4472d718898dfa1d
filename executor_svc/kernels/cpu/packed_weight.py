"""A weight as the streaming kernels read it, and the product with it.

Knows the packed layout. Does not know modules.

    values [ceil(out_features / 32), in_features, 32]      the 32 outputs of a panel side by side
    scales [ceil(out_features / 32), ceil(in_features / 32), 32]   int8 alone

A gated weight has 16 gate outputs and the 16 up outputs that belong to them in every panel, so that act(gate) * up needs
no second pass. Outputs past out_features are zero.

A bfloat16 weight may be held plain too (plain_weight.py), for products of many rows where the processor multiplies bfloat16
natively: then it takes as many bytes as one in float32.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from executor_svc.kernels.cpu.compile import Kernel
from executor_svc.kernels.cpu.linear import ACTIVATIONS, PANEL, PLAIN, linear_bf16, linear_f32, linear_i8
from executor_svc.kernels.cpu.plain_weight import PlainWeight
from executor_svc.kernels.cpu.split_linear import can_split, split_arguments, split_linear_f32

INT8_GROUP = 32
"""Weights along in_features that share an int8 scale."""

PLAIN_ROWS = 28
"""From so many rows on the library's bfloat16 product is faster, if the weight is held plain. Measured: docs/experiments.md."""

SPLIT_ROWS = 80
"""From so many rows on float32 weights are multiplied on the matrix unit. Measured: docs/experiments.md."""

_KERNELS: dict[torch.dtype, Kernel] = {torch.float32: linear_f32, torch.bfloat16: linear_bf16, torch.int8: linear_i8}


@dataclass(frozen=True)
class PackedWeight:
    """A packed matrix, with its bias.

    Attributes:
        values: float32, bfloat16 or int8 [num_panels, in_features, 32].
        scales: float32 [num_panels, ceil(in_features / 32), 32]; None unless values are int8.
        bias: float32 [num_panels * 32]; None: none.
        in_features: columns of the matrix.
        out_features: rows of the matrix; of a gated one, half its rows.
        activation: "silu" or "gelu_tanh" for a gated weight; None for a plain one.
        plain: the same matrix for PLAIN_ROWS rows and more; None: panels for any number of rows.
    """

    values: Tensor
    scales: Tensor | None
    bias: Tensor | None
    in_features: int
    out_features: int
    activation: str | None = None
    plain: PlainWeight | None = None

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        """All that takes memory, by name."""
        plain = {} if self.plain is None else {"plain_values": self.plain.values, "plain_bias": self.plain.bias}
        return {"values": self.values, "scales": self.scales, "bias": self.bias, **plain}

    def streams(self, num_rows: int) -> bool:
        """Whether apply runs the kernel of arguments for so many rows."""
        return self.plain is None or num_rows < PLAIN_ROWS

    def apply(self, x: Tensor, out: Tensor | None = None, *, mode: int = PLAIN) -> Tensor:
        """The product x · weight^T + bias, activated if the weight is gated.

        Args:
            x: float32 [num_rows, in_features], the last dimension contiguous.
            out: float32 [num_rows, out_features], the last dimension contiguous; None: a new one.
            mode: PLAIN, or ADD to add to out.

        Returns:
            out.
        """
        if out is None:
            out = x.new_empty(x.shape[0], self.out_features)
        if x.shape[0] == 0:  # a step that samples nothing; the kernel divides by the number of tiles
            return out
        if self.plain is not None and not self.streams(x.shape[0]):
            return self.plain.apply(x, out, self._mode(mode))
        kernel, fields = self.arguments(x, out, mode)
        kernel(*fields, threads=torch.get_num_threads())
        return out

    def arguments(self, x: Tensor, out: Tensor, mode: int) -> tuple[Kernel, tuple[int, ...]]:
        """The kernel of apply and its fields, for callers that run several kernels at once."""
        kernel, fields = self._call
        x_stride, out_stride = x.stride(0) * 4, out.stride(0) * 4
        arguments = (
            x.data_ptr(),
            x_stride,
            x.shape[0],
            *fields,
            out.data_ptr(),
            out_stride,
            self.out_features,
            self._mode(mode),
        )
        if x.shape[0] >= SPLIT_ROWS and self.values.dtype == torch.float32 and can_split(self.in_features):
            return split_linear_f32, arguments + split_arguments(self.in_features)
        return kernel, arguments

    def _mode(self, mode: int) -> int:
        """The mode of a product: that asked for, or the weight's own if it is gated."""
        return mode if self.activation is None else ACTIVATIONS[self.activation]

    @cached_property
    def _call(self) -> tuple[Kernel, tuple[int, ...]]:
        """The kernel, and the arguments that are always the same: a decode step is 200 calls of a few microseconds."""
        scales = self.scales.data_ptr() if self.scales is not None else 0
        bias = self.bias.data_ptr() if self.bias is not None else 0
        return _KERNELS[self.values.dtype], (self.in_features, self.values.data_ptr(), scales, bias, self.values.shape[0])

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of the matrix: float32 [num_indices, in_features] for int64 [num_indices]."""
        if self.plain is not None:
            return self.plain.values[indices].float()
        panels, columns = indices // PANEL, indices % PANEL
        found = self.values[panels, :, columns].float()
        if self.scales is not None:
            scales = self.scales[panels, :, columns].repeat_interleave(INT8_GROUP, dim=1)
            found *= scales[:, : self.in_features]
        return found


def pack(
    values: Tensor,
    *,
    scales: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    keep_plain: bool = False,
) -> PackedWeight:
    """Packs a matrix.

    Args:
        values: float32, bfloat16 or int8 [out_features, in_features]; of a gated weight the gate's rows, then the up's.
        scales: float32 [out_features, ceil(in_features / 32)] of int8 values.
        bias: float [out_features].
        activation: makes it a gated weight.
        keep_plain: holds bfloat16 values plain too; the tensors given are kept, not copied.
    """
    rows, in_features = values.shape
    order = torch.arange(rows)
    out_features = rows
    if activation is not None:
        out_features = rows // 2
        padded = -(-out_features // (PANEL // 2)) * (PANEL // 2)
        # Row of every place in the panels; rows is the number of a row of zeros.
        half = torch.full((2, padded), rows)
        half[0, :out_features], half[1, :out_features] = order[:out_features], order[out_features:]
        order = half.view(2, -1, PANEL // 2).transpose(0, 1).reshape(-1)
    num_panels = -(-len(order) // PANEL)
    order = torch.nn.functional.pad(order, (0, num_panels * PANEL - len(order)), value=rows)
    return PackedWeight(
        values=_panels(values, order),
        scales=None if scales is None else _panels(scales, order),
        bias=None if bias is None else _with_zero(bias.float())[order].contiguous(),
        in_features=in_features,
        out_features=out_features,
        activation=activation,
        plain=PlainWeight(values, None if bias is None else bias.bfloat16()) if keep_plain else None,
    )


def _panels(matrix: Tensor, order: Tensor) -> Tensor:
    """[num_panels, in_features, 32] of a matrix's rows in that order; the order's largest number is a row of zeros."""
    out = matrix.new_empty(len(order) // PANEL, matrix.shape[1], PANEL)
    for start in range(0, len(order), 64 * PANEL):
        places = order[start : start + 64 * PANEL]
        rows = matrix[places.clamp(max=matrix.shape[0] - 1)]
        rows[places >= matrix.shape[0]] = 0
        out[start // PANEL : start // PANEL + 64] = rows.view(-1, PANEL, matrix.shape[1]).transpose(1, 2)
    return out


def _with_zero(vector: Tensor) -> Tensor:
    return torch.cat([vector, vector.new_zeros(1)])
