"""Habits that change the model after its plan was applied, and what is done with gradients."""

from __future__ import annotations

from benchmarks.fuzz.habit import Habit, each_module

_ROUND_TRIP = """\
model = {}
optimizer = remade(optimizer, model)"""
_HAS_INNER = 'hasattr(part, "inner") and isinstance(part.inner, nn.Linear)'

CHANGES = [
    Habit(name="converted after apply", setup="""\
dtype = torch.bfloat16 if len(net_of(model).blocks) % 2 else torch.float64
model.to(dtype)
inputs = cast(inputs, dtype)"""),
    Habit(name="norm added after apply", promised=False, setup=each_module(_HAS_INNER, """\
norm = nn.BatchNorm1d(part.inner.out_features)
part.inner = nn.Sequential(part.inner, nn.Flatten(0, 1), norm, nn.Unflatten(0, (-1, 8)))""")),
    Habit(name="dropout added after apply", promised=False, setup=each_module(
        _HAS_INNER, "part.inner = nn.Sequential(part.inner, nn.Dropout(0.3))")),
    Habit(name="hooks added after apply", promised=False, setup="""\
for part in list(model.modules())[1:]:
    if isinstance(part, nn.Linear):
        part.register_forward_hook(lambda module, args, output: output * 1.5)"""),
    Habit(name="backward hooks added after apply", promised=False, setup="""\
def halve(module, inward, outward):
    return tuple(None if g is None else g * 0.5 for g in inward)
for part in list(net_of(model).blocks.values()):
    part.register_full_backward_hook(halve)"""),
    Habit(name="parametrized after apply", promised=False, setup="""\
for part in list(model.modules()):
    if isinstance(part, nn.Linear) and not hasattr(part, "parametrizations"):
        parametrizations.weight_norm(part)
optimizer = remade(optimizer, model)"""),
    Habit(name="block replaced after apply", promised=False, setup="""\
net = net_of(model)
net.blocks["0"] = copy.deepcopy(net.blocks["0"])
optimizer = remade(optimizer, model)"""),
    Habit(name="frozen after apply", setup="for p in list(model.parameters())[2:6]:\n    p.requires_grad_(False)"),
    Habit(name="moved after apply", setup='model.to("cpu")\nmodel.train()'),
    Habit(name="weights set after apply", setup="""\
with torch.no_grad():
    for p in model.parameters():
        p.mul_(0.5)"""),
    Habit(name="deepcopied after apply", promised=False, setup=_ROUND_TRIP.format("copy.deepcopy(model)")),
    Habit(name="copy made after apply", promised=False, setup="twin = copy.deepcopy(model)",
          after="call(twin, copied(inputs))"),
    Habit(name="pickled after apply", promised=False, setup=_ROUND_TRIP.format("pickle.loads(pickle.dumps(model))")),
    Habit(name="state loaded after apply", setup="""\
kept = io.BytesIO()
torch.save(model.state_dict(), kept)
kept.seek(0)
model.load_state_dict(torch.load(kept))
del kept"""),
    Habit(name="state assigned after apply", promised=False, setup="""\
model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
optimizer = remade(optimizer, model)"""),
    Habit(name="plan taken off and applied again", begin="""\
if handle is not None:
    handle.remove()
    handle = planner.apply(model, plan)"""),
    Habit(name="plan taken off before backward", promised=False, between="""\
if handle is not None:
    handle.remove()""", after="""\
if handle is not None:
    handle = planner.apply(model, plan)"""),
    Habit(name="plan taken off in the middle", promised=False,
          begin="if step == 1 and handle is not None:\n    handle.remove()"),
    Habit(name="plan saved and loaded", begin="""\
if handle is not None:
    handle.remove()
    handle = planner.apply(model, reloaded(plan))"""),
    Habit(name="inner module called", facts=("wrapped",), forward="loss = loss_fn(call(model.net, inputs))"),
    Habit(name="inner module called and outer one", facts=("wrapped",), promised=False, forward="""\
loss = loss_fn(call(model.net, copied(inputs)))
backward(0.1 * loss)
loss = loss_fn(call(model, inputs))"""),
]  # fmt: skip

# What loops change from the second step on
CHANGING = [
    Habit(name="a frozen part is trained from the second step", promised=False, begin="""\
for p in list(model.parameters())[::2]:
    p.requires_grad_(step > 0)"""),
    Habit(name="a part is frozen from the second step", promised=False, begin="""\
for p in list(model.parameters())[::3]:
    p.requires_grad_(step < 1)"""),
    Habit(name="a part is evaluated from the second step", promised=False, begin="""\
model.train()
if step:
    next(iter(net_of(model).blocks.values())).eval()"""),
    Habit(name="a bias is gone from the second step", promised=False, begin=each_module(_HAS_INNER, """\
if step == 1:
    part.inner.bias = None""")),
    Habit(name="a block is another one from the second step", promised=False, begin="""\
if step == 1:
    name, part = next(iter(net_of(model).blocks.items()))
    net_of(model).blocks[name] = copy.deepcopy(part)
    optimizer = remade(optimizer, model)"""),
    Habit(name="each batch has another size", promised=False, begin="""\
inputs = halved(inputs) if step == 1 else joined(inputs) if step else inputs"""),
]  # fmt: skip

# What hooks keep on parameters, and change as they are called
KEPT_ON_PARAMETERS = [
    Habit(name="main gradients on parameters", promised=False, unless=("sparse",), setup="""\
def adding(p):
    p.main_grad.add_(p.grad)
for p in model.parameters():
    p.main_grad = torch.zeros_like(p)
    if p.requires_grad:
        p.register_post_accumulate_grad_hook(adding)"""),
]  # fmt: skip

UPDATES = [
    Habit(name="gradients clipped", promised=False, unless=("scaler", "sparse"),
          after="torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)"),
    Habit(name="gradients clipped by value", promised=False, unless=("scaler", "sparse"),
          after="torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)"),
    Habit(name="gradients set to zeros", promised=False, begin="optimizer.zero_grad(set_to_none=False)"),
    Habit(name="gradients of the model set to None", begin="model.zero_grad(set_to_none=True)", unless=("accumulate",)),
    Habit(name="gradients kept over two steps", promised=False, update="if step % 2:\n    optimizer.step()"),
    Habit(name="noise on gradients", promised=False, unless=("sparse",), after="""\
for p in model.parameters():
    if p.grad is not None:
        p.grad.add_(torch.randn_like(p.grad), alpha=0.01)"""),
    Habit(name="average of weights", promised=False,
          setup="average = {n: p.detach().clone() for n, p in model.named_parameters()}", after="""\
with torch.no_grad():
    for name, p in model.named_parameters():
        average[name].lerp_(p, 0.1)"""),
    Habit(name="SAM", promised=False, unless=("scaler", "sparse", "accumulate", "autocast"), after="""\
moved = [(p, 0.05 * p.grad.sign()) for p in model.parameters() if p.grad is not None]
with torch.no_grad():
    for p, e in moved:
        p.add_(e)
optimizer.zero_grad()
backward(loss_fn(call(model, inputs)))
with torch.no_grad():
    for p, e in moved:
        p.sub_(e)
del moved, p, e"""),
    Habit(name="learning rate changes", after="optimizer.param_groups[0]['lr'] *= 0.5"),
    Habit(name="optimizer made anew", promised=False, begin="optimizer = remade(optimizer, model)"),
]  # fmt: skip
