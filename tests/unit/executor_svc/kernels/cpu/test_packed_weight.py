"""Products with packed weights against float64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from executor_svc.kernels.cpu.linear import ADD, PLAIN
from executor_svc.kernels.cpu.packed_weight import PLAIN_ROWS, pack
from executor_svc.model.quantize import quantize_weight

ROWS = (1, 2, 5, 6, 7, 12, 13, 25, 40)
SIZES = ((64, 48), (33, 70), (16, 8), (100, 31), (7, 1))


def poisoned(num_rows: int, width: int) -> Tensor:
    return torch.full((num_rows, width), float("nan"))


@pytest.mark.parametrize("out_features, in_features", SIZES)
def test_product_equals_float64(out_features: int, in_features: int, threads: int) -> None:
    weight, bias = torch.randn(out_features, in_features), torch.randn(out_features)
    packed = pack(weight, bias=bias)
    for num_rows in ROWS:
        x = torch.randn(num_rows, in_features)

        found = packed.apply(x, poisoned(num_rows, out_features))

        torch.testing.assert_close(
            found.double(), functional.linear(x.double(), weight.double(), bias.double()), rtol=0, atol=1e-4
        )


@pytest.mark.parametrize("out_features, in_features", SIZES)
def test_int8_product_equals_that_of_its_dequantised_weight(out_features: int, in_features: int) -> None:
    weight = quantize_weight(torch.randn(out_features, in_features))
    packed = pack(weight.values, scales=weight.scales)
    for num_rows in ROWS:
        x = torch.randn(num_rows, in_features)

        found = packed.apply(x, poisoned(num_rows, out_features))

        torch.testing.assert_close(found.double(), x.double() @ weight.dequantized().double().T, rtol=0, atol=1e-4)


def test_bfloat16_weights_are_exact_in_float32() -> None:
    weight = torch.randn(40, 33).bfloat16()
    packed = pack(weight)
    for num_rows in ROWS:
        x = torch.randn(num_rows, 33)

        found = packed.apply(x, poisoned(num_rows, 40))

        torch.testing.assert_close(found.double(), x.double() @ weight.double().T, rtol=0, atol=1e-4)


def test_a_row_has_the_same_bits_whatever_rows_are_beside_it() -> None:
    packed, x = pack(torch.randn(64, 200)), torch.randn(40, 200)
    together = packed.apply(x)

    assert all(torch.equal(packed.apply(x[i : i + n]), together[i : i + n]) for n in (1, 6, 13) for i in range(0, 27, 9))


def test_add_mode_adds_to_what_is_there() -> None:
    weight, x, residual = torch.randn(40, 33), torch.randn(9, 33), torch.randn(9, 40)
    expected = residual.double() + x.double() @ weight.double().T

    found = pack(weight).apply(x, residual, mode=ADD)

    assert found is residual
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("width", [16, 24, 96, 7])
def test_gated_product_activates_the_first_half(activation: str, width: int) -> None:
    weight, bias = torch.randn(2 * width, 31) / 4, torch.randn(2 * width)
    packed = pack(weight, bias=bias, activation=activation)
    for num_rows in ROWS:
        x = torch.randn(num_rows, 31)
        both = functional.linear(x.double(), weight.double(), bias.double())
        gate, up = both[:, :width], both[:, width:]
        activated = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")

        found = packed.apply(x, poisoned(num_rows, width))

        torch.testing.assert_close(found.double(), activated * up, rtol=1e-5, atol=1e-5)


def test_silu_of_huge_inputs_is_finite() -> None:
    packed = pack(torch.cat([torch.eye(16), torch.ones(16, 16) / 16]), activation="silu")
    x = torch.full((1, 16), 1000.0)
    x[0, ::2] = -1000.0
    x[0, 1] = 1016.0

    found = packed.apply(x)

    expected = functional.silu(x.double()) * x.double().mean()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_rows_are_those_of_the_matrix() -> None:
    weight = torch.randn(50, 33)
    quantized = quantize_weight(weight)
    indices = torch.tensor([0, 49, 31, 32, 7, 7])

    assert torch.equal(pack(weight).rows(indices), weight[indices])
    packed = pack(quantized.values, scales=quantized.scales)
    torch.testing.assert_close(packed.rows(indices), quantized.dequantized()[indices])


AROUND_PLAIN_ROWS = (1, 13, PLAIN_ROWS - 1, PLAIN_ROWS, PLAIN_ROWS + 33)


@pytest.mark.parametrize("mode", [PLAIN, ADD])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("out_features, in_features", SIZES)
def test_plain_bfloat16_weight_gives_the_same_product(
    out_features: int, in_features: int, has_bias: bool, mode: int, threads: int
) -> None:
    weight = torch.randn(out_features, in_features).bfloat16()
    bias = torch.randn(out_features).bfloat16() if has_bias else None
    packed = pack(weight, bias=bias, keep_plain=True)
    for num_rows in AROUND_PLAIN_ROWS:
        x = torch.randn(num_rows, in_features).bfloat16().float()
        residual = torch.randn(num_rows, out_features)
        before = residual.double() if mode == ADD else 0.0
        expected = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())

        found = packed.apply(x, residual, mode=mode)

        assert found is residual
        # Many rows are rounded to bfloat16 once, on the way out of the library's product.
        rtol = 2**-8 if num_rows >= PLAIN_ROWS else 0.0
        allowed = expected.abs() * rtol + 1e-4
        assert bool(((found.double() - (before + expected)).abs() <= allowed).all())


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("width", [16, 7])
def test_plain_gated_bfloat16_weight_activates_the_first_half(activation: str, width: int) -> None:
    weight, bias = (torch.randn(2 * width, 31) / 4).bfloat16(), torch.randn(2 * width).bfloat16()
    packed = pack(weight, bias=bias, activation=activation, keep_plain=True)
    for num_rows in AROUND_PLAIN_ROWS:
        x = torch.randn(num_rows, 31).bfloat16().float()
        both = functional.linear(x.double(), weight.double(), bias.double())
        gate, up = both[:, :width], both[:, width:]
        activated = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")

        found = packed.apply(x, poisoned(num_rows, width))

        tolerance = 2e-2 if num_rows >= PLAIN_ROWS else 1e-5
        torch.testing.assert_close(found.double(), activated * up, rtol=tolerance, atol=tolerance)


def test_plain_weight_takes_as_many_rows_as_there_are_and_none() -> None:
    packed = pack(torch.randn(40, 33).bfloat16(), keep_plain=True)

    assert packed.apply(torch.randn(0, 33)).shape == (0, 40)
    assert [packed.streams(num_rows) for num_rows in (1, PLAIN_ROWS - 1, PLAIN_ROWS)] == [True, True, False]
    assert pack(torch.randn(40, 33).bfloat16()).streams(PLAIN_ROWS)


def test_plain_weight_reads_slices_of_wider_rows() -> None:
    weight = torch.randn(40, 33).bfloat16()
    packed = pack(weight, keep_plain=True)
    wide_x, wide_out = torch.randn(PLAIN_ROWS, 50).bfloat16().float(), torch.zeros(PLAIN_ROWS, 64)

    packed.apply(wide_x[:, 5:38], wide_out[:, 8:48])

    expected = wide_x[:, 5:38].double() @ weight.double().T
    torch.testing.assert_close(wide_out[:, 8:48].double(), expected, rtol=2**-8, atol=1e-4)
    assert not wide_out[:, :8].any() and not wide_out[:, 48:].any()


def test_rows_of_a_plain_weight_are_exact() -> None:
    weight, indices = torch.randn(50, 33).bfloat16(), torch.tensor([0, 49, 31, 32, 7, 7])

    for keep_plain in (False, True):
        assert torch.equal(pack(weight, keep_plain=keep_plain).rows(indices), weight[indices].float())
