import asyncio
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from harness.weight_sync.membership import Fleet, Membership, MembershipConflict, UnknownMember
from tests.support.examples import examples
from tests.support.role_setting import settle

NAMES = ("rollout[0]", "rollout[1]", "actor_fwd[0]")


def joined(*names: str) -> Membership:
    membership = Membership()
    for name in names:
        membership.join(name)
    return membership


def test_the_epoch_changes_with_those_who_take_part_and_not_with_what_they_hold() -> None:
    membership = joined("a", "b")
    epochs = [membership.epoch]
    membership.set_version("a", 3)
    membership.seen("b", 2, now=1.0)
    assert membership.epoch == epochs[-1]
    for change in (lambda: membership.join("c"), lambda: membership.mark_lost("a", "why")):
        change()
        epochs.append(membership.epoch)
    assert epochs == sorted(set(epochs))


def test_a_lost_member_is_on_record_with_its_old_version_and_takes_part_again_only_when_it_joins() -> None:
    membership = joined("a", "b")
    membership.set_version("a", 4)
    membership.mark_lost("a", "its link broke")
    assert membership.of("a").trouble == "its link broke" and membership.of("a").version == 4
    assert membership.seen("a", 4, now=9.0).health == "lost"
    assert membership.ranks == {"b": 1}
    membership.join("a", version=4)
    assert membership.ranks == {"a": 1, "b": 2} and membership.of("a").trouble == ""


def test_a_member_that_is_silent_for_too_long_is_named_and_well_again_when_it_is_heard_of() -> None:
    membership = joined("a", "b", "c")
    membership.seen("b", 0, now=5.0)
    membership.mark_lost("c", "gone")
    assert membership.mark_silent(now=10.0, after_s=10.0) == []
    assert membership.mark_silent(now=10.1, after_s=10.0) == ["a"]
    assert membership.ranks == {"a": 1, "b": 2}, "silence alone loses no member: a computation may be long"
    membership.seen("a", 1, now=11.0)
    assert membership.mark_silent(now=11.0, after_s=10.0) == []


def test_nothing_can_be_recorded_of_an_unknown_member() -> None:
    membership = joined("a")
    for record, told in ((membership.mark_lost, [""]), (membership.seen, [1, 0.0]), (membership.set_version, [1])):
        with pytest.raises(UnknownMember, match="'b' is no member"):
            record("b", *told)  # type: ignore[operator]
    assert membership.ranks == {"a": 1}


class AnyHistory(RuleBasedStateMachine):
    """Against a plain dict; and a membership made anew is the same once all have joined it."""

    def __init__(self) -> None:
        super().__init__()
        self.membership, self.held = Membership(), dict[str, int]()
        self.lost: set[str] = set()

    @rule(name=st.sampled_from(NAMES), version=st.integers(0, 5))
    def join(self, name: str, version: int) -> None:
        self.membership.join(name, version=version)
        self.held[name] = version
        self.lost.discard(name)

    @rule(name=st.sampled_from(NAMES), version=st.integers(0, 5))
    def take(self, name: str, version: int) -> None:
        if name in self.held:
            self.membership.set_version(name, version)
            self.held[name] = version

    @rule(name=st.sampled_from(NAMES))
    def lose(self, name: str) -> None:
        if name in self.held:
            self.membership.mark_lost(name, "why")
            self.lost.add(name)

    @rule()
    def restart(self) -> None:
        before, self.membership = self.membership, Membership()
        for member in before.members:
            if member.health != "lost":
                self.membership.join(member.name, version=member.version)
        self.held = {name: version for name, version in self.held.items() if name not in self.lost}
        self.lost.clear()

    @invariant()
    def it_knows_what_each_member_holds(self) -> None:
        assert self.membership.versions == self.held
        assert set(self.membership.ranks) == set(self.held) - self.lost
        assert sorted(self.membership.ranks.values()) == list(range(1, len(self.membership.ranks) + 1))


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=examples(60), stateful_step_count=20)


