"""The CPU, as Triton sees a device."""

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import Benchmarker, DriverBase


class InterpretedDriver(DriverBase):
    """Active wherever it is installed."""

    @staticmethod
    def is_active() -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Benchmarker:
        raise NotImplementedError("kernels that are interpreted are not timed")
