"""utils/batchnorm.py against torch.nn.BatchNorm, autograd and single-process references."""

import contextlib
import copy
import io
import json
import os
import pickle
from collections import Counter

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.pool import free_port
from utils import batchnorm_functions
from utils.batchnorm import convert_batchnorm, resolve_group, revert_batchnorm
from utils.errors import UsageError

EXACT = {"rtol": 1e-12, "atol": 1e-12}
TIGHT = {"rtol": 1e-10, "atol": 1e-10}
SHAPES = {nn.BatchNorm1d: (8, 3, 5), nn.BatchNorm2d: (8, 3, 4, 5), nn.BatchNorm3d: (8, 3, 2, 3, 4)}


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def seeded(seed=0):
    """Start of every function that runs in the pool: the same numbers on every rank."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(seed)
    return dist.get_rank(), dist.get_world_size()


def close(actual, expected, **tolerance):
    torch.testing.assert_close(actual, expected, **(tolerance or EXACT))


def randomised(layer):
    """Parameters and buffers that are not zeros and ones, so that a swap of them shows."""
    with torch.no_grad():
        for tensor in (*layer.parameters(), *layer.buffers()):
            if tensor.is_floating_point():
                tensor.uniform_(0.5, 1.5)
    return layer


def grouped_reference(layer, x, group):
    """Output of explicit nn.BatchNorm per chunk, and the mean over chunks of their statistics."""
    outputs, means, variances = [], [], []
    for chunk in x.split(group):
        outputs.append(
            nn.functional.batch_norm(
                chunk, None, None, layer.weight, layer.bias, True, 0, layer.eps
            )
        )
        flat = chunk.transpose(0, 1).flatten(1)
        means.append(flat.mean(1))
        variances.append(flat.var(1))
    return torch.cat(outputs), torch.stack(means).mean(0), torch.stack(variances).mean(0)


# ---- Which groups a layout honours ----------------------------------------------------------


@pytest.mark.parametrize(
    "group, m, processes, expected",
    [
        (16, 16, 2, 16),
        ("32", 16, 2, 32),
        (4, 16, 1, 4),
        (1, 16, 4, 1),
        (64, 16, 4, 64),
        ("device", 16, 4, 16),
        ("global", 16, 4, 64),
        ("auto", 15, 4, 60),
        ("auto", 2, 1, 2),
        ("auto", 32, 1, 32),
        ("auto", 64, 4, 64),
    ],
)
def test_group_resolves(group, m, processes, expected):
    assert resolve_group(group, m, processes) == (expected, "")


@pytest.mark.parametrize("m", [16, 63])
def test_auto_gives_advice_in_between(m):
    size, advice = resolve_group("auto", m, 2)
    assert size == m and "depends on the layout" in advice and "\n" not in advice


@pytest.mark.parametrize(
    "group, m, processes, use",
    [
        (48, 16, 2, "use 16 or 32"),
        (5, 16, 2, "use 4 or 8"),
        (24, 16, 2, "use 16 or 32"),
        (32, 16, 3, "use 16 or 48"),
        (2, 1, 1, "use 1"),
        (32, 16, 1, "use 8 or 16"),
    ],
)
def test_group_that_the_layout_cannot_honour(group, m, processes, use):
    with pytest.raises(UsageError) as error:
        resolve_group(group, m, processes)
    named = f"bn_group={group} cannot be honoured by {processes} processes x micro_batch_size={m}"
    assert str(error.value) == f"{named}; {use}"


@pytest.mark.parametrize("group", ["0", "-4", "many", "", "2.5", 0, -1])
def test_group_that_is_no_number(group):
    with pytest.raises(UsageError, match="bn_group="):
        resolve_group(group, 16, 2)


# ---- One process ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize(
    "options",
    [{}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}, {"bias": False}],
    ids=str,
)
def test_plain_equals_torch(kind, options):
    reference = randomised(kind(3, **options))
    layer = copy.deepcopy(reference)
    plan = convert_batchnorm(layer, 8, 8)
    assert plan.implementation == "plain" and isinstance(layer, kind)
    for step in range(5):
        if step == 3:
            reference.eval(), layer.eval()
        x = torch.randn(SHAPES[kind]).requires_grad_()
        x2 = x.detach().clone().requires_grad_()
        weights = torch.randn_like(x)
        expected, actual = reference(x), layer(x2)
        (expected * weights).sum().backward()
        (actual * weights).sum().backward()
        plan.update_running_statistics() if step < 3 else None
        close(actual, expected)
        close(x2.grad, x.grad)
        close([p.grad for p in layer.parameters()], [p.grad for p in reference.parameters()])
        close(layer.state_dict(), reference.state_dict())


def test_cast_after_the_conversion():
    """torch's op would write float64 numbers into float32 memory, and raises nothing."""
    reference = randomised(nn.BatchNorm2d(3)).float()
    layer = copy.deepcopy(reference)
    plan = convert_batchnorm(layer, 8, 8)
    layer, reference, x = layer.double(), reference.double(), torch.randn(8, 3, 4, 5)
    close(layer(x), reference(x))
    plan.update_running_statistics()
    close(layer.state_dict(), reference.state_dict())


