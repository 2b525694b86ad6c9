"""Habits that change between forward and backward what the model computes with: flags, attributes, tensors."""

from __future__ import annotations

from benchmarks.fuzz.habit import Habit, each_module, validation

_DROPS = ("Dropping", "Convolves", "Recurs", "Encodes", "CrossReads", "LayerDrop", "Checkpoints", "Deep")
_BUFFERED = ("MovingScale", "ReplacedScale", "Codebook", "LateStatistics", "SpectralNorm", "OldSpectralNorm")
_NORMS = ("Norms", "AveragingNorms", "InstanceNorms", "Convolves")
_IS_NORM = "isinstance(part, nn.modules.batchnorm._NormBase)"
_IS_DROPOUT = "isinstance(part, nn.modules.dropout._DropoutNd)"
_HAS_SCALE = 'hasattr(part, "scale") and isinstance(part.scale, float)'

# Flags, rates and attributes that differ when backward comes
FLAGS = [
    Habit(name="eval before backward", between="model.eval()", after="model.train()"),
    Habit(
        name="eval of norms before backward",
        needs=_NORMS,
        after="model.train()",
        between=each_module(_IS_NORM, "part.eval()"),
    ),
    Habit(
        name="train of a frozen norm before backward",
        needs=_NORMS,
        between="model.train()",
        begin=each_module(_IS_NORM, "part.eval()"),
    ),
    Habit(
        name="dropout rate before backward",
        needs=_DROPS,
        begin=each_module(_IS_DROPOUT, "part.p = 0.3"),
        between=each_module(_IS_DROPOUT, "part.p = 0.9"),
    ),
    Habit(
        name="dropout off before backward",
        needs=_DROPS,
        begin=each_module(_IS_DROPOUT, "part.p = 0.4"),
        between=each_module(_IS_DROPOUT, "part.p = 0.0"),
    ),
    Habit(name="dropout rate grows", needs=_DROPS, begin=each_module(_IS_DROPOUT, "part.p = 0.1 * step")),
    Habit(
        name="momentum of norms before backward",
        needs=_NORMS,
        between=each_module(_IS_NORM, "part.momentum = 0.5"),
    ),
    Habit(
        name="eps of norms before backward",
        begin=each_module('hasattr(part, "eps")', "part.eps = 1e-5"),
        between=each_module('hasattr(part, "eps")', "part.eps = 1e-1"),
    ),
    Habit(
        name="cond set before backward",
        promised=False,  # The new tensor is the loop's own.
        needs=("Conditioned",),
        between=each_module('hasattr(part, "cond")', "part.cond = torch.zeros(())"),
    ),
    Habit(
        name="cond deleted before backward",
        needs=("Conditioned",),
        between=each_module('hasattr(part, "cond")', "del part.cond"),
    ),
    Habit(
        name="cond changed in place before backward",
        needs=("Conditioned",),
        promised=False,
        between=each_module('hasattr(part, "cond")', "part.cond = part.cond.detach() + 1.0"),
    ),
    Habit(
        name="scale set each step",
        needs=("Scaled",),
        begin=each_module(_HAS_SCALE, "part.scale = 1.0 + step"),
    ),
    Habit(
        name="scale set before backward",
        needs=("Scaled",),
        between=each_module(_HAS_SCALE, "part.scale += 1.0"),
    ),
    Habit(
        name="counter advanced before backward",
        needs=("Counts", "LateStatistics"),
        between=each_module('hasattr(part, "calls")', "part.calls += 1"),
    ),
    Habit(
        name="frozen before backward",
        begin="for p in model.parameters():\n    p.requires_grad_(True)",
        between="""\
for p in list(model.parameters())[:4]:
    p.requires_grad_(False)""",
    ),
    Habit(
        name="thaws from step to step",
        begin="""\
for number, p in enumerate(model.parameters()):
    p.requires_grad_(number % 3 <= step)""",
        promised=False,
    ),
]

# Tensors that differ when backward comes
TENSORS = [
    Habit(
        name="buffers written before backward",
        needs=_BUFFERED + _NORMS,
        between="""\
with torch.no_grad():
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.mul_(0.5)""",
    ),
    Habit(
        name="buffers replaced before backward",
        promised=False,
        needs=_BUFFERED + _NORMS,
        between="""\
for part in model.modules():
    for name, buffer in list(part.named_buffers(recurse=False)):
        setattr(part, name, buffer.clone())""",
    ),
    Habit(
        name="buffers written through data",
        needs=_BUFFERED + _NORMS,
        between="""\
for buffer in model.buffers():
    if buffer.is_floating_point():
        buffer.data.mul_(0.5)""",
    ),
    Habit(  # All of them through data, or biases under no_grad, by how many there are.
        name="parameters written before backward",
        between="""\
if len(list(model.parameters())) % 2:
    for p in model.parameters():
        p.data.mul_(0.9)
else:
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias") and "norm" not in name:
                p.add_(0.5)""",
    ),
    Habit(
        name="weights swapped through data",
        promised=False,
        between="""\
for p in model.parameters():
    p.data = p.data * 0.9""",
    ),
    Habit(
        name="average of weights loaded for validation",
        promised=False,
        between=f"""\
kept = {{name: p.data for name, p in model.named_parameters()}}
for p in model.parameters():
    p.data = p.data * 0.5
{validation("torch.no_grad()")}
for name, p in model.named_parameters():
    p.data = kept[name]""",
    ),
    Habit(
        name="input zeroed before backward",
        facts=("free_input",),
        between="for tensor in tensors_of(inputs):\n    tensor.detach().zero_()",
    ),
    Habit(name="input refilled before backward", facts=("free_input",), between="refill(inputs)"),
    Habit(name="input changed through data", between="for tensor in tensors_of(inputs):\n    tensor.data.fill_(1)"),
    Habit(
        name="input freed before backward",
        promised=False,
        between="""\
inputs = copied(inputs)""",
    ),
]
