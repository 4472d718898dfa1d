"""The CPU's attention backend. Knows how a call is handed to the compiled kernels. Does not know models or requests."""

from executor_svc.kernels.torch_backend import TorchBackend


class CpuBackend(TorchBackend):
    """Paged attention on the CPU."""

    name = "cpu"
