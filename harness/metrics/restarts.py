"""What is written down of roles that died and were started again."""

from __future__ import annotations

import msgspec


class Restart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """roles: that were lost; why: how they died; done: what was done about it; at_s: when that was, on the run's clock;
    took_s: until they were at work again."""

    roles: list[str]
    why: str
    done: str
    at_s: float
    took_s: float

    @property
    def line(self) -> str:
        return f"lost {', '.join(self.roles)}: {self.why}; {self.done}, at work again after {self.took_s:.1f} s"
