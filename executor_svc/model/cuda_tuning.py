"""Measures how the products of one model are computed fastest on this GPU, and keeps the result (kernels/triton/configs.py).

Knows stacks and candidates. A product is measured over the weights of all layers, as a step reads them: one that stays in the
second-level cache would say nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from executor_svc.kernels.triton.linear_configs import ProductChoice, tune_product
from executor_svc.model.cuda_functions import StreamedProducts, product_shape
from executor_svc.model.cuda_rewrite import StackedModel
from executor_svc.model.stack_parts import ProductPart

ROWS = (1, 2, 4, 8, 16, 32, 64)
_REPEATS = 3


def tune_products(model: StackedModel, progress: Callable[[str], None], rows: Sequence[int] = ROWS) -> None:
    """Tunes every product of the model that has not been tuned on this machine.

    Args:
        model: on the GPU.
        progress: called with lines for people.
        rows: numbers of rows to tune for.
    """
    layers = model.stack.layers
    groups = {
        "qkv": [layer.qkv for layer in layers],
        "output": [layer.output for layer in layers],
        "gate_up": [layer.gate_up for layer in layers],
        "down": [layer.down for layer in layers],
        "head": [model.head],
    }
    products = StreamedProducts(model.head.weight.device)
    for name, group in groups.items():
        for num_rows in rows:
            choice = tune_product(product_shape(group[0], num_rows), _timer(products, group, num_rows))
            progress(f"{name} of {num_rows} rows: {choice.config or 'the library'}")


@torch.inference_mode()
def _timer(products: StreamedProducts, group: Sequence[ProductPart], num_rows: int) -> Callable[[ProductChoice], float]:
    """Measures seconds of all products of a group, one after the other in a CUDA graph."""
    weight = group[0].weight
    x = torch.randn(num_rows, weight.shape[1], dtype=torch.float32, device=weight.device).to(weight.dtype)
    out = torch.empty(num_rows, group[0].num_outputs, dtype=weight.dtype, device=weight.device)
    make_event: Any = torch.cuda.Event
    make_stream: Any = torch.cuda.Stream
    stream = make_stream()

    def measure(choice: ProductChoice) -> float:
        with torch.inference_mode():
            products.compute(choice, x, group[0], out)  # compiles
            torch.cuda.synchronize()
            # The context manager torch.cuda.graph collects garbage each time, which takes longer than the rest.
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(stream):
                graph.capture_begin()
                try:
                    for product in group:
                        products.compute(choice, x, product, out)
                finally:
                    graph.capture_end()
            torch.cuda.synchronize()
        graph.replay()
        started, ended = make_event(enable_timing=True), make_event(enable_timing=True)
        best = float("inf")
        for _ in range(_REPEATS):
            started.record()
            graph.replay()
            ended.record()
            ended.synchronize()
            best = min(best, started.elapsed_time(ended) / 1e3)
        return best

    return measure
