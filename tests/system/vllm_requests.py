"""What tests ask of vLLM: a tiny model, and greedy requests that its stock engine answers with many words."""

import random

WORDS = 2000
SHAPE = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
         "max_position_embeddings": 1024, "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True,
         "torch_dtype": "float32", "num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
         "num_key_value_heads": 4, "head_dim": 32, "vocab_size": WORDS}


def requests() -> list[tuple[list[int], int]]:
    """Prompts of 8 to 600 tokens, of which every third begins alike, and how many tokens each is to be answered with."""
    draw = random.Random(1)
    alike = [draw.randrange(5, WORDS) for _ in range(96)]
    made = []
    for number in range(24):
        prompt = [draw.randrange(5, WORDS) for _ in range(draw.choice((8, 40, 130, 300, 500)))]
        made.append((alike + prompt if number % 3 == 0 else prompt, draw.choice((8, 32, 64, 120))))
    return made
