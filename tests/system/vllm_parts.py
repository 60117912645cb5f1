"""What parts of Sluice's plugin make of vLLM's own classes: a JSON object.

    windows    how many blocks of a request are let go behind a window of 64 tokens when 1000 have been computed: by vLLM, and with the plugin
    prompts    what of a prompt's probabilities is left to vLLM, output by output: of one in flight for a request that has been preempted, of a part of
               its prompt, of its next token, of the one after that; and of a request that has ended meanwhile
"""

import json
import os
from types import SimpleNamespace

os.environ.update(VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR", SLUICE_VLLM_KV="pool")

import torch  # noqa: E402
from vllm.v1.core.block_pool import BlockPool  # noqa: E402
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager  # noqa: E402
from vllm.v1.kv_cache_interface import SlidingWindowSpec  # noqa: E402
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402

import sluice.vllm  # noqa: E402


def let_go() -> int:
    pool = BlockPool(100, enable_caching=True, hash_block_size=16)
    spec = SlidingWindowSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=torch.float32, sliding_window=64)
    manager = SlidingWindowManager(spec, block_pool=pool, enable_caching=True, kv_cache_group_id=0, scheduler_block_size=16, max_admission_blocks_per_request=100)
    blocks = pool.get_new_blocks(63)
    manager.req_to_blocks["request"] = blocks
    manager.remove_skipped_blocks("request", 1000)
    return sum(block is pool.null_block for block in blocks)


def left_of_prompts() -> list:
    from sluice.vllm import _patches

    request = SimpleNamespace(async_tokens_to_discard=1)
    scheduler = SimpleNamespace(requests={"request": request}, sluice_prompt_logprobs={})

    def seen(token: list[int], of_prompt: str | None) -> str | None:
        output = ModelRunnerOutput(["request"], {"request": 0}, sampled_token_ids=[token], prompt_logprobs_dict={"request": of_prompt} if of_prompt else {})
        _patches._keep_prompt_logprobs(scheduler, output)
        return output.prompt_logprobs_dict.get("request")

    made = [seen([7], "probabilities")]
    request.async_tokens_to_discard = 0
    made += [seen([], None), seen([7], None), seen([8], None)]
    request.async_tokens_to_discard = 1
    made.append(seen([7], "others"))
    scheduler.requests.clear()
    return [*made, seen([7], None), len(scheduler.sluice_prompt_logprobs)]


alone = let_go()
sluice.vllm.register()
print(json.dumps({"windows": [alone, let_go()], "prompts": left_of_prompts()}))
