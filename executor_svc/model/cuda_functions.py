"""What a decoder stack calls on a GPU: the Triton kernels, and the library's products where those are faster.

Knows parts and kernels. Does not know families, steps or requests.
"""

import functools

import torch
from torch import Tensor
from torch.nn import functional

from executor_svc.kernels.batch import AttentionBatch, LayerCache, Rotary
from executor_svc.kernels.triton.activation import act_mul
from executor_svc.kernels.triton.backend import TritonBackend
from executor_svc.kernels.triton.kv_write import rope_write_kv
from executor_svc.kernels.triton.linear import MAX_ROWS, StreamWorkspace, stream_linear
from executor_svc.kernels.triton.linear_configs import ProductChoice, ProductShape, choose
from executor_svc.kernels.triton.norm import add_rms_norm, rms_norm, sandwich_rms_norm
from executor_svc.kernels.triton.prefill import packed_rows
from executor_svc.model.forward_context import ForwardContext
from executor_svc.model.stack_functions import StackFunctions, torch_attention
from executor_svc.model.stack_parts import AttentionPart, NormPart, ProductPart


def triton_functions(device: torch.device, *, overlap: bool | None = None) -> StackFunctions:
    """The fast way on a device with CUDA.

    Args:
        device: where everything is.
        overlap: kernels begin before the one in front of them has ended; None: where the device can.
    """
    norm = functools.partial(triton_norm, overlap=overlap)
    return StackFunctions(norm, StreamedProducts(device, overlap=overlap), triton_attention, triton_turn, triton_attend)


def triton_norm(
    x: Tensor,
    norm: NormPart,
    out: Tensor,
    *,
    residual: Tensor | None = None,
    post: NormPart | None = None,
    rows: Tensor | None = None,
    overlap: bool | None = None,
) -> None:
    """See NormFunction."""
    if residual is None:
        rms_norm(x, norm.weight, norm.epsilon, out, rows=rows, overlap=overlap)
    elif post is None:
        add_rms_norm(x, residual, norm.weight, norm.epsilon, out, rows=rows, overlap=overlap)
    else:
        sandwich_rms_norm(x, residual, post.weight, norm.weight, norm.epsilon, out, rows=rows, overlap=overlap)


def triton_attention(
    qkv: Tensor, positions: Tensor, part: AttentionPart, context: ForwardContext, *, rows: Tensor | None = None
) -> Tensor:
    """See AttentionFunction."""
    backend, batch, call = context.backend, context.batch, part.call
    if not isinstance(backend, TritonBackend):
        return torch_attention(qkv, positions, part, context, rows=rows)
    num_tokens = qkv.shape[0]
    cache = context.layer_cache(call.layer_idx)
    query, key, value, turned, key_out = _room_for_heads(qkv, part, batch, of_all=rows is None)
    triton_turn(qkv, positions, batch.slot_mapping, part, cache, turned, key_out=key_out)
    if rows is not None:
        query, batch, num_tokens = query[rows], rows_as_decodes(batch, positions, rows), rows.shape[0]
    out = _attend(query, key, value, part, cache, batch, backend)
    context.note_attended(call.layer_idx)
    return (out if out.shape[0] == num_tokens else out[:num_tokens]).flatten(1)


def triton_turn(
    qkv: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    part: AttentionPart,
    cache: LayerCache,
    turned: Tensor,
    *,
    key_out: Tensor | None = None,
) -> None:
    """See TurnFunction; turned and key_out may be any query_out and key_out of rope_write_kv."""
    norms = (None, None) if part.q_norm is None or part.k_norm is None else (part.q_norm.weight, part.k_norm.weight)
    rope_write_kv(
        qkv,
        positions,
        slot_mapping,
        cache,
        turned,
        key_out=key_out,
        num_heads=part.num_heads,
        num_kv_heads=part.num_kv_heads,
        head_dim=part.head_dim,
        rotary=Rotary(part.rotary.cos, part.rotary.sin),
        q_norm_weight=norms[0],
        k_norm_weight=norms[1],
        norm_eps=1e-6 if part.q_norm is None else part.q_norm.epsilon,
    )


def triton_attend(turned: Tensor, part: AttentionPart, context: ForwardContext, out: Tensor) -> None:
    """See AttendFunction."""
    backend, cache = context.backend, context.layer_cache(part.call.layer_idx)
    assert isinstance(backend, TritonBackend), "turned heads are in the cache of its layout"
    _attend(*part.split(turned), part, cache, context.batch, backend, out)
    context.note_attended(part.call.layer_idx)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    part: AttentionPart,
    cache: LayerCache,
    batch: AttentionBatch,
    backend: TritonBackend,
    out: Tensor | None = None,
) -> Tensor:
    call = part.call
    return backend.attend_written(
        query, key, value, cache, batch, scale=call.scale, window=call.window, softcap=call.softcap, sinks=None, out=out
    )


