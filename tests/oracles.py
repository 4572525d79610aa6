"""Slow and obvious references. Nothing here may import compresskit: a reference that shares code proves nothing."""

from __future__ import annotations

import math

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


def quantize(x, scale, zero_point, low, high):
    """Integers of an affine grid, by numpy, in float64; half to even, as ONNX says."""
    x, scale = np.asarray(x, np.float64), np.asarray(scale, np.float64)
    return np.clip(np.rint(x / scale) + np.asarray(zero_point), low, high)


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


def random_bits(seed, step, index):
    """Sixteen bits of compresskit's counter hash, in Python integers (lowbias32, twice keyed)."""
    mask = 0xFFFFFFFF

    def mixed(x):
        x ^= x >> 16
        x = (x * 0x7FEB352D) & mask
        x ^= x >> 15
        x = (x * 0x846CA68B) & mask
        return x ^ (x >> 16)

    key = mixed((mixed((step + (seed & mask) * 0x9E3779B1) & mask) + (seed >> 32)) & mask)
    return mixed((mixed((index & mask) ^ key) + (index >> 32)) & mask) & 0xFFFF


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
