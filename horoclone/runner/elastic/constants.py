"""Under Horovod's name: the text with which an elastic job ends that has begun too many generations."""

RESET_LIMIT_EXCEEDED_MESSAGE = (
    "Horovod was shutdown because number of resets during elastic job exceeded limit: {}"
)
