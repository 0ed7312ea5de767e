"""What a worker of a cluster printed, on its way to the driver's folder."""

from __future__ import annotations

from pathlib import Path

from harness.runtime.ray_worker import take_end


def test_of_a_long_output_the_end_is_taken_and_what_is_left_out_is_said(tmp_path: Path) -> None:
    file = tmp_path / "worker.log"
    for printed, taken in ((b"whole", b"whole"), (b"beginning end", b"[8 bytes before this were left out]\ng end")):
        file.write_bytes(printed)
        assert take_end(file, 5) == taken
        assert not file.exists()
