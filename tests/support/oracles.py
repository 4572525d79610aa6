"""Slow and obvious references. Nothing here may import compresskit: a reference that shares code proves nothing."""

from __future__ import annotations

import copy
import itertools
import math
from functools import partial

import numpy as np
import torch
from torch import nn


def soft_targets(student, teacher, temperature):
    """T^2 KL(p_t || p_s), one sample and one class at a time, in float64."""
    total = 0.0
    for s_row, t_row in zip(student.double().tolist(), teacher.double().tolist(), strict=True):
        s_row, t_row = [[v / temperature for v in row] for row in (s_row, t_row)]
        s_sum, t_sum = [math.fsum(math.exp(v - max(row)) for v in row) for row in (s_row, t_row)]
        for s, t in zip(s_row, t_row, strict=True):
            log_p = t - max(t_row) - math.log(t_sum)
            log_q = s - max(s_row) - math.log(s_sum)
            total += math.exp(log_p) * (log_p - log_q)
    return temperature**2 * total / len(student)


def clusters(values, count):
    """Least sum of squared distances of numbers to the means of `count` runs of them, of all ways to cut the sorted numbers."""
    values, least = sorted(map(float, values)), math.inf
    for cuts in itertools.combinations(range(1, len(values)), count - 1):
        runs = [values[a:b] for a, b in itertools.pairwise([0, *cuts, len(values)])]
        least = min(least, math.fsum((v - math.fsum(run) / len(run)) ** 2 for run in runs for v in run))
    return least


def quantize(x, scale, zero_point, low, high):
    """Integers of an affine grid, by numpy, in float64; half to even, as ONNX says."""
    x, scale = np.asarray(x, np.float64), np.asarray(scale, np.float64)
    return np.clip(np.rint(x / scale) + np.asarray(zero_point), low, high)


def sqnr(exact, rounded):
    """Signal-to-quantization-noise ratio in dB."""
    exact, rounded = (np.asarray(v, dtype=np.float64) for v in (exact, rounded))
    return float(10 * np.log10((exact**2).sum() / ((exact - rounded) ** 2).sum()))


def masked_forward(model: nn.Module, inputs, readers: dict[str, tuple[int, list[int]]]):
    """The model's output when the named layers read zeros in the given channels (dim 1, or the last for a linear layer)."""
    handles = []
    for name, (dim, gone) in readers.items():

        def hook(_, args, dim=dim, gone=gone):
            x = args[0].clone()
            x.index_fill_(dim, torch.tensor(gone, dtype=torch.long), 0)
            return (x, *args[1:])

        handles.append(model.get_submodule(name).register_forward_pre_hook(hook))
    try:
        with torch.no_grad():
            return model(*inputs)
    finally:
        for handle in handles:
            handle.remove()


def fold(weight, bias, mean, var, gamma, beta, eps):
    """Convolution and BatchNorm as one convolution, in numpy float64."""
    weight, mean, var, gamma, beta = (np.asarray(v.detach(), np.float64) for v in (weight, mean, var, gamma, beta))
    k = gamma / np.sqrt(var + eps)
    bias = 0.0 if bias is None else np.asarray(bias.detach(), np.float64)
    return weight * k.reshape(-1, *[1] * (weight.ndim - 1)), (bias - mean) * k + beta


def adamw(weights, gradients, *, lr, betas=(0.9, 0.999), eps=1e-8, decay=0.01):
    """AdamW in float64 on one tensor, for a list of gradients."""
    w, m, v = weights.double(), 0.0, 0.0
    for t, g in enumerate((g.double() for g in gradients), 1):
        w = w * (1 - lr * decay)
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
        w = w - lr * (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps)
    return w


def macs(layers):
    """Multiply-accumulates from first principles: (positions, inputs a group, kernel size, outputs) of each layer."""
    return sum(positions * inputs * kernel * outputs for positions, inputs, kernel, outputs in layers)


def softmax64(row):
    """Probabilities of one row of logits."""
    row = np.asarray(row, np.float64)
    e = np.exp(row - row.max())
    return e / e.sum()


def kl64(p, q):
    """KL(p || q) of two rows of probabilities; 0 log 0 is 0."""
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def array64(tensor):
    """A tensor as a float64 array."""
    return tensor.detach().double().numpy()


