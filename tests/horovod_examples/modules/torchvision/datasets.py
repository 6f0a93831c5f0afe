"""MNIST from the files that torchvision's loader would read, and nothing that downloads."""

import os

import numpy as np
import torch


class MNIST(torch.utils.data.Dataset):
    def __init__(self, root, train=True, transform=None, target_transform=None, download=False):
        name = os.path.join(root, "MNIST", "raw", "train" if train else "t10k")
        with open(f"{name}-images-idx3-ubyte", "rb") as file:
            content = file.read()
        shape = np.frombuffer(content, ">u4", 3, 4)
        self.images = np.frombuffer(content, np.uint8, offset=16).reshape(shape)
        with open(f"{name}-labels-idx1-ubyte", "rb") as file:
            self.labels = np.frombuffer(file.read(), np.uint8, offset=8)
        self.transform = transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        return (self.transform(image) if self.transform else image), int(self.labels[index])
