"""Inputs for the served models, and the requests of the Open Inference Protocol V2 that carry them.

Sentences are real: they come from the documentation strings of the standard library. No package that the examples need
carries a recording of speech, so audio is synthesised: a source of glottal pulses through three formants, which a
detector of voice takes for voice, in turn with noise, which it does not.
"""

import ast
import json
import math
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

SAMPLE_RATE = 16_000  # per second
VOWELS = ((730, 1090, 2440), (270, 2290, 3010), (530, 1840, 2480), (300, 870, 2240))  # formants in Hz


def _documented_strings() -> Iterator[str]:
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                yield text


def sentences(count: int) -> list[str]:
    """Different sentences of the standard library's documentation, of 40 to 300 characters."""
    found: dict[str, None] = {}
    for text in _documented_strings():
        for sentence in re.split(r"(?<=[.!?])\s+|\n\s*\n", text):
            sentence = " ".join(sentence.split())
            if 40 <= len(sentence) <= 300 and sentence[0].isupper() and sentence.endswith("."):
                found[sentence] = None
        if len(found) >= count:
            return list(found)[:count]
    raise RuntimeError(f"the standard library documents itself in fewer than {count} sentences")


def _resonator(signal: torch.Tensor, centre_hz: float, width_hz: float) -> torch.Tensor:
    """Convolves with the impulse response of one formant: a decaying sine."""
    time = torch.arange(SAMPLE_RATE // 20, dtype=torch.float64) / SAMPLE_RATE
    response = torch.exp(-math.pi * width_hz * time) * torch.sin(2 * math.pi * centre_hz * time)
    spectrum_length = len(signal) + len(response)
    both = torch.fft.rfft(signal, spectrum_length) * torch.fft.rfft(response, spectrum_length)
    return torch.fft.irfft(both, spectrum_length)[: len(signal)]


def voice(seconds: float, pitch_hz: float, vowels: int, generator: torch.Generator) -> torch.Tensor:
    """A voice that goes through `vowels` vowels; float64, peak 0.5."""
    total = int(seconds * SAMPLE_RATE)
    time = torch.arange(total, dtype=torch.float64) / SAMPLE_RATE
    phase = torch.cumsum(pitch_hz * (1 + 0.06 * torch.sin(2 * math.pi * 3 * time)), 0) / SAMPLE_RATE
    source = torch.diff(torch.floor(phase), prepend=torch.zeros(1, dtype=torch.float64))
    source += 0.02 * torch.randn(total, dtype=torch.float64, generator=generator)
    result = torch.zeros(total, dtype=torch.float64)
    for index, piece in enumerate(torch.arange(total).tensor_split(vowels)):
        formants = VOWELS[int(torch.randint(len(VOWELS), (1,), generator=generator))]
        spoken = sum(_resonator(source[piece], f, 60 + 40 * n) / (n + 1) for n, f in enumerate(formants))
        envelope = torch.sin(torch.linspace(0.15, math.pi - 0.15, len(piece), dtype=torch.float64))
        result[piece] = spoken * envelope
    return 0.5 * result / result.abs().max()


def clips(count: int, seconds: float = 0.96) -> list[tuple[str, torch.Tensor]]:
    """Pairs of "voice" or "noise", in turn, and a clip of 16-bit samples as float32 in [-1, 1]."""
    generator = torch.Generator().manual_seed(0)
    result = []
    for index in range(count):
        if index % 2 == 0:
            kind, clip = "voice", voice(seconds, 90 + 15 * (index % 9), 4, generator)
        else:
            kind = "noise"
            clip = 0.01 * torch.randn(int(seconds * SAMPLE_RATE), dtype=torch.float64, generator=generator)
        result.append((kind, ((clip * 32767).round() / 32768).float()))
    return result


def as_tensor(name: str, values: torch.Tensor) -> dict:
    """A tensor as the protocol's JSON has it."""
    datatype = {torch.int64: "INT64", torch.float32: "FP32"}[values.dtype]
    return {"name": name, "datatype": datatype, "shape": list(values.shape), "data": values.flatten().tolist()}


def write_requests(file: Path, requests: list[tuple[list[dict], list[dict]]]) -> None:
    """Writes pairs of inputs and expected outputs, one `{"inputs": …, "expected": …}` a line, at once or not at all."""
    part = file.with_suffix(".part")
    with part.open("w", encoding="utf-8") as out:
        for inputs, expected in requests:
            out.write(json.dumps({"inputs": inputs, "expected": expected}) + "\n")
    part.replace(file)
