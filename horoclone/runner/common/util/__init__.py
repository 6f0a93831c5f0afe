"""Under Horovod's name: see horoclone.runner."""