def test_a_model_without_batchnorm_has_nothing_to_sum():
    plan = convert_batchnorm(nn.Linear(2, 2), 8, 8)
    assert plan.statistics() is None
    plan.update_running_statistics()


def test_two_dimensional_input():
    reference, x = randomised(nn.BatchNorm1d(3)), torch.randn(8, 3)
    layer = copy.deepcopy(reference)
    plan = convert_batchnorm(layer, 8, 8)
    close(layer(x), reference(x))
    plan.update_running_statistics()
    close(layer.state_dict(), reference.state_dict())
    with pytest.raises(ValueError, match="2D or 3D"):
        layer(torch.randn(8, 3, 2, 2))


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("batch", [8, 7])
@pytest.mark.parametrize("group", [4, 2])
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"bias": False}], ids=str)
def test_ghost_split_equals_contiguous_chunks(kind, batch, group, options, large, monkeypatch):
    monkeypatch.setattr(batchnorm_functions, "LARGE_CHUNK", 0 if large else 2**20)
    reference = randomised(kind(3, **options))
    layer = copy.deepcopy(reference)
    plan = convert_batchnorm(layer, group, 8)
    assert plan.implementation == "ghost split"
    x = torch.randn(batch, *SHAPES[kind][1:]).requires_grad_()
    x2 = x.detach().clone().requires_grad_()
    expected, mean, variance = grouped_reference(reference, x, group)
    actual = layer(x2)
    weights = torch.randn_like(actual)
    (expected * weights).sum().backward()
    (actual * weights).sum().backward()
    close(actual, expected)
    close(x2.grad, x.grad)
    close([p.grad for p in layer.parameters()], [p.grad for p in reference.parameters()])
    plan.update_running_statistics()
    close(layer.running_mean, 0.9 * reference.running_mean + 0.1 * mean)
    close(layer.running_var, 0.9 * reference.running_var + 0.1 * variance)
    assert layer.num_batches_tracked == 1


@pytest.mark.parametrize("large", [False, True])
def test_ghost_split_gradcheck(large, monkeypatch):
    monkeypatch.setattr(batchnorm_functions, "LARGE_CHUNK", 0 if large else 2**20)
    layer = randomised(nn.BatchNorm2d(2))
    convert_batchnorm(layer, 2, 4)

    def function(x, weight, bias):
        return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, x)

    x = torch.randn(4, 2, 2, 1, requires_grad=True)
    parameters = [p.detach().clone().requires_grad_() for p in (layer.weight, layer.bias)]
    assert torch.autograd.gradcheck(function, (x, *parameters))


def test_one_value_per_channel_raises_in_the_forward_too():
    layer = nn.BatchNorm1d(3)
    convert_batchnorm(layer, 2, 4)
    with pytest.raises(ValueError, match="per channel"):
        layer(torch.randn(3, 3))
    layer(torch.randn(4, 3))


def test_empty_batch_collects_nothing():
    layer = nn.BatchNorm2d(3)
    before = copy.deepcopy(layer.state_dict())
    plan = convert_batchnorm(layer, 4, 4)
    layer(torch.empty(0, 3, 2, 2)).sum().backward()
    plan.update_running_statistics()
    close(layer.state_dict(), before)


def test_discarded_and_unused_statistics():
    model = nn.ModuleList([nn.BatchNorm1d(3), nn.BatchNorm1d(3)])
    before = copy.deepcopy(model.state_dict())
    plan = convert_batchnorm(model, 4, 4)
    model[0](torch.full((4, 3), torch.nan))
    plan.discard_statistics()
    plan.update_running_statistics()
    close(model.state_dict(), before)
    model[1](torch.randn(4, 3))
    plan.update_running_statistics()
    close(model[0].state_dict(), nn.BatchNorm1d(3).state_dict())
    assert model[1].num_batches_tracked == 1 and model[1].running_mean.abs().min() > 0


def test_mean_much_larger_than_deviation():
    x = (torch.randn(64, 4, 8, 8) + 1e4).float()
    expected, mean, variance = grouped_reference(nn.BatchNorm2d(4), x.double(), 32)
    layer = nn.BatchNorm2d(4, momentum=1.0, dtype=torch.float32)
    plan = convert_batchnorm(layer, 32, 64)
    actual = layer(x)
    plan.update_running_statistics()
    close(layer.running_mean.double(), mean, rtol=1e-7, atol=0)
    close(layer.running_var.double(), variance, rtol=1e-6, atol=0)
    close(actual.double(), expected, rtol=0, atol=2e-3)  # a float32 near 1e4 is 1e-3 from its next


