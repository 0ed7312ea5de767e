"""Bytes of tensors that are alive in this process, counted operation by operation."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class CountedMemory(TorchDispatchMode):
    """Counts storages from the operation that returns them to when they are freed, or resized: so FSDP2 frees what it
    gathered. What a kernel allocates for itself alone is not seen.

    bytes: alive now. peak: the most since `forget_peak`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._sizes: dict[int, int] = {}

    def forget_peak(self) -> None:
        self.peak = self.bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_iter(made):
            local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor, its shard here
            if isinstance(local, torch.Tensor) and local.device.type != "meta":
                self._see(local.untyped_storage())
        return made

    def __enter__(self) -> "CountedMemory":
        plain = self._plain = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            done = plain(storage, size)
            if storage._cdata in self._sizes:
                self._set(storage._cdata, size)
            return done

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._plain  # type: ignore[method-assign]

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._forget, key)
        self._set(key, storage.nbytes())

    def _set(self, key: int, size: int) -> None:
        self.bytes += size - self._sizes[key]
        self._sizes[key] = size
        self.peak = max(self.peak, self.bytes)

    def _forget(self, key: int) -> None:
        self.bytes -= self._sizes.pop(key)
