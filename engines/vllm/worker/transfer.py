"""The worker's end of the weight link: buckets of the adapter's memory, as one of vLLM's backends."""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from engines.buckets import BucketContents, shared_tensor, unpacked
from engines.transfers import TransferEnd


@dataclass
class BucketInfo(BucketContents, WeightTransferUpdateInfo):
    """A bucket; `handle`: how to map its memory."""

    handle: list[Any]


class BucketTransfer(WeightTransferEngine[WeightTransferInitInfo, BucketInfo]):
    """Puts each bucket in place as it comes: the adapter lets nothing be generated before the last one. On a GPU,
    where they are quantised, and where a model has experts, vLLM's layerwise reload makes of a layer's weights what its
    kernels want, once all of them are there; else on a CPU, whose layers compute with plain weights, in place. Each of
    several workers gets all weights whole, of which the model's own loading takes its part."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = BucketInfo
    _trainer: TransferEnd | None = None

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """Do nothing: there is nobody to meet."""

    def join(self, path: str, data: bytes, number: int) -> str | None:
        """Become a receiver of the trainer, the first worker as this `number`: `engines.transfers.TransferEnd`."""
        self._trainer = self._trainer or TransferEnd()
        return self._trainer.join(path, data, number + get_tensor_model_parallel_rank(), self.device)

    def receive(self, version: int) -> tuple[str | None, bool]:
        """Receive all weights from the trainer. Returns why they did not arrive whole, and whether any were put."""
        assert self._trainer is not None, "receive before join"
        # a copy: a layer of which a part has come keeps it until the rest does
        failure = self._trainer.receive(version, self.model.load_weights, keeps=self._layerwise)
        self._synchronize()
        return failure, self._trainer.touched

    def start_weight_update(self) -> None:
        """Prepare the model for new weights, where it takes them layer by layer."""
        if self._layerwise:
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Returns when the bucket is here: then the sender may use its buffer again."""
        self.receive_weights(self.parse_update_info(update_info))
        self._synchronize()

    def receive_weights(self, update_info: BucketInfo) -> None:
        """Load a bucket's tensors into the model."""
        # a copy: a layer of which a part has come keeps it until the rest does
        buffer = shared_tensor(update_info.handle, update_info.size).to(self.device, copy=True)
        self.model.load_weights(unpacked(buffer, update_info))

    def finish_weight_update(self) -> None:
        """Finish layers whose weights have all come, and wait for the device."""
        if self._layerwise:
            finalize_layerwise_reload(self.model, self.model_config)
        self._synchronize()

    def abandon(self) -> None:
        """Give an update up that broke off: layers of which a part came forget it, and have what they had."""
        if self._layerwise:
            forget_partial_layers(self.model)
            finalize_layerwise_reload(self.model, self.model_config)

    @property
    def _layerwise(self) -> bool:
        return self.device.type != "cpu" or self.model_config.quantization is not None or self.model_config.is_moe

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def shutdown(self) -> None:
        """Do nothing: there is nothing to leave."""


def forget_partial_layers(model: torch.nn.Module) -> None:
    """Finishing a reload puts a layer's old weights back only where none of the new ones came; of those that are left
    over, the next reload would make a layer of two versions."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights.clear()
            info.load_numel = 0
