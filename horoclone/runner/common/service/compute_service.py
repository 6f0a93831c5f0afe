"""Under Horovod's name: where the processes of a tf.data service meet. Its names raise Unsupported on use."""

from horoclone.stand_ins import any_name

__getattr__ = any_name(
    __name__,
    "See horovod.tensorflow.data: python -m horovod.tensorflow.data.compute_worker starts such a service.",
)
