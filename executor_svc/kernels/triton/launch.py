"""Launches of Triton's kernels that take the host 10 microseconds instead of 30.

Knows what Triton compiles a variant of a kernel for. Does not know any kernel.

Triton decides at every launch which variant the arguments need, by a way of its own that is long. A Launch decides it by a
shorter one: the same arguments as far as any variant depends on them, the same variant. What that is, Triton says in
`JITFunction.run` and `native_specialize_impl`:

    tensor      its dtype, and whether its address is divisible by 16
    int         whether it is 1, whether it is divisible by 16, and which of int32, int64, uint64 holds it
    float       nothing
    constants   their values, options (num_warps and the like) included

A parameter with do_not_specialize depends on less; then one variant is known under several keys, which costs a line in a
dictionary and nothing else. Whatever is not in this list goes Triton's own way each time: other types of arguments, launches
that a profiler listens to, and all of them where kernels are interpreted.
"""

from typing import Any

from torch import Tensor
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

_INT32_END, _INT64_END = 1 << 31, 1 << 63


class Constants:
    """Constants and options of a launch, good for many: whoever launches often keeps them."""

    def __init__(self, **values: Any):
        """Constants by parameter, options by name."""
        self.values = values
        self._hash = hash(frozenset(values.items()))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constants) and self.values == other.values


class Launch:
    """One kernel, launched on the current device and stream; a decorator above triton.jit."""

    def __init__(self, kernel: Any):
        """Compiles nothing yet.

        Args:
            kernel: decorated with triton.jit; parameters that are no constants come first.
        """
        self._kernel = kernel
        self._is_compiled = isinstance(kernel, JITFunction)
        self._variants: dict[tuple[Any, ...], _Variant] = {}

    def __call__(self, grid: tuple[int, ...], *arguments: Tensor | int | float, **constants: Any) -> None:
        """As kernel[grid](*arguments, **constants); see launch."""
        self.launch(grid, Constants(**constants), *arguments)

    def launch(self, grid: tuple[int, ...], constants: Constants, *arguments: Tensor | int | float) -> None:
        """Queues the kernel.

        Args:
            grid: programs, in up to three dimensions.
            constants: for all parameters that are constants, and options.
            arguments: for all others, in order; tensors of the current device.
        """
        if not self._is_compiled or _has_listeners():
            self._kernel[grid](*arguments, **constants.values)
            return
        device = driver.active.get_current_device()
        key: list[Any] = [device, constants]
        values: list[int | float] = []
        for argument in arguments:
            if isinstance(argument, Tensor):
                address = argument.data_ptr()
                key.append((argument.dtype,) if address & 15 else argument.dtype)
                values.append(address)
            elif type(argument) is int:
                key.append(_kind(argument))
                values.append(argument)
            elif type(argument) is float:
                key.append(None)
                values.append(argument)
            else:
                self._kernel[grid](*arguments, **constants.values)
                return
        variant = self._variants.get(tuple(key))
        if variant is None:
            # Checks the arguments as well: where its tensors are, and their number.
            compiled = self._kernel.run(*arguments, grid=grid, warmup=False, **constants.values)
            names = self._kernel.arg_names[len(arguments) :]
            if compiled is not None and all(name in constants.values for name in names):
                self._variants[tuple(key)] = _Variant(compiled, tuple(constants.values[name] for name in names))
            return
        variant.launch(grid, driver.active.get_current_stream(device), values)


class _Variant:
    """A kernel as compiled for some kind of arguments."""

    def __init__(self, compiled: Any, constants: tuple[Any, ...]):
        self._compiled = compiled
        self._run = compiled.run
        self._function = compiled.function
        self._metadata = compiled.packed_metadata
        self._constants = constants

    def launch(self, grid: tuple[int, ...], stream: int, values: list[int | float]) -> None:
        """Queues it; addresses stand for tensors. Constants are passed on and not looked at."""
        width = len(grid)
        self._run(
            grid[0],
            grid[1] if width > 1 else 1,
            grid[2] if width > 2 else 1,
            stream,
            self._function,
            self._metadata,
            None,  # what hooks would be told
            None,
            None,
            *values,
            *self._constants,
        )


def _kind(value: int) -> int:
    """Equal for numbers that no variant tells apart."""
    kind = 2 if value == 1 else 0 if value & 15 else 1
    if -_INT32_END <= value < _INT32_END:
        return kind
    return kind + (4 if value < _INT64_END else 8)


def _has_listeners() -> bool:
    """Whether somebody wants to be told of each launch."""
    hook = knobs.runtime.launch_enter_hook
    return hook is not None and bool(getattr(hook, "calls", True))