@pytest.mark.parametrize("group", [8, 4])
def test_half_precision_and_channels_last(group):
    for dtype, parameters in ((torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)):
        x = torch.randn(8, 3, 4, 4).to(dtype)
        layer = nn.BatchNorm2d(3, momentum=1.0, dtype=parameters)
        plan = convert_batchnorm(layer, group, 8)
        output = layer(x)
        assert output.dtype == dtype
        output.sum().backward()
        assert layer.weight.grad.dtype == parameters
        plan.update_running_statistics()
        _, mean, variance = grouped_reference(nn.BatchNorm2d(3), x.double(), group)
        assert layer.running_var.dtype == parameters
        tolerance = 1e-6 if parameters == torch.float32 else 1e-2
        close(layer.running_mean.double(), mean, rtol=tolerance, atol=tolerance)
        close(layer.running_var.double(), variance, rtol=tolerance, atol=tolerance)
    layer = nn.BatchNorm2d(3)
    convert_batchnorm(layer, group, 8)
    x = torch.randn(8, 3, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    output = layer(x)
    output.square().sum().backward()
    assert output.is_contiguous(memory_format=torch.channels_last)
    assert x.grad.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("group", [8, 4])
def test_strided_input_and_gradient(group, large, monkeypatch):
    monkeypatch.setattr(batchnorm_functions, "LARGE_CHUNK", 0 if large else 2**20)
    reference = randomised(nn.BatchNorm2d(3))
    layer = copy.deepcopy(reference)
    convert_batchnorm(layer, group, 8)
    for x in (
        torch.randn(3, 8, 4, 5).transpose(0, 1),
        torch.randn(8, 5, 4, 3).permute(0, 3, 2, 1)[:, :, ::2],
        torch.randn(8, 3, 1, 1).expand(8, 3, 2, 2),
    ):
        x, x2 = x.detach().requires_grad_(), x.detach().clone().requires_grad_()
        actual, (expected, *_) = layer(x), grouped_reference(reference, x2, group)
        close(actual, expected)
        seed = torch.randn(8, 3, 1, 1).expand_as(x)
        actual.backward(seed), expected.backward(seed)
        close(x.grad, x2.grad)
    close(layer(torch.randn(8, 3, 2, 2)).sum(), torch.tensor(8 * 4.0) * reference.bias.sum())


# ---- Conversion -----------------------------------------------------------------------------


def small_model():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1),
        nn.BatchNorm2d(2),
    )  # fmt: skip


def test_conversion_changes_nothing_else_and_reverts():
    model = randomised(small_model())
    model[4].weight.requires_grad_(False)
    calls = []
    model[1].register_forward_hook(lambda *_: calls.append("forward"))
    model[1].extra = "kept"
    before, state = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    buffers = dict(model.named_buffers())
    flags = {name: p.requires_grad for name, p in before.items()}
    for convert in (lambda: convert_batchnorm(model, 2, 4), lambda: revert_batchnorm(model)):
        convert()
        assert list(model.state_dict()) == list(state)
        close(model.state_dict(), state)
        assert all(p is before[name] for name, p in model.named_parameters())
        assert all(b is buffers[name] for name, b in model.named_buffers())
        assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
        assert model[1].training and model[1].extra == "kept"
        model.eval()(torch.randn(4, 3, 4, 4))
        model.train()
    assert calls == ["forward"] * 2
    assert type(model[1]) is nn.BatchNorm2d and not model._ddp_params_and_buffers_to_ignore
    assert set(vars(model[1])) - set(vars(nn.BatchNorm2d(4))) == {"extra"}


def test_converting_again_plans_anew():
    model = small_model()
    first = convert_batchnorm(model, 2, 4)
    model(torch.randn(4, 3, 4, 4))
    plan = convert_batchnorm(model, 8, 8)
    assert (first.group, plan.group, plan.num_layers) == (2, 8, 2)
    assert model[1].bn_group == 8 and model[1].bn_window.total().eq(0).all()
    revert_batchnorm(model)
    assert type(model[1]) is nn.BatchNorm2d


def test_bare_and_shared_layers():
    bare = nn.BatchNorm1d(3)
    assert convert_batchnorm(bare, 4, 4).num_layers == 1 and isinstance(bare, nn.BatchNorm1d)
    shared = nn.BatchNorm1d(3, momentum=1.0)
    model = nn.Sequential(shared, nn.Linear(3, 3), shared)
    assert convert_batchnorm(model, 4, 4).num_layers == 1
    assert model[0] is model[2] is shared
    assert {"0.running_mean", "2.running_mean"} <= set(model._ddp_params_and_buffers_to_ignore)


@pytest.mark.parametrize("how", ["layer in eval", "not trainable", "not trainable, model in eval"])
def test_frozen_layers_stay_frozen(how):
    model = randomised(small_model())
    frozen = model[1].eval()
    if "not trainable" in how:
        frozen.requires_grad_(False)
    if "model in eval" in how:
        model.eval()
    before, expected = copy.deepcopy(frozen.state_dict()), copy.deepcopy(frozen)
    plan = convert_batchnorm(model, 2, 4)
    assert (plan.num_layers, plan.num_frozen) == (1, 1) and "1 frozen" in plan.describe()
    for _ in range(2):
        model.train()
        assert not frozen.training and model[4].training
        x = torch.randn(4, 4, 3, 3)
        close(frozen(x), expected(x))
        model(torch.randn(4, 3, 4, 4)).sum().backward()
        plan.update_running_statistics()
        close(frozen.state_dict(), before)
        plan = convert_batchnorm(model, 2, 4)  # planning anew does not thaw
    revert_batchnorm(model)
    assert not frozen.training and type(frozen) is nn.BatchNorm2d


def test_whole_model_in_evaluation_is_not_frozen():
    model = small_model().eval()
    assert convert_batchnorm(model, 2, 4).num_frozen == 0
    assert model.train()[1].training


