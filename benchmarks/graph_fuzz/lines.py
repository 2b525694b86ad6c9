"""Lines of generated forwards, by what they are for.

``{v}``, ``{w}`` are new values; ``{a}`` is any value, ``{b}`` one of its shape, ``{o}`` one that the forward has made,
``{d}`` its last size, ``{c}`` its second, ``{h}`` half of its last; ``{m}`` names a new module, parameter or buffer,
and ``{old}`` one of the linear layers that are there. What stands before ``;;`` goes into ``__init__``.
``rows`` has the last sizes of a value, without gradient.
"""

from __future__ import annotations

LINES: dict[str, tuple[int, list[str]]] = {}


def _add(kind: str, weight: int, text: str) -> None:
    LINES[kind] = weight, [line.strip() for line in text.strip().splitlines()]


_add("pointwise", 10, """
    {v} = torch.tanh({a})
    {v} = F.gelu({a})
    {v} = F.relu({a})
    {v} = F.silu({a})
    {v} = {a}.sigmoid()
    {v} = {a} * 0.5
    {v} = F.softplus({a})
    {v} = {a}.clamp(-1, 1)
    {v} = {a}.abs()
    {v} = -{a}
    {v} = torch.where({a} > 0, {a}, 0.1 * {a})
    {v} = {a}.square().add(1).rsqrt()
    {v} = F.elu({a})
    {v} = F.hardswish({a})
    {v} = {a}.sin()
    {v} = {a}.masked_fill({a} < 0, 0.5)
    {v} = F.mish({a})
    {v} = {a}.clone()
    {v} = {a}.contiguous()
    {v} = torch.nan_to_num({a})
""")  # fmt: skip

_add("binary", 8, """
    {v} = {a} + {b}
    {v} = {a} - {b}
    {v} = {a} * {b}.tanh()
    {v} = torch.maximum({a}, {b})
    {v} = torch.where({a} > {b}, {a}, {b})
    {v} = torch.lerp({a}, {b}, 0.3)
    {v} = {a} / ({b}.abs() + 1)
    {v} = torch.addcmul({a}, {b}, {b}.tanh(), value=0.1)
    {v} = {a} + {b}.mean(-1, keepdim=True)
    {v} = torch.atan2({a}, {b}.abs() + 1)
    {v} = torch.hypot({a}, {b}.abs() + 1)
""")  # fmt: skip

_add("reduction", 4, """
    {v} = {a}.mean(-1, keepdim=True).expand_as({a})
    {v} = {a}.sum(0)
    {v} = {a}.amax(-1, keepdim=True) + {a}
    {v} = F.softmax({a}, -1)
    {v} = F.log_softmax({a}, -1)
    {v} = {a}.cumsum(-1) / {d}
    {v} = {a} / ({a}.norm(dim=-1, keepdim=True) + 1)
    {v} = {a}.var(-1, keepdim=True) + {a}
    {v} = torch.logsumexp({a}, 0)
    {v}, _ = {a}.max(1)
    {v} = {a}.topk({h}, -1).values
    {v}, _ = {a}.sort(-1)
    {v}, _ = torch.std_mean({a}, 1)
    {v} = F.normalize({a}, dim=-1)
    {v} = {a}.median(-1).values
    {v} = {a}.prod(-1)
""")  # fmt: skip

_add("view", 8, """
    {v} = {a}.reshape(-1, {d})
    {v} = {a}.transpose(-1, -2)
    {v} = {a}[..., :{h}]
    {v} = {a}[:, 1:]
    {v} = {a}.flatten(1)
    {v}, {w} = {a}.chunk(2, -1)
    {v} = {a}[0]
    {v} = {a}.unsqueeze(1)
    {v} = {a}.permute(*reversed(range({a}.dim())))
    {v} = {a}[::2]
    {v} = {a}.narrow(-1, 1, {h})
    {v}, {w} = torch.split({a}, [{h}, {d} - {h}], -1)
    {v} = {a}[:1].expand_as({a})
    {v} = {a}.unflatten(-1, (2, -1))
    {v} = {a}.select(1, 0)
    {v}, *_ = {a}.unbind(1)
    {v} = {a}.diagonal(dim1=-2, dim2=-1)
    {v} = {a}.movedim(0, -1)
    {v} = {a}.squeeze()
    {v} = {a}.unfold(-1, 4, 4)
    {v} = {a}.view_as({b})
    {v} = {a}.view(-1)
""")  # fmt: skip

