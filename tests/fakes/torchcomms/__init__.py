"""See _comms.py."""

from torchcomms._comms import (  # noqa: F401
    BatchSendRecv,
    CommOptions,
    P2POp,
    P2POpType,
    RedOpType,
    ReduceOp,
    TorchComm,
    TorchWork,
    new_comm,
    register_backend,
)
