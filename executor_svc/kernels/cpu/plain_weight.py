"""A bfloat16 weight as the library's product reads it, for many rows: it uses AMX, which the streaming kernels cannot.

Knows torch's product. Does not know the packed layout, nor when which of the two is used (packed_weight.py).
"""

from dataclasses import dataclass

from llvmlite import binding
from torch import Tensor
from torch.nn import functional

from executor_svc.kernels.cpu.finish import finish


def has_bfloat16_products() -> bool:
    """Whether the library's bfloat16 products are worth a second copy: with AMX alone.

    With AVX-512 BF16 they are slower than panels at any number of rows, without that as well by far.
    """
    return bool(binding.get_host_cpu_features().get("amx-bf16", False))


@dataclass(frozen=True)
class PlainWeight:
    """A matrix as it is, with its bias.

    Attributes:
        values: bfloat16 [num_rows_of_weight, in_features]; of a gated weight the gate's rows, then the up's.
        bias: bfloat16 [num_rows_of_weight]; None: none.
    """

    values: Tensor
    bias: Tensor | None

    def apply(self, x: Tensor, out: Tensor, mode: int) -> Tensor:
        """As PackedWeight.apply, but x and the product are rounded to bfloat16; mode tells the activation too."""
        return finish(functional.linear(x.bfloat16(), self.values, self.bias), out, mode)
