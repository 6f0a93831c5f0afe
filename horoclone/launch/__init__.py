"""Starts ranks, carries their output and ends them: horoclonerun, `horoclone`, horoclone.run.

This package imports no framework and no native code; rich, yaml and cloudpickle only where they are needed.
"""
