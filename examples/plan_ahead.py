"""A plan for eight GPUs that are not there, of two kinds, for a model that has no weights yet.

python examples/plan_ahead.py
python examples/plan_ahead.py plan.json   # and write it, for auto_parallelize(model, batch, plan="plan.json")
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hetu_fx

ROWS, LENGTH = 32, 2048
DEVICES = [{"rank": rank, "kind": "A100-80G", "node": "new"} for rank in range(4)]
DEVICES += [{"rank": rank, "kind": "V100-32G", "node": "old"} for rank in range(4, 8)]
INSIDE = {"bytes_per_second": 1e11, "latency_seconds": 1e-5}
BETWEEN = {"bytes_per_second": 3e9, "latency_seconds": 5e-5}
CLUSTER = {"format": "hetu_fx.cluster/1", "devices": DEVICES, "links": {"intra": INSIDE, "inter": BETWEEN}}


if __name__ == "__main__":
    with torch.device("meta"):  # nothing is allocated
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=4))  # four of the thirty-two blocks of a 7B model
        rows = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    with tempfile.TemporaryDirectory() as folder:
        cluster = Path(folder) / "cluster.json"
        cluster.write_text(json.dumps(CLUSTER))
        plan = hetu_fx.plan(model, {"input_ids": rows, "labels": rows}, cluster=cluster)  # the one line
    print(plan.explain())
    if len(sys.argv) > 1:
        plan.write(sys.argv[1])
