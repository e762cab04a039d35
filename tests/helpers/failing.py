"""What fails in a backward, for tests of how an exception there reaches the caller."""

import torch


class FailsBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        raise ArithmeticError("planted")
