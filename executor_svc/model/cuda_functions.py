"""What a decoder stack calls on a GPU: the Triton kernels, and the library's products where those are faster.

Knows parts and kernels. Does not know families, steps or requests.
"""

import functools

import torch
from torch import Tensor
from torch.nn import functional

from executor_svc.kernels.batch import Rotary
from executor_svc.kernels.triton.activation import act_mul
from executor_svc.kernels.triton.backend import TritonBackend
from executor_svc.kernels.triton.kv_write import rope_write_kv
from executor_svc.kernels.triton.linear import MAX_REDUCE_ROWS, Norm, StreamWorkspace, stream_linear
from executor_svc.kernels.triton.linear_configs import ProductShape, by_rule, choose
from executor_svc.kernels.triton.norm import add_rms_norm, rms_norm, sandwich_rms_norm
from executor_svc.model.forward_context import ForwardContext
from executor_svc.model.stack_functions import StackFunctions, torch_attention
from executor_svc.model.stack_parts import AttentionPart, NormPart, ProductPart


def triton_functions(device: torch.device, *, overlap: bool | None = None) -> StackFunctions:
    """The fast way on a device with CUDA.

    Args:
        device: where everything is.
        overlap: kernels begin before the one in front of them has ended; None: where the device can.
    """
    products = StreamedProducts(device, overlap=overlap)
    norm = functools.partial(triton_norm, overlap=overlap)
    return StackFunctions(norm, products, triton_attention, absorbs=products.absorbs)


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


def triton_attention(qkv: Tensor, positions: Tensor, part: AttentionPart, context: ForwardContext) -> Tensor:
    """See AttentionFunction."""
    backend, batch, call = context.backend, context.batch, part.call
    if not isinstance(backend, TritonBackend):
        return torch_attention(qkv, positions, part, context)
    num_tokens, num_heads, num_kv_heads = qkv.shape[0], part.num_heads, part.num_kv_heads
    cache = context.layer_cache(call.layer_idx)
    # Chunks attend to their own keys where they are fresh; decodes read all of them from the cache.
    num_rotated = num_heads + (num_kv_heads if batch.num_decodes < batch.num_seqs else 0)
    rotated = qkv.new_empty(num_tokens, num_rotated, part.head_dim)
    norms = (None, None) if part.q_norm is None or part.k_norm is None else (part.q_norm.weight, part.k_norm.weight)
    rope_write_kv(
        qkv,
        positions,
        batch.slot_mapping,
        cache,
        rotated,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=part.head_dim,
        rotary=Rotary(part.rotary.cos, part.rotary.sin),
        q_norm_weight=norms[0],
        k_norm_weight=norms[1],
        norm_eps=1e-6 if part.q_norm is None else part.q_norm.epsilon,
    )
    value = qkv.view(num_tokens, -1, part.head_dim)[:, num_heads + num_kv_heads :]
    key = rotated[:, num_heads:] if num_rotated > num_heads else value
    out = backend.attend_written(
        rotated[:, :num_heads], key, value, cache, batch, scale=call.scale, window=call.window, softcap=call.softcap, sinks=None
    )
    context.note_attended(call.layer_idx)
    return out.flatten(1)


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

    def __init__(self, device: torch.device, *, can_absorb: bool = True, overlap: bool | None = None):
        """Products.

        Args:
            device: where everything is.
            can_absorb: whether norms and sums may become part of products.
            overlap: as in triton_functions.
        """
        self._workspace = StreamWorkspace.for_device(device)
        self._can_absorb = can_absorb
        self._overlap = overlap
        self._choose = functools.cache(choose)

    def absorbs(self, num_rows: int) -> bool:
        """Whether norms and sums are part of products of so many rows."""
        return self._can_absorb and num_rows <= MAX_REDUCE_ROWS

    def __call__(self, x: Tensor, product: ProductPart, out: Tensor, *, norm: NormPart | None = None, add: bool = False) -> None:
        """See ProductFunction."""
        dtype = str(product.weight.dtype).removeprefix("torch.")
        num_rows, depth = x.shape
        shape = ProductShape(num_rows, product.num_outputs, depth, product.activation is not None, dtype)
        choice = self._choose(shape)
        if (norm is not None or add) and not choice.reduce:
            choice = by_rule(shape)
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
            add=add,
            norm=None if norm is None else Norm(norm.weight, norm.epsilon),
            reduce=choice.reduce,
            overlap=self._overlap,
        )