_add("copy of parts", 4, """
    {v} = torch.cat([{a}, {b}], -1)
    {v} = torch.stack([{a}, {b}])
    {v} = torch.cat([{a}, {b}.relu(), {a}])
    {v} = F.pad({a}, (1, 2))
    {v} = {a}.roll(1, 0)
    {v} = {a}.flip(-1)
    {v} = {a}.repeat_interleave(2, 0)
    {v} = {a}[:, torch.arange({c} - 1, -1, -1)]
    {v} = {a}.gather(-1, {b}.argsort(-1))
    {v} = {a}.triu()
    {v} = torch.zeros_like({a}).scatter_add(-1, {b}.argsort(-1), {a})
    {v} = {a}.tile(2)
    {v} = {a}.index_select(0, torch.tensor([1, 0, 1]))
    {v} = torch.meshgrid({a}[0], {a}[0], indexing='ij')[0]
""")  # fmt: skip

_add("in place", 6, """
    {o}.add_({b})
    {o}.mul_(0.9)
    F.relu_({o})
    {o}[..., :{h}] = 0.5
    {o}[:, 0] += 1
    {o}[0].tanh_()
    {o}.copy_({b})
    {o}.masked_fill_({o} < 0, 0.1)
    {o}.clamp_(-2, 2)
    {o} += {b}
    {o}.transpose(-1, -2).sigmoid_()
    {v} = F.dropout({o}, 0.2, self.training, inplace=True)
    {v} = F.silu({o}, inplace=True)
    {o}.zero_()
    {o}.unsqueeze_(0)
    {o}.t_()
    {o}.reshape(-1)[1:5].mul_(2)
    {v} = torch.empty_like({a}); {v}.copy_({a})
    {v} = torch.zeros_like({a}); {v}[..., 1:] = {a}[..., 1:]
""")  # fmt: skip

_add("matmul", 5, """
    {v} = {a} @ {a}.transpose(-1, -2) / {d}
    {v} = torch.einsum('...i,...j->...ij', {a}[..., :4], {b}[..., :3]).flatten(-2)
    {v} = torch.softmax({a} @ {b}.transpose(-1, -2) / {d} ** 0.5, -1) @ {b}
    {v} = {a}.transpose(-1, -2) @ {b} / {d}
    {v} = F.scaled_dot_product_attention({a}, {b}, {a})
    {v} = torch.baddbmm({a}, {b}, {b}.transpose(-1, -2) @ {a} / {d})
    {v} = F.scaled_dot_product_attention({a}, {b}, {b}, is_causal=True, dropout_p=0.1)
    {v} = torch.cdist({a}, {b} + 1)
""")  # fmt: skip

_add("layer", 9, """
    self.{m} = nn.Linear({d}, 32);; {v} = self.{m}({a})
    self.{m} = nn.Linear({d}, {d}, bias=False);; {v} = self.{m}({a})
    self.{m} = nn.Linear({d}, 16);; {v} = self.{m}({a})
    self.{m} = nn.Conv1d({c}, {c}, 3, padding=1);; {v} = self.{m}({a})
    self.{m} = nn.Conv2d({c}, {c}, 3, padding=1);; {v} = self.{m}({a})
    self.{m} = nn.PReLU();; {v} = self.{m}({a})
    self.{m} = nn.Conv1d({c}, 8, 3, 2);; {v} = self.{m}({a})
    self.{m} = nn.Bilinear({d}, {d}, 8);; {v} = self.{m}({a}, {b})
    self.{m} = nn.MultiheadAttention({d}, 2, dropout=0.1, batch_first=True);; {v}, _ = self.{m}({a}, {a}, {a})
    self.{m} = nn.ConvTranspose1d({c}, 4, 2, 2);; {v} = self.{m}({a})
""")  # fmt: skip

_add("norm", 5, """
    self.{m} = nn.LayerNorm({d});; {v} = self.{m}({a})
    self.{m} = nn.RMSNorm({d});; {v} = self.{m}({a})
    self.{m} = nn.GroupNorm(2, {c});; {v} = self.{m}({a})
    {v} = F.layer_norm({a}, [{d}])
    self.{m} = nn.InstanceNorm1d({c}, affine=True);; {v} = self.{m}({a})
    {v} = F.local_response_norm({a}, 2)
""")  # fmt: skip

_add("batch norm", 4, """
    self.{m} = nn.BatchNorm1d({c});; {v} = self.{m}({a})
    self.{m} = nn.BatchNorm2d({c});; {v} = self.{m}({a})
    self.{m} = nn.BatchNorm1d({c}, affine=False);; {v} = self.{m}({a})
    self.{m} = nn.BatchNorm1d({c}, momentum=None);; {v} = self.{m}({a})
    self.{m} = nn.BatchNorm1d({c}, track_running_stats=False);; {v} = self.{m}({a})
    self.{m} = nn.BatchNorm1d({c}).eval();; {v} = self.{m}({a})
    self.{m} = nn.InstanceNorm1d({c}, track_running_stats=True);; {v} = self.{m}({a})
""")  # fmt: skip

