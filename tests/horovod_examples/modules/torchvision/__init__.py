"""Stands for torchvision where that is not installed: only what Horovod's examples take from it."""
