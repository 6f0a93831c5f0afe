"""Batch normalisation with the statistics of all ranks' batches, on every device, also 16-bit.

Each rank sends count, mean and sum of squared deviations per channel; all ranks combine them in rank order (Chan et
al.), so they get the same bits, and unequal batches, also empty ones, have the right weight. Thread: the one that runs
forward, and autograd's.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call"
from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from horoclone.errors import Unsupported
from horoclone.ops import Sum
from horoclone.process_sets import ProcessSet, global_process_set, set_id
from horoclone.torch import operations


class SyncBatchNorm(_BatchNorm):
    """Replaces BatchNorm1d, 2d and 3d, with statistics over all ranks: input of shape [N, C] or [N, C, ...], at least
    2-d, floating point.

    In evaluation mode, or with one rank, it is plain batch normalisation. In training every rank must call it equally
    often; ValueError where all ranks together have one value per channel. It can be differentiated as often as wanted:
    the second backward, too, must run on every rank.
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
        """Replaces every batch normalisation layer in `module`; all that it holds stays the same objects: parameters,
        buffers, hooks, parametrizations, other attributes. A layer with several names has one replacement.

        Returns `module`, or the layer's replacement if `module` is one. Call it before the optimizer is made. A
        SyncBatchNorm of this module stays as it is, with its process set. Subclasses keep their forward(), which must
        call the inherited one: where it does not, the first call in training raises Unsupported. ValueError for a
        torch.nn.SyncBatchNorm with a process group.
        """
        return _converted(cls, module, process_set, {})

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalises over all dimensions but the second, with the statistics of all ranks in training mode."""
        self._check_input_dim(input)
        self.__dict__.pop("_not_reached", None)
        if not self.training:
            return super().forward(input)
        set_id(self.process_set)  # refuses one that is not registered, rather than normalise alone
        if self.process_set.size() == 1:
            return super().forward(input)
        weight = self.weight
        _check_input(input, self.running_mean if weight is None else weight)
        output, mean, variance, count = _SyncBatchNorm.apply(
            input, weight, self.bias, self.eps, self.process_set
        )
        if self.track_running_stats:
            self._track(mean.detach(), variance.detach(), count)
        return output

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        factor = self.momentum or 0.0
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        if factor and self.running_mean is not None and self.running_var is not None:
            unbiased = variance * (count / (count - 1).clamp(min=1))
            weight = factor * (count > 0).to(count.dtype)  # nothing is learned from no rows at all
            for kept, new in ((self.running_mean, mean), (self.running_var, unbiased)):
                kept.lerp_(new.to(kept.dtype), weight.to(kept.dtype))


# --- statistics and their derivatives ---


def _check_input(input: torch.Tensor, of_channels: torch.Tensor | None) -> None:
    """ValueError for what torch's kernels refuse: before other ranks wait for this one, and where the wrong number of
    channels would be expanded."""
    if not input.is_floating_point():
        raise ValueError(f"SyncBatchNorm: expected floating-point input, got {input.dtype}")
    if of_channels is not None and of_channels.numel() != input.shape[1]:
        raise ValueError(
            f"SyncBatchNorm: expected {of_channels.numel()} channels, got input of shape {list(input.shape)}"
        )


def _channel_view(values: torch.Tensor, dims: int) -> torch.Tensor:
    return values.view(1, -1, *([1] * (dims - 2)))


def _all_but_channels(x: torch.Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


class _SyncBatchNorm(torch.autograd.Function):
    """Backward is made of operations that autograd knows, on what it knows: mean and variance are outputs, so their
    own gradients come to this backward again, from the second derivative."""

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
        over = _all_but_channels(x)
        own_count = x.numel() // max(1, x.shape[1])
        if own_count:
            own_mean = x.mean(over)
            own_squares = (x - _channel_view(own_mean, x.dim())).square().sum(over)
        else:
            own_mean = own_squares = x.new_zeros(x.shape[1])
        count, mean, squares = _combined(own_count, own_mean, own_squares, group)
        if own_count <= 1 and float(count) == 1:  # the only case in which the host waits for a GPU
            raise ValueError(
                "SyncBatchNorm: expected more than 1 value per channel when training, got "
                f"1 on all {group.size()} ranks together; input of shape {list(input.shape)} here. "
                "Give the ranks more rows, or call eval() first."
            )
        variance = squares / count.clamp(min=1)
        scale = torch.rsqrt(variance + eps)
        output = (x - _channel_view(mean, x.dim())) * _channel_view(scale, x.dim())
        if weight is not None:
            output = output * _channel_view(weight.to(exact), x.dim())
        if bias is not None:
            output = output + _channel_view(bias.to(exact), x.dim())
        ctx.save_for_backward(input, weight, mean, variance, count)
        ctx.has_bias, ctx.eps, ctx.group = bias is not None, eps, group
        ctx.mark_non_differentiable(count)
        return output.to(input.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor, grad_mean: Any, grad_variance: Any, _: Any) -> Any:
        input, weight, mean, variance, count = ctx.saved_tensors
        grad, scale, dims = grad_output.to(mean.dtype), torch.rsqrt(variance + ctx.eps), input.dim()
        over = _all_but_channels(input)
        normal = (input.to(mean.dtype) - _channel_view(mean, dims)) * _channel_view(scale, dims)
        own = torch.stack([grad.sum(over), (grad * normal).sum(over)])
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            factor = scale if weight is None else scale * weight.to(scale.dtype)
            # What reaches the mean and the variance, by way of the output and by themselves.
            to_mean = grad_mean - own[0] * factor
            to_variance = grad_variance - own[1] * factor * scale / 2
            sums = torch.stack([to_mean, to_variance])
            means = operations.allreduce(sums, op=Sum, process_set=ctx.group) / count.clamp(min=1)
            deviation = 2 * means[1] / scale
            grad_input = (
                grad * _channel_view(factor, dims)
                + _channel_view(means[0], dims)
                + normal * _channel_view(deviation, dims)
            ).to(grad_output.dtype)
        if weight is not None:
            grad_weight = own[1].to(weight.dtype)
            grad_bias = own[0].to(weight.dtype) if ctx.has_bias else None
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
    return total.clone(), all_mean.clone(), all_squares.clone()


# --- conversion ---

_PLAIN = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)


def _converted(
    cls: Any,
    module: torch.nn.Module,
    process_set: ProcessSet,
    done: dict[torch.nn.Module, torch.nn.Module],
) -> torch.nn.Module:
    if module in done:
        return done[module]
    result = module
    if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
        if getattr(module, "process_group", None) is not None:
            raise ValueError(
                f"convert_sync_batchnorm: {module} has a process group of torch.distributed. Set its process_group to "
                "None, and pass process_set= for the ranks that share statistics."
            )
        kind = _class_for(cls, module)
        result = kind.__new__(kind)
        result.__dict__.update(module.__dict__)
        result.process_set = process_set  # type: ignore[assignment]
    done[module] = result
    for name, child in result._modules.items():  # named_children() leaves out the second name of a child
        if child is not None and (new := _converted(cls, child, process_set, done)) is not child:
            result._modules[name] = new
    return result


def _class_for(cls: Any, module: _BatchNorm) -> Any:
    kind: Any = type(module)
    if not parametrize.is_parametrized(module):
        return _synchronised(cls, kind)
    # torch has given this layer a class of its own, with properties for what is parametrized, and takes its first base
    # for the layer's class when the parametrizations are removed.
    own = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    return type(kind.__name__, (_synchronised(cls, kind.__bases__[0]),), own)


@functools.cache
def _synchronised(cls: Any, kind: Any) -> Any:
    """The class of the replacements for layers of class `kind`: `cls`, or for a subclass or a lazy layer one derived
    from both, in which what `kind` inherits from batch normalisation is what `cls` does."""
    if kind in _PLAIN:
        return cls

    # Pickle finds classes by name, and this one is made here
    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        state: Any = object.__reduce_ex__(self, 2)[2:]
        return (_blank, (cls, kind), *state)

    own: dict[str, Any] = {"__reduce_ex__": __reduce_ex__, "__module__": kind.__module__}
    if getattr(kind, "cls_to_become", None) is not None:  # a lazy layer's, once it has seen its first input
        own["cls_to_become"] = _synchronised(cls, kind.cls_to_become)
    elif kind.forward is not _BatchNorm.forward:
        own["forward"] = _checked(kind)
    return type(f"Sync{kind.__name__}", (kind, cls), own)


def _blank(cls: Any, kind: Any) -> Any:
    made = _synchronised(cls, kind)
    return made.__new__(made)


def _checked(kind: Any) -> Any:
    """The forward() of `kind`; Unsupported where it has computed statistics by itself, of this rank's batch."""

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["_not_reached"] = True
        output = kind.forward(self, *args, **kwargs)
        if self.__dict__.pop("_not_reached", None) and self.training:
            raise Unsupported(
                f"convert_sync_batchnorm: {kind.__module__}.{kind.__qualname__} has a forward() of its own that does "
                "not call super().forward(), so its statistics are those of this rank's batch alone. Call it there, "
                "or use hvd.SyncBatchNorm in the class."
            )
        return output

    return forward
