"""Custom storage of CUDA checkpoints, on fake bindings: the emulated driver is simpler than a real one."""

from __future__ import annotations

from enum import Enum
from typing import Any

from slurm_affinode.checkpoint.cuda_driver import Driver
from slurm_affinode.checkpoint.cuda_storage import Storage


class Code(Enum):
    """``CUresult``."""

    CUDA_SUCCESS = 0


class Attribute(Enum):
    """``CUpointer_attribute``."""

    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9


class Bindings:
    """A driver with streams 70 and 71 in the contexts of GPUs 0 and 1."""

    CUresult, CUpointer_attribute = Code, Attribute
    current: int | None = None

    def cuStreamGetCtx(self, stream: int) -> Any:
        return Code.CUDA_SUCCESS, stream + 100

    def cuCtxSetCurrent(self, context: int) -> Any:
        self.current = context
        return (Code.CUDA_SUCCESS,)

    def cuCtxGetDevice(self) -> Any:
        assert self.current is not None
        return Code.CUDA_SUCCESS, self.current - 170

    def cuPointerGetAttribute(self, attribute: Attribute, at: int) -> Any:
        return Code.CUDA_SUCCESS, at >> 40


def test_gpu_is_found_from_the_stream_or_the_address() -> None:
    """The address is used for the default stream, as in the description of the driver's API."""
    storage = object.__new__(Storage)  # no ring of host memory
    storage._driver = Driver(Bindings())
    assert [storage._ordinal(stream, 0) for stream in (70, 71)] == [0, 1]
    assert storage._ordinal(0, 3 << 40) == 3