def reverse_kl(student, teacher, temperature):
    """T^2 KL(p_s || p_t), sample by sample."""
    pairs = zip(array64(student) / temperature, array64(teacher) / temperature, strict=True)
    return temperature**2 * np.mean([kl64(softmax64(s), softmax64(t)) for s, t in pairs])


def jsd(student, teacher, beta, temperature):
    """T^2 [beta KL(p_t || m) + (1 - beta) KL(p_s || m)], m their mixture."""
    total = []
    for s, t in zip(array64(student) / temperature, array64(teacher) / temperature, strict=True):
        p, q = softmax64(t), softmax64(s)
        m = beta * p + (1 - beta) * q
        total.append(beta * kl64(p, m) + (1 - beta) * kl64(q, m))
    return temperature**2 * np.mean(total)


def standardized_soft_targets(student, teacher, temperature):
    """Soft targets of z-scores, with the sample standard deviation."""

    def z(x):
        x = array64(x)
        return torch.from_numpy((x - x.mean(1, keepdims=True)) / x.std(1, ddof=1, keepdims=True))

    return soft_targets(z(student), z(teacher), temperature)


def dkd(student, teacher, target, alpha, beta, temperature):
    """Target / not target, and the other classes among themselves, from probabilities."""
    total = []
    for s, t, y in zip(array64(student) / temperature, array64(teacher) / temperature, target.tolist(), strict=True):
        q, p = softmax64(s), softmax64(t)
        tckd = kl64([p[y], 1 - p[y]], [q[y], 1 - q[y]])
        nckd = kl64(np.delete(p, y) / (1 - p[y]), np.delete(q, y) / (1 - q[y]))
        total.append(alpha * tckd + beta * nckd)
    return temperature**2 * np.mean(total)


def dist(student, teacher, beta, gamma, temperature):
    """Pearson correlations of probabilities along both axes, by numpy."""
    q, p = (np.stack([softmax64(row) for row in array64(x) / temperature]) for x in (student, teacher))
    inter = np.mean([1 - np.corrcoef(a, b)[0, 1] for a, b in zip(q, p, strict=True)])
    intra = np.mean([1 - np.corrcoef(a, b)[0, 1] for a, b in zip(q.T, p.T, strict=True)])
    return temperature**2 * (beta * inter + gamma * intra)


def smoothed_ce(student, target, smoothing):
    """Cross-entropy to (1 - e) one-hot + e / C."""
    total = []
    for s, y in zip(array64(student), target.tolist(), strict=True):
        wanted = np.full(len(s), smoothing / len(s))
        wanted[y] += 1 - smoothing
        total.append(-np.sum(wanted * np.log(softmax64(s))))
    return np.mean(total)


def hint(student, teacher):
    """Mean of squares."""
    return np.mean((array64(student) - array64(teacher)) ** 2)


def attention_transfer(student, teacher):
    """Unit energy maps."""
    maps = []
    for x in (student, teacher):
        q = (array64(x) ** 2).sum(1).reshape(len(x), -1)
        maps.append(q / np.linalg.norm(q, axis=1, keepdims=True))
    return np.mean((maps[0] - maps[1]) ** 2)


def hcl(student, teacher, levels):
    """The squared difference of block means, for levels that divide the size."""
    d = array64(student) - array64(teacher)
    size, value, share, total = d.shape[2], np.mean(d**2), 1.0, 1.0
    for level in levels:
        if level < size:
            share /= 2
            k = size // level
            means = d.reshape(*d.shape[:2], level, k, level, k).mean((3, 5))
            value, total = value + share * np.mean(means**2), total + share
    return value / total


def cosine_distance(student, teacher):
    """1 - cosine along the last axis."""
    s, t = array64(student), array64(teacher)
    return np.mean(1 - (s * t).sum(-1) / np.linalg.norm(s, axis=-1) / np.linalg.norm(t, axis=-1))


def attention_kl(student, teacher, mask=None):
    """KL of attention rows, over the tokens that are there."""
    s, t = array64(student), array64(teacher)
    total = []
    for n, h, i in np.ndindex(s.shape[:3]):
        keep = np.ones(s.shape[3], bool) if mask is None else mask[n].numpy().astype(bool)
        if keep[i]:
            total.append(kl64(softmax64(t[n, h, i][keep]), softmax64(s[n, h, i][keep])))
    return np.mean(total)


