"""Products on the matrix unit against float64, beside the streaming product of the same weights."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from executor_svc.kernels.cpu.amx import has_matrix_unit
from executor_svc.kernels.cpu.linear import ADD
from executor_svc.kernels.cpu.packed_weight import SPLIT_ROWS, pack
from executor_svc.kernels.cpu.split_linear import can_split, split_linear_f32

pytestmark = pytest.mark.skipif(not has_matrix_unit(), reason="this processor has no matrix unit for bfloat16 (AMX)")

ROWS = (SPLIT_ROWS, SPLIT_ROWS + 1, 130, 513)
SIZES = ((64, 32), (33, 64), (7, 96), (200, 1536))


@pytest.fixture(params=[1, 2, 3], ids=lambda n: f"{n}_threads")
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def poisoned(num_rows: int, width: int) -> Tensor:
    return torch.full((num_rows, width), float("nan"))


@pytest.mark.parametrize("out_features, in_features", SIZES)
def test_product_is_as_close_to_float64_as_one_in_float32(out_features: int, in_features: int, threads: int) -> None:
    weight, bias = torch.randn(out_features, in_features), torch.randn(out_features)
    packed = pack(weight, bias=bias)
    for num_rows in ROWS:
        x = torch.randn(num_rows, in_features)
        exact = functional.linear(x.double(), weight.double(), bias.double())
        assert packed.arguments(x, x, 0)[0] is split_linear_f32

        found = packed.apply(x, poisoned(num_rows, out_features))

        error, float32_error = (found - exact).norm(), (functional.linear(x, weight, bias) - exact).norm()
        assert error <= 2 * float32_error


def test_sizes_of_numbers_do_not_matter() -> None:
    """Parts are relative to their number: rows and columns of very different sizes are equally exact."""
    sizes = 10.0 ** torch.arange(-12, 12)
    weight = torch.randn(len(sizes), 64) * sizes[:, None]
    x = torch.randn(120, 64) * sizes.repeat(5)[:, None]
    exact = x.double() @ weight.double().T

    found = pack(weight).apply(x, poisoned(120, len(sizes)))

    scale = x.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)
    assert ((found - exact).abs() / scale).max() < 1e-6


def test_strided_rows_are_read_and_written_in_place() -> None:
    packed, wide = pack(torch.randn(40, 64)), torch.randn(100, 200)
    x, out = wide[:, 100:164], poisoned(100, 90)

    packed.apply(x, out[:, 10:50])

    torch.testing.assert_close(out[:, 10:50], packed.apply(x.contiguous()), rtol=0, atol=0)
    assert out[:, :10].isnan().all()
    assert out[:, 50:].isnan().all()


def test_add_mode_adds_to_what_is_there() -> None:
    weight, x, residual = torch.randn(70, 64), torch.randn(99, 64), torch.randn(99, 70)
    expected = residual.double() + x.double() @ weight.double().T

    found = pack(weight).apply(x, residual, mode=ADD)

    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("width", [16, 24, 96, 7])
def test_gated_product_activates_the_first_half(activation: str, width: int, threads: int) -> None:
    weight, x = torch.randn(2 * width, 64) / 8, torch.randn(131, 64)
    product = x.double() @ weight.double().T
    gate, up = product[:, :width], product[:, width:]
    activated = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")

    found = pack(weight, activation=activation).apply(x, poisoned(131, width))

    torch.testing.assert_close(found.double(), activated * up, rtol=0, atol=1e-4)


def test_a_row_has_the_same_bits_whatever_rows_are_beside_it(threads: int) -> None:
    packed, x = pack(torch.randn(64, 160)), torch.randn(400, 160)
    together = packed.apply(x)

    assert all(torch.equal(packed.apply(x[i : i + n]), together[i : i + n]) for n in (96, 133) for i in (0, 1, 250))


def test_a_poisoned_row_harms_no_other() -> None:
    packed, x = pack(torch.randn(64, 64)), torch.randn(128, 64)
    expected = packed.apply(x)
    x[5, 3], x[70, 0] = float("nan"), float("inf")

    found = packed.apply(x)

    healthy = [i for i in range(128) if i not in (5, 70)]
    assert torch.equal(found[healthy], expected[healthy])
    assert not found[[5, 70]].isfinite().any()


def test_a_depth_that_tiles_do_not_divide_streams() -> None:
    packed, x = pack(torch.randn(64, 40)), torch.randn(128, 40)

    assert not can_split(40)
    assert packed.arguments(x, x, 0)[0] is not split_linear_f32
