"""How many groups may start, and which of them train next: bounded staleness by admission.

Takes what happens to groups (`admit`, `ready`, `discard`) and to weights (`published`). Gives the room for
new groups, and the groups of the next batch. Knows no clock, no engine and no event loop, so that a
simulation runs the same code as training. Never throws a slow group away: what is admitted is taken, unless
it is discarded by name.

A group that is admitted while episodes begin on version `v` holds no token older than `v`, and step `s`
trains the weights of version `s - 1`. With the bound `k` the group is therefore due at step `v + k + 1`. A
step takes a fixed number of groups, those that are due first; so it is enough that for every step `d` from
the next one on, no more groups are due until `d` than the steps until `d` take. Admission never breaks that,
and `take` waits for a group that would.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StalenessSchedule:
    """`groups_per_step` groups train in each step, up to `last_step`.

    No token is older than `max_staleness` versions: with `hold` the learner waits for what is due, without it
    tokens may come later and are then to be masked.
    """

    groups_per_step: int
    max_staleness: int
    last_step: int
    hold: bool = True


@dataclass(slots=True)
class GroupTicket:
    """Admitted group. `version` is the oldest on which its episodes started."""

    number: int
    version: int
    ready: bool = False


@dataclass
class StalenessController:
    """The groups on their way. `version` is that of the last step that is done.

    `begins` is the version of the engine; of several, the oldest one on which an episode may begin.
    """

    pace: StalenessSchedule
    version: int = 0
    begins: int = field(init=False)
    learning: bool = field(default=False, init=False)
    _tickets: dict[int, GroupTicket] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.begins = self.version

    @property
    def next_step(self) -> int:
        """Return the next step to take."""
        return self.version + 1 + self.learning

    @property
    def on_their_way(self) -> tuple[GroupTicket, ...]:
        """Return the admitted groups that are neither taken nor discarded, by number."""
        return tuple(self._tickets[number] for number in sorted(self._tickets))

    @property
    def num_ready(self) -> int:
        """Return the number of groups that wait for the learner."""
        return sum(ticket.ready for ticket in self._tickets.values())

    @property
    def room(self) -> int:
        """Return the number of groups that may be admitted now."""
        steps = self._due(self.begins) - self.next_step + 1
        return max(0, self.pace.groups_per_step * steps - len(self._tickets))

    def admit(self, number: int) -> GroupTicket:
        """Admit a group. Raises ValueError if there is no room or the number is in use."""
        if number in self._tickets:
            raise ValueError(f"group {number} is on its way already")
        if not self.room:
            raise ValueError(f"there is no room for group {number}")
        ticket = self._tickets[number] = GroupTicket(number, self.begins)
        return ticket

    def admit_again(self, number: int, version: int) -> bool:
        """Whether a group that was admitted at `version`, before the run was resumed, goes on.

        It does unless it cannot train in time any more, the pace being another one now. Where nothing is
        held back for it, it goes on however late it is.
        """
        self._tickets[number] = GroupTicket(number, version)
        if not self.pace.hold or self._feasible(self._tickets.values(), self.next_step):
            return True
        del self._tickets[number]
        return False

    def ready(self, number: int) -> None:
        """Record that all episodes of a group have ended."""
        self._tickets[number].ready = True

    def discard(self, number: int) -> None:
        """Remove a group that will not train."""
        del self._tickets[number]

    def take(self) -> list[int] | None:
        """Return the groups of the next step, oldest first; None if it must wait.

        The learner works on them until `published`.
        """
        numbers = None if self.learning else self._next_batch()
        if numbers is None:
            return None
        for number in numbers:
            del self._tickets[number]
        self.learning = True
        return numbers

    @property
    def batches_ready(self) -> int:
        """Whole batches that wait for the learner; none where it would wait for a group that is due."""
        return 0 if self._next_batch() is None else self.num_ready // self.pace.groups_per_step

    @property
    def is_held(self) -> bool:
        """Return whether a batch is complete but the learner waits for a group that is due."""
        return not self.learning and self.num_ready >= self.pace.groups_per_step

    def published(self, version: int, *, everywhere: bool = True) -> None:
        """Record that the engine (or the first of several) has the weights of the last step."""
        if version != self.version + 1 or not self.learning:
            raise ValueError(f"version {version} follows {self.version}, learning: {self.learning}")
        self.version, self.learning = version, False
        if everywhere:
            self.begins = version

    @property
    def is_behind(self) -> bool:
        """Return whether episodes may still start on a version older than the newest."""
        return self.begins < self.version

    def serves(self, version: int) -> None:
        """Record the oldest version on which new episodes may start."""
        self.begins = max(self.begins, version)

    def _next_batch(self) -> list[int] | None:
        """What the next step may train of what is ready now, oldest first."""
        if self.num_ready < self.pace.groups_per_step:
            return None
        ready = sorted((t for t in self._tickets.values() if t.ready), key=lambda t: (t.version, t.number))
        chosen = {ticket.number: ticket for ticket in ready[: self.pace.groups_per_step]}
        others = [ticket for ticket in self._tickets.values() if ticket.number not in chosen]
        if self.pace.hold and not self._feasible(others, self.next_step + 1):
            return None
        return list(chosen)

    def _due(self, version: int) -> int:
        """Return the last step that may train a group of this version."""
        return min(version + self.pace.max_staleness + 1, self.pace.last_step)

    def _feasible(self, tickets: Collection[GroupTicket], first: int) -> bool:
        """Return whether the steps from `first` on can take all tickets in time."""
        due = Counter(self._due(ticket.version) for ticket in tickets)
        total = 0
        for step in sorted(due):
            total += due[step]
            if total > self.pace.groups_per_step * (step - first + 1):
                return False
        return True
