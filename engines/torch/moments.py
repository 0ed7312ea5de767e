"""AdamW's two moments of each parameter, and where they rest while they are not needed: float32, 8 bytes a parameter of
a rank.

They are needed by a step alone. Of device memory a rank holds, in bytes for each parameter of its shards:

| `training.optimizer_offload` | while it computes gradients, scores or sends | in a step |
|---|---|---|
| none | 4 master weights + 4 gradients + 8 moments | 16 |
| between_phases | 4 + 4 | 16: all moments come, and go |
| always | 4 + 4 | 8, and 8 for the parameter of which it is the turn |

The arithmetic is that of the device in any case, in the same order: no bit of a result depends on this.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor

from engines.device_memory import give_back
from engines.host_memory import host_buffers
from engines.torch.first_weights import local_part
from harness.config import OptimizerOffload

_NAMES = ("exp_avg", "exp_avg_sq")


class Moments:
    """The moments of one optimizer. They rest on a host whose memory is pinned, where the device is a GPU; on a CPU
    they are copied all the same, so that it is the same code, and nothing is won."""

    def __init__(self, optimizer: torch.optim.AdamW, offload: OptimizerOffload, device: torch.device) -> None:
        self._optimizer, self._offload, self._device = optimizer, offload, device
        self._parameters: Sequence[torch.Tensor] = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        self._resting: dict[torch.Tensor, dict[str, torch.Tensor]] = {}  # by parameter: on the host, kept for reuse
        self._away: set[torch.Tensor] = set()

    def step(self) -> None:
        """`optimizer.step()`, with the moments where it reads them.

        They are made by the first step, and stay: in blocks of their own, not in corners of those of activations, which
        could then never be given back.
        """
        if not self._optimizer.state:
            give_back(self._device)
        if self._offload != "always":
            with self.on_device():
                self._optimizer.step()
            return
        gradients = {parameter: parameter.grad for parameter in self._parameters}
        for parameter in self._parameters:
            parameter.grad = None
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
            self._fetch(parameter)
            self._optimizer.step()
            self._put_away(parameter)
            parameter.grad = None
        self._settle()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Keep all of them on the device inside of this."""
        for parameter in self._parameters:
            self._fetch(parameter)
        try:
            yield
        finally:
            if self._offload != "none":
                for parameter in self._parameters:
                    self._put_away(parameter)
                self._settle()

    def _fetch(self, parameter: torch.Tensor) -> None:
        if parameter not in self._away:
            return
        self._away.remove(parameter)
        for name, resting in self._resting[parameter].items():
            moment = resting.to(self._device, non_blocking=True, copy=True)
            if isinstance(parameter, DTensor):
                mesh, placements, shape = parameter.device_mesh, parameter.placements, parameter.shape
                moment = DTensor.from_local(
                    moment, mesh, placements, run_check=False, shape=shape, stride=parameter.stride()
                )
            self._optimizer.state[parameter][name] = moment

    def _put_away(self, parameter: torch.Tensor) -> None:
        """Move a parameter's moments to the host; before the first step there are none."""
        state = self._optimizer.state[parameter]
        if _NAMES[0] not in state:
            return
        locals_ = {name: local_part(state.pop(name)) for name in _NAMES}
        if not self._resting:
            self._resting = self._places()
        for name, local in locals_.items():
            self._resting[parameter][name].copy_(local, non_blocking=True)
        self._away.add(parameter)

    def _places(self) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """Memory of the host for the moments of every parameter, float32 as it."""
        locals_ = [local_part(parameter) for parameter in self._parameters for _ in _NAMES]
        sizes = [local.numel() * local.itemsize for local in locals_]
        buffers = iter(host_buffers(sizes, pinned=self._device.type == "cuda"))
        return {
            parameter: {name: next(buffers).view(parameter.dtype).view(local_part(parameter).shape) for name in _NAMES}
            for parameter in self._parameters
        }

    def _settle(self) -> None:
        """Wait until copies are over."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
