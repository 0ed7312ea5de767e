"""Every way that weights travel, from a trainer's process to an engine's: what arrives, and bytes a second."""

from collections.abc import Iterator
from multiprocessing.connection import Connection

import torch

from harness.acceptance.gpu_gate.part import GateSetting
from harness.acceptance.gpu_gate.parts.common import QWEN_HALF_B, SMALL, per_second, seconds_of
from harness.acceptance.gpu_gate.parts.worlds import forking
from harness.acceptance.gpu_gate.results import Check, Figure
from harness.calibration.profile.timing import wait_for
from harness.calibration.profile.transfers import timed_arrival, timed_sending
from harness.config import ModelConfig
from harness.config.transports import connected_transports, transport_of
from harness.rpc.sockets import forget, new_path
from harness.weight_sync.plan import plan_transfer
from harness.weight_sync.process_group import GroupOffer, open_rendezvous

_TIMEOUT_S = 60.0
_BUCKET_BYTES = 64 << 20
_VERSIONS = (1, 2, 3)  # the first is not timed
_HOST = torch.device("cpu")


def run(setting: GateSetting) -> Iterator[Check]:
    """Sender and receiver have a GPU each where there are two, and one together where there is one."""
    gpus = torch.cuda.device_count() if setting.gpu else 0
    model = QWEN_HALF_B if setting.gpu else SMALL
    here, there = setting.device, torch.device("cuda", 1) if gpus > 1 else setting.device
    yield _local(model, here)
    way = "from a GPU to another" if gpus > 1 else "from a GPU and to it" if gpus else "between processes"
    for name in connected_transports():
        transport = transport_of(name)
        if transport.over == "device" and gpus < 2:
            why = " (NCCL joins no two ranks of one GPU)" if gpus else ""
            yield _travelled(f"{name}, over Gloo{why}", name, model, _HOST, _HOST)
            continue
        if transport.one_host and gpus:
            yield _travelled(f"{name}, in the memory of one GPU", name, model, here, here, within_gpu=True)
        over = ", over NCCL" if transport.over == "device" else ", through the host" if gpus else ""
        yield _travelled(f"{name}, {way}{over}", name, model, here, there)


def weights(model: ModelConfig, version: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Tensors of as many numbers as a decoder of these sizes has, other ones in each version; made on the device."""
    attention, dtype = model.heads * model.head_dim, getattr(torch, model.dtype)
    shapes = {"embedding": (model.vocabulary, model.hidden)}
    for layer in range(model.layers):
        shapes |= {
            f"{layer}.q": (attention, model.hidden),
            f"{layer}.kv": (2 * model.kv_heads * model.head_dim, model.hidden),
            f"{layer}.o": (model.hidden, attention),
            f"{layer}.up": (2 * model.ff, model.hidden),
            f"{layer}.down": (model.hidden, model.ff),
            f"{layer}.norms": (2, model.hidden),
        }
    made = {}
    for number, (name, shape) in enumerate(shapes.items()):
        counted = torch.arange(shape[0] * shape[1], device=device, dtype=torch.int32)
        made[name] = ((counted * (2 * version + 1) + number) % 251).to(dtype).view(shape)
    return made


def _local(model: ModelConfig, device: torch.device) -> Check:
    """A colocated engine that copies what the trainer beside it has."""
    sent, arrived = weights(model, 1, device), weights(model, 0, device)

    def copy() -> None:
        for name, tensor in sent.items():
            arrived[name].copy_(tensor)

    seconds = seconds_of(copy, device)
    size = sum(tensor.nbytes for tensor in sent.values())
    same = all(torch.equal(arrived[name], tensor) for name, tensor in sent.items())
    return Check("local, copied on the device", f"{size / 1e6:.0f} MB, {per_second(size, seconds, 'B')}", same)


def _travelled(
    name: str, transport: str, model: ModelConfig, here: torch.device, there: torch.device, *, within_gpu: bool = False
) -> Check:
    sample = weights(model, 0, here)
    plan = plan_transfer(sample.items(), _BUCKET_BYTES)
    del sample
    place = new_path()
    rendezvous, store = open_rendezvous(place, 1, _TIMEOUT_S)
    source, offer = transport_of(transport).with_ends().offer(plan, rendezvous, here, within_gpu=within_gpu)
    context = forking(__name__)
    answers, theirs = context.Pipe(duplex=False)
    receiver = context.Process(target=_receive, args=(offer, model, there, theirs), daemon=True)
    receiver.start()
    theirs.close()
    sender = source.sender(store, here)
    offer.withdraw()
    taken, wrong = [], []
    for version in _VERSIONS:
        sent = weights(model, version, here)
        wait_for(here)
        start, _, _ = timed_sending(sender, sent, here, version)
        seconds, named = _answer(answers, start, name)
        taken.append(seconds)
        wrong += named
    receiver.join(_TIMEOUT_S)
    forget(place)
    size = sum(tensor.nbytes for tensor in sent.values())
    said = f"{size / 1e6:.0f} MB, {per_second(size, min(taken[1:]), 'B')} from the first byte to the last"
    figure = Figure(f"weights by {name}", size / min(taken[1:]), "B/s")
    return Check(name, said + (f"; damaged: {', '.join(sorted(set(wrong)))}" if wrong else ""), not wrong, (figure,))


def _answer(answers: Connection, start: float, name: str) -> tuple[float, list[str]]:
    """Seconds until all had arrived, and which tensors are not what was sent."""
    if not answers.poll(_TIMEOUT_S):
        raise TimeoutError(f"{name}: the receiver did not answer within {_TIMEOUT_S:.0f} s")
    arrived_at, wrong = answers.recv()
    return arrived_at - start, wrong


def _receive(offer: GroupOffer, model: ModelConfig, device: torch.device, answers: Connection) -> None:
    """Receive weights into memory of its own, as an engine does."""
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    receiver = offer.receiver(0, device)
    own = weights(model, 0, device)
    for version in _VERSIONS:
        _, _, arrived_at = timed_arrival(receiver, own, device, version)
        expected = weights(model, version, device)
        answers.send((arrived_at, [name for name, tensor in expected.items() if not torch.equal(own[name], tensor)]))
