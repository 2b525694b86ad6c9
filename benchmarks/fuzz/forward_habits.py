"""Habits of forwards: several of them, in part, by other ways than calling the model."""

from __future__ import annotations

from benchmarks.fuzz.habit import Habit, validation

# Under functorch a forward must not write what it did not make.
_WRITING = (
    "Norms",
    "AveragingNorms",
    "InstanceNorms",
    "Convolves",
    "MovingScale",
    "ReplacedScale",
    "Codebook",
    "Remembers",
)
_WRITING += (
    "LateStatistics",
    "TensorAttribute",
    "SpectralNorm",
    "OldSpectralNorm",
    "Stores",
    "History",
    "Forces",
    "Checkpoints",
)

_OF_WEIGHTS = """\
named = {name: p.detach() for name, p in model.named_parameters()}
def of_weights(weights):
    return loss_fn(torch.func.functional_call(model, weights, args_of(inputs), kwargs_of(inputs)))"""

FORWARDS = [
    Habit(
        name="validation before backward",
        promised=False,
        between=validation("torch.no_grad()"),
    ),
    Habit(
        name="no_grad forward before backward", promised=False, between="with torch.no_grad():\n    call(model, inputs)"
    ),
    Habit(
        name="inference_mode forward before backward",
        promised=False,
        between=validation("torch.inference_mode()"),
    ),
    Habit(
        name="other forward before backward", promised=False, between="other = call(model, copied(inputs))\ndel other"
    ),
    Habit(
        name="two forwards, two backwards",
        promised=False,
        forward="""\
loss = loss_fn(call(model, inputs))
second = loss_fn(call(model, copied(inputs)))""",
        backward="backward(second)\nbackward(loss)\ndel second",
    ),
    Habit(
        name="two forwards, one backward",
        promised=False,
        forward="""\
loss = loss_fn(call(model, inputs)) + 0.5 * loss_fn(call(model, copied(inputs)))""",
    ),
    Habit(
        name="three forwards, backwards in turn",
        promised=False,
        forward="""\
losses_now = [loss_fn(call(model, copied(inputs))) for _ in range(3)]
loss = losses_now.pop()""",
        backward="backward(loss)\nwhile losses_now:\n    backward(losses_now.pop(0))",
    ),
    Habit(
        name="gradient accumulation",
        promised=False,
        forward="""\
for _ in range(2):
    backward(0.3 * loss_fn(call(model, copied(inputs))))
loss = loss_fn(call(model, inputs))""",
    ),
    Habit(name="smaller batch", promised=False, forward="loss = loss_fn(call(model, halved(inputs)))"),
    Habit(
        name="validation between steps",
        begin=validation("torch.no_grad()"),
    ),
    Habit(
        name="eval forward with gradients",
        promised=False,
        begin="""\
model.eval()
backward(0.1 * loss_fn(call(model, copied(inputs))))
model.train()""",
    ),
    Habit(name="forward without backward", begin="dropped = call(model, inputs)\ndel dropped"),
    Habit(name="calls forward itself", forward="loss = loss_fn(model.forward(*args_of(inputs), **kwargs_of(inputs)))"),
    Habit(
        name="calls a block alone",
        promised=False,
        needs=("Dropping", "Norms", "Plain", "Attends", "Deep", "Recurs"),
        begin="""\
for part in net_of(model).blocks.values():
    if type(part).__name__ not in ("CrossReads", "Conditioned"):
        part(torch.randn(2, 4, WIDTH)).sum().backward()
        optimizer.zero_grad()
        break""",
    ),
    Habit(name="wrapped in another module", forward="loss = loss_fn(call(Holder(model), inputs))"),
    Habit(
        name="functional_call",
        promised=False,
        forward="""\
named = {name: p * 1.0 for name, p in model.named_parameters()}
loss = loss_fn(torch.func.functional_call(model, named, args_of(inputs), kwargs_of(inputs)))
del named""",
    ),
    Habit(
        name="functional_call with detached weights",
        promised=False,
        forward="""\
named = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}
loss = loss_fn(torch.func.functional_call(model, named, args_of(inputs), kwargs_of(inputs)))
found = torch.autograd.grad(loss, list(named.values()), allow_unused=True, retain_graph=True)
for p, g in zip(model.parameters(), found):
    p.grad = g
del named""",
        backward="pass",
    ),
    Habit(
        name="MAML",
        promised=False,
        forward="""\
first = loss_fn(call(model, copied(inputs)))
named = {name: p for name, p in model.named_parameters() if p.requires_grad}
grads = torch.autograd.grad(first, list(named.values()), create_graph=True, allow_unused=True)
grads = [torch.zeros(()) if g is None or g.is_sparse else g for g in grads]
fast = {name: p - 0.01 * g for (name, p), g in zip(named.items(), grads)}
loss = loss_fn(torch.func.functional_call(model, fast, args_of(inputs), kwargs_of(inputs)))
del first, named, grads, fast""",
    ),
    Habit(
        name="functorch grad",
        promised=False,
        unless=("autocast",),
        lacks=_WRITING,
        begin=f"""{_OF_WEIGHTS}
seen = torch.func.grad(of_weights)(named)
del named, of_weights, seen""",
    ),
    Habit(
        name="functorch vmap grad",
        promised=False,
        unless=("autocast", "takes_more_than_tensors"),
        lacks=_WRITING,
        begin="""\
named = {name: p.detach() for name, p in model.named_parameters()}
def of_sample(weights, *sample):
    return loss_fn(torch.func.functional_call(model, weights, tuple(part.unsqueeze(0) for part in sample)))
dims = (None, *(0 for _ in args_of(inputs)))
seen = torch.func.vmap(torch.func.grad(of_sample), in_dims=dims, randomness="different")(named, *args_of(inputs))
del named, of_sample, seen""",
    ),
    Habit(
        name="functorch jvp",
        promised=False,
        unless=("autocast",),
        lacks=_WRITING,
        begin=f"""{_OF_WEIGHTS}
seen = torch.func.jvp(of_weights, (named,), ({{name: torch.ones_like(p) for name, p in named.items()}},))
del named, of_weights, seen""",
    ),
]
