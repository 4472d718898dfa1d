"""Launches a kernel with all sorts of arguments, Triton's way and ours, over a driver that notes what would reach the device.

A process of its own, where nothing is interpreted. Prints how many different variants it saw; raises where the two ways differ.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime.driver import driver

from executor_svc.kernels.triton.launch import Constants, Launch
from tests.unit.executor_svc.kernels.triton.compile_only import CompileOnlyDriver
from tests.unit.executor_svc.kernels.triton.launch_kernel import scaled_rows


class NotingDriver(CompileOnlyDriver):
    """Notes each launch: the compiled variant, its grid, stream and arguments, with tensors by their address."""

    def __init__(self, capability: int) -> None:
        super().__init__(capability)
        self.launches: list[tuple[Any, ...]] = []
        self.stream = 5

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        def note(*args: Any) -> None:
            grid_and_stream, function, packed, arguments = args[:4], args[4], args[5], args[9:]
            said = tuple(x.data_ptr() if isinstance(x, Tensor) else x for x in arguments)
            self.launches.append((metadata.hash, grid_and_stream, function, packed, said))

        return note


def main() -> None:
    device = NotingDriver(90)
    driver.set_active(device)
    launch, variants = Launch(scaled_rows), set()
    memory = {dtype: torch.zeros(64, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
    ids = torch.zeros(64, dtype=torch.int64)

    def check(*arguments: Any, grid: tuple[int, ...] = (3,), **constants: Any) -> None:
        device.launches.clear()
        scaled_rows[grid](*arguments, **constants)
        launch(grid, *arguments, **constants)  # may go Triton's way
        launch(grid, *arguments, **constants)
        launch.launch(grid, Constants(**constants), *arguments)
        plain, *ours = device.launches
        assert ours == [plain] * 3, (arguments, constants)
        variants.add(plain[0])

    strides = (0, 1, 2, 16, 17, -16, 2**31 - 1, 2**31, 2**31 + 8, -(2**31), -(2**31) - 1, 2**40, 2**63 - 1)
    for offset, stride in product((0, 1, 4), strides):
        check(memory[torch.float32][offset:], ids, memory[torch.float32], 5, stride, 1.0, WIDTH=16, ADD=0)
    for x, out, ids_at, size, wide in product((0, 1, 8), (0, 3, 8), (0, 1, 2), (1, 7, 16), (False, True)):
        dtype = torch.float32 if wide else torch.bfloat16
        arguments = memory[torch.bfloat16][x:], ids[ids_at:], memory[dtype][out:], size, 16
        check(*arguments, 2.5, grid=(2, 7), WIDTH=32, ADD=1)
        check(*arguments, 0.0, grid=(2, 7, 3), WIDTH=32, ADD=1, num_warps=8)
        check(*arguments, 16.0, WIDTH=16, ADD=1, num_warps=8, launch_pdl=True)
    device.stream = 6
    check(memory[torch.float32], ids, memory[torch.float32], 5, 1, 1.0, WIDTH=16, ADD=0)
    check(memory[torch.float32], ids, memory[torch.float32], 5, 1, 1.0, ADD=0, WIDTH=16)
    check(memory[torch.float32], ids, memory[torch.float32], 5, True, 1.0, WIDTH=16, ADD=0)

    heard: list[object] = []
    knobs.runtime.launch_enter_hook.add(heard.append)
    device.launches.clear()
    launch((3,), memory[torch.float32], ids, memory[torch.float32], 5, 1, 1.0, WIDTH=16, ADD=0)
    assert len(device.launches) == 1
    print(len(variants))


if __name__ == "__main__":
    main()
