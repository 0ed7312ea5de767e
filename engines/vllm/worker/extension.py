"""The module that vLLM's worker imports before it makes the model (`worker_extension_cls`)."""

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.platforms import current_platform

from engines.vllm.options import BACKEND
from engines.vllm.worker.transfer import BucketTransfer

WeightTransferEngineFactory.register_engine(BACKEND, BucketTransfer)
if current_platform.is_cpu():
    from engines.vllm.worker import cpu_layers

    cpu_layers.install()


class Extension:
    """Methods that vLLM's worker gets besides its own."""

    _weight_update_active: bool
    vllm_config: VllmConfig
    weight_transfer_engine: BucketTransfer

    def join_transfer(self, path: str, data: bytes, number: int) -> str | None:
        """Become a receiver of the trainer: `BucketTransfer.join`."""
        return self.weight_transfer_engine.join(path, data, number)

    def receive_weights(self, version: int) -> tuple[str | None, bool]:
        """Receive from the trainer, in an update that was started: `BucketTransfer.receive`."""
        with set_current_vllm_config(self.vllm_config):
            return self.weight_transfer_engine.receive(version)

    def abandon_weight_update(self) -> None:
        """End an update that broke off; the next one may start."""
        self._weight_update_active = False
        with set_current_vllm_config(self.vllm_config):
            self.weight_transfer_engine.abandon()
