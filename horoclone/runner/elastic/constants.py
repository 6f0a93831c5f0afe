"""Under Horovod's name: the text with which an elastic job ends that has begun too many generations."""

from horoclone.bootstrap.roster import RESET_LIMIT_TEXT

RESET_LIMIT_EXCEEDED_MESSAGE = RESET_LIMIT_TEXT
