"""Which bytes of memory a tensor is: from any tensor to plain spans of storage, without copying where it can be
helped."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_PLAIN = (Tensor, torch.nn.Parameter)


class Span(NamedTuple):
    """`nbytes` bytes from byte `offset` of `storage` on `device`, elements of `dtype`; `address` is that of the first
    byte; `copied` if the storage is not the tensor's own."""

    storage: torch.UntypedStorage
    offset: int
    nbytes: int
    address: int
    device: torch.device
    dtype: torch.dtype
    copied: bool


def span(tensor: Tensor) -> Span:
    """The bytes that stand for a tensor. Call inside `quiet()`, with what `plain` returned or any plain tensor.

    - non-overlapping dense tensors, in whatever order their dimensions lie in memory: their storage, in storage order
      (`metadata` has the strides); no copy;
    - dimensions of stride 0 (`expand`): once;
    - gaps or overlaps (`x[:, ::2]`, `unfold`): a contiguous copy in logical order;
    - conjugate and negative bits are resolved, zero tensors made real;
    - several parts (sparse: indices, then values; nested and other wrappers: their inner tensors): one after the other.

    Raises ValueError for a tensor without data: meta, or its storage freed.
    """
    copied = False
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_nested:
        inner = parts(tensor)
        copied = len(inner) != 1
        tensor = _joined(inner) if copied else inner[0]
    if not tensor.is_contiguous():
        tensor, gaps = _dense(tensor)
        copied = copied or gaps
    if tensor.is_conj() or tensor.is_neg():
        tensor, copied = tensor.resolve_conj().resolve_neg(), True
    itemsize = tensor.element_size()
    nbytes = tensor.numel() * itemsize
    address = tensor.data_ptr()
    if nbytes and not address:
        if tensor.device.type == "meta" or not tensor._is_zerotensor():
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} on {tensor.device} has no data to fingerprint")
        tensor = tensor.clone()
        address = tensor.data_ptr()
    storage = tensor.untyped_storage()
    offset = tensor.storage_offset() * itemsize
    if offset + nbytes > storage.nbytes():
        raise ValueError(f"the storage of a tensor of shape {tuple(tensor.shape)} was freed or is too small")
    return Span(storage, offset, nbytes, address, tensor.device, tensor.dtype, copied)


def parts(tensor: Tensor) -> list[Tensor]:
    """The plain strided tensors of which a tensor is made, in a fixed order; [tensor] for a plain one.

    Sparse tensors give indices, then values, as they are stored (not coalesced). Wrapper subclasses (DTensor, nested
    and quantised ones) give what their own `__tensor_flatten__` names; subclasses with data of their own are taken as
    plain.
    """
    if tensor.layout is torch.sparse_coo:
        return [*parts(tensor._indices()), *parts(tensor._values())]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [*parts(tensor.crow_indices()), *parts(tensor.col_indices()), *parts(tensor.values())]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [*parts(tensor.ccol_indices()), *parts(tensor.row_indices()), *parts(tensor.values())]
    if type(tensor) not in _PLAIN and hasattr(tensor, "__tensor_flatten__"):
        if hasattr(tensor, "trigger_wait"):
            tensor.trigger_wait()
        inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        return [part for each in inner if isinstance(each, Tensor) for part in parts(each)]
    if tensor.is_nested:
        return [part for each in tensor.unbind() for part in parts(each)]
    if tensor.layout is not torch.strided:
        return [tensor.to_dense()]
    return [tensor.detach()]


def _dense(tensor: Tensor) -> tuple[Tensor, bool]:
    """A tensor whose storage, from its first element on, holds each of its elements exactly once; whether it is a
    copy."""
    dims = [(stride, dim) for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride())) if size != 1]
    for stride, dim in reversed(dims):
        if stride == 0:
            tensor = tensor.select(dim, 0)
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(tensor.shape, tensor.stride()) if n != 1):
        if stride != expected:
            return tensor.contiguous(), True
        expected *= size
    return tensor, False


def _joined(tensors: list[Tensor]) -> Tensor:
    """The bytes of several tensors in one flat uint8 tensor on the device of the first."""
    pieces = []
    for tensor in tensors:
        s = span(tensor)
        pieces.append(view(s, torch.uint8, 0, s.nbytes).to(tensors[0].device))
    return torch.cat(pieces)


def view(s: Span, dtype: torch.dtype, start: int, count: int) -> Tensor:
    """`count` elements of `dtype` from byte `start` of a span, flat, without a copy; the bytes must be aligned for
    it."""
    flat = torch.empty(0, dtype=dtype, device=s.device)
    return flat.set_(s.storage, (s.offset + start) // flat.element_size(), (count,), (1,))
