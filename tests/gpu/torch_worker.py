"""A PyTorch program that trains: ``python torch_worker.py DIRECTORY``.

Weights, gradients and Adam's two moments fill the given amount of memory; forward pass, backward pass and optimizer
step are one captured CUDA graph, replayed for each step. Everything is seeded and deterministic, so two runs are
equal bit for bit.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import protocol

MIB = 1 << 20
BYTES_PER_PARAMETER = 16
"""In float32: the weight, its gradient, Adam's two moments."""
_BATCH = 64
_WARM_UP = 3
_BLOCK = 64 * MIB


class Training:
    """The model, its optimizer and the graph."""

    def setup(self, mib: int, seed: int = 1) -> dict[str, Any]:
        """Build the model within ``mib`` MiB, warm up, and capture the graph."""
        import torch

        self.torch = torch
        torch.manual_seed(seed)
        torch.use_deterministic_algorithms(True)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.benchmark = False
        width = 8192 if mib >= 8192 else 1024
        layers = max(1, mib * MIB // (width * width * BYTES_PER_PARAMETER))
        modules: list[Any] = []
        for _ in range(layers):
            linear = torch.nn.Linear(width, width, bias=False, device="cuda")
            # With the default, signals and gradients vanish over tens of layers, and the weights would hardly change.
            torch.nn.init.xavier_uniform_(linear.weight, gain=torch.nn.init.calculate_gain("tanh"))
            modules += [linear, torch.nn.Tanh()]
        self.model = torch.nn.Sequential(*modules)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4, fused=True, capturable=True)
        self.x = torch.zeros(_BATCH, width, device="cuda")
        self.y = torch.zeros(_BATCH, width, device="cuda")
        self.inputs = torch.Generator().manual_seed(seed)
        self.width = width
        self._capture()
        return {
            "graph": True,
            "layers": layers,
            "allocated": int(torch.cuda.memory_allocated()),
            "torch": torch.__version__,
            "gpu": torch.cuda.get_device_name(),
        }

    def steps(self, count: int) -> list[str]:
        """Return the loss of each step in hexadecimal."""
        result = []
        for _ in range(count):
            self._feed()
            self.graph.replay()
            result.append(float(self.loss.item()).hex())
        return result

    def digest(self) -> str:
        """Return a digest of all weights and the whole optimizer state."""
        tensors = [*self.model.parameters()]
        for parameter in self.model.parameters():
            state = self.optimizer.state[parameter]
            tensors += [state[name] for name in sorted(state) if self.torch.is_tensor(state[name])]
        whole = hashlib.sha256()
        with ThreadPoolExecutor(8) as pool:
            for tensor in tensors:
                flat = tensor.detach().reshape(-1).view(self.torch.uint8)
                blocks = (flat[at : at + _BLOCK].cpu() for at in range(0, flat.numel(), _BLOCK))
                for block in pool.map(_digest, blocks):
                    whole.update(block)
        return whole.hexdigest()

    def drop(self) -> None:
        """Free all memory."""
        del self.graph, self.loss, self.optimizer, self.model
        self.torch.cuda.empty_cache()

    def _feed(self) -> None:
        self.x.copy_(self.torch.randn(_BATCH, self.width, generator=self.inputs))
        self.y.copy_(self.torch.randn(_BATCH, self.width, generator=self.inputs))

    def _step(self) -> Any:
        loss = self.torch.nn.functional.mse_loss(self.model(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        return loss

    def _capture(self) -> None:
        """Follow PyTorch's notes on CUDA graphs: warm up on a side stream, then capture a whole step."""
        torch = self.torch
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                self._feed()
                self.optimizer.zero_grad(set_to_none=True)
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        self.optimizer.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = self._step()
        torch.cuda.synchronize()


def _digest(block: Any) -> bytes:
    """Return the digest of a byte tensor in host memory, without NumPy, which PyTorch does not require."""
    return hashlib.sha256((ctypes.c_char * block.numel()).from_address(block.data_ptr())).digest()


def main() -> None:
    """Execute the commands in the directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    options = parser.parse_args()
    protocol.detach()
    training = Training()
    protocol.serve(options.directory, {name: getattr(training, name) for name in ("setup", "steps", "digest", "drop")})


if __name__ == "__main__":
    main()
