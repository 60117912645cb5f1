"""What the plugin says of engines as vLLM itself describes them: a JSON object, by what is refused; empty where it is taken.

    vllm_refusals.py FOLDER
"""

import json
import os
import sys
from pathlib import Path

folder = Path(sys.argv[1])
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1",
                  VLLM_CPU_KVCACHE_SPACE="1", SLUICE_VLLM_KV="own")

import torch  # noqa: E402
from vllm.config import ECTransferConfig, KVEventsConfig, KVTransferConfig, set_current_vllm_config  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs  # noqa: E402
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, MambaSpec, SlidingWindowSpec  # noqa: E402
from vllm_requests import SHAPE  # noqa: E402

from sluice.vllm import _checks  # noqa: E402


class OtherScheduler(Scheduler):
    """One that vLLM's users may name."""


def described(**options):
    return EngineArgs(model=str(folder), **{"skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "block_size": 16,
                                            **options}).create_engine_config()


def of_engine(device: str = "cpu", backend: str = "CPU_ATTN", *, sleeps: bool = False, **options) -> str:
    config = described(**options)
    config.model_config.enable_sleep_mode = sleeps  # vLLM itself refuses that on the host
    try:
        _checks.check_engine(config, device, [backend], config.scheduler_config.get_scheduler_cls(), (Scheduler, AsyncScheduler))
    except _checks.Refused as why:
        return str(why)
    return ""


def of_cache(**layers) -> str:
    """As vLLM itself groups the layers, and lays them out."""
    config = described()
    with set_current_vllm_config(config):
        kv_cache, = get_kv_cache_configs(config, [layers], [64 << 20])
    try:
        _checks.check_tensors(kv_cache, (AttentionSpec,))
    except _checks.Refused as why:
        return str(why)
    return ""


def attention(heads: int = 4, **more) -> FullAttentionSpec:
    return (SlidingWindowSpec if more else FullAttentionSpec)(block_size=16, num_kv_heads=heads, head_size=32, dtype=torch.float32, **more)


(folder / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
found = {
    "": of_engine(),
    "no events": of_engine(kv_events_config=KVEventsConfig(enable_kv_cache_events=False)),
    "another device": of_engine(device="xpu"),
    "tensor or pipeline parallel": of_engine(tensor_parallel_size=2),
    "pipeline parallel": of_engine(pipeline_parallel_size=2),
    "several engines of one server": of_engine(data_parallel_size=2, distributed_executor_backend="uni"),
    "a worker in another process than the scheduler": of_engine(distributed_executor_backend="mp"),
    "a KV connector": of_engine(kv_transfer_config=KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")),
    "offloading of the KV cache": of_engine(kv_offloading_size=1.0),
    "events of the KV cache": of_engine(kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null")),
    "an encoder cache connector": of_engine(ec_transfer_config=ECTransferConfig(ec_connector="ECExampleConnector", ec_role="ec_both")),
    "speculative decoding": of_engine(speculative_config={"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}),
    "sleep mode": of_engine(sleeps=True),
    "the experts of each token": of_engine(enable_return_routed_experts=True),
    "another scheduler": of_engine(scheduler_cls=OtherScheduler),
    "FlexAttention": of_engine(backend="FLEX_ATTENTION"),
    "another attention backend on a GPU": of_engine(device="cuda", backend="FLASHINFER"),
    "on a GPU": of_engine(device="cuda", backend="FLASH_ATTN"),
    "cache: windows beside whole attention": of_cache(one=attention(), two=attention(sliding_window=64)),
    "cache: states": of_cache(one=attention(), two=MambaSpec(block_size=16, shapes=((16, 64),), dtypes=(torch.float32,), page_size_padded=attention().page_size_bytes)),
    "cache: pages of two sizes": of_cache(one=attention(4), two=attention(8)),
}
print(json.dumps(found))
