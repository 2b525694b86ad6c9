"""Plans whose head runs in pieces together with its loss: peaks to the byte, gradients but for rounding, refusals."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

import planner
from planner.distributed.simulated_ranks import simulate_collectives, simulated_group
from tests.support.nightly import by_day

WORDS, WIDTH, TOKENS = 3000, 32, 96


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden):
        return hidden + self.down(F.gelu(self.up(self.norm(hidden))))


class Language(nn.Module):
    """Words in, logits out, or the loss where labels are given; ``tied``: the head's weight is the embedding's."""

    def __init__(self, *, tied=False):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, words, labels=None):
        hidden = self.words(words)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        return logits if labels is None else (_loss(logits, labels), logits)


def _loss(logits, labels):
    return F.cross_entropy(logits[:, :-1].reshape(-1, WORDS), labels[:, 1:].reshape(-1))


def workload(model, **more):
    words = torch.randint(0, WORDS, (4, TOKENS), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.01)
    return planner.Workload(model=model, inputs=words, loss=lambda out: _loss(out, words), optimizer=optimizer, **more)


def with_loss_inside(model):
    words = torch.randint(0, WORDS, (4, TOKENS), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    return planner.Workload(
        model=model, inputs={"words": words, "labels": words}, loss=lambda out: out[0], optimizer=optimizer
    )


def halved(model):
    return workload(model, autocast=torch.bfloat16)


def scaled(model):
    return workload(model, autocast=torch.float16, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))


def accumulating(model):
    return workload(model, accumulate=True)


def frozen_base(model):
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    return workload(model)


def gradients_of(model, step):
    step.model.zero_grad()
    step.step(until="optimizer")
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    step.zero_grad()
    return found


STEPS = [
    (workload, False),
    (with_loss_inside, True),
    (halved, False),
    (scaled, True),
    (accumulating, False),
    (frozen_base, True),
]


BY_DAY = [(workload, False)]


@pytest.mark.slow
@pytest.mark.parametrize("case", by_day(STEPS, BY_DAY), ids=lambda case: case[0].__name__)
def test_a_plan_in_pieces_takes_what_it_says_and_has_the_gradients_of_the_step(case):
    make, tied = case
    torch.manual_seed(0)
    model = Language(tied=tied)
    step = make(model)
    profile = planner.profile(step, numerics="rounding")
    assert profile.pieces is None
    pieces = [each.pieces for each in profile.in_pieces]
    assert pieces[0] is not None and (pieces[0].head, pieces[0].count) == ("head", 3)
    assert all(each is not None and each.head == "head" for each in pieces)
    plain = gradients_of(model, step)
    with pytest.raises(planner.Infeasible) as refused:
        planner.solve(profile, 1, numerics="rounding")
    least_bytes = refused.value.minimum_budget_bytes
    span = profile.unplanned_peak_bytes - least_bytes
    for budget in (least_bytes, least_bytes + span // 3):
        plan = planner.solve(profile, budget, numerics="rounding")
        assert plan.pieces in pieces
        with planner.apply(model, plan):
            measured_bytes = planner.measure(step).peak_bytes
            planned = gradients_of(model, step)
        assert measured_bytes <= plan.predicted_peak_bytes <= budget
        if step.autocast is None:  # Programs keep no casts, which the prediction counts until the loss is there.
            assert measured_bytes == plan.predicted_peak_bytes
        tolerance = 1e-5 if step.autocast is None else torch.finfo(step.autocast).eps ** 0.5
        assert planned.keys() == plain.keys()
        assert all((planned[name] - each).norm() <= tolerance * each.norm() for name, each in plain.items())
    assert all(torch.equal(each, plain[name]) for name, each in gradients_of(model, step).items())


class Wide(nn.Module):
    """Blocks whose MLP takes most of the memory, on one long sequence."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, hidden):
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class Convolutions(nn.Sequential):
    """On a batch of images."""

    def __init__(self):
        super().__init__(nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 3, 3))


