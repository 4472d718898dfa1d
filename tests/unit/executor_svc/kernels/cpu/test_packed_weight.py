"""Products with packed weights against float64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from executor_svc.kernels.cpu.linear import ADD
from executor_svc.kernels.cpu.packed_weight import pack
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
