"""A text server as one writes it with FastAPI and transformers. It knows nothing of Sluice.

    python server.py --port 9000
    curl -d '{"prompt": "Once upon a time", "max_tokens": 16}' http://127.0.0.1:9000/v1/completions

A Llama with random weights, drawn from a fixed seed, continues the bytes of a prompt, greedily: the same prompt has the same answer,
in every process. With `"stream": true` the answer comes as server-sent events, one for each token, with `[DONE]` behind the last.
"""

from __future__ import annotations

import argparse
import json
import threading

import torch
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

TOKENS = 256  # one for each byte


class Completion(BaseModel):
    prompt: str = Field(min_length=1, max_length=1024)
    max_tokens: int = Field(default=16, ge=1, le=512)
    stream: bool = False


def make_model(layers: int, width: int, device: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=TOKENS, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
                         num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=2048)
    with torch.device(device):
        return LlamaForCausalLM(config).eval()


def make_app(model: LlamaForCausalLM) -> FastAPI:
    app = FastAPI()
    one_at_a_time = threading.Lock()

    def generate(asked: Completion):
        """The tokens that follow the prompt, one by one."""
        read = torch.tensor([list(asked.prompt.encode())], device=model.device)
        cache = DynamicCache()
        for _ in range(asked.max_tokens):
            with one_at_a_time, torch.inference_mode():
                logits = model(input_ids=read, past_key_values=cache, use_cache=True).logits
            read = logits[:, -1:].argmax(-1)
            yield int(read)

    def events(asked: Completion):
        for token in generate(asked):
            yield f"data: {json.dumps({'choices': [{'token': token}]})}\n\n"
        yield "data: [DONE]\n\n"

    @app.get("/health")
    def health() -> dict:
        return {"status": "ok"}

    @app.post("/v1/completions")
    def complete(asked: Completion):
        if asked.stream:
            return StreamingResponse(events(asked), media_type="text/event-stream")
        return {"choices": [{"tokens": list(generate(asked))}]}

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    model = make_model(arguments.layers, arguments.width, arguments.device)
    uvicorn.run(make_app(model), host="127.0.0.1", port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
