"""The other side of the parity test: MiniLLM trained by PyTorch on the CPU in fp32, sharded by FSDP2 over Gloo (--ranks N) or
plain in one process on the same global batches (--plain, with --ranks as the number of ranks it stands for).

Reads the same weights and tokens as `minillm`, writes {"losses": [...]} and the final full weights. `--make DIR` writes
init.safetensors and tokens.bin for a configuration instead."""
import argparse
import json
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def parse():
    p = argparse.ArgumentParser()
    for name, default in dict(vocab=257, dim=64, layers=2, heads=4, batch=2, seq=32, steps=10, ranks=1, grad_accum=1).items():
        p.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--adam-eps", type=float, default=1e-8)
    p.add_argument("--clip", type=float)
    for name in ("make", "data", "init", "save-full", "losses"):
        p.add_argument(f"--{name}")
    p.add_argument("--plain", action="store_true")
    return p.parse_args()


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1 = nn.RMSNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.norm2 = nn.RMSNorm(dim)
        self.ffn = nn.Sequential(nn.Linear(dim, dim * 4, bias=False), nn.SiLU(), nn.Linear(dim * 4, dim, bias=False))

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.ffn(self.norm2(x))


class MiniLLM(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.embed = nn.Embedding(a.vocab, a.dim)
        self.layers = nn.ModuleList([Block(a.dim, a.heads) for _ in range(a.layers)])
        self.head = nn.Linear(a.dim, a.vocab, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make(a):
    """PyTorch's own initialisation, then every bias and norm weight moved off its special value: a test that starts all
    biases at zero would compare numbers whose size is set by the first few updates alone."""
    torch.manual_seed(1)
    model = MiniLLM(a)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.1)
    save_file(model.state_dict(), f"{a.make}/init.safetensors")
    count = 8 * a.batch * a.seq * a.grad_accum + 5  # few enough that the samples run out and start again
    tokens = torch.randint(0, a.vocab, (count,), dtype=torch.int32)
    with open(f"{a.make}/tokens.bin", "wb") as f:
        f.write(tokens.to(torch.uint16).numpy().astype("<u2").tobytes())


def samples(a, tokens, first):
    """Samples first … first + batch − 1, modulo their number: inputs and targets."""
    total = (len(tokens) - 1) // a.seq
    starts = [(first + b) % total * a.seq for b in range(a.batch)]
    rows = torch.stack([tokens[s:s + a.seq + 1] for s in starts]).long()
    return rows[:, :-1], rows[:, 1:]


def micro_batches(a, tokens, step, rank):
    """This rank's micro-batches of a step. The plain run sees those of all ranks as one batch."""
    for k in range(a.grad_accum):
        m = step * a.grad_accum + k
        ranks = range(a.ranks) if a.plain else [rank]
        parts = [samples(a, tokens, (m * a.ranks + r) * a.batch) for r in ranks]
        yield torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def train(a, rank):
    model = MiniLLM(a)
    model.load_state_dict(load_file(a.init))
    if not a.plain:
        mesh = init_device_mesh("cpu", (a.ranks,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    with open(a.data, "rb") as f:
        tokens = torch.frombuffer(bytearray(f.read()), dtype=torch.uint16).to(torch.int32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=a.lr, eps=a.adam_eps)
    losses = []
    for step in range(a.steps):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for k, (inputs, targets) in enumerate(micro_batches(a, tokens, step, rank)):
            if not a.plain:
                model.set_requires_gradient_sync(k + 1 == a.grad_accum)
            loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            (loss / a.grad_accum).backward()
            total += loss.detach()
        if a.clip:
            nn.utils.clip_grad_norm_(model.parameters(), a.clip)
        optimizer.step()
        if not a.plain:
            dist.all_reduce(total)
            total /= a.ranks
        losses.append(total.item() / a.grad_accum)
    full = {n: (p.detach() if a.plain else p.full_tensor().detach()).contiguous() for n, p in model.named_parameters()}
    if rank == 0:
        save_file(full, a.save_full)
        with open(a.losses, "w") as f:
            json.dump({"losses": losses}, f)


def worker(rank, a, store):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", rank=rank, world_size=a.ranks, init_method=f"file://{store}")
    train(a, rank)
    dist.barrier()
    dist.destroy_process_group()
    # Skip the interpreter's finalisation: a Gloo or autograd thread that asks for the GIL while it runs is ended by force,
    # and that ends in std::terminate ("terminate called without an active exception") now and then.
    os._exit(0)


if __name__ == "__main__":
    args = parse()
    torch.set_num_threads(1)
    if args.make:
        make(args)
    elif args.plain:
        train(args, 0)
    else:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(worker, (args, f"{folder}/store"), nprocs=args.ranks)
