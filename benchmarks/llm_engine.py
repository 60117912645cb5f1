"""vLLM in one process, as it is or with its KV cache out of the pool; does what each line of its standard input asks for (llm.py).

    llm_engine.py '{"model": "1b", "folder": "/tmp/engine", "kv": "pool", "blocks": 4096, "runner": 1, "attention": "FLASH_ATTN"}'

Each line is an object with `do`, and is answered by one line:

    answer    the requests of `seed` and `count`, greedily, all at once, in an order that `order` draws; tokens go to the file `out`
    rescore   how far each token of `answers`, an object of answers by number of the request, is from what this engine likes best there
    watch     what has been timed of growth and demands since it was asked last
    started   that it is there, and how long that took
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

TINY = {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32,
        "vocab_size": 2000, "torch_dtype": "float32"}
#: Llama-3.2-1B's and Llama-3.1-8B's, without their long positions.
SHAPES = {
    "tiny": TINY,
    "1b": {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
           "vocab_size": 128256, "torch_dtype": "bfloat16"},
    "8b": {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
           "vocab_size": 128256, "torch_dtype": "bfloat16", "tie_word_embeddings": False},
}
LONGEST = 2048  # tokens of a request and its answer


def shape(model: str) -> dict:
    """A model's `config.json`."""
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
            "max_position_embeddings": LONGEST, "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True,
            **SHAPES[model]}


def seed_weights(parameters: Iterable[torch.Tensor], model: str) -> None:
    """The same for all that have a model of that shape: vLLM's own are nearly zero, so that every answer would be the same word."""
    import torch

    generator = None
    with torch.no_grad():
        for parameter in parameters:
            generator = generator or torch.Generator(device=parameter.device).manual_seed(5)
            if parameter.dim() == 1:
                parameter.fill_(1)
            else:
                parameter.normal_(0, 0.3 if model == "tiny" else 0.02, generator=generator)


def requests(seed: int, count: int, words: int, longest_prompt: int, longest_answer: int) -> list[tuple[list[int], int]]:
    """Prompts, of which every third begins like others, and how many tokens each is to be answered with."""
    draw = random.Random(seed)
    alike = [[draw.randrange(5, words) for _ in range(96)] for _ in range(4)]
    made = []
    for number in range(count):
        prompt = [draw.randrange(5, words) for _ in range(draw.randint(8, longest_prompt))]
        made.append((draw.choice(alike) + prompt if number % 3 == 0 else prompt, draw.randint(8, longest_answer)))
    return made


