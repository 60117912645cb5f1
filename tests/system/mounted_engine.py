"""The example's engine below a path of its own, so that several can stand behind one server.

    python mounted_engine.py --port 9000 --path /one [--layers 8] [--width 512] [--device cpu]
"""

import argparse
import sys
from pathlib import Path

import uvicorn
from fastapi import FastAPI

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "engine"))
import server  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--path", required=True)
parser.add_argument("--layers", type=int, default=8)
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--device", default="cpu")
arguments = parser.parse_args()
app = FastAPI()
app.mount(arguments.path, server.make_app(server.make_model(arguments.layers, arguments.width, arguments.device)))
uvicorn.run(app, host="127.0.0.1", port=arguments.port, log_level="warning")
