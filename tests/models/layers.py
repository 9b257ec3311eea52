"""The multilayer perceptron that most models of the zoo end in."""

from itertools import pairwise

from torch import nn


def mlp(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers through `widths` with an activation between every two, none at the end."""
    layers: list[nn.Module] = []
    for width, following in pairwise(widths):
        layers += [nn.Linear(width, following), activation()]
    return nn.Sequential(*layers[:-1])