def rows_as_decodes(batch: AttentionBatch, positions: Tensor, rows: Tensor) -> AttentionBatch:
    """Some tokens of a batch as decodes: each alone, behind all that its sequence has in front of it.

    Args:
        batch: its KV is in the cache already.
        positions: int64 [num_tokens], in each token's own sequence.
        rows: int64 [num_rows], tokens of the batch.
    """
    seqs = torch.searchsorted(batch.cu_seqlens_q[1:], rows.int(), right=True)
    num_rows = rows.shape[0]
    return AttentionBatch(
        slot_mapping=rows,  # for their number alone: nothing is written any more
        block_tables=batch.block_tables[seqs],
        cu_seqlens_q=torch.arange(num_rows + 1, dtype=torch.int32, device=rows.device),
        seq_lens=(positions[rows] + 1).int(),
        num_decodes=num_rows,
        max_seqlen_q=1,
        max_seqlen_k=batch.max_seqlen_k,
        block_size=batch.block_size,
    )


def _room_for_heads(
    qkv: Tensor, part: AttentionPart, batch: AttentionBatch, *, of_all: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Where turned heads go: queries, keys, values, and query_out and key_out of rope_write_kv that fill them.

    of_all: all queries are asked for, so that chunks may be attended to by their own keys.
    """
    num_tokens, sizes = qkv.shape[0], (part.num_heads, part.num_kv_heads, part.num_kv_heads)
    num_rows = packed_rows(batch) if of_all else None
    if num_rows is not None:
        heads = turned = qkv.new_empty(num_rows, sum(sizes), part.head_dim)
        if num_rows > num_tokens:
            turned, padding = heads[:num_tokens], heads[num_tokens:]
            padding.zero_()
        return (*part.split(heads), turned, None)
    value = qkv.view(num_tokens, -1, part.head_dim)[:, part.num_heads + part.num_kv_heads :]
    query = qkv.new_empty(num_tokens, part.num_heads, part.head_dim)
    if not of_all or batch.num_decodes == batch.num_seqs:  # decodes read all keys from the cache
        return query, value, value, query, None
    key = qkv.new_empty(num_tokens, part.num_kv_heads, part.head_dim)
    return query, key, value, query, key


def library_product(x: Tensor, product: ProductPart, out: Tensor) -> None:
    """The product by the library, into out where it can write there."""
    if product.activation is not None:
        act_mul(functional.linear(x, product.weight, product.bias), out, product.activation)
    elif out.dtype != product.weight.dtype:
        out.copy_(functional.linear(x, product.weight, product.bias))
    elif product.bias is None:
        torch.mm(x, product.weight.t(), out=out)
    else:
        torch.addmm(product.bias, x, product.weight.t(), out=out)


class StreamedProducts:
    """Products whose weight is streamed for few rows, and the library's for many; see ProductFunction."""

    def __init__(self, device: torch.device, *, overlap: bool | None = None):
        """Products.

        Args:
            device: where everything is.
            overlap: as in triton_functions.
        """
        self._workspace = StreamWorkspace.for_device(device)
        self._overlap = overlap

    def __call__(self, x: Tensor, product: ProductPart, out: Tensor) -> None:
        """See ProductFunction."""
        if x.shape[0] > MAX_ROWS:
            library_product(x, product, out)
            return
        self.compute(choose(product_shape(product, x.shape[0])), x, product, out)

    def compute(self, choice: ProductChoice, x: Tensor, product: ProductPart, out: Tensor) -> None:
        """As a call, in a way that somebody else has chosen."""
        if choice.config is None:
            library_product(x, product, out)
            return
        stream_linear(
            x,
            product.weight,
            out,
            choice.config,
            self._workspace,
            bias=product.bias,
            activation=product.activation,
            reduce=choice.reduce,
            overlap=self._overlap,
        )


def product_shape(product: ProductPart, num_rows: int) -> ProductShape:
    """What the configuration of a product of so many rows depends on."""
    dtype = str(product.weight.dtype).removeprefix("torch.")
    return ProductShape(num_rows, product.num_outputs, product.weight.shape[1], product.activation is not None, dtype)
