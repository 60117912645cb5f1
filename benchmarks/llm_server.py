"""vLLM's own server as the engine of a policy, unmodified, for the benchmarks that put it there; a model for it: `python llm_server.py FOLDER NAME`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from llm_engine import LONGEST, seed_weights, shape
from records import ROOT

WORDS = 16
MIB, GIB = 1 << 20, 1 << 30
CACHE_BYTES = {"tiny": 32 * MIB, "1b": 2 * GIB, "8b": 8 * GIB}
PATH = "/v1/completions"


def body(name: str, tokens: int, stream: bool) -> dict:
    """A request to the model of that name, in numbers of words: there is no tokenizer."""
    return {"model": name, "prompt": [7 * place % 1999 + 1 for place in range(WORDS)], "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, "stream": stream}


def tokens_of(event: str) -> list[int]:
    """Of one event of a stream."""
    if not event.startswith("data: {"):
        return []
    return [token for choice in json.loads(event[len("data: "):])["choices"] for token in choice.get("token_ids") or []]


def made_model(folder: Path, name: str) -> Path:
    """A folder with a model of that shape and seeded weights, as a model hub has them."""
    subprocess.run([sys.executable, Path(__file__), folder, name], check=True)
    return folder


def of_policy(name: str, model: str, folder: Path, backend: str) -> dict:
    """What an engine of that name says of its process, its answers and its environment."""
    of_device = (["--gpu-memory-utilization", "0.05", "--attention-backend", "FLASH_ATTN"] if backend == "cuda"
                 else ["--enforce-eager", "--num-gpu-blocks-override", "512"])
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", name, "--host", "127.0.0.1", "--port",
               "{port}", "--skip-tokenizer-init", "--max-model-len", str(LONGEST), "--max-num-batched-tokens", str(LONGEST), "--max-num-seqs", "64",
               "--kv-cache-memory-bytes", str(CACHE_BYTES[model]), *of_device]
    environment = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING",
                   "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0"}
    if backend == "host":
        environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1",
                        "PYTHONPATH": str(ROOT / ".cache" / "vllm")}
    return {"command": command, "ready": "/health", "api": "openai", "start": "at_boot", "start_timeout": "10m", "env": environment}


def main() -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder, name = Path(sys.argv[1]), sys.argv[2]
    config = {key: value for key, value in shape(name).items() if key not in ("architectures", "model_type")}
    torch.set_default_dtype(getattr(torch, config["torch_dtype"]))
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(LlamaConfig(**config))
    seed_weights(model.parameters(), name)
    model.save_pretrained(folder)


if __name__ == "__main__":
    main()
