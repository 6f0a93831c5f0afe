"""Under Horovod's name: what runs on other hosts. Its names raise Unsupported on use."""

from horoclone.stand_ins import any_name

__getattr__ = any_name(
    __name__,
    "Ranks of horoclone meet through their launcher; start them with horoclonerun, horoclone.run(), mpirun or srun.",
)