def relation_kl(student, teacher):
    """Attention of values to values."""
    scores = [np.einsum("nhid,nhjd->nhij", v, v) / np.sqrt(v.shape[-1]) for v in (array64(student), array64(teacher))]
    return attention_kl(*map(torch.from_numpy, scores))


def similarity_preserving(student, teacher):
    """Row-normalized Gram matrices."""
    grams = []
    for x in (student, teacher):
        f = array64(x).reshape(len(x), -1)
        g = f @ f.T
        grams.append(g / np.linalg.norm(g, axis=1, keepdims=True))
    return np.sum((grams[0] - grams[1]) ** 2) / len(student) ** 2


def huber(x):
    """Half a square below 1, a line above."""
    return np.where(np.abs(x) < 1, 0.5 * x**2, np.abs(x) - 0.5)


def rkd_distance(student, teacher):
    """Distances one pair at a time."""
    out = []
    for x in (student, teacher):
        f = array64(x).reshape(len(x), -1)
        d = np.array([[np.linalg.norm(a - b) for b in f] for a in f])
        out.append(d / d[d > 0].mean())
    return np.mean(huber(out[0] - out[1]))


def rkd_angle(student, teacher):
    """Angles one triple at a time; a side of length 0 has cosine 0."""

    def unit(v):
        length = np.linalg.norm(v)
        return v / length if length > 0 else v

    out = []
    for x in (student, teacher):
        f = array64(x).reshape(len(x), -1)
        out.append(np.array([[[unit(b - a) @ unit(c - a) for c in f] for b in f] for a in f]))
    return np.mean(huber(out[0] - out[1]))


def cosines(x):
    """Cosines between the rows of a batch."""
    f = array64(x).reshape(len(x), -1)
    f = f / np.linalg.norm(f, axis=1, keepdims=True)
    return f @ f.T


def pkt(student, teacher, eps=1e-7):
    """Divergence of cosine kernels read as probabilities."""
    s, t = ((cosines(x) + 1) / 2 for x in (student, teacher))
    s, t = (k / k.sum(1, keepdims=True) for k in (s, t))
    return np.mean(t * np.log((t + eps) / (s + eps)))


def correlation_congruence(student, teacher, gamma, order):
    """Taylor series of exp(-gamma |a - b|^2) for unit rows."""
    kernels = [
        math.exp(-2 * gamma) * sum((2 * gamma) ** p / math.factorial(p) * cosines(x) ** p for p in range(order + 1))
        for x in (student, teacher)
    ]
    return np.mean((kernels[0] - kernels[1]) ** 2)


def info_nce(student, teacher, temperature):
    """Cross-entropy of the diagonal."""
    s, t = (array64(x).reshape(len(x), -1) for x in (student, teacher))
    s, t = (f / np.linalg.norm(f, axis=1, keepdims=True) for f in (s, t))
    return np.mean([-math.log(softmax64(row)[i]) for i, row in enumerate(s @ t.T / temperature)])


def crd(anchor, own, others, samples, z, temperature):
    """-log h(own) - sum log(1 - h), from probabilities."""
    noise = others.shape[1] / samples
    total = []
    for a, o, rest in zip(array64(anchor), array64(own), array64(others), strict=True):
        p = math.exp(a @ o / temperature) / z
        loss = -math.log(p / (p + noise))
        for r in rest:
            q = math.exp(a @ r / temperature) / z
            loss -= math.log(noise / (q + noise))
        total.append(loss)
    return np.mean(total)


def bucketed(student, teacher, k, temperature):
    """T^2 KL after all classes but the teacher's k likeliest are put together."""
    total = []
    for s, t in zip(array64(student) / temperature, array64(teacher) / temperature, strict=True):
        p, q = softmax64(t), softmax64(s)
        top = np.argsort(-t)[:k]
        total.append(kl64([*p[top], 1 - p[top].sum()], [*q[top], 1 - q[top].sum()]))
    return temperature**2 * np.mean(total)


def random_bits(seed, step, index):
    """Sixteen bits of compresskit's counter hash, in Python integers: a half of the word of two neighbours.

    The word of a place in a block of 2^17 values (lowbias32), times an odd factor of the block, its halves folded.
    """
    mask = 0xFFFFFFFF

    def mixed(x):
        x ^= x >> 16
        x = (x * 0x7FEB352D) & mask
        x ^= x >> 15
        x = (x * 0x846CA68B) & mask
        return x ^ (x >> 16)

    key = mixed((mixed((step + (seed & mask) * 0x9E3779B1) & mask) + (seed >> 32)) & mask)
    block, place = index >> 17, (index & 0x1FFFF) >> 1
    factor = mixed(((block & mask) ^ 0x9E3779B1) + key & mask) | 1
    word = mixed(place ^ key) * factor & mask
    word ^= word >> 16
    return (word >> 16 if index % 2 else word) & 0xFFFF


