#!/usr/bin/env python3
"""Kernel times by torch.profiler, of the operators that `profiler_kernels times` runs, in the same JSON.

Usage: torch_profiler_kernels.py FILE [calls]. FILE gets {"tool": ..., "calls": ..., "kernels": {name: [ns, ...]}}.
"""
import collections
import json
import sys
import time

import torch
from torch.profiler import ProfilerActivity, profile


def tensors():
    def gpu(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, dtype=dtype, device="cuda")

    t = {"a": gpu(8192, 8192), "b": gpu(8192, 8192), "product": gpu(8192, 8192)}
    t["source"], t["to"] = gpu(1 << 28, dtype=torch.float32), torch.empty(1 << 28, dtype=torch.bfloat16, device="cuda")
    t["x"], t["qkv"], t["up"], t["head"] = gpu(8192, 2048), gpu(2048, 6144), gpu(2048, 8192), gpu(2048, 32000)
    t["logits"] = gpu(8192, 8192, dtype=torch.float32)
    return t


def work(t):
    torch.mm(t["a"], t["b"], out=t["product"])
    t["to"].copy_(t["source"])
    for w in ("qkv", "up", "head"):
        torch.mm(t["x"], t[w])
    torch.add(t["logits"], t["logits"])
    torch.softmax(t["logits"], 1)
    torch.cuda.synchronize()
    time.sleep(0.03)  # as there: otherwise the power limit sets the times


def main():
    path, calls = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 60
    t = tensors()
    for _ in range(20):
        work(t)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        for _ in range(calls):
            work(t)
        torch.cuda.synchronize()
    kernels = collections.defaultdict(list)
    for event in prof.profiler.kineto_results.events():
        name = event.name()
        if event.device_type() == torch.autograd.DeviceType.CUDA and not name.startswith(("Memcpy", "Memset", "ProfilerStep")):
            kernels[name].append(event.duration_ns())
    with open(path, "w") as file:
        json.dump({"tool": "torch.profiler " + torch.__version__, "calls": calls, "kernels": kernels}, file, indent=1)


if __name__ == "__main__":
    main()