class Leaky(nn.BatchNorm2d):
    def forward(self, input):
        return nn.functional.leaky_relu(super().forward(input))


@pytest.mark.parametrize(
    "layer", [Leaky(4), nn.LazyBatchNorm2d()], ids=["Leaky", "LazyBatchNorm2d"]
)
def test_unknown_subclass_is_refused(layer):
    model = nn.Sequential(nn.BatchNorm2d(4), nn.Sequential(nn.Identity(), layer))
    with pytest.raises(UsageError, match=rf"'1\.1'.*{type(layer).__name__}"):
        convert_batchnorm(model, 2, 4)
    assert type(model[0]) is nn.BatchNorm2d


def test_other_refusals():
    with pytest.raises(UsageError, match="bn_group=3 .* use 2 or 4"):
        convert_batchnorm(small_model(), 3, 4)
    with pytest.raises(UsageError, match="before accelerator.prepare"):
        convert_batchnorm(torch.compile(small_model()), 2, 4)
    model = small_model()
    model.compile()
    with pytest.raises(UsageError, match="compiled"):
        convert_batchnorm(model, 2, 4)


def test_other_normalisations_are_left_alone():
    torchvision = pytest.importorskip("torchvision")
    layers = [nn.InstanceNorm2d(4), nn.GroupNorm(2, 4), nn.LayerNorm(4)]
    for frozen, seen in (([], "no BatchNorm layers"), ([4], "1 layers, all frozen")):
        layers += [torchvision.ops.FrozenBatchNorm2d(channels) for channels in frozen]
        kinds = [type(layer) for layer in layers]
        plan = convert_batchnorm(nn.Sequential(*layers), 2, 4)
        assert [type(layer) for layer in layers] == kinds
        assert (plan.num_layers, plan.num_frozen, plan.describe()) == (0, len(frozen), seen)
        plan.update_running_statistics()


@pytest.mark.parametrize(
    "x", [torch.ones(4, 3), torch.ones(4, 3, 2, 2), None], ids=["1d", "2d", "none"]
)
def test_sync_batchnorm_comes_back_as_what_fits(x):
    layer = nn.SyncBatchNorm(3)
    keys = list(layer.state_dict())
    convert_batchnorm(layer, 4, 4)
    assert not isinstance(layer, nn.SyncBatchNorm) and list(layer.state_dict()) == keys
    if x is not None:
        layer.to(x.dtype).eval()(x)
    revert_batchnorm(layer)
    kinds = {2: nn.BatchNorm1d, 4: nn.BatchNorm2d}
    assert type(layer) is (kinds[x.dim()] if x is not None else nn.SyncBatchNorm)
    layer.eval().float()(torch.ones(4, 3, dtype=torch.float32) if x is None else x.float())


def test_check_values_per_channel():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
            self.pooled = nn.BatchNorm2d(4)

        def forward(self, x):
            return self.pooled(self.body(x).mean((2, 3), keepdim=True))

    model = Pooled()
    forward = torch.no_grad()(lambda: model.eval()(torch.randn(1, 3, 4, 4)))
    with pytest.raises(UsageError, match="'pooled'.*bn_group=2"):
        convert_batchnorm(model, 1, 4).check_values_per_channel(forward)
    convert_batchnorm(model.train(), 2, 4).check_values_per_channel(forward)
    revert_batchnorm(model.train())
    model.pooled.eval()
    convert_batchnorm(model, 1, 4).check_values_per_channel(forward)  # frozen: no statistics
    assert not model.body[1]._forward_pre_hooks


def test_plan_goes_into_json():
    plan = convert_batchnorm(small_model(), 2, 4)
    stored = json.loads(json.dumps(plan.as_dict()))
    assert stored["group"] == 2 and stored["implementation"] == "ghost split"
    assert stored["ranks"] == [[0]] and plan.ranks_sharing == 1
    assert plan.collectives_per_update(4) == 0 and plan.bytes_per_update(4) == 0
    assert plan.describe() == "2 layers, group 2: ghost split of 4 into 2"


