import sys, time, torch
from transformers import BertConfig, BertModel
class Wrap(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.m = BertModel(BertConfig(), add_pooling_layer=True)
    def forward(self, ids):
        return self.m(ids)[1].float()
with torch.inference_mode():
    w = Wrap().eval().half().cuda()
    ids = torch.zeros(1, 128, dtype=torch.int64, device="cuda")
    t = torch.jit.trace(w, ids, strict=False, check_trace=False)
    def go(name, f):
        for _ in range(20): f(ids).cpu()
        b = time.monotonic()
        for _ in range(50): f(ids).cpu()
        print(name, (time.monotonic() - b) / 50 * 1e3, "ms", flush=True)
    go("eager", w)
    go("jit optimised", t)
    with torch.jit.optimized_execution(False):
        go("jit unoptimised", t)
    s = torch.cuda.Stream()
    with torch.cuda.stream(s):
        with torch.jit.optimized_execution(False):
            go("own stream", t)
