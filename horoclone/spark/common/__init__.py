"""Under Horovod's name: what the estimators for PyTorch and for Keras have in common."""
