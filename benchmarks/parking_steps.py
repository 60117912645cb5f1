"""Training steps of a GPT-2-like model for the benchmark `parking`: makes as many as each line of its input says, and answers with
the seconds that they took (pairs.py)."""

import torch
from pairs import answer
from torch import nn

WIDTH, HEADS, LAYERS, WORDS, LENGTH, BATCH = 768, 12, 6, 8192, 512, 8


class Model(nn.Module):
    """Decoder blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.blocks(self.tokens(x), self.mask, is_causal=True)).flatten(0, 1), y.flatten())


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randint(WORDS, (BATCH, LENGTH + 1), device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(data[:, :-1], data[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    answer(step, torch.cuda.synchronize)
