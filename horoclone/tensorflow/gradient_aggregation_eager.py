"""A class that scripts import from horovod.tensorflow.gradient_aggregation_eager."""

from __future__ import annotations

from horoclone.process_sets import ProcessSet, global_process_set
from horoclone.tensorflow.gradient_aggregation import LocalGradientAggregationHelper, Reduce


class LocalGradientAggregationHelperEager(LocalGradientAggregationHelper):
    """As LocalGradientAggregationHelper; before the last pass compute_gradients() gives the sums so far."""

    gives_sums = True

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Reduce,
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
    ) -> None:
        super().__init__(
            backward_passes_per_step,
            allreduce_func,
            sparse_as_dense,
            average_aggregated_gradients,
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
        )
