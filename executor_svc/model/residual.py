"""The residual stream of a decoder stack, in two forms. Knows norms and products; no attention and no layer.

float32           a product goes into a row of its own; the norm that follows adds it        the most exact
weights' dtype    a product adds to the stream itself, the norm only reads it                the least to read and write
"""

from typing import Protocol

from torch import Tensor

from executor_svc.model.stack_functions import StackFunctions, add_product
from executor_svc.model.stack_parts import NormPart, ProductPart


class Residual(Protocol):
    """Rows that every layer adds to.

    Attributes:
        rows: [num_tokens, hidden_size], the sums.
        normed: [num_tokens, hidden_size] in the weights' dtype, what the last norm made of them.
    """

    rows: Tensor
    normed: Tensor

    def begin(self, norm: NormPart) -> None:
        """The norm of what the stream begins with."""
        ...

    def add(
        self,
        x: Tensor,
        product: ProductPart,
        norm: NormPart,
        *,
        post: NormPart | None = None,
        out: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> None:
        """Adds a product, and normalises the sums.

        Args:
            x: [num_tokens, in_features].
            product: without activation.
            norm: of the sums.
            post: the product goes through it before it is added; None: nothing does.
            out: where the norm goes; None: to normed.
            rows: int64 [num_rows], the tokens that out is wanted for, after which the stream is void; None: all.
        """
        ...


class RoundedLate:
    """Sums in float32; see Residual."""

    def __init__(self, functions: StackFunctions, rows: Tensor, normed: Tensor, delta: Tensor):
        """Sums in rows, which it begins with; delta is scratch of normed's form and dtype."""
        self.rows = rows
        self.normed = normed
        self._delta = delta
        self._functions = functions

    def begin(self, norm: NormPart) -> None:
        """See Residual."""
        self._functions.norm(self.rows, norm, self.normed)

    def add(
        self,
        x: Tensor,
        product: ProductPart,
        norm: NormPart,
        *,
        post: NormPart | None = None,
        out: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> None:
        """See Residual."""
        self._functions.product(x, product, self._delta)
        self._functions.norm(self._delta, norm, self.normed if out is None else out, residual=self.rows, post=post, rows=rows)


class InPlaceResidual:
    """Sums in the weights' dtype, which products add to; see Residual. Not for products that go through a norm."""

    def __init__(self, functions: StackFunctions, rows: Tensor, normed: Tensor):
        """Sums in rows, which it begins with."""
        self.rows = rows
        self.normed = normed
        self._functions = functions

    def begin(self, norm: NormPart) -> None:
        """See Residual."""
        self._functions.norm(self.rows, norm, self.normed)

    def add(
        self,
        x: Tensor,
        product: ProductPart,
        norm: NormPart,
        *,
        post: NormPart | None = None,
        out: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> None:
        """See Residual."""
        assert post is None, "the product of such a layer cannot be added in place"
        add_product(x, product, self.rows)
        self._functions.norm(self.rows, norm, self.normed if out is None else out, rows=rows)
