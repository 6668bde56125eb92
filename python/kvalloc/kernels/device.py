"""What a launch asks of the card, and whether there is one."""

import functools
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import triton

from kvalloc.errors import InvalidArgument

__all__ = ["INTERPRETED", "Card", "card_of", "current"]

# Triton decides at import, by the same variable, whether kernels are compiled or interpreted on the CPU.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on")


@dataclass(frozen=True, slots=True)
class Card:
    """A device, as far as launches are shaped by it.

    Attributes
    ----------
    arch : int
        Compute capability, 90 for 9.0.
    sms : int
        Multiprocessors.
    shared : int
        The most shared memory one block can have, in bytes.
    """

    arch: int
    sms: int
    shared: int

    @property
    def fp8(self) -> bool:
        """Whether the card converts fp8 itself; before 9.0 it is done bit by bit.

        8.9 could, but not to bfloat16 with every version of the compiler.
        """
        return self.arch >= 90


# Stands in for a card when kernels are interpreted: few multiprocessors, so that tiny shapes are split too,
# and the bit-by-bit fp8, since the interpreter's own conversion is not the card's.
_INTERPRETER = Card(arch=80, sms=4, shared=96 << 10)


@functools.cache
def _card(index: int) -> Card:
    major, minor = torch.cuda.get_device_capability(index)
    found = triton.runtime.driver.active.utils.get_device_properties(index)
    return Card(major * 10 + minor, found["multiprocessor_count"], found["max_shared_mem"])


def card_of(tensor: torch.Tensor) -> Card:
    """The card that a tensor lies on.

    Parameters
    ----------
    tensor : torch.Tensor
        Any.

    Returns
    -------
    Card

    Raises
    ------
    InvalidArgument
        If kernels can't reach the tensor.
    """
    if tensor.is_cuda:
        return _card(tensor.device.index)
    if INTERPRETED and tensor.device.type == "cpu":
        return _INTERPRETER
    raise InvalidArgument(
        f"the Triton kernels need tensors on a CUDA device, these are on {tensor.device}; on the CPU use "
        "kvalloc.kernels.reference or a TorchStore with device='cpu'"
    )


def current(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make a tensor's card the current one, which is where Triton launches.

    Parameters
    ----------
    tensor : torch.Tensor
        Any that `card_of` accepts.

    Returns
    -------
    context manager
    """
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
