"""Checkpoint files as streams of tensors: torch.save's archives, safetensors, folders of torch.distributed.checkpoint.

Nothing is loaded whole and no code from a file runs. Names are those of `contents`, so that they fit the sidecar.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from sdcrun.shim import fingerprint
from sdcrun.shim.checkpoints import inert
from sdcrun.shim.checkpoints.contents import leaves

BLOCK = 4 << 20
LARGEST_COPY = 256 << 20
_SAFETENSORS = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "C64": "complex64", "U16": "uint16", "U32": "uint32",
    "U64": "uint64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip


class Damaged(ValueError):
    """The file cannot be what was written: the text says what is broken in it."""


@dataclass
class Stored:
    """One tensor in a file: `start` and `extent` are the bytes from its first to its last element, in file `path`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    path: str
    start: int
    extent: int

    @property
    def dense(self) -> bool:
        """Whether the bytes from the first to the last element are exactly the tensor's elements."""
        return self.extent == _numel(self.shape) * itemsize(self.dtype)

    def pieces(self) -> Iterator[bytes]:
        """The bytes that stand for the tensor, in the order in which a fingerprint reads them."""
        if self.dense:
            yield from _stream(self.path, self.start, self.extent)
            return
        if self.extent > LARGEST_COPY:
            raise MemoryError(f"{self.name} is spread over {self.extent} bytes")
        data = bytearray(b"".join(_stream(self.path, self.start, self.extent)))
        flat = torch.frombuffer(data, dtype=getattr(torch, self.dtype))
        view = flat.as_strided(self.shape, self.strides)
        for dim, stride in enumerate(self.strides):
            if stride == 0 and self.shape[dim] > 1:
                view = view.narrow(dim, 0, 1)
        copy = view.contiguous().view(-1).view(torch.uint8)
        for start in range(0, copy.numel(), BLOCK):
            yield ctypes.string_at(copy.data_ptr() + start, min(BLOCK, copy.numel() - start))

    def fingerprint(self) -> tuple[int, int]:
        """FP1 of the tensor as it lies in the file."""
        return fingerprint.fingerprint_bytes(self.pieces())


@dataclass
class Reading:
    """What a file holds. `opaque` are names of tensors that are not taken apart here, `strange` whether there are
    objects of other classes (whose tensors may have other names), `files` all files that were looked at."""

    tensors: dict[str, Stored] = field(default_factory=dict)
    opaque: list[str] = field(default_factory=list)
    strange: bool = False
    files: list[str] = field(default_factory=list)

    def frame(self) -> str:
        """A digest of all bytes that belong to no tensor: the archive's headers, structure and plain values."""
        digest = hashlib.blake2b(digest_size=16)
        for path in self.files:
            size = os.path.getsize(path)
            digest.update(struct.pack("<q", size))
            at = 0
            for stored in sorted((t for t in self.tensors.values() if t.path == path), key=lambda t: t.start):
                for piece in _stream(path, at, max(0, stored.start - at)):
                    digest.update(piece)
                at = max(at, stored.start + stored.extent)
            for piece in _stream(path, at, max(0, size - at)):
                digest.update(piece)
        return digest.hexdigest()


def itemsize(dtype: str) -> int:
    """Bytes of one element."""
    return torch.empty(0, dtype=getattr(torch, dtype)).element_size()


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _stream(path: str, start: int, count: int) -> Iterator[bytes]:
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while count > 0:
            piece = file.read(min(BLOCK, count))
            if not piece:
                raise Damaged(f"{path} ends too early")
            count -= len(piece)
            yield piece


def read(path: str) -> Reading:
    """Looks into a checkpoint. Raises Damaged for one that is broken, NotImplementedError for a format that is not
    read, OSError."""
    if os.path.isdir(path):
        return _read_folder(path)
    with open(path, "rb") as file:
        start = file.read(9)
    if start[:4] == b"PK\x03\x04":
        return _read_archive(path)
    if len(start) == 9 and start[8:9] == b"{":
        return _read_safetensors(path)
    if start[:1] == b"\x80":
        raise NotImplementedError("torch.save's format from before 1.6")
    raise Damaged("it is neither an archive of torch.save nor safetensors" if start else "it is empty")


# -- torch.save ---------------------------------------------------------------------------------------------------


def _read_archive(path: str) -> Reading:
    with open(path, "rb") as file:
        contents, records = _archive(file, 0)
    reading = Reading(files=[path])
    for leaf in _leaves(contents, reading):
        if isinstance(leaf.tensor, inert.Opaque):
            reading.opaque.append(leaf.name)
        else:
            reading.tensors[leaf.name] = _placed(leaf.name, leaf.tensor, records, path)
    return reading


