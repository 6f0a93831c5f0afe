"""The sampler of elastic training as one of torch's; it works in every job."""

from __future__ import annotations

import torch

from horoclone.elastic import sampler

__all__ = ["ElasticSampler"]


class ElasticSampler(sampler.ElasticSampler, torch.utils.data.Sampler[int]):
    __doc__ = sampler.ElasticSampler.__doc__
