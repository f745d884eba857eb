"""A small 3D convolutional network as an encoder: any `nn.Module` on images `[B, 1, D, H, W]` is one."""

import torch
from torch import nn


class SmallCNN(nn.Module):
    """Images of intensities 0 to 1 -> a feature map `[B, 16, D/4, H/4, W/4]`, whose positions become tokens."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(1, 8, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv3d(8, 16, 3, stride=2, padding=1),
        )

    def forward(self, images):
        return self.layers(images - 0.5)


def create_encoder(path):
    """The network with the weights of the file `path`; None: with initial weights, the baseline of its row."""
    network = SmallCNN()
    if path is not None:
        network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return network