# ---- Activation checkpointing, torch.compile ------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("group", [8, 4])
def test_checkpointing_collects_once(reentrant, group):
    model = randomised(small_model())
    plain = copy.deepcopy(model)
    plan, plan2 = convert_batchnorm(model, group, 8), convert_batchnorm(plain, group, 8)
    x = torch.randn(8, 3, 4, 4, requires_grad=True)
    checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
    plain(x).square().sum().backward()
    close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    assert model[1].bn_window.total()[-1] == plain[1].bn_window.total()[-1] == 8 // group
    plan.update_running_statistics(), plan2.update_running_statistics()
    close(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("group", [8, 4])
def test_compiled_without_recompilation(group):
    model = randomised(small_model())
    eager = copy.deepcopy(model)
    plan, plan2 = convert_batchnorm(model, group, 8), convert_batchnorm(eager, group, 8)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(3):
        x = torch.randn(8, 3, 4, 4)
        expected, actual = eager(x), compiled(x)
        close(actual, expected, **TIGHT)
        actual.square().sum().backward(), expected.square().sum().backward()
        plan.update_running_statistics(), plan2.update_running_statistics()
    close([p.grad for p in model.parameters()], [p.grad for p in eager.parameters()], **TIGHT)
    close(model.state_dict(), eager.state_dict(), **TIGHT)
    assert counter.frame_count == 1


# ---- Several processes ----------------------------------------------------------------------


class _Replicated(torch.autograd.Function):
    """The same tensor on all ranks, each of which uses it: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class _Gathered(torch.autograd.Function):
    """All ranks' slices, on all ranks; the (same) gradient goes back to the own slice."""

    @staticmethod
    def forward(ctx, x, sizes):
        ctx.sizes = sizes
        parts = [x.new_empty(size, *x.shape[1:]) for size in sizes]
        for source, part in enumerate(parts):
            if source == dist.get_rank():
                part.copy_(x)
            dist.broadcast(part, source)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        return grad.split(ctx.sizes)[dist.get_rank()], None


def synchronised_function(sizes):
    """f(whole batch, weight, bias) on all ranks, by way of synchronised BatchNorm of the slices."""

    def function(x, weight, bias, eps=1e-5):
        mine = _Replicated.apply(x).split(sizes)[dist.get_rank()]
        affine = [v if v is None else _Replicated.apply(v) for v in (weight, bias)]
        output, _ = batchnorm_functions.synchronised(mine, *affine, eps, dist.get_world_size())
        return _Gathered.apply(output, sizes)

    return function


def run_gradcheck(all_sizes):
    _, processes = seeded()
    for sizes in all_sizes:
        assert len(sizes) == processes
        x = torch.randn(sum(sizes), 2, 1, requires_grad=True)
        weight, bias = (torch.rand(2, requires_grad=True) for _ in range(2))
        function = synchronised_function(sizes)
        assert torch.autograd.gradcheck(function, (x, weight, bias))
    assert torch.autograd.gradcheck(function, (x, None, None))


def test_synchronised_gradcheck(pool):
    pool.run(2, run_gradcheck, [(2, 2), (3, 1), (3, 0)])


def use_emulated_kernels():
    """Stand-ins on the CPU, by the definitions of torch's CUDA kernels: they check our wiring."""

    def dims(x):
        return [d for d in range(x.dim()) if d != 1]

    def wide(v, x):
        return v.view(1, -1, *[1] * (x.dim() - 2))

    def stats(x, eps):
        variance, mean = torch.var_mean(x, dims(x), correction=0)
        return mean, (variance + eps).rsqrt()

    def elemt(x, weight, bias, mean, invstd, eps):
        assert mean.dtype == invstd.dtype == x.dtype
        out = (x - wide(mean, x)) * wide(invstd, x)
        out = out if weight is None else out * wide(weight, x)
        return out if bias is None else out + wide(bias, x)

    def backward_reduce(dy, x, mean, invstd, weight, input_g, weight_g, bias_g):
        sum_dy, sum_dy_xmu = dy.sum(dims(x)), (dy * (x - wide(mean, x))).sum(dims(x))
        return sum_dy, sum_dy_xmu, sum_dy_xmu * invstd, sum_dy

    def backward_elemt(dy, x, mean, invstd, weight, sum_dy, sum_dy_xmu, count):
        assert count.dtype == torch.int32
        n = count.sum()
        dx = dy - wide(sum_dy / n, x)
        dx = dx - (x - wide(mean, x)) * wide(invstd * invstd * sum_dy_xmu / n, x)
        scale = invstd if weight is None else invstd * weight
        return dx * wide(scale, x)

    has_kernels = batchnorm_functions._has_kernels
    batchnorm_functions._has_kernels = lambda x: True
    kernels = {
        "batch_norm_stats": stats, "batch_norm_elemt": elemt,
        "batch_norm_backward_reduce": backward_reduce, "batch_norm_backward_elemt": backward_elemt,
    }  # fmt: skip
    saved = {name: getattr(torch, name) for name in kernels}
    for name, kernel in kernels.items():
        setattr(torch, name, kernel)

    def restore():
        batchnorm_functions._has_kernels = has_kernels
        for name, kernel in saved.items():
            setattr(torch, name, kernel)

    return restore


def run_synchronised(cases, emulated, device="cpu"):
    """Groups of 2 ranks, of any sizes, against nn.BatchNorm of the joined batch."""
    rank, processes = seeded()
    restore = use_emulated_kernels() if emulated else lambda: None
    for kind, sizes, options in cases:
        reference = randomised(kind(3, **options))
        layer = copy.deepcopy(reference).to(device)
        plan = convert_batchnorm(layer, 8, 4)
        assert plan.implementation == "synchronised" and plan.ranks_sharing == 2
        for _ in range(2):
            window = [torch.randn(size, *SHAPES[kind][1:]) for size in sizes]
            seeds = [torch.randn_like(x) for x in window]
            pairs = range(0, processes, 2)
            results = []
            for first in pairs:
                joined = torch.cat(window[first : first + 2]).requires_grad_()
                outputs = copy.deepcopy(reference)
                y = outputs(joined)
                (y * torch.cat(seeds[first : first + 2])).sum().backward()
                parts = [t.split(sizes[first : first + 2]) for t in (y, joined.grad)]
                results.append((parts, outputs))
            (outputs, gradients), _ = results[rank // 2]
            x = window[rank].to(device).requires_grad_()
            y = layer(x)
            (y * seeds[rank].to(device)).sum().backward()
            close(y.cpu(), outputs[rank % 2])
            close(x.grad.cpu(), gradients[rank % 2])
            for name, p in layer.named_parameters():
                assert p.grad is not None  # on an empty rank too, else DDP waits for it
                total = p.grad.cpu().clone()
                dist.all_reduce(total)
                close(total, sum(dict(r.named_parameters())[name].grad for _, r in results))
                p.grad = None
            plan.update_running_statistics()
            for name, buffer in reference.named_buffers():
                if buffer.is_floating_point():
                    buffer.copy_(
                        sum(dict(r.named_buffers())[name] for _, r in results) / len(pairs)
                    )
                else:
                    buffer += 1
            close({k: v.cpu() for k, v in layer.state_dict().items()}, reference.state_dict())
    restore()
    return processes


CASES = [
    (nn.BatchNorm2d, [4, 4], {}),
    (nn.BatchNorm1d, [3, 1], {}),
    (nn.BatchNorm3d, [0, 4], {}),
    (nn.BatchNorm2d, [4, 2], {"affine": False}),
    (nn.BatchNorm2d, [4, 2], {"bias": False}),
    (nn.BatchNorm2d, [1, 4], {"momentum": None}),
    (nn.BatchNorm2d, [4, 4], {"track_running_stats": False}),
]


@pytest.mark.parametrize("emulated", [False, True], ids=["own", "emulated kernels"])
def test_synchronised_equals_torch_on_the_joined_batch(pool, emulated):
    assert pool.run(2, run_synchronised, CASES, emulated) == [2, 2]
    cases = [(nn.BatchNorm2d, [4, 4, 4, 4], {}), (nn.BatchNorm2d, [4, 0, 2, 3], {})]
    assert pool.run(4, run_synchronised, cases, emulated) == [4] * 4


@pytest.mark.gpu
def test_synchronised_on_the_accelerator(pool):
    assert pool.run(2, run_synchronised, CASES, False, "cuda:0") == [2, 2]


def run_against_torch_syncbatchnorm():
    rank, _ = seeded()
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        reference = randomised(nn.SyncBatchNorm(8)).to(
            "cuda:0", torch.promote_types(dtype, torch.float32)
        )
        layer = copy.deepcopy(reference)
        plan = convert_batchnorm(layer, 8, 4)
        for memory_format in (torch.contiguous_format, torch.channels_last):
            full = torch.randn(8, 8, 6, 6).to("cuda:0", dtype)
            x = full[rank * 4 : rank * 4 + 4].to(memory_format=memory_format).requires_grad_()
            x2 = x.detach().clone().requires_grad_()
            y, y2 = reference(x), layer(x2)
            y.float().square().sum().backward(), y2.float().square().sum().backward()
            plan.update_running_statistics()
            options = {"rtol": tolerance, "atol": tolerance}
            close([y2, x2.grad], [y, x.grad], **options)
            close(
                [p.grad for p in layer.parameters()],
                [p.grad for p in reference.parameters()],
                **options,
            )
            close(layer.state_dict(), reference.state_dict(), **options)
            assert y2.is_contiguous(memory_format=memory_format)


@pytest.mark.gpu
def test_global_equals_torch_syncbatchnorm(pool):
    pool.run(2, run_against_torch_syncbatchnorm)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [8, 4])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_one_process_on_the_accelerator(group, memory_format):
    layer = randomised(nn.BatchNorm2d(8))
    x = torch.randn(8, 8, 6, 6, requires_grad=True)
    expected, mean, _ = grouped_reference(layer, x, group)
    expected.square().sum().backward()
    device_layer = copy.deepcopy(layer)
    plan = convert_batchnorm(device_layer, group, 8)
    device_layer.to("cuda")
    x2 = x.detach().to("cuda").to(memory_format=memory_format).requires_grad_()
    actual = device_layer(x2)
    actual.square().sum().backward()
    plan.update_running_statistics()
    assert actual.is_contiguous(memory_format=memory_format)
    close(actual.cpu(), expected, **TIGHT)
    close(x2.grad.cpu(), x.grad, **TIGHT)
    close(device_layer.running_mean.cpu(), 0.9 * layer.running_mean + 0.1 * mean, **TIGHT)


def layout_statistics(m, accumulation, group, updates=2):
    """State after two windows of 16 examples, and this rank's outputs of the last one."""
    rank, processes = seeded()
    model = randomised(small_model())
    plan = convert_batchnorm(model, group, m)
    for _ in range(updates):
        window, outputs = torch.randn(16, 3, 4, 4), []
        for micro_step in range(accumulation):
            first = (micro_step * processes + rank) * m
            outputs.append((first, model(window[first : first + m]).detach()))
        plan.update_running_statistics()
    return model.state_dict(), outputs


def run_layouts(layouts):
    return [layout_statistics(*layout) for layout in layouts]


def test_running_statistics_are_the_same_in_every_layout(pool):
    reference, honoured = {}, 0
    for processes in (1, 2, 4):
        layouts = []
        for accumulation in (a for a in (1, 2, 4, 8, 16) if a * processes <= 16):
            m = 16 // processes // accumulation
            for group in (2, 4, 8, 16):
                if m % group == 0 or (group % m == 0 and group <= m * processes):
                    layouts.append((m, accumulation, group))
                else:
                    with pytest.raises(UsageError):
                        resolve_group(group, m, processes)
        honoured += len(layouts)
        of_ranks = pool.run(processes, run_layouts, layouts)
        for (_, _, group), *replies in zip(layouts, *of_ranks, strict=True):
            outputs = {first: y for _, parts in replies for first, y in parts}
            whole = torch.cat([outputs[first] for first in sorted(outputs)])
            for state, _ in replies:
                expected_state, expected = reference.setdefault(group, (state, whole))
                close(state, expected_state)
                close(whole, expected)
    assert honoured >= 24 and len(reference) == 4


def run_copies(port):
    rank, _ = seeded()
    model = small_model()
    convert_batchnorm(model, 4, 2)
    x = torch.randn(8, 3, 4, 4)[rank * 2 : rank * 2 + 2]
    expected = model(x)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
    ):
        close(other(x), expected)
        close(other[1].bn_window.total(), 2 * model[1].bn_window.total())
    # A new default process group: the old subgroups are gone with the old one.
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo")
    close(model(x), expected)
    dist.destroy_process_group()
    close(model.eval()(x), copy.deepcopy(model)(x))
    with pytest.raises(RuntimeError, match="convert_batchnorm again"):
        model.train()(x)


