"""The zoo: every model does a training step, the seed fixes it, and wrong settings are named."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from planner import zoo
from profiler.workload.workload import Workload

_TEXT = {"batch": 2, "layers": 2, "hidden": 16, "heads": 2, "seq": 8, "vocab": 32}
SMALL = {
    "gpt2": _TEXT,
    "bert": _TEXT,
    "llama": _TEXT,
    "t5": _TEXT,
    "vit": {"batch": 2, "layers": 2, "hidden": 16, "heads": 2, "image": 16, "patch": 8, "classes": 3},
    "resnet50": {"batch": 4, "hidden": 4, "image": 32, "classes": 3},
    "unet": {"batch": 2, "hidden": 4, "image": 32, "classes": 3},
    "densenet": {"batch": 2, "layers": 2, "hidden": 4, "image": 8, "classes": 3},
    "mlp": {"batch": 4, "layers": 3, "hidden": 8},
    "mindspore_blocks": {"batch": 2, "blocks": 2, "hidden": 8, "heads": 2, "seq": 4},
}


def small(name: str, **settings: object) -> Workload:
    return zoo.build(name, **{**SMALL[name], **settings})


def step(workload: Workload) -> float:
    """A step whose dropout masks are the same each time."""
    torch.manual_seed(7)
    return workload.step()


def test_the_small_settings_cover_the_zoo():
    assert set(SMALL) == set(zoo.names())


@pytest.mark.parametrize("name", SMALL)
class TestEveryModel:
    def test_trains(self, name):
        workload = small(name)
        before = [p.detach().clone() for p in workload.model.parameters()]
        assert workload.model.training
        assert math.isfinite(step(workload))
        assert all(p.grad is not None and p.grad.isfinite().all() for p in workload.model.parameters())
        assert any(not torch.equal(p, q) for p, q in zip(before, workload.model.parameters(), strict=True))

    @pytest.mark.slow
    @pytest.mark.parametrize("precision", ["amp-bf16", "amp-fp16", "bf16"])
    def test_trains_in_every_precision(self, name, precision):
        workload = small(name, precision=precision)
        assert workload.step() > 0
        while not workload.stepped:
            assert workload.scaler is not None and workload.scaler.get_scale() >= 1  # it begins at 65,536 and falls
            workload.step()
        kind = torch.bfloat16 if precision == "bf16" else torch.float32
        assert {p.dtype for p in workload.model.parameters()} == {kind}
        assert all(p.grad is not None and p.grad.isfinite().all() for p in workload.model.parameters())

    @pytest.mark.slow
    def test_the_seed_fixes_weights_batch_and_step(self, name):
        one, two, other = small(name, seed=3), small(name, seed=3), small(name, seed=4)
        assert step(one) == step(two)
        for key, value in one.model.state_dict().items():
            assert torch.equal(value, two.model.state_dict()[key]), key
        assert step(one) != step(other)

    def test_building_leaves_the_random_numbers_alone(self, name):
        state = torch.get_rng_state()
        small(name)
        assert torch.equal(state, torch.get_rng_state())

    def test_an_unknown_setting_lists_the_accepted_ones(self, name):
        with pytest.raises(ValueError, match=rf"zoo:{name}: expected the settings .*batch=\d+.*got 'colour'; use one"):
            zoo.build(name, colour=1)

    @pytest.mark.gpu
    def test_trains_on_the_gpu_from_the_same_weights(self, name):
        here, there = small(name), small(name, device="cuda")
        for one, two in zip(here.model.parameters(), there.model.parameters(), strict=True):
            assert torch.equal(one, two.cpu())
        assert math.isfinite(step(there))


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_the_defaults_train(name):
    assert math.isfinite(zoo.build(name).step())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("adamw", torch.optim.AdamW),
        ("adam", torch.optim.Adam),
        ("sgd", torch.optim.SGD),
        ("momentum", torch.optim.SGD),
        ("adafactor", torch.optim.Adafactor),
        ("none", type(None)),
    ],
)
def test_the_optimizer_is_a_setting(name, kind):
    assert type(small("mlp", optimizer=name).optimizer) is kind
    assert math.isfinite(small("mlp", optimizer=name).step())


def test_momentum_is_a_setting_of_sgd():
    found = [small("mlp", optimizer=name).optimizer for name in ("sgd", "momentum")]
    assert [optimizer.defaults["momentum"] for optimizer in found if optimizer is not None] == [0, 0.9]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("mlp", {"batch": 0}, "expected batch to be at least 1, got 0; write batch="),
        ("mlp", {"batch": "many"}, "expected batch to be int, got 'many'; write for example batch="),
        ("mlp", {"batch": 2.5}, "expected batch to be int, got 2.5"),
        ("mlp", {"batch": True}, "expected batch to be int, got True"),
        ("mlp", {"seed": -1}, "expected seed to be at least 0, got -1"),
        ("mlp", {"optimizer": "lion"}, "expected optimizer to be adamw, adam, sgd, .*, none, got 'lion'; use one"),
        ("mlp", {"precision": 16}, "expected precision to be float32, amp-bf16, amp-fp16, bf16, got 16; use one"),
        ("mlp", {"precision": "amp-fp16", "optimizer": "none"}, "amp-fp16 needs an optimizer .*none; write optim"),
        ("mlp", {"device": "toaster"}, "expected device to be cpu or cuda, got 'toaster'; write device=cpu"),
        ("mlp", {"device": 3.5}, "expected device to be cpu or cuda, got 3.5; write device=cpu"),
        ("gpt2", {"hidden": 10, "heads": 4}, "hidden to be a multiple of heads, got hidden=10 and heads=4; change"),
        ("gpt2", {"seq": 1}, "expected seq to be at least 2, got 1; write seq="),
        ("llama", {"hidden": 12, "heads": 4}, r"hidden / heads to be even .*, got 3; write hidden=24"),
        ("vit", {"image": 30}, "image to be a multiple of patch, got image=30 and patch=8; change one"),
        ("unet", {"image": 40}, "image to be a multiple of 16, got 40; write image=32"),
        ("densenet", {"image": 4}, "image to be at least 8, got 4; write image=8"),
    ],
)
def test_a_value_that_cannot_work_is_refused(name, settings, message):
    with pytest.raises(ValueError, match=f"zoo:{name}: .*{message.removeprefix('expected ')}"):
        zoo.build(name, **settings)


def test_an_unknown_model_lists_the_known_ones():
    with pytest.raises(ValueError, match="expected one of gpt2, .*mindspore_blocks, got 'gpt7'; did you mean gpt2"):
        zoo.build("gpt7")


def test_cuda_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="the device 'cuda' is not there without CUDA; write device=cpu"):
        zoo.build("mlp", device="cuda")


def test_without_transformers_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)  # None makes the import raise ModuleNotFoundError
    with pytest.raises(ModuleNotFoundError, match=r"run pip install transformers"):
        zoo.build("gpt2")
    assert math.isfinite(small("mlp").step())  # needs none


def test_the_unet_joins_each_level_once():
    workload = small("unet")
    joined: list[int] = []
    for name in ("up1", "up2", "up3", "up4"):
        workload.model.get_submodule(name).register_forward_hook(
            lambda _module, inputs, _output: joined.append(inputs[1].shape[-1])
        )
    workload.step()
    assert joined == [4, 8, 16, 32]  # the deepest level is joined first; 32 is the image


def test_each_layer_of_the_densenet_reads_all_before_it():
    workload = small("densenet", layers=3)
    read: list[int] = []
    for layer in workload.model.get_submodule("blocks.0.layers").children():
        layer.register_forward_pre_hook(lambda _layer, inputs: read.append(len(inputs[0])))
    workload.step()
    assert read == [1, 2, 3]


def test_the_densenet_takes_a_batch_of_one():
    assert math.isfinite(small("densenet", batch=1).step())


def test_the_attention_blocks_compute_what_the_tutorial_writes():
    workload = small("mindspore_blocks", blocks=1)
    block = workload.model.get_submodule("blocks.0").eval()  # no dropout
    with torch.no_grad():
        block.get_parameter("y").uniform_()
    x = workload.inputs
    assert isinstance(x, torch.Tensor) and x.shape == (2, 4, 2, 4)
    scores = torch.einsum("bqhw,bkhw->bhqk", x, x) / 2.37891**2
    weights = torch.softmax(scores - 0.0001 * (1 - block.get_parameter("y"))[:, None], dim=-1)
    torch.testing.assert_close(block(x), torch.einsum("bhqk,bkhw->bqhw", weights, x))


def test_the_attention_blocks_give_the_derivative_of_the_input():
    workload = small("mindspore_blocks")
    workload.step()
    assert isinstance(workload.inputs, torch.Tensor) and workload.inputs.is_leaf
    assert workload.inputs.grad is not None and workload.inputs.grad.abs().sum() > 0


def test_settings_reach_the_model():
    workload = zoo.build("gpt2", **_TEXT)
    assert isinstance(workload.inputs, dict)
    assert workload.inputs["input_ids"].shape == (2, 8)
    assert len(workload.model.get_submodule("transformer.h")) == 2  # type: ignore[arg-type]
