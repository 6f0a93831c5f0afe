"""The sampler of elastic training, which is not supported yet: it raises Unsupported on use."""

from horoclone.stand_ins import ELASTIC, stand_in

ElasticSampler = stand_in(
    "hvd.elastic.ElasticSampler",
    f"{ELASTIC} torch.utils.data.distributed.DistributedSampler(num_replicas=hvd.size(), rank=hvd.rank()) shares out "
    "the data of such a job.",
)

__all__ = ["ElasticSampler"]
