"""Run by every Python of an example: keras.datasets.mnist.load_data() reads mnist.npz of the working folder.

Keras checks the digest of the file that it downloads, so that no file of ours would do.
"""

import importlib.util
import os
import sys

MODULES = ("tf_keras.src.datasets.mnist", "keras.src.datasets.mnist")


class Finder:
    """Finds these modules as they are, and replaces one function when they have been loaded."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in MODULES:
            return None
        sys.meta_path.remove(Finder)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, Finder)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            module.load_data = load_data

        spec.loader.exec_module = exec_module
        return spec


def load_data(path="mnist.npz"):
    import numpy as np

    with np.load("mnist.npz") as data:
        return (data["x_train"], data["y_train"]), (data["x_test"], data["y_test"])


if os.path.exists("mnist.npz"):
    sys.meta_path.insert(0, Finder)
