"""Residual networks of 18 layers with the argument `norm_layer`, for synthetic benchmarks."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, channels, out, stride, norm_layer):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False), norm_layer(out), nn.ReLU(inplace=True),
            nn.Conv2d(out, out, 3, 1, 1, bias=False), norm_layer(out),
        )  # fmt: skip
        self.shortcut = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), norm_layer(out))

    def forward(self, x):
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet18(weights=None, norm_layer=nn.BatchNorm2d, num_classes=1000):
    layers = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        norm_layer(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels = 64
    for out, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(channels, out, stride, norm_layer), Block(out, out, 1, norm_layer)]
        channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, num_classes))
