"""Recognition of inference engines by their command lines."""

from __future__ import annotations

import pytest

from slurm_affinode.engines import metric_table


@pytest.mark.parametrize(
    ("command", "title"),
    [
        ("/opt/venv/bin/python3.12 /opt/venv/bin/vllm serve facebook/opt-125m --port 8123", "vLLM"),
        ("python -m vllm.entrypoints.openai.api_server --model m", "vLLM"),
        ("python -X dev -u -m vllm.entrypoints.openai.api_server", "vLLM"),
        ("VLLM::APIServer_0", "vLLM"),
        ("python3 -m sglang.launch_server --model-path m", "SGLang"),
        ("text-generation-router-v2 --port 80", "TGI"),
        ("/opt/tritonserver/bin/tritonserver --model-repository /models", "Triton, TensorRT-LLM"),
        ("./llama-server -m model.gguf", "llama.cpp"),
        ("/usr/bin/python /home/ada/llama_server.py model.gguf", "llama.cpp"),
    ],
)
def test_server_is_known_by_its_command_line(command: str, title: str) -> None:
    names = metric_table.program_names(command.split(" "))
    assert [check.title for check in metric_table.servers_named(names)] == [title]


@pytest.mark.parametrize(
    "command",
    [
        "",
        "python",
        "python -m",
        "python -W",
        "python -c vllm",
        "python train.py vllm",
        "bash -c vllm",
        "VLLM::EngineCore",
        "sglang::scheduler_TP0",
        "python -m sglang.bench_serving",
        "curl http://vllm",
        "tail -f vllm",
        "/home/vllm/serve",
    ],
)
def test_other_program_is_not_known(command: str) -> None:
    """Clients, and processes of an engine that serve no metrics."""
    assert metric_table.servers_named(metric_table.program_names(command.split(" "))) == []