def bf16_neighbours(value):
    """The two bf16 values around an fp32 one, by cutting bits with struct; the same one twice where it is exact."""
    import struct

    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    low = bits & 0xFFFF0000
    high = low if low == bits else low + 0x10000
    return tuple(struct.unpack("<f", struct.pack("<I", b))[0] for b in (low, high))


def loss_scales(overflows, *, start, growth=2.0, backoff=0.5, interval=2000, hysteresis=1, floor=1.0, ceiling=2.0**24):
    """The scale after each step, as a plain loop says it."""
    scale, clean, left, seen = start, 0, hysteresis, []
    for overflow in overflows:
        if overflow:
            clean, left = 0, left - 1
            if left <= 0:
                scale *= backoff
        else:
            clean += 1
            if clean == interval:
                scale, clean, left = scale * growth, 0, hysteresis
        scale = min(max(scale, floor), ceiling)
        seen.append(scale)
    return seen


def sgd(weights, gradients, *, lr, momentum=0.0):
    """SGD with momentum in float64; None among the gradients is a step that was skipped."""
    w, buffer = weights.double(), 0.0
    for g in gradients:
        if g is not None:
            buffer = momentum * buffer + g.double()
            w = w - lr * buffer
    return w


def float8(values, fraction, smallest, largest):
    """fp8 values nearest to the given ones, ties to even, one at a time; `smallest` is the least normal exponent."""

    def one(x):
        if x == 0 or not math.isfinite(x):
            return x
        step = 2.0 ** (max(math.frexp(x)[1] - 1, smallest) - fraction)
        return math.copysign(min(abs(round(x / step) * step), largest), x)

    return torch.tensor([one(x) for x in values.double().flatten().tolist()], dtype=torch.float64).view(values.shape)


class _MaskedNorm(nn.Module):
    """A LayerNorm or GroupNorm written out, whose statistics leave out the channels in `gone` (of its own weight)."""

    def __init__(self, norm, gone):
        super().__init__()
        self.norm, self.gone = norm, gone

    def forward(self, x):
        norm = self.norm
        if isinstance(norm, nn.GroupNorm):
            counts = torch.ones(x.shape[1], dtype=x.dtype)
            counts[self.gone] = 0
            counts = counts.view(1, -1, *[1] * (x.ndim - 2)).expand_as(x)
            grouped = [v.reshape(x.shape[0], norm.num_groups, -1) for v in (x, counts)]
            dims, weight = (2,), [v.view(1, -1, *[1] * (x.ndim - 2)) for v in (norm.weight, norm.bias)]
        else:
            counts = torch.ones(norm.normalized_shape, dtype=x.dtype)
            counts[self.gone] = 0
            grouped, weight = [x, counts.expand_as(x)], [norm.weight, norm.bias]
            dims = tuple(range(x.ndim - len(norm.normalized_shape), x.ndim))
        values, counts = grouped
        total = counts.sum(dims, keepdim=True)
        mean = (values * counts).sum(dims, keepdim=True) / total
        variance = ((values - mean).square() * counts).sum(dims, keepdim=True) / total
        return ((values - mean) / (variance + norm.eps).sqrt()).reshape(x.shape) * weight[0] + weight[1]


