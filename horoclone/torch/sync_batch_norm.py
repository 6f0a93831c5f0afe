"""Batch normalisation with the statistics of all ranks' batches, on every device, also 16-bit.

Each rank sends count, mean and sum of squared deviations per channel; all ranks combine them in rank order (Chan et
al.), so they get the same bits, and unequal batches, also empty ones, have the right weight. Thread: the one that runs
forward, and autograd's.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call"
from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from horoclone.ops import Sum
from horoclone.process_sets import ProcessSet, global_process_set
from horoclone.torch import operations


class SyncBatchNorm(_BatchNorm):
    """Drop-in for BatchNorm1d/2d/3d: input of shape [N, C] or [N, C, ...], at least 2-d, floating point.

    In evaluation mode, or with one rank, it is plain batch normalisation. Every rank must call it equally often.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_set: ProcessSet = global_process_set
    ) -> torch.nn.Module:
        """Replaces every batch normalisation layer in `module`; its parameters and buffers stay the same objects.

        Returns `module`, or the layer's replacement if `module` is one. Call it before the optimizer is made.
        """
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            options = (module.eps, module.momentum, module.affine, module.track_running_stats)
            layer = cls(module.num_features, *options, process_set=process_set)
            layer._parameters, layer._buffers = module._parameters, module._buffers
            return layer.train(module.training)
        for name, child in module.named_children():
            setattr(module, name, cls.convert_sync_batchnorm(child, process_set))
        return module

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalises over all dimensions but the second, with the statistics of all ranks in training mode."""
        self._check_input_dim(input)
        uses_batch = self.training or not self.track_running_stats
        if not uses_batch or (self.process_set.size() or 1) == 1:
            return super().forward(input)
        factor = 0.0
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        output, mean, variance, count = _SyncBatchNorm.apply(
            input, self.weight, self.bias, self.eps, self.process_set
        )
        if factor and self.running_mean is not None and self.running_var is not None:
            unbiased = variance * (count / (count - 1).clamp(min=1))
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)
        return output


def _channel_view(values: torch.Tensor, dims: int) -> torch.Tensor:
    return values.view(1, -1, *([1] * (dims - 2)))


class _SyncBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        group: ProcessSet,
    ) -> Any:
        exact = torch.promote_types(input.dtype, torch.float32)
        x = input.to(exact)
        over = [d for d in range(x.dim()) if d != 1]
        own_count = x.numel() // max(1, x.shape[1])
        if own_count:
            own_mean = x.mean(over)
            own_squares = (x - _channel_view(own_mean, x.dim())).square().sum(over)
        else:
            own_mean = own_squares = x.new_zeros(x.shape[1])
        count, mean, squares = _combined(own_count, own_mean, own_squares, group)
        variance = squares / count
        scale = torch.rsqrt(variance + eps)
        normal = (x - _channel_view(mean, x.dim())) * _channel_view(scale, x.dim())
        output = normal
        if weight is not None:
            output = output * _channel_view(weight.to(exact), x.dim())
        if bias is not None:
            output = output + _channel_view(bias.to(exact), x.dim())
        ctx.save_for_backward(normal, weight, scale, count)
        ctx.has_bias, ctx.group = bias is not None, group
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(input.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor, *_: Any) -> Any:
        normal, weight, scale, count = ctx.saved_tensors
        grad = grad_output.to(normal.dtype)
        dims = normal.dim()
        over = [d for d in range(dims) if d != 1]
        sums = torch.stack([grad.sum(over), (grad * normal).sum(over)])
        sums_own = sums.clone()
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            operations.allreduce_(sums, op=Sum, process_set=ctx.group)
            means = sums / count
            grad_input = grad - _channel_view(means[0], dims) - normal * _channel_view(means[1], dims)
            factor = scale if weight is None else scale * weight.to(scale.dtype)
            grad_input = (grad_input * _channel_view(factor, dims)).to(grad_output.dtype)
        if weight is not None:
            grad_weight = sums_own[1].to(weight.dtype)
            grad_bias = sums_own[0].to(weight.dtype) if ctx.has_bias else None
        return grad_input, grad_weight, grad_bias, None, None


def _combined(
    count: int, mean: torch.Tensor, squares: torch.Tensor, group: ProcessSet
) -> tuple[torch.Tensor, ...]:
    """Count, mean and sum of squared deviations of all ranks' values together."""
    mine = torch.cat([mean.new_full((1,), float(count)), mean, squares]).unsqueeze(0)  # no copy from the host
    everybody = operations.allgather(mine, process_set=group)
    channels = mean.numel()
    total, all_mean, all_squares = (
        everybody[0, 0],
        everybody[0, 1 : channels + 1],
        everybody[0, channels + 1 :],
    )
    for row in everybody[1:]:
        n, m, s = row[0], row[1 : channels + 1], row[channels + 1 :]
        both = (total + n).clamp(min=1)
        delta = m - all_mean
        all_mean = all_mean + delta * (n / both)
        all_squares = all_squares + s + delta.square() * (total * n / both)
        total = total + n
    return total.clamp(min=1).clone(), all_mean.clone(), all_squares.clone()
