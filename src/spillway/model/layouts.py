"""In which order a tensor's dimensions lie in memory: a block may view what it is given only as that allows."""

import torch

Order = tuple[int, ...]


def order_of(tensor: torch.Tensor) -> Order:
    """Its dimensions, the outermost first. In their own order where it is contiguous or several places are one."""
    strides = tensor.stride()
    if tensor.is_contiguous() or 0 in strides:
        return tuple(range(tensor.dim()))
    return tuple(sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim)))


def inverse(order: Order) -> Order:
    """What undoes a permutation."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def is_plain(order: Order) -> bool:
    """Whether nothing is permuted."""
    return order == tuple(range(len(order)))