_add("random", 5, """
    {v} = F.dropout({a}, 0.3, self.training)
    {v} = F.dropout1d({a}, 0.3)
    {v} = {a} + torch.rand_like({a})
    {v} = {a} * torch.bernoulli(torch.full_like({a}, 0.5))
    self.{m} = nn.AlphaDropout(0.2);; {v} = self.{m}({a})
    {v} = {a} + 0.1 * torch.randn({d}, dtype={a}.dtype)
    {v} = F.rrelu({a}, training=True)
    {v} = {a}[:, torch.randperm({c})]
    {v} = F.gumbel_softmax({a}, dim=-1)
    {v} = {a} + torch.randint(0, 3, ({d},))
    {v} = {a} + torch.empty_like({a}).uniform_(0, 0.1)
""")  # fmt: skip

_add("embedding", 3, """
    self.{m} = nn.Embedding(20, 32);; {v} = self.{m}(ids)
    self.{m} = nn.Embedding(20, 16, padding_idx=0);; {v} = self.{m}(ids)
    self.{m} = nn.Embedding(20, {d});; {v} = {a} + self.{m}(ids[0, 0])
    self.{m} = nn.EmbeddingBag(20, 16);; {v} = self.{m}(ids)
    self.{m} = nn.Embedding(20, {d});; {v} = {a} @ self.{m}.weight.t() + self.{m}(ids).mean()
""")  # fmt: skip

_add("tied", 3, """
    {v} = self.{old}({a})
    {v} = F.linear({a}, self.{old}.weight.t())
    {v} = {a} + self.{old}.weight.sum()
    self.{m} = nn.Linear({d}, 32); self.{m}.weight = self.{old}.weight;; {v} = self.{m}({a})
    self.{m} = nn.Linear({d}, {d}); self.{m}.weight = self.{old}.weight;; {v} = self.{m}({a})
""")  # fmt: skip

_add("parameter", 4, """
    self.{m} = nn.Parameter(torch.randn({d}) * 0.1);; {v} = {a} + self.{m}
    self.{m} = nn.Parameter(torch.ones({d}));; {v} = {a} * self.{m}[:]
    self.{m} = nn.Parameter(torch.randn(8, 32));; {v} = self.{m}.t()
    self.{m} = nn.Parameter(torch.randn(8, {d}));; {v} = self.{m}.exp() @ {a}.transpose(-1, -2)
    self.{m} = nn.Parameter(torch.randn(4, 8, 16));; {v} = self.{m}
    self.{m} = nn.Parameter(torch.randn(2, {d}));; {v} = {a} * self.{m}[0] + self.{m}[1]
""")  # fmt: skip

_add("buffer", 4, """
    self.register_buffer('{m}', torch.zeros({d}));; self.{m}.lerp_(rows({a}).mean(0), 0.1); {v} = {a} - self.{m}
    self.register_buffer('{m}', torch.zeros({d}));; {v} = {a} - self.{m}; self.{m} += 1
    self.register_buffer('{m}', torch.ones({d}));; {v} = {a} * self.{m}
    self.register_buffer('{m}', torch.zeros(()));; self.{m}.add_(1); {v} = {a} / self.{m}.clamp(min=1)
    self.register_buffer('{m}', torch.zeros(8, {d}));; self.{m}[0] = rows({a})[0]; {v} = {a} + self.{m}.sum()
    self.register_buffer('{m}', torch.zeros({d}));; self.{m} = 0.5 * self.{m} + rows({a})[0]; {v} = {a} + self.{m}
    self.register_buffer('{m}', torch.zeros(3, dtype=torch.long));; self.{m} += 1; {v} = {a} + self.{m}.sum()
    self.register_buffer('{m}', torch.zeros(8, {d}));; self.{m}.copy_(rows({a})[:8]); {v} = {a} * 2
""")  # fmt: skip

_add("image", 2, """
    {v} = F.max_pool1d({a}, 2)
    {v} = F.avg_pool2d({a}, 2)
    {v} = F.interpolate({a}, scale_factor=2)
    {v} = F.adaptive_avg_pool1d({a}, 4)
    {v} = F.max_pool2d({a}, 2)
    {v} = F.pixel_shuffle({a}, 2)
    {v} = F.unfold({a}, 2)
    {v} = F.interpolate({a}, size=12, mode='linear')
""")  # fmt: skip

_add("gradient", 2, """
    {v} = {a}.detach()
    {v} = {a} + ({b} - {b}.detach()) * 2
    with torch.no_grad(): {v} = {a} * 2
    {v} = {a}.to(torch.float32)
    {v} = {a}.to(torch.bfloat16)
    {v} = {a}.double()
    {v} = torch.utils.checkpoint.checkpoint(lambda t: t.tanh().exp().sin(), {a}, use_reentrant=False)
    {v} = {a}.float().to({b}.dtype)
""")  # fmt: skip
