"""vLLM on the host, in one process: first as it is, then with its KV cache out of the pool, by Sluice's plugin.

    vllm_engine.py FOLDER BLOCKS

The model is tiny, its weights are seeded. Before the second engine some are tried that cannot be made. The first line of output says how
all that went; what each line of standard input then asks for is answered by one JSON object:

    batch      the same requests as at first, all at once: how many answers are the stock engine's, and what the cache did meanwhile
    counts     what the cache has done so far
    reset      vLLM forgets its prefix cache
    end        the engine ends, the process does not
"""

import dataclasses
import gc
import json
import os
import sys
from pathlib import Path

folder, blocks = Path(sys.argv[1]), int(sys.argv[2])
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="WARNING", HF_HUB_OFFLINE="1",
                  TRANSFORMERS_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1", SLUICE_VLLM_KV="own")

import torch  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.config import KVEventsConfig  # noqa: E402
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory  # noqa: E402
from vllm.model_executor.model_loader import dummy_loader  # noqa: E402
from vllm.plugins import DEFAULT_PLUGINS_GROUP, load_plugins_by_group  # noqa: E402
from vllm_requests import SHAPE, requests  # noqa: E402


def seeded_weights(model, *_arguments, **_options):
    """vLLM's own are nearly zero, so that every answer would be the same word."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.fill_(1)
        else:
            parameter.data.normal_(0, 0.3, generator=generator)


def engine(**options) -> LLM:
    return LLM(model=str(folder), **{"skip_tokenizer_init": True, "load_format": "dummy", "dtype": "float32", "seed": 0, "enforce_eager": True,
                                     "max_model_len": 1024, "block_size": 16, "max_num_batched_tokens": 512, "max_num_seqs": 16,
                                     "enable_prefix_caching": True, "num_gpu_blocks_override": blocks, **options})


def answers(llm: LLM) -> tuple[list[list[int]], int]:
    """The tokens of each, and how many tokens of the prompts had been computed before."""
    asked = requests()
    done = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in asked],
                        [SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False) for _, tokens in asked], use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in done], sum(one.num_cached_tokens or 0 for one in done)


def end_engine() -> None:
    gc.collect()
    cleanup_dist_env_and_memory()


def why_refused(**options) -> str:
    """What making such an engine raises."""
    try:
        engine(**options)
    except Exception as why:
        return f"{type(why).__module__}.{type(why).__name__}: {why}"
    finally:
        end_engine()
    return ""


dummy_loader.initialize_dummy_weights = seeded_weights
(folder / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
stock = engine()
expected, _ = answers(stock)
kind = type(stock.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool).__module__
del stock
end_engine()
os.environ["SLUICE_VLLM_KV"] = "pool"
load_plugins_by_group(DEFAULT_PLUGINS_GROUP)["sluice"]()  # as vLLM calls it, which it does once in a process
refused = {"events": why_refused(kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null")),
           "size": why_refused(num_gpu_blocks_override=1_000_000)}
llm = engine()
print(json.dumps({"words": len({word for answer in expected for word in answer}), "stock": kind, "refused": refused}), flush=True)


def cache():
    return llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool.elastic


for line in sys.stdin:
    match line.split():
        case ["batch"]:
            found, known = answers(llm)
            print(json.dumps({"equal": sum(a == b for a, b in zip(expected, found)), "of": len(expected), "known": known,
                              **dataclasses.asdict(cache().blocks.counts)}), flush=True)
        case ["counts"]:
            print(json.dumps({"owned": cache().blocks.owned, **dataclasses.asdict(cache().blocks.counts)}), flush=True)
        case ["reset"]:
            print(json.dumps({"reset": llm.reset_prefix_cache()}), flush=True)
        case ["end"]:
            del llm
            end_engine()
            print("{}", flush=True)
