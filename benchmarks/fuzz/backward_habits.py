"""Habits around forward and backward: contexts that are gone when the other runs, random numbers, kinds of backward."""

from __future__ import annotations

from benchmarks.fuzz.habit import Habit

_ATTENDS = ("AttendsPlainly", "Attends", "Encodes", "CrossReads")
_PARAMETRIZED = ("SpectralNorm", "Orthogonal", "WeightNorm")
_LAST_WEIGHTS = "[p for p in model.parameters() if p.requires_grad][-2:]"

_TWO_LOSSES = """\
output = call(model, inputs)
loss = loss_fn(output)
other = (first_of(output).float() ** 4).mean()
del output"""

CONTEXTS = [
    Habit(name="sdpa_kernel", needs=_ATTENDS, around="sdpa_kernel([SDPBackend.MATH])", promised=False),
    Habit(name="parametrize.cached", needs=_PARAMETRIZED, around="parametrize.cached()", promised=False),
    Habit(name="default dtype in forward", around="default_dtype(torch.float64)", promised=False),
    Habit(name="default dtype in backward", during="default_dtype(torch.float64)"),
    Habit(name="deterministic in forward", around="deterministic()", promised=False),
    Habit(name="deterministic in backward", during="deterministic()", promised=False),
    Habit(name="matmul precision in forward", around='matmul_precision("medium")', promised=False),
    Habit(name="matmul precision in backward", during='matmul_precision("medium")', promised=False),
    Habit(name="threads in forward", around="threads(2)", promised=False),
    Habit(name="threads in backward", during="threads(2)", promised=False),
    Habit(name="fork_rng around forward", around="torch.random.fork_rng()", promised=False),
    Habit(name="fork_rng around backward", during="torch.random.fork_rng()", promised=False),
    Habit(name="device context", around='torch.device("cpu")'),
    Habit(name="mkldnn off in forward", around="torch.backends.mkldnn.flags(enabled=False)", promised=False),
    Habit(name="anomaly mode", around="torch.autograd.detect_anomaly(check_nan=False)", promised=False),
    Habit(name="save_on_cpu", around="torch.autograd.graph.save_on_cpu()", promised=False),
    Habit(name="hooks on saved tensors", promised=False,
          around="torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t)"),
    Habit(name="autocast in backward", promised=False, during='torch.autocast("cpu", torch.bfloat16)'),
    Habit(name="autocast off in backward", facts=("autocast",), promised=False,
          during='torch.autocast("cpu", enabled=False)'),
    Habit(name="autocast without its cache", facts=("autocast",), promised=False,
          around='torch.autocast("cpu", torch.bfloat16, cache_enabled=False)'),
    Habit(name="inference flag off and on", around="torch.set_grad_enabled(True)"),
    Habit(name="profiler ranges", around='torch.profiler.record_function("forward")'),
]  # fmt: skip

BACKWARDS = [
    Habit(name="seeded between", between="torch.manual_seed(5)"),
    Habit(name="seeded before each step", begin="torch.manual_seed(step)"),
    Habit(name="draws between", between="torch.rand(3)\nrandom.random()\nnp.random.rand()"),
    Habit(name="python seeded between", between="random.seed(4)\nnp.random.seed(4)"),
    Habit(name="collects garbage between", between="gc.collect()"),
    Habit(name="model deepcopied between", between="kept = copy.deepcopy(model)\ndel kept", promised=False),
    Habit(name="state saved between", promised=False,
          between="kept = io.BytesIO()\ntorch.save(model.state_dict(), kept)\ndel kept"),
    Habit(name="graph retained, backward twice", promised=False,
          backward="(0.5 * loss).backward(retain_graph=True)\nbackward(loss)"),
    Habit(name="graph retained and left", promised=False, unless=("scaler",),
          backward="loss.backward(retain_graph=True)"),
    Habit(name="two losses", promised=False, forward=_TWO_LOSSES, backward="backward(loss + other)\ndel other"),
    Habit(name="two losses, graph retained", promised=False, forward=_TWO_LOSSES,
          backward="other.backward(retain_graph=True)\nbackward(loss)\ndel other"),
    Habit(name="output kept", promised=False, forward="output = call(model, inputs)\nloss = loss_fn(output)"),
    Habit(name="part of the graph", promised=False, backward=f"""\
first = torch.autograd.grad(loss, {_LAST_WEIGHTS}, retain_graph=True, allow_unused=True)
backward(loss)
del first"""),
    Habit(name="only some gradients", promised=False, unless=("scaler",),
          backward=f"loss.backward(inputs={_LAST_WEIGHTS})"),
    Habit(name="gradients by autograd.grad", promised=False, unless=("scaler", "accumulate"), backward="""\
trained = [p for p in model.parameters() if p.requires_grad]
for p, g in zip(trained, torch.autograd.grad(loss, trained, allow_unused=True)):
    p.grad = g
del g"""),
    Habit(name="gradient of the batch", facts=("leaf_input",), promised=False,
          backward="backward(loss)\nrefill(inputs)"),
    Habit(name="double backward", promised=False, backward="""\
trained = [p for p in model.parameters() if p.requires_grad]
grads = torch.autograd.grad(loss, trained, create_graph=True, allow_unused=True)
backward(loss + 0.1 * sum((g.float() ** 2).sum() for g in grads if g is not None and not g.is_sparse))
del grads"""),
    Habit(name="penalty on the input's gradient", facts=("leaf_input",), promised=False, forward="""\
loss = loss_fn(call(model, inputs))
(slope,) = torch.autograd.grad(loss, list(inputs), create_graph=True)
loss = loss + (slope.norm() - 1) ** 2
del slope"""),
    Habit(name="backward in a thread", promised=False, backward="in_thread(lambda: backward(loss))"),
    Habit(name="forward in a thread", promised=False, unless=("autocast",),
          forward="loss = in_thread(lambda: loss_fn(call(model, inputs)))"),
    Habit(name="backward fails once", promised=False, backward="""\
def fail(grad):
    raise Interrupt("in backward")
parameter = next(p for p in model.parameters() if p.requires_grad)
hook = parameter.register_hook(fail)
try:
    backward(loss)
except Interrupt:
    pass
hook.remove()
optimizer.zero_grad()
del loss
loss = loss_fn(call(model, inputs))
backward(loss)""", unless=("autocast",)),
    Habit(name="forward fails once", begin="""\
def fail(*_):
    raise Interrupt("in forward")
hook = model.get_submodule(head_of(model)).register_forward_pre_hook(fail)
try:
    call(model, inputs)
except Interrupt:
    pass
hook.remove()
del fail"""),
    Habit(name="loss fails once", begin="""\
try:
    lost = loss_fn(call(model, inputs))
    raise Interrupt("after forward")
except Interrupt:
    del lost"""),
    Habit(name="one step left out", backward="if step != 1:\n    backward(loss)"),
    Habit(name="updates inside backward", setup="""\
def update(p):
    if not p.grad.is_sparse:
        p.data.add_(p.grad, alpha=-0.01)
for p in model.parameters():
    if p.requires_grad:
        p.register_post_accumulate_grad_hook(update)""", promised=False),
    Habit(name="hook on the loss", between="loss.register_hook(lambda grad: grad * 2)"),
    Habit(name="loss scaled by hand", promised=False, backward="(loss * 8.0).backward()", unless=("scaler",)),
]  # fmt: skip