def without_dropout(model: nn.Module) -> nn.Module:
    """A copy that drops nothing in train mode: what is dropped differs in tensors of other widths, also with one seed."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return model


def zeroed_forward(model: nn.Module, inputs, remove: dict[str, dict[int, tuple[int, ...]]], *, training: bool = False):
    """Outputs in float64 of a copy of the model in which the named indices of the named tensors are zero.

    Normalisations over channels leave those channels out of their statistics. Parametrized linear layers are made plain first.
    In train mode BatchNorm takes the statistics of these inputs, and dropout drops nothing.
    """
    model = without_dropout(model).double().train(training)
    remove = dict(remove)
    for path, module in list(model.named_modules()):
        if nn.utils.parametrize.is_parametrized(module):
            plain = nn.Linear(module.in_features, module.out_features).double()
            plain.weight, plain.bias = nn.Parameter(module.weight.detach()), module.bias
            parent, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent), leaf, plain)
            remove[f"{path}.weight"] = remove.pop(f"{path}.parametrizations.weight.original1", {})
            remove.pop(f"{path}.parametrizations.weight.original0", None)
        if hasattr(module, "standardized"):
            module.standardized = partial(_standardized, module.standardized, remove.get(f"{path}.weight", {}))
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    with torch.no_grad():
        for name, dims in remove.items():
            for dim, gone in dims.items():
                tensors[name].index_fill_(dim, torch.tensor(gone, dtype=torch.long), 0)
    for path, module in list(model.named_modules()):
        gone = remove.get(f"{path}.weight", {}).get(0, ())
        alone = isinstance(module, nn.GroupNorm) and module.num_groups == module.num_channels
        if isinstance(module, nn.LayerNorm | nn.GroupNorm) and gone and not alone:
            parent, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent), leaf, _MaskedNorm(module, list(gone)))
    torch.backends.mha.set_fastpath_enabled(False)  # it reads the norms of an encoder layer without calling them
    try:
        with torch.no_grad():
            return model(*(v.double() if v.is_floating_point() else v for v in inputs))
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def _standardized(formula, gone, weight, gain):
    """A weight standardized over the inputs that stay; zero where an output or an input is gone."""
    outputs, inputs = ([i for i in range(n) if i not in gone.get(d, ())] for d, n in enumerate(weight.shape[:2]))
    result = torch.zeros_like(weight)
    result[np.ix_(outputs, inputs)] = formula(weight[outputs][:, inputs], gain[outputs])
    return result


def blocks(rows, bits, block, symmetric):
    """Rows (channels, inputs) rounded in blocks: (rounded, integers, scales, zero points), each block by itself."""
    rows = array64(rows)
    channels, inputs = rows.shape
    width = block or inputs
    count = -(-inputs // width)
    rounded, integers = np.zeros_like(rows), np.zeros(rows.shape, int)
    scales, points = np.ones((channels, count)), np.zeros((channels, count), int)
    for c in range(channels):
        for b in range(count):
            part = slice(b * width, min((b + 1) * width, inputs))
            values = np.float32(rows[c, part])
            low, high = min(values.min(), 0), max(values.max(), 0)
            if symmetric:
                scale, bottom, top = (
                    np.float32(max(-low, high)) / np.float32(2 ** (bits - 1) - 1),
                    -(2 ** (bits - 1)),
                    2 ** (bits - 1) - 1,
                )
                zero = 0
            else:
                scale, bottom, top = np.float32(high - low) / np.float32(2**bits - 1), 0, 2**bits - 1
                zero = 0 if scale == 0 else int(np.clip(-np.rint(low / scale), bottom, top))
            scale = scale if scale > 1e-30 else np.float32(1)
            integers[c, part] = np.clip(np.rint(values * (np.float32(1) / scale)) + zero, bottom, top)
            rounded[c, part] = (integers[c, part] - zero) * np.float64(scale)
            scales[c, b], points[c, b] = scale, zero
    return rounded, integers, scales, points


def gptq(rows, second, scales, points, bits, block, symmetric, *, damping=0.01, mask=None):
    """Optimal brain quantization in the order of falling second moments, the inverse updated in full after every column."""
    weight, second = array64(rows).copy(), array64(second).copy()
    width = block or weight.shape[1]
    typical = np.diag(second).mean()
    diagonal = np.where(np.diag(second) > 0, damping * typical, typical)
    inverse = np.linalg.inv(second + np.diag(diagonal))
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if symmetric else (0, 2**bits - 1)
    left = list(np.argsort(-np.diag(second), kind="stable"))
    result = np.zeros_like(weight)
    while left:
        j = left.pop(0)
        scale, zero = scales[:, j // width], points[:, j // width]
        result[:, j] = (np.clip(np.rint(weight[:, j] / scale) + zero, low, high) - zero) * scale
        if mask is not None:
            result[:, j] *= mask[:, j]
        error = (weight[:, j] - result[:, j]) / inverse[j, j]
        weight[:, left] -= np.outer(error, inverse[j, left])
        inverse = inverse - np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    return result
