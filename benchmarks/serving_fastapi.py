"""A server that people write themselves: FastAPI, one worker of uvicorn with its fast loop and parser, and the same TorchScript models.

`POST /raw/M` takes and gives FP32 values as they are in memory, `POST /json/M` `{"x": [...]}` and `{"y": [...]}`.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import torch
import uvicorn
from fastapi import FastAPI, Request, Response


def application(repository: Path) -> FastAPI:
    torch.set_num_threads(1)
    models = {folder.name: torch.jit.load(str(folder / "1" / "model.pt")) for folder in repository.iterdir()}
    app = FastAPI()

    def outputs_of(model: str, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return models[model](x.unsqueeze(0))[0]

    @app.post("/raw/{model}")
    async def raw(model: str, request: Request) -> Response:
        x = torch.frombuffer(bytearray(await request.body()), dtype=torch.float32)
        return Response(outputs_of(model, x).numpy().tobytes(), media_type="application/octet-stream")

    @app.post("/json/{model}")
    async def as_json(model: str, request: Request) -> dict[str, list[float]]:
        return {"y": outputs_of(model, torch.tensor((await request.json())["x"])).tolist()}

    return app


if __name__ == "__main__":
    listening = socket.socket(fileno=int(sys.argv[2]))
    config = uvicorn.Config(application(Path(sys.argv[1])), loop="uvloop", http="httptools", log_level="warning", access_log=False)
    uvicorn.Server(config).run(sockets=[listening])