def test_copies_and_a_new_process_group(pool):
    pool.run(4, run_copies, free_port())


def run_large_mean():
    rank, processes = seeded()
    x = (torch.randn(32, 4, 8, 8) + 1e4).float()
    seeds = torch.randn(32, 4, 8, 8).float()
    exact = x.double().requires_grad_()
    expected, mean, variance = grouped_reference(nn.BatchNorm2d(4), exact, 32)
    expected.backward(seeds.double())
    layer = nn.BatchNorm2d(4, momentum=1.0, dtype=torch.float32)
    plan = convert_batchnorm(layer, 32, 32 // processes)
    mine = slice(rank * 32 // processes, (rank + 1) * 32 // processes)
    part = x[mine].requires_grad_()
    actual = layer(part)
    actual.backward(seeds[mine])
    plan.update_running_statistics()
    close(layer.running_mean.double(), mean, rtol=1e-7, atol=0)
    close(layer.running_var.double(), variance, rtol=3e-7, atol=0)
    close(actual.double(), expected[mine], rtol=0, atol=1e-5)  # better than torch's own 1e-3
    close(part.grad.double(), exact.grad[mine], rtol=0, atol=1e-5)


def test_synchronised_with_a_mean_much_larger_than_the_deviation(pool):
    pool.run(2, run_large_mean)


def run_autocast():
    """60 updates in float32 under bf16 autocast; one rank's batch is empty now and then."""
    rank, _ = seeded()
    torch.set_default_dtype(torch.float32)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1)
    )
    plan = convert_batchnorm(model, 8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(60):
        x = torch.randn(8, 3, 6, 6)[rank * 4 : rank * 4 + 4]
        x = x[:0] if rank == 1 and step % 20 == 5 else x
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = model[0](x)
            output = model[1](hidden)
            assert hidden.dtype == output.dtype == torch.bfloat16
            loss = (model[2:](output).float() - 1).square().sum() / 1000
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        plan.update_running_statistics()
        optimizer.step(), optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_autocast(pool):
    first, second = pool.run(2, run_autocast)
    close(first, second, rtol=0, atol=0)
    assert first["1.running_mean"].dtype == first["1.running_var"].dtype == torch.float32
    assert first["1.num_batches_tracked"] == 60 and first["1.running_var"].isfinite().all()


def run_formats_and_checkpointing():
    rank, _ = seeded()
    x = torch.randn(8, 3, 4, 4)[rank * 4 : rank * 4 + 4].to(memory_format=torch.channels_last)
    layer = nn.BatchNorm2d(3)
    convert_batchnorm(layer, 8, 4)
    output = layer(x.requires_grad_())
    output.square().sum().backward()
    assert output.is_contiguous(memory_format=torch.channels_last)
    assert x.grad.is_contiguous(memory_format=torch.channels_last)

    whole = torch.randn(8, 3, 4, 4).bfloat16()  # half precision in, float32 parameters
    reference = nn.BatchNorm2d(3, dtype=torch.float32)
    layer = copy.deepcopy(reference)
    convert_batchnorm(layer, 8, 4)
    part = whole[rank * 4 : rank * 4 + 4].requires_grad_()
    exact = whole.detach().float().requires_grad_()
    actual, expected = layer(part), reference(exact)
    (actual.float() ** 3).sum().backward(), (expected**3).sum().backward()
    mine = slice(rank * 4, rank * 4 + 4)
    assert actual.dtype == part.grad.dtype == torch.bfloat16
    close(actual.float(), expected[mine], rtol=1e-2, atol=1e-2)
    close(part.grad.float(), exact.grad[mine], rtol=2e-2, atol=0.1)

    for reentrant in (True, False):
        model = randomised(small_model())
        plain = copy.deepcopy(model)
        plan, plan2 = convert_batchnorm(model, 8, 4), convert_batchnorm(plain, 8, 4)
        checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
        plain(x).square().sum().backward()
        close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
        assert model[1].bn_window.total()[-1] == 1
        plan.update_running_statistics(), plan2.update_running_statistics()
        close(model.state_dict(), plain.state_dict())

    with torch.no_grad():  # in train mode, as nn.BatchNorm does
        model(x)
    assert model[1].bn_window.total()[-1] == 1


def test_synchronised_formats_and_checkpointing(pool):
    pool.run(2, run_formats_and_checkpointing)


def run_compiled():
    rank, _ = seeded()
    model = randomised(small_model())
    eager = copy.deepcopy(model)
    plan, plan2 = convert_batchnorm(model, 8, 4), convert_batchnorm(eager, 8, 4)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter)
    frames = []
    for _ in range(3):
        x = torch.randn(8, 3, 4, 4)[rank * 4 : rank * 4 + 4]
        actual, expected = compiled(x), eager(x)
        close(actual, expected, **TIGHT)
        actual.square().sum().backward(), expected.square().sum().backward()
        plan.update_running_statistics(), plan2.update_running_statistics()
        frames.append(counter.frame_count)
    close([p.grad for p in model.parameters()], [p.grad for p in eager.parameters()], **TIGHT)
    close(model.state_dict(), eager.state_dict(), **TIGHT)
    torch._dynamo.reset()
    return frames


