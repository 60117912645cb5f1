import json, os, subprocess, sys, time, threading, http.client, random, re, tempfile
from pathlib import Path
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import torch
folder = Path(tempfile.mkdtemp(prefix="lt-"))
from transformers import BertConfig, BertModel
class Wrap(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.m = BertModel(BertConfig(), add_pooling_layer=True)
    def forward(self, ids):
        return self.m(ids)[1].float()
with torch.inference_mode():
    w = Wrap().eval().half().cuda()
    t = torch.jit.trace(w, torch.zeros(1, 128, dtype=torch.int64, device="cuda"), strict=False, check_trace=False)
    t = t.cpu()
    d = folder / "models" / "bert" / "1"; d.mkdir(parents=True)
    t.save(str(d / "model.pt"))
    (folder / "models" / "bert" / "config.pbtxt").write_text('name: "bert"\nplatform: "pytorch_libtorch"\nmax_batch_size: 0\ninput { name: "ids" data_type: TYPE_INT64 dims: [ 1, 128 ] }\noutput { name: "pooled" data_type: TYPE_FP32 dims: [ 1, 768 ] }\n')
del w, t
torch.cuda.empty_cache()
BIN = ROOT / "build/release/bin"
env = {**os.environ, "SLUICE_RUNTIME_DIR": str(folder / "run"), "SLUICE_BROKER": str(BIN / "sluice")}
def serve(pause):
    p = folder / "policy.yaml"
    p.write_text(f"version: 1\nserver: {{model_repository: {folder}/models}}\npool: {{backend: cuda, memory: 44GiB}}\ntraining: {{pause: {pause}}}\nmodels:\n  - {{name: bert, slo: {{latency: 20ms}}, warm: {{mode: always}}}}\n")
    err = open(folder / f"log-{pause}", "w")
    s = subprocess.Popen([BIN / "sluice", "serve", "--policy", p, "--port", "0"], stdout=subprocess.PIPE, stderr=err, env=env, text=True)
    line = s.stdout.readline()
    m = re.match(r"listening on http://(.*):(\d+)", line)
    if not m: print("server failed", line, (folder / f"log-{pause}").read_text()); sys.exit(1)
    return s, (m[1], int(m[2]))
BODY = json.dumps({"inputs": [{"name": "ids", "datatype": "INT64", "shape": [1, 128], "data": list(range(128))}]}).encode()
def one(c):
    c.request("POST", "/v2/models/bert/infer", BODY); r = c.getresponse(); data = r.read(); assert r.status == 200, data
def status(addr):
    c = http.client.HTTPConnection(*addr); c.request("GET", "/v2/sluice/status"); return json.loads(c.getresponse().read())
def load(addr, rate, seconds):
    rng = random.Random(5); t = time.monotonic() + 0.05; end = t + seconds; arr = []
    while t < end: arr.append(t); t += rng.expovariate(rate)
    lat = []; lock = threading.Lock(); it = iter(arr)
    def work():
        c = http.client.HTTPConnection(*addr)
        while True:
            with lock:
                a = next(it, None)
            if a is None: return
            d = a - time.monotonic()
            if d > 0: time.sleep(d)
            one(c); lat.append(time.monotonic() - a)
    th = [threading.Thread(target=work) for _ in range(8)]
    b0 = status(addr)["pauses"]; began = time.monotonic_ns()
    [x.start() for x in th]; [x.join() for x in th]
    ended = time.monotonic_ns(); b1 = status(addr)["pauses"]
    lat.sort()
    span = (ended - began) / 1e9
    return dict(n=len(lat), p50=lat[len(lat)//2]*1e3, p99=lat[int(len(lat)*.99)]*1e3, busy=(b1.get("busy_s",0)-b0.get("busy_s",0))/span, held=(b1["held_s"]-b0["held_s"])/span, count=b1["count"]-b0["count"], began=began, ended=ended)
def show(name, r, extra=""): print(name, {k: round(v, 4) for k, v in r.items() if k not in ("began", "ended")}, extra, flush=True)
steps = folder / "steps"
def rate(b, e):
    ends = [int(x) for x in steps.read_text().split("\n")[:-1]]
    def at(t):
        import bisect
        i = bisect.bisect_right(ends, t)
        if i == 0 or i >= len(ends): return float(i)
        return i + (t - ends[i-1]) / (ends[i] - ends[i-1])
    return (at(e) - at(b)) / (e - b) * 1e9
job = sys.argv[1]
s, addr = serve("on_launch")
c = http.client.HTTPConnection(*addr)
for _ in range(60): one(c)
t0 = time.monotonic()
for _ in range(200): one(c)
sat = 200 / (time.monotonic() - t0)
print("closed loop", round(sat, 1), "/s")
alone = {}
for r in (0.1 * sat, 0.5 * sat): alone[r] = load(addr, r, 4); show(f"alone {r:.0f}/s", alone[r])
tr = subprocess.Popen([BIN / "sluice", "run", "--backend", "cuda", "--runtime-dir", folder / "run", "--require-pool", "--", sys.executable, ROOT / "benchmarks/beside_job.py", "--workload", job, "--until", folder / "enough", "--steps", steps, "--shared"], env=env)
while not steps.exists() or steps.read_text().count("\n") < 30:
    time.sleep(0.2)
    if tr.poll() is not None: print("training ended", tr.returncode); sys.exit(1)
def measure(pause):
    b = time.monotonic_ns(); time.sleep(4); e = time.monotonic_ns(); time.sleep(0.4); base = rate(b, e)
    print(pause, "training alone", round(base, 3), "/s", flush=True)
    for r, a in alone.items():
        m = load(addr, r, 5); time.sleep(0.4); got = rate(m["began"], m["ended"]) / base
        show(f"{pause} {r:.0f}/s", m, f"training {got:.3f} idle_share {got/(1-a['busy']):.3f} p50 {m['p50']/a['p50']:.3f} p99 {m['p99']/a['p99']:.3f}")
measure("on_launch")
s.terminate(); s.wait()
s, addr = serve("on_request")
c = http.client.HTTPConnection(*addr)
for _ in range(60): one(c)
measure("on_request")
(folder / "enough").touch()
print(json.dumps(status(addr)["pauses"]))
s.terminate(); s.wait(); tr.terminate(); tr.wait()
print((folder / "log-on_launch").read_text()[-1500:])