def main() -> None:
    said = json.loads(sys.argv[1])
    answers_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints, too
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
                      HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_USE_FLASHINFER_SAMPLER="0", VLLM_USE_DEEP_GEMM="0",
                      VLLM_USE_V2_MODEL_RUNNER=str(said["runner"] - 1), VLLM_PLUGINS="", SLUICE_VLLM_KV=said["kv"])
    import torch
    from vllm import LLM, SamplingParams
    from vllm.model_executor.model_loader import dummy_loader

    done = []

    def seeded_weights(model: torch.nn.Module, *_arguments: object, **_options: object) -> None:
        """The loader calls this for the model, and then for parts of it."""
        if not done:
            done.append(model)
            seed_weights((each for each in model.state_dict().values() if torch.is_floating_point(each)), said["model"])

    dummy_loader.initialize_dummy_weights = seeded_weights
    if said["kv"] == "pool":
        import sluice.vllm
        sluice.vllm.register()
    folder = Path(said["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    config = shape(said["model"])
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    on_gpu = torch.cuda.is_available()
    began = time.perf_counter()
    llm = LLM(model=str(folder), skip_tokenizer_init=True, load_format="dummy", dtype=config["torch_dtype"], seed=0, enforce_eager=not on_gpu,
              max_model_len=LONGEST, block_size=16, max_num_batched_tokens=2048, max_num_seqs=said.get("sequences", 64), enable_prefix_caching=True,
              num_gpu_blocks_override=said["blocks"], disable_log_stats=True,
              **({"attention_backend": said["attention"], "gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": said["bytes"],
                  "compilation_config": {"custom_ops": ["none"]}} if on_gpu else {}))
    core = llm.llm_engine.engine_core.engine_core
    watch = Watch(core.scheduler) if said["kv"] == "pool" else None
    started = {"started_s": time.perf_counter() - began, "scheduler": type(core.scheduler).__name__}

    def answer(of: dict) -> dict:
        asked = requests(of["seed"], of["count"], config["vocab_size"], of["longest_prompt"], of["longest_answer"])
        order = list(range(len(asked)))
        random.Random(of.get("order", 0)).shuffle(order)
        began = time.perf_counter()
        made = llm.generate([{"prompt_token_ids": asked[number][0]} for number in order],
                            [SamplingParams(temperature=0, max_tokens=asked[number][1], ignore_eos=True, detokenize=False) for number in order],
                            use_tqdm=False)
        took = time.perf_counter() - began
        tokens = [list(one.outputs[0].token_ids) for _, one in sorted(zip(order, made, strict=True), key=lambda each: each[0])]
        if "out" in of:
            Path(of["out"]).write_text(json.dumps(tokens), encoding="utf-8")
        return {"seconds": took, "tokens": sum(map(len, tokens)), "known": sum(one.num_cached_tokens or 0 for one in made),
                **(watch.counts() if watch else {})}

    def rescore(of: dict) -> dict:
        asked = requests(of["seed"], of["count"], config["vocab_size"], of["longest_prompt"], of["longest_answer"])
        answers = {int(number): tokens for number, tokens in json.loads(Path(of["answers"]).read_text(encoding="utf-8")).items()}
        made = llm.generate([{"prompt_token_ids": asked[number][0] + tokens} for number, tokens in answers.items()],
                            SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False, ignore_eos=True), use_tqdm=False)
        gaps = {}
        for (number, tokens), one in zip(answers.items(), made, strict=True):
            likely = one.prompt_logprobs[len(asked[number][0]):]
            gaps[number] = max(max(each.logprob for each in place.values()) - place[token].logprob for token, place in zip(tokens, likely, strict=True))
        return {"gaps": gaps}

    for line in sys.stdin:
        of = json.loads(line)
        match of["do"]:
            case "answer":
                made = answer(of)
            case "rescore":
                made = rescore(of)
            case "watch":
                made = watch.read()
            case "started":
                made = started
        print(json.dumps(made), file=answers_to, flush=True)


class Watch:
    """When the cache grew, was demanded, and gave."""

    def __init__(self, scheduler: object) -> None:
        self._cache = cache = scheduler.kv_cache_manager.block_pool.elastic
        self._grown_ms: list[float] = []
        self._beyond_ms: list[float] = []
        self._given_ms: list[float] = []
        self._demanded_at: tuple[float, int] | None = None  # and the last step that was in flight, or was being scheduled
        self._scheduling = False
        self._ended_at: dict[int, float] = {}
        space, blocks = cache.space, cache.blocks
        back, give_back, await_demand, refuse_rest = space.back, space.give_back, space.await_demand, space.refuse_rest
        attend, launched, ended = blocks.attend, blocks.launched, blocks.ended

        def timed_back(chunks: list[int], patience_ms: int) -> bool:
            began = time.perf_counter()
            granted = back(chunks, patience_ms)
            if granted:
                self._grown_ms.append(1e3 * (time.perf_counter() - began))
            return granted

        def seen_demand(timeout_ms: int) -> int:
            demanded = await_demand(timeout_ms)
            if not demanded:
                self._demanded_at = None
            elif self._demanded_at is None:
                self._demanded_at = (time.perf_counter(), blocks._launched + self._scheduling)
            return demanded

        def timed_attend(preempt: object = None, *more: object) -> object:
            made = attend(preempt, *more)
            self._scheduling = threading.current_thread() is threading.main_thread() and preempt is not None
            return made

        def timed_launch() -> int:
            step = launched()
            self._scheduling = False
            return step

        def refused() -> None:
            refuse_rest()
            self._demanded_at = None

        def timed_end() -> int:
            step = ended()
            self._ended_at[step] = time.perf_counter()
            return step

        def timed_give_back(chunks: list[int]) -> None:
            give_back(chunks)
            if self._demanded_at is not None and not space.demanded():
                at, launched = self._demanded_at
                now = time.perf_counter()
                self._given_ms.append(1e3 * (now - at))
                self._beyond_ms.append(1e3 * (now - max(at, self._ended_at.get(launched, at))))
                self._demanded_at = None

        space.back, space.give_back, space.await_demand, space.refuse_rest = timed_back, timed_give_back, seen_demand, refused
        blocks.attend, blocks.launched, blocks.ended = timed_attend, timed_launch, timed_end

    def read(self) -> dict:
        made = {"grown_ms": self._grown_ms, "given_ms": self._given_ms, "beyond_ms": self._beyond_ms}
        self._grown_ms, self._given_ms, self._beyond_ms = [], [], []
        return made

    def counts(self) -> dict:
        counts = self._cache.blocks.counts
        return {"grown": counts.grown, "refused": counts.refused, "preempted": counts.preempted, "demanded": counts.demanded, "most": counts.most}


if __name__ == "__main__":
    main()
