"""Models of packages for graphs, molecules, equations and densities."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.packages.training import Called, Training, model, of, trained

# torch_geometric


def _graph(nodes: int = 600, edges: int = 3000, features: int = 32) -> Any:
    return of("torch_geometric.data.Data")(
        x=torch.randn(nodes, features), edge_index=torch.randint(nodes, (2, edges)), y=torch.randint(5, (nodes,))
    )


def _nodes(net: nn.Module, data: Any) -> Training:
    return trained(net, lambda: F.cross_entropy(net(data.x, data.edge_index), data.y))


@model("torch_geometric")
def gcn(checkpointed: bool) -> Training:
    return _nodes(of("torch_geometric.nn.GCN")(32, 64, 5, out_channels=5, dropout=0.2, norm="batch_norm"), _graph())


@model("torch_geometric")
def gat(checkpointed: bool) -> Training:
    return _nodes(of("torch_geometric.nn.GAT")(32, 64, 4, out_channels=5, heads=4, dropout=0.2, v2=True), _graph())


@model("torch_geometric")
def sage(checkpointed: bool) -> Training:
    return _nodes(of("torch_geometric.nn.GraphSAGE")(32, 64, 5, out_channels=5, jk="cat"), _graph())


@model("torch_geometric")
def pna(checkpointed: bool) -> Training:
    net = of("torch_geometric.nn.PNA")(
        32, 32, 3, out_channels=5, aggregators=["mean", "max", "std"], scalers=["identity", "amplification"],
        deg=torch.tensor([10, 40, 80, 120, 140]),
    )  # fmt: skip
    return _nodes(net, _graph())


@model("torch_geometric", own="DeepGCNLayer(ckpt_grad=True)")
def deep_gcn(checkpointed: bool) -> Training:
    names = ("DeepGCNLayer", "GENConv", "LayerNorm")
    layer, convolution, norm = (of(f"torch_geometric.nn.{name}") for name in names)

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.last = nn.Linear(32, 64), nn.Linear(64, 5)
            self.layers = nn.ModuleList(
                layer(convolution(64, 64, num_layers=2), norm(64), nn.ReLU(), "res+", 0.1, ckpt_grad=checkpointed)
                for _ in range(6)
            )

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            x = self.encoder(x)
            for each in self.layers:
                x = each(x, edges)
            return self.last(x)

    return _nodes(Deep(), _graph())


@model("torch_geometric")
def gin_of_batches(checkpointed: bool) -> Training:
    """The model takes PyG's own batch, an object."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gin = of("torch_geometric.nn.GIN")(32, 64, 4, norm="batch_norm", jk="cat")
            self.last = nn.Linear(64, 3)

        def forward(self, batch: Any) -> Tensor:
            x = self.gin(batch.x, batch.edge_index)
            return self.last(of("torch_geometric.nn.global_add_pool")(x, batch.batch))

    data = of("torch_geometric.data.Data")
    graphs = [
        data(x=torch.randn(40, 32), edge_index=torch.randint(40, (2, 160)), y=torch.randint(3, (1,))) for _ in range(24)
    ]
    net, batch = Net(), of("torch_geometric.data.Batch").from_data_list(graphs)
    return trained(net, lambda: F.cross_entropy(net(batch), batch.y))


@model("torch_geometric")
def transformer_of_batches(checkpointed: bool) -> Training:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            convolution = of("torch_geometric.nn.TransformerConv")
            self.layers = nn.ModuleList(convolution(32, 8, heads=4, edge_dim=8, dropout=0.1) for _ in range(4))
            self.norms = nn.ModuleList(of("torch_geometric.nn.GraphNorm")(32) for _ in range(4))
            self.last = nn.Linear(32, 1)

        def forward(self, batch: Any) -> Tensor:
            x = batch.x
            for each, norm in zip(self.layers, self.norms, strict=True):
                x = x + norm(each(x, batch.edge_index, batch.edge_attr), batch.batch).relu()
            return self.last(of("torch_geometric.nn.global_mean_pool")(x, batch.batch)).squeeze(-1)

    data = of("torch_geometric.data.Data")
    graphs = [
        data(
            x=torch.randn(30, 32),
            edge_index=torch.randint(30, (2, 120)),
            edge_attr=torch.randn(120, 8),
            y=torch.randn(1),
        )
        for _ in range(16)
    ]
    net, batch = Net(), of("torch_geometric.data.Batch").from_data_list(graphs)
    return trained(net, lambda: F.mse_loss(net(batch), batch.y))


# Molecules and forces