MODELS = {"long sequence": (Wide, (1, 512, WIDTH)), "images": (Convolutions, (8, 3, 24, 24))}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.nightly
def test_modules_in_pieces_take_what_the_plan_says_and_have_the_gradients_of_the_step(name):
    kind, shape = MODELS[name]
    torch.manual_seed(0)
    model = kind()
    step = planner.Workload(model=model, inputs=torch.randn(shape), loss=lambda out: out.square().mean())
    profile = planner.profile(step, numerics="rounding")
    plain = gradients_of(model, step)
    with pytest.raises(planner.Infeasible) as refused:
        planner.solve(profile, 1, numerics="rounding")
    least_bytes = refused.value.minimum_budget_bytes
    with pytest.raises(planner.Infeasible, match="in pieces"):
        planner.solve(profile, least_bytes)
    plan = planner.solve(profile, least_bytes, numerics="rounding")
    assert plan.pieces is not None and plan.pieces.modules and not plan.pieces.head
    with planner.apply(model, plan):
        assert planner.measure(step).peak_bytes == plan.predicted_peak_bytes <= least_bytes
        planned = gradients_of(model, step)
    torch.testing.assert_close(planned, plain, rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def profiled():
    torch.manual_seed(0)
    return planner.profile(workload(Language()), numerics="rounding", menus=False)


@pytest.mark.slow
def test_without_leave_nothing_runs_in_pieces_and_the_refusal_says_what_that_would_reach(profiled):
    with pytest.raises(planner.Infeasible) as refused:
        planner.solve(profiled, 1, numerics="rounding")
    least_bytes = refused.value.minimum_budget_bytes
    with pytest.raises(planner.Infeasible, match="solve with --allow-rounding \\(numerics='rounding'") as refused:
        planner.solve(profiled, least_bytes)
    assert f"in pieces {least_bytes} bytes" in str(refused.value)
    assert refused.value.minimum_budget_bytes > least_bytes
    assert planner.solve(profiled, "100%").pieces is None


@pytest.mark.slow
def test_a_profile_without_pieces_is_refused_with_how_to_have_them():
    profile = planner.profile(workload(Language()))
    assert not profile.in_pieces
    with pytest.raises(planner.Infeasible, match="profile and solve with --allow-rounding"):
        planner.solve(profile, 1)


@pytest.mark.slow
def test_a_plan_in_pieces_says_so_and_is_read_back(profiled, tmp_path):
    plan = planner.solve(profiled, "30%", numerics="rounding")
    assert re.search("head and the loss: (3|12) pieces of at most (128|32) rows", plan.summary())
    assert re.search("head in (3|12) pieces", plan.in_one_line())
    plan.save(tmp_path / "plan.json")
    assert planner.Plan.load(tmp_path / "plan.json") == plan
    profiled.save(tmp_path / "profile.json")
    assert planner.Profile.load(tmp_path / "profile.json") == profiled


class Mixing(Language):
    """Its head takes rows together: each with the mean of all."""

    def __init__(self):
        super().__init__()
        self.head = _Mixing(WIDTH, WORDS)


class _Mixing(nn.Linear):
    def forward(self, input):
        return super().forward(input - input.mean(-2, keepdim=True))


@pytest.mark.slow
def test_a_head_whose_rows_depend_on_each_other_runs_at_once():
    profile = planner.profile(workload(Mixing()), numerics="rounding")
    assert all(each.pieces is not None and not each.pieces.head for each in profile.in_pieces)


class Penalised(Language):
    """Its loss needs all logits besides."""

    def forward(self, words, labels=None):
        logits = self.head(self.words(words))
        return logits + 0 * logits.square().mean()


@pytest.mark.slow
def test_a_head_whose_whole_output_is_needed_runs_at_once():
    profile = planner.profile(workload(Penalised()), numerics="rounding")
    assert all(each.pieces is not None and not each.pieces.head for each in profile.in_pieces)


def test_small_heads_have_no_pieces():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    step = planner.Workload(model=model, inputs=torch.randn(512, 8), loss=lambda out: out.square().mean())
    assert planner.profile(step).heads == ()


@pytest.mark.slow
def test_what_needs_all_of_the_output_under_the_plan_is_said_once_and_right(profiled):
    torch.manual_seed(0)
    model = Language()
    words = torch.randint(0, WORDS, (4, TOKENS))
    (expected,) = torch.autograd.grad(model(words).square().mean(), model.head.weight)
    with planner.apply(model, planner.solve(profiled, "30%", numerics="rounding")):
        with pytest.warns(RuntimeWarning, match="all that it returns is made at once"):
            model(words).square().mean().backward()
        model.eval()
        assert type(model(words)) is torch.Tensor
    torch.testing.assert_close(model.head.weight.grad, expected)


@pytest.mark.slow
def test_a_copy_of_a_planned_model_has_no_pieces(profiled):
    model = Language()
    with planner.apply(model, planner.solve(profiled, "30%", numerics="rounding")):
        assert type(copy.deepcopy(model)(torch.zeros(4, TOKENS, dtype=torch.long))) is torch.Tensor


@pytest.mark.slow
def test_one_call_trains_in_pieces():
    torch.manual_seed(0)
    model = Language()
    step = workload(model)
    planner.auto_checkpoint(step, budget="30%", numerics="rounding")
    handle = planner.handle_of(model)
    assert handle is not None and handle.plan.pieces is not None
    assert planner.measure(step).peak_bytes == handle.plan.predicted_peak_bytes
    handle.remove()
    with pytest.raises(ValueError, match="numerics: expected one of eager, compiled, rounding, got 'exact'"):
        planner.profile(step, numerics="exact")  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
@pytest.mark.parametrize("unit", by_day([True, False], [True]))
def test_a_head_under_fully_shard_is_gathered_once(unit, monkeypatch):
    """Whether it is a unit of its own or one of the whole model; its loss comes after its forward."""
    gathers = []
    gather = _fsdp_param_group.foreach_all_gather

    def counted(params, *args, **settings):
        gathers.append({param._module_info.module for param in params})
        return gather(params, *args, **settings)

    torch.manual_seed(0)
    model = Language()
    with simulated_group(2):
        for module in [*model.blocks, *([model.head] if unit else [])]:
            fully_shard(module)
        fully_shard(model)
        simulate_collectives(model)
        work = workload(model)
        exact = local(gradients_of(model, work))
        profile = planner.profile(work, numerics="rounding", menus=False)
        apart = profile.in_pieces[0]
        assert apart.unplanned_peak_bytes < profile.unplanned_peak_bytes / 2
        plan = planner.solve(profile, apart.unplanned_peak_bytes, numerics="rounding")
        before = [each.post_forward_mesh_info for each in groups_of(model)]
        with planner.apply(model, plan):
            assert planner.measure(work, repeats=1).peak_bytes <= plan.predicted_peak_bytes
            monkeypatch.setattr(_fsdp_param_group, "foreach_all_gather", counted)
            found = local(gradients_of(model, work))
        assert sum(model.head in modules for modules in gathers) == 1
        assert [each.post_forward_mesh_info for each in groups_of(model)] == before
    torch.testing.assert_close(found, exact)


def local(gradients):
    return {name: each.to_local() for name, each in gradients.items()}


def groups_of(model):
    return [
        group
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups
    ]