def test_an_engine_leaves_between_two_transfers_and_comes_back_with_the_weights_of_a_later_one() -> None:
    membership = joined("a", "b")
    epoch = membership.epoch
    membership.request("b", "leave")
    assert membership.working == ["a", "b"] and membership.epoch == epoch, "not before a transfer begins"
    with pytest.raises(MembershipConflict, match="a cannot leave: no engine would be left"):
        membership.request("a", "leave")
    assert [member.name for member in membership.begin_transfer()] == ["b"]
    assert membership.working == ["a"] and membership.ranks == {"a": 1} and membership.epoch > epoch
    with pytest.raises(MembershipConflict, match="b cannot join: it is leaving"):
        membership.request("b", "join")
    membership.mark_away("b")
    with pytest.raises(MembershipConflict, match="b cannot leave: it is away"):
        membership.request("b", "leave")
    membership.request("b", "join")
    assert membership.begin_transfer()[0].health == "joining"
    assert membership.working == ["a"] and membership.ranks == {"a": 1, "b": 2}
    assert membership.received("b", 3) and not membership.received("b", 4)
    assert membership.working == ["a", "b"] and membership.begin_transfer() == []
    assert membership.behind == ["b"]
    membership.set_version("b", 3)
    assert not membership.behind


def test_an_engine_that_was_asked_to_leave_may_be_asked_to_stay_until_a_transfer_begins() -> None:
    membership = joined("a", "b")
    membership.request("b", "leave")
    assert membership.request("b", "join").requested is None
    assert membership.begin_transfer() == [] and membership.working == ["a", "b"]
    membership.mark_lost("b", "it died")
    for requested in ("leave", "join"):
        with pytest.raises(MembershipConflict, match=f"b cannot {requested}: it is lost"):
            membership.request("b", requested)  # type: ignore[arg-type]


def test_an_engine_that_was_to_leave_stays_where_the_others_have_died_since() -> None:
    membership = joined("a", "b", "c")
    membership.request("b", "leave")
    membership.mark_lost("a", "killed")
    membership.mark_lost("c", "killed")
    assert membership.begin_transfer() == [] and membership.working == ["b"]
    assert membership.of("b").requested is None


class Engine:
    name = "a"

    async def end(self) -> None: ...


async def test_whoever_needs_all_engines_waits_for_those_that_are_started_again() -> None:
    started = asyncio.Event()

    async def replace(engine: object, why: str) -> int:
        await started.wait()
        return 3

    async def welcome(engine: object) -> None: ...

    fleet = Fleet[Any]([Engine()], on_lost="go_on")  # type: ignore[list-item]
    fleet.replace, fleet.welcome = replace, welcome  # type: ignore[assignment]
    await fleet.lose({"a": "killed"})
    assert fleet.working == []
    asyncio.get_running_loop().call_later(0, started.set)
    await fleet.all_back()
    assert [engine.name for engine in fleet.working] == ["a"]


async def test_an_engine_that_dies_once_more_as_it_comes_back_is_waited_for_to_its_second_return() -> None:
    deaths, once_more = ["died as it was welcomed"], asyncio.Event()

    async def replace(engine: object, why: str) -> int:
        if why != "killed":
            await once_more.wait()
        return 3

    async def welcome(engine: object) -> None:
        if deaths:
            await fleet.lose({"a": deaths.pop()})

    fleet = Fleet[Any]([Engine()], on_lost="go_on")  # type: ignore[list-item]
    fleet.replace, fleet.welcome = replace, welcome  # type: ignore[assignment]
    await fleet.lose({"a": "killed"})
    waiting = asyncio.create_task(fleet.back("a"))
    await settle()
    assert not waiting.done()
    once_more.set()
    assert await waiting and fleet.number("a") == 3
    await fleet.all_back()
