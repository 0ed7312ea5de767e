"""A small model, a device and factors in round numbers."""

from harness.config import DeviceConfig, LengthsConfig, ModelConfig, RooflineConfig

MODEL = ModelConfig("small", 8, 2, 2, 1, 4, 16, 10, False, 100, dtype="bfloat16")
DEVICE = DeviceConfig(
    name="device", flops=1000.0, memory_bytes_per_s=100.0, memory_bytes=100_000.0, link_bytes_per_s=50.0,
    network_bytes_per_s=5.0, host_bytes_per_s=20.0, per_node=4, host_memory_bytes=1e6, source="made up",
)  # fmt: skip
FACTORS = RooflineConfig(
    name="factors", kind="roofline", forward_share=0.5, train_share=0.25, decode_share=0.5, memory_share=0.5,
    network_share=0.5, host_share=0.5, overlap=0.0, latency_s=0.0, kv_share=0.9, kv_share_colocated=0.5,
    colocated_train_factor=2.0, decode_step_s=1.0, call_s=0.25, sync_s=0.125, offload_s=3.0, reload_s=4.0,
    reward_s_per_sample=0.0, prompt_tokens=10, lengths=LengthsConfig(kind="constant", mean=20.0, cap=40),
)  # fmt: skip
