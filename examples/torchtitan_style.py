"""A trainer in torchtitan's style within a memory budget: parallelize, fully_shard, micro-batches, clipping.

torchrun --nproc-per-node 2 examples/torchtitan_style.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import planner


def parallelize(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    """As torchtitan's, but without its activation checkpointing: the plan chooses what runs again."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model[1:-1]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


class Trainer:
    def __init__(self, mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        blocks = [nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True, norm_first=True) for _ in range(6)]
        self.model = parallelize(nn.Sequential(nn.Embedding(256, 64), *blocks, nn.Linear(64, 256)), mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        torch.manual_seed(dist.get_rank())
        self.steps = torch.randint(256, (6, 4, 8, 33))  # four micro-batches in each

    def train_step(self, rows: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        total = torch.zeros(())
        for tokens in rows:
            predicted = self.model(tokens[:, :-1]).float()
            loss = F.cross_entropy(predicted.flatten(0, 1), tokens[:, 1:].flatten()) / len(rows)
            del predicted
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return total.item()


if __name__ == "__main__":
    dist.init_process_group()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plain, planned = Trainer(mesh), Trainer(mesh)
    work = planner.Workload(planned.model, step=lambda: planned.train_step(planned.steps[0]))
    planner.auto_checkpoint(work, budget="85%")  # the lines that are added, on every rank
    plan, peak = planner.handle_of(planned.model).plan, planner.measure(work).peak_bytes
    losses, expected = ([each.train_step(rows) for rows in each.steps] for each in (planned, plain))
    print(f"budget {plan.budget_bytes} bytes, measured {peak} bytes, predicted {plan.predicted_peak_bytes} bytes")
    told = "as without a plan" if losses == expected else "other than without a plan"
    print(told, "losses", *(f"{loss:.4f}" for loss in losses))
    dist.destroy_process_group()