def test_synchronised_compiled(pool):
    for frames in pool.run(2, run_compiled):
        assert 0 < frames[0] == frames[-1]


class WithBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = small_model()
        self.register_buffer("mine", torch.zeros(()))

    def forward(self, x):
        return self.body(x)


class counted:
    """Calls and bytes of the real collectives, by name, that this rank enters."""

    names = ("all_reduce", "all_gather_single", "all_gather_into_tensor", "all_gather", "broadcast")

    def __enter__(self):
        self.calls, self.bytes, self.originals = Counter(), Counter(), {}
        for name in self.names:
            if hasattr(dist, name):
                self.originals[name] = getattr(dist, name)
                setattr(dist, name, self.wrap(name, self.originals[name]))
        return self

    def wrap(self, name, original):
        def call(*args, **kwargs):
            sent = args[0] if name in ("all_reduce", "broadcast") else args[1]
            self.calls[name] += 1
            self.bytes[name] += sent.numel() * sent.element_size()
            return original(*args, **kwargs)

        return call

    def __exit__(self, *_):
        for name, original in self.originals.items():
            setattr(dist, name, original)


def run_under_accelerate(group):
    from accelerate import Accelerator

    rank, processes = seeded()
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == processes == 2
    torch.manual_seed(rank)  # buffers that differ: the conversion has to make them rank 0's
    model = WithBuffer()
    randomised(model.body[1])
    plan = convert_batchnorm(model, group, 4)
    states = [None, None]
    dist.all_gather_object(states, model.body[1].running_mean)
    close(*states)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    report = {}
    for accumulation in (1, 2, 4, 8):
        with torch.no_grad():
            accelerator.unwrap_model(model).mine.fill_(rank + 7)
            model.module.body[1].running_var.add_(rank)  # must survive: DDP leaves it alone
            before = model.module.body[1].running_var.clone()
        with counted() as collectives:
            for micro_step in range(accumulation):
                x = torch.randn(4, 3, 4, 4)
                with (
                    accelerator.no_sync(model)
                    if micro_step + 1 < accumulation
                    else contextlib.nullcontext()
                ):
                    accelerator.backward(model(x).square().sum())
            assert model.module.mine == 7  # rank 0's, broadcast by DDP
            close(model.module.body[1].running_var, before)
            with torch.no_grad():
                model.module.body[1].running_var.sub_(rank)
            plan.update_running_statistics()
        optimizer.step(), optimizer.zero_grad()
        report[accumulation] = (
            collectives.calls.total(), plan.collectives_per_update(accumulation),
            collectives.bytes.total(), plan.bytes_per_update(accumulation),
        )  # fmt: skip
    return report, model.module.state_dict()


@pytest.mark.parametrize("group, calls", [(8, 5), (4, 1), (2, 1)])
def test_under_accelerate_ddp(pool, group, calls):
    (report, state), (report2, state2) = pool.run(2, run_under_accelerate, group)
    close(state, state2, rtol=0, atol=0)
    assert report == report2
    for accumulation, (entered, planned, sent, planned_bytes) in report.items():
        assert entered == planned == 1 + (calls - 1) * accumulation
        assert sent == planned_bytes > 0


def run_refusals():
    seeded()
    model = nn.parallel.DistributedDataParallel(small_model())
    with pytest.raises(UsageError, match="DistributedDataParallel"):
        convert_batchnorm(model, 8, 4)
    with pytest.raises(UsageError, match="bn_group=12 .* use 4 or 8"):
        convert_batchnorm(small_model(), 12, 4)
    plan = convert_batchnorm(small_model(), 8, 4)
    assert "over 2 ranks x 4" in plan.describe()
    assert plan.as_dict()["ranks"] == [[0, 1]]


def test_refusals_with_two_processes(pool):
    pool.run(2, run_refusals)