def _archive(file: Any, base: int) -> tuple[Any, dict[str, tuple[int, int]]]:
    """(structure, key of each storage -> (start, size) in bytes) of an archive whose first byte is byte `base`."""
    try:
        archive = zipfile.ZipFile(file)
        names = archive.namelist()
        head = next((name for name in names if name.endswith("/data.pkl")), None)
        if head is None:
            raise Damaged("the archive has no data.pkl")
        prefix = head[: -len("data.pkl")]
        if prefix + "byteorder" in names and archive.read(prefix + "byteorder") != b"little":
            raise NotImplementedError("bytes in big-endian order")
        structure = archive.read(head)
        records = {}
        for info in archive.infolist():
            if info.filename.startswith(prefix + "data/"):
                if info.compress_type != zipfile.ZIP_STORED:
                    raise NotImplementedError("a compressed archive")
                file.seek(info.header_offset)
                header = file.read(30)
                if header[:4] != b"PK\x03\x04":
                    raise Damaged(f"the record {info.filename} has no header")
                name, extra = struct.unpack("<HH", header[26:30])
                start = base + info.header_offset + 30 + name + extra
                records[info.filename[len(prefix) + 5 :]] = (start, info.file_size)
    except (Damaged, NotImplementedError):
        raise
    except Exception as error:  # zipfile raises whatever it trips over
        raise Damaged(f"the archive is broken: {error}") from None
    try:
        return inert.read(structure), records
    except pickle.UnpicklingError as error:
        raise Damaged(f"its structure cannot be read: {error}") from None


def _leaves(contents: Any, reading: Reading) -> list:
    def unfold(value: Any) -> Any:
        """A stand-in as the container that it stands for."""
        if not isinstance(value, inert.Stand):
            return None
        reading.strange = True
        state = value.state
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state = {**(state[0] or {}), **state[1]}
        return value.entries or value.items or (state if isinstance(state, dict) else None)

    return leaves(contents, lambda value: isinstance(value, (inert.TensorRef, inert.Opaque)), unfold)


def _placed(name: str, tensor: inert.TensorRef, records: dict[str, tuple[int, int]], path: str) -> Stored:
    if tensor.storage.key not in records:
        raise Damaged(f"{name} has no record data/{tensor.storage.key}")
    start, size = records[tensor.storage.key]
    width = itemsize(tensor.dtype)
    extent = 0
    if _numel(tensor.shape):
        extent = width * (1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.strides)))
    if tensor.offset * width + extent > size:
        raise Damaged(f"{name} reaches past the end of its record")
    return Stored(name, tensor.dtype, tensor.shape, tensor.strides, path, start + tensor.offset * width, extent)


# -- safetensors --------------------------------------------------------------------------------------------------


def _read_safetensors(path: str) -> Reading:
    reading = Reading(files=[path])
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > os.path.getsize(path):
            raise Damaged("its header is longer than the file")
        try:
            header = json.loads(file.read(length))
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                dtype, shape = _SAFETENSORS.get(entry["dtype"]), tuple(entry["shape"])
                if dtype is None:
                    reading.opaque.append(name)
                    continue
                first, last = entry["data_offsets"]
                stored = Stored(name, dtype, shape, _row_major(shape), path, 8 + length + first, last - first)
                if not stored.dense or 8 + length + last > os.path.getsize(path):
                    raise Damaged(f"{name} does not fit its place")
                reading.tensors[name] = stored
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, Damaged):
                raise
            raise Damaged(f"its header cannot be read: {error}") from None
    return reading


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


# -- torch.distributed.checkpoint -----------------------------------------------------------------------------------


class _Region(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, path: str, start: int, length: int) -> None:
        self._file = open(path, "rb")
        self._start, self._length, self._at = start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        self._file.seek(self._start + self._at)
        data = self._file.read(left if size is None or size < 0 else min(size, left))
        self._at += len(data)
        return data

    def close(self) -> None:
        self._file.close()
        super().close()


def _read_folder(folder: str) -> Reading:
    """Tensors that lie in one piece; those in shards are opaque. Names are the flattened ones of the planner."""
    try:
        with open(os.path.join(folder, ".metadata"), "rb") as file:
            metadata = inert.read(file.read())
    except FileNotFoundError:
        raise Damaged("the folder has no .metadata: the save did not end") from None
    except pickle.UnpicklingError as error:
        raise Damaged(f"its .metadata cannot be read: {error}") from None
    reading = Reading(strange=True, files=sorted(entry.path for entry in os.scandir(folder) if entry.is_file()))
    try:
        for index, info in _attributes(metadata)["storage_data"].items():
            where, place = _attributes(index), _attributes(info)
            name, offset = where["fqn"], where.get("offset")
            if offset is not None and any(_numbers(offset)):
                reading.opaque.append(name)
                continue
            path = os.path.join(folder, str(place["relative_path"]))
            with _Region(path, int(place["offset"]), int(place["length"])) as region:
                contents, records = _archive(region, int(place["offset"]))
            if isinstance(contents, inert.TensorRef):
                reading.tensors[name] = _placed(name, contents, records, path)
    except Damaged:
        raise
    except FileNotFoundError as error:
        raise Damaged(f"{error.filename} is missing") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NotImplementedError(f"metadata of another form ({error})") from None
    return reading


def _attributes(stand: Any) -> dict[str, Any]:
    state = stand.state if isinstance(stand, inert.Stand) else None
    if isinstance(state, tuple) and len(state) == 2:
        state = {**(state[0] or {}), **(state[1] or {})}
    if not isinstance(state, dict):
        raise TypeError("an object without attributes")
    return state


def _numbers(offset: Any) -> list[int]:
    if isinstance(offset, inert.Stand):
        offset = offset.args[0] if offset.args else offset.items
    return [int(number) for number in offset]
