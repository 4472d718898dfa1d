"""What a decoder stack calls on a GPU: the Triton kernels, and the library's products where those are faster.

Knows parts and kernels. Does not know families, steps or requests.
"""

import functools

import torch
from torch import Tensor
from torch.nn import functional

from executor_svc.kernels.triton.activation import act_mul
from executor_svc.kernels.triton.linear import MAX_REDUCE_ROWS, Norm, StreamWorkspace, stream_linear
from executor_svc.kernels.triton.linear_configs import ProductShape, by_rule, choose
from executor_svc.kernels.triton.norm import add_rms_norm, rms_norm, sandwich_rms_norm
from executor_svc.model.stack_functions import StackFunctions, torch_attention
from executor_svc.model.stack_parts import NormPart, ProductPart


def triton_functions(device: torch.device) -> StackFunctions:
    """The fast way on a device with CUDA."""
    products = StreamedProducts(device)
    return StackFunctions(triton_norm, products, torch_attention, absorbs=products.absorbs)


def triton_norm(
    x: Tensor,
    norm: NormPart,
    out: Tensor,
    *,
    residual: Tensor | None = None,
    post: NormPart | None = None,
    rows: Tensor | None = None,
) -> None:
    """See NormFunction."""
    if residual is None:
        rms_norm(x, norm.weight, norm.epsilon, out, rows=rows)
    elif post is None:
        add_rms_norm(x, residual, norm.weight, norm.epsilon, out, rows=rows)
    else:
        sandwich_rms_norm(x, residual, post.weight, norm.weight, norm.epsilon, out, rows=rows)


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

    def __init__(self, device: torch.device, *, can_absorb: bool = True):
        """Products.

        Args:
            device: where everything is.
            can_absorb: whether norms and sums may become part of products.
        """
        self._workspace = StreamWorkspace.for_device(device)
        self._can_absorb = can_absorb
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
        )