def _cluster(atoms: int = 80, edges: int = 600) -> tuple[Tensor, Tensor]:
    source = torch.randint(atoms, (edges,))
    return torch.randn(atoms, 3) * 2, torch.stack([source, (source + torch.randint(1, atoms, (edges,))) % atoms])


def _equivariant(gradients: bool) -> Training:
    """Convolutions of e3nn as its docs write them; with forces the energy's gradient is trained on."""
    names = ("Irreps", "FullyConnectedTensorProduct", "Linear", "spherical_harmonics")
    irreps, product, linear, harmonics = (of(f"e3nn.o3.{name}") for name in names)
    mlp, gate_of = of("e3nn.nn.FullyConnectedNet"), of("e3nn.nn.NormActivation")

    class Convolution(nn.Module):
        def __init__(self, given: Any, made: Any) -> None:
            super().__init__()
            self.given, self.harmonic = irreps(given), irreps("1x0e + 1x1o")
            self.product = product(self.given, self.harmonic, irreps(made), shared_weights=False)
            self.weights = mlp([8, 16, self.product.weight_numel], torch.nn.functional.silu)
            self.skip, self.gate = linear(self.given, irreps(made)), gate_of(irreps(made), torch.sigmoid)

        def forward(self, x: Tensor, edges: Tensor, harmonic: Tensor, lengths: Tensor) -> Tensor:
            messages = self.product(x[edges[0]], harmonic, self.weights(lengths))
            return self.gate(self.skip(x) + torch.zeros_like(self.skip(x)).index_add(0, edges[1], messages) / 4)

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inner = "8x0e + 4x1o"
            sizes = ["8x0e", inner, inner, inner]
            self.layers = nn.ModuleList(Convolution(*pair) for pair in pairwise(sizes))
            self.last = linear(irreps(inner), irreps("1x0e"))

        def forward(self, position: Tensor, kinds: Tensor, edges: Tensor) -> Tensor | tuple[Tensor, Tensor]:
            if gradients:
                position = position.detach().requires_grad_()
            far = position[edges[0]] - position[edges[1]]
            harmonic = harmonics(irreps("1x0e + 1x1o"), far, True, normalization="component")
            lengths = torch.exp(-((far.norm(dim=1, keepdim=True) - torch.linspace(0, 4, 8)) ** 2))
            x = kinds
            for layer in self.layers:
                x = layer(x, edges, harmonic, lengths)
            energy = self.last(x).sum()
            return (energy, -torch.autograd.grad(energy, position, create_graph=True)[0]) if gradients else energy

    (position, edges), net = _cluster(), Network()
    kinds, goal = torch.randn(80, 8), torch.randn(80, 3)

    def loss() -> Tensor:
        found = net(position, kinds, edges)
        return found[0] ** 2 * 1e-4 + F.mse_loss(found[1], goal) if gradients else (found - 1) ** 2

    return trained(net, loss)


@model("e3nn")
def energy(checkpointed: bool) -> Training:
    return _equivariant(gradients=False)


@model("e3nn")
def forces(checkpointed: bool) -> Training:
    return _equivariant(gradients=True)


@model("egnn_pytorch")
def egnn(checkpointed: bool) -> Training:
    net = of("egnn_pytorch.EGNN_Network")(num_tokens=10, dim=32, depth=3, num_nearest_neighbors=8)
    kinds, position = torch.randint(10, (2, 48)), torch.randn(2, 48, 3)

    def loss() -> Tensor:
        features, moved = net(kinds, position)
        return features.square().mean() + F.mse_loss(moved, position + 1)

    return trained(net, loss)


# Equations


class Field(nn.Module):
    """The right side of an equation."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, 128), nn.Tanh(), nn.Linear(128, width))

    def forward(self, time: Tensor, state: Tensor) -> Tensor:
        return self.net(state)


def _flow(checkpointed: bool, method: str, **settings: Any) -> Training:
    integrate = of(f"torchdiffeq.odeint{'_adjoint' if checkpointed else ''}")

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.field, self.last = nn.Linear(16, 64), Field(), nn.Linear(64, 16)

        def forward(self, x: Tensor) -> Tensor:
            times = torch.linspace(0, 1, 9)
            return self.last(integrate(self.field, self.first(x), times, method=method, **settings)[-1])

    net, x, goal = Flow(), torch.randn(256, 16), torch.randn(256, 16)
    return trained(net, lambda: F.mse_loss(net(x), goal))


@model("torchdiffeq")
def rk4(checkpointed: bool) -> Training:
    return _flow(checkpointed, "rk4")


@model("torchdiffeq")
def dopri5(checkpointed: bool) -> Training:
    return _flow(checkpointed, "dopri5", rtol=1e-4, atol=1e-5)


@model("torchsde", "trampoline")
def sde(checkpointed: bool) -> Training:
    class Equation(nn.Module):
        noise_type, sde_type = "diagonal", "ito"

        def __init__(self) -> None:
            super().__init__()
            self.drift, self.spread = Field(32), nn.Sequential(nn.Linear(32, 32), nn.Sigmoid())

        def f(self, time: Tensor, state: Tensor) -> Tensor:
            return self.drift(time, state)

        def g(self, time: Tensor, state: Tensor) -> Tensor:
            return self.spread(state)

    net, start, goal = Equation(), torch.randn(256, 32), torch.randn(256, 32)
    times = torch.linspace(0, 1, 5)

    def solved(state: Tensor) -> Tensor:
        motion = of("torchsde.BrownianInterval")(t0=0.0, t1=1.0, size=(256, 32), entropy=7)
        return of("torchsde.sdeint")(net, state, times, bm=motion, method="euler", dt=0.05)[-1]

    whole = Called(net, solved)
    return trained(whole, lambda: F.mse_loss(whole(start), goal))


@model("neuralop", "tensorly")
def fno(checkpointed: bool) -> Training:
    net = of("neuralop.models.FNO")(n_modes=(8, 8), hidden_channels=16, in_channels=1, out_channels=1, n_layers=4)
    x, goal = torch.randn(4, 1, 32, 32), torch.randn(4, 1, 32, 32)
    return trained(net, lambda: F.mse_loss(net(x), goal))


@model("neuralop", "tensorly")
def uno(checkpointed: bool) -> Training:
    net = of("neuralop.models.UNO")(
        1, 1, hidden_channels=16, uno_out_channels=[16, 24, 24, 16], uno_n_modes=[[6, 6]] * 4,
        uno_scalings=[[1.0, 1.0], [0.5, 0.5], [1.0, 1.0], [2.0, 2.0]], n_layers=4,
        channel_mlp_skip="linear",
    )  # fmt: skip
    x, goal = torch.randn(4, 1, 32, 32), torch.randn(4, 1, 32, 32)
    return trained(net, lambda: F.mse_loss(net(x), goal))


# Densities


@model("normflows")
def real_nvp(checkpointed: bool) -> Training:
    flows: list[Any] = []
    for _ in range(8):
        flows += [of("normflows.flows.AffineCouplingBlock")(of("normflows.nets.MLP")([8, 64, 64, 16], init_zeros=True))]
        flows += [of("normflows.flows.Permute")(16, mode="swap"), of("normflows.flows.ActNorm")(16)]
    net = of("normflows.NormalizingFlow")(of("normflows.distributions.base.DiagGaussian")(16), flows)
    x = torch.randn(512, 16)
    whole = Called(net, net.forward_kld)
    return trained(whole, lambda: whole(x))


@model("nflows")
def masked_flow(checkpointed: bool) -> Training:
    transforms: list[Any] = []
    for _ in range(4):
        transforms += [of("nflows.transforms.permutations.ReversePermutation")(features=8)]
        transforms += [
            of("nflows.transforms.autoregressive.MaskedAffineAutoregressiveTransform")(features=8, hidden_features=64)
        ]
    base = of("nflows.distributions.normal.StandardNormal")(shape=[8])
    net = of("nflows.flows.base.Flow")(of("nflows.transforms.base.CompositeTransform")(transforms), base)
    x = torch.randn(512, 8)
    whole = Called(net, net.log_prob)
    return trained(whole, lambda: -whole(x).mean())


@model("gpytorch")
def deep_kernel(checkpointed: bool) -> Training:
    x, y = torch.randn(200, 16), torch.randn(200)
    likelihood = of("gpytorch.likelihoods.GaussianLikelihood")()

    class Regression(of("gpytorch.models.ExactGP")):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(x, y, likelihood)
            self.extracted = nn.Sequential(
                *[nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)) for _ in range(4)]
            )
            self.mean = of("gpytorch.means.ConstantMean")()
            self.kernel = of("gpytorch.kernels.ScaleKernel")(of("gpytorch.kernels.RBFKernel")())

        def forward(self, x: Tensor) -> Any:
            found = self.extracted(x)
            return of("gpytorch.distributions.MultivariateNormal")(self.mean(found), self.kernel(found))

    net = Regression()
    marginal = of("gpytorch.mlls.ExactMarginalLogLikelihood")(likelihood, net)
    whole = Called(net, lambda rows: -marginal(net(rows), y))
    return trained(whole, lambda: whole(x))
